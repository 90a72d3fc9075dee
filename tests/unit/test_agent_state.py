"""An agent's outer state: a step is whole or not made, and what error feedback holds is counted once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isles.agent.journal import Journal
from isles.agent.restore import replay
from isles.agent.state import OuterState
from isles.codec import decode, get_codec
from isles.exchange.spool import Averages, Spool, chunk_digest
from isles.spec import CodecTable, OuterTable

SIZE, CHUNK = 3 * 4096, 4096


def state_of(residual: bool = False) -> OuterState:
    layout: Any = SimpleNamespace(fragments=[(0, SIZE)], total=SIZE)
    vectors = [np.zeros(SIZE, np.float32) for _ in range(3)]
    state = OuterState(layout, OuterTable(), vectors[0], vectors[1], vectors[2] if residual else None)
    state.refresh_digests()
    return state


def an_average(folder: Path, number: int) -> tuple[Averages, str]:
    codec, averages = get_codec(CodecTable(name="fp32")), Averages(folder)
    spool = Spool(folder / f"r{number}.spool", codec.encoded_size(CHUNK))
    for chunk in range(SIZE // CHUNK):
        body = codec.encode(np.ones(CHUNK, np.float32), np.zeros(CHUNK, np.float32), offset=chunk * CHUNK)
        spool.put(chunk, body, chunk_digest(body))
    return averages, averages.add(spool, 0, number, CHUNK, SIZE, ()).manifest.digest


@pytest.mark.parametrize("damaged", [0, 2])
def test_a_round_whose_average_the_disk_altered_is_not_stepped_in_part(tmp_path: Path, damaged: int) -> None:
    averages, digest = an_average(tmp_path, 1)
    journal = Journal(tmp_path / "journal.json", 1)
    journal.applied(0, 1, digest, landed=True)
    with (tmp_path / "r1.spool").open("r+b") as file:
        file.seek(averages.get(0, 1, digest).spool.slot * damaged + 100)  # type: ignore[union-attr]
        file.write(b"\xff\xff\xff")
    state = state_of()
    replay(state, journal, averages)
    assert state.fragments[0].applied == 0 and not state.globals.any() and averages.held(0) == []
    averages, digest = an_average(tmp_path, 1)  # it was fetched again
    journal.applied(0, 1, digest, landed=True)
    replay(state, journal, averages)
    assert state.fragments[0].applied == 1 and np.allclose(state.globals, -1.33)


def test_a_round_is_written_down_once_however_often_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal.json", 1)
    with monkeypatch.context() as patched:
        patched.setattr("isles.agent.journal.write_whole", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no space")))
        for _ in range(2):
            with pytest.raises(Exception, match="cannot be written"):
                journal.applied(0, 1, "d", landed=True)
    journal.applied(0, 1, "d", landed=True)
    assert [a.number for a in Journal(tmp_path / "journal.json", 1).fragments[0].applied] == [1]


@pytest.mark.parametrize("landings", ["1", "01", "0011", "101001"])
def test_all_that_was_trained_is_sent_or_still_owed(landings: str) -> None:
    """Error feedback (SparseLoCo, arXiv 2508.15706) without decay: contributions that did not land are sent with the next."""
    codec = get_codec(CodecTable(name="topk", residual_decay=1.0))
    state, rng = state_of(residual=True), np.random.default_rng(4)
    trained, sent = np.zeros(SIZE), np.zeros(SIZE)
    pending = np.zeros(SIZE, np.float32)
    print("seed 4")
    for landed in landings:
        more = rng.standard_normal(SIZE).astype(np.float32)
        trained += more
        pending += more
        state.sent[:] = state.globals - pending
        state.set_aside(0)
        body = state.encode(codec, 0, 0, SIZE, seed=1)
        assert np.array_equal(state.residual_before(), state._aside[0])  # type: ignore[arg-type]
        state.settle(0, landed=landed == "1")
        if landed == "1":
            sent += decode(bytes(body), np.empty(SIZE, np.float32))
            pending[:] = 0
    assert state.residual is not None
    owed = state.residual + pending
    assert np.allclose(sent + owed, trained, atol=1e-4)
    assert np.abs(state.residual).max() > 0.1
