"""Files that are written whole: on the disk with their names, where that is asked for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from isles.files import write_whole


@pytest.mark.parametrize("durable", [True, False])
def test_the_name_of_a_durable_file_is_synced_after_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[tuple[bool, list[str]]] = []  # whether a folder, and what was in the folder then

    def fsync(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), sorted(p.name for p in tmp_path.iterdir())))

    monkeypatch.setattr("os.fsync", fsync)
    write_whole(tmp_path / "journal", b"one", durable=durable)
    assert (tmp_path / "journal").read_bytes() == b"one"
    assert synced == ([(False, [".journal.writing"]), (True, ["journal"])] if durable else [])


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_folder_that_cannot_be_synced_by_nature_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("isles.files.sync", refuse)
    if number == errno.EINVAL:
        write_whole(tmp_path / "journal", b"one")
    else:
        with pytest.raises(OSError, match="error"):
            write_whole(tmp_path / "journal", b"one")
    assert [p.name for p in tmp_path.iterdir()] == ["journal"]
