"""What an exchange keeps on disk: nothing of another cut of the round, nothing that nobody needs, and a full disk is said as what it is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.unit.test_exchange_network import CHUNK, SIZE, islands, run

from isles.errors import DiskError, NetworkError
from isles.exchange.spool import Spool
from isles.protocol.parts import plan_parts


def test_a_round_that_is_opened_again_in_other_chunks_begins_with_none_of_the_old_ones(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc") as made:
            record = made.record("abc")
            first = [asyncio.create_task(made.join(n, record)) for n in "ab"]  # type: ignore[arg-type]
            while not made.received("a", "b"):
                await asyncio.sleep(0.02)
            for task in first:
                task.cancel()
            await asyncio.gather(*first, return_exceptions=True)
            size = CHUNK * 2
            parts = plan_parts(-(-SIZE // size), dict.fromkeys("abc", 0.0), 3)
            digest = await made.all(replace(record, attempt=1, chunk=size, parts=parts))
            assert np.array_equal(made.values("c", digest), made.expected("abc"))

    run(play)


def test_what_a_kill_cut_off_is_swept_up_and_what_is_whole_is_found(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            digest = await made.all(made.record("ab"))
            left = [tmp_path / "a" / "f0-r2-c4096" / "b-0.spool", tmp_path / "a" / "averages" / "f0-r2-a0.spool"]
            for path in left:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"half")
            await made.at["a"].stop()
            await made.start("a")
            assert not any(path.exists() for path in left)
            assert np.array_equal(made.values("a", digest), made.expected("ab"))

    run(play)


def full_from(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    put = Spool.put

    def full(self: Spool, at: int, data: bytes | memoryview, digest: bytes) -> None:
        if at >= chunk:
            raise DiskError("the disk is full")
        put(self, at, data, digest)

    monkeypatch.setattr(Spool, "put", full)


def test_a_disk_that_is_full_while_an_average_is_fetched_is_said_plainly_and_the_rest_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc") as made:
            digest = await made.all(made.record("ab"))
            peers = {n: made.peers[n] for n in "ab"}
            with monkeypatch.context() as patched:
                full_from(patched, 2)
                with pytest.raises(DiskError, match="full"):
                    await made.at["c"].fetch_result(0, 1, digest, start=0, size=SIZE, peers=peers)
            await made.at["c"].fetch_result(0, 1, digest, start=0, size=SIZE, peers=peers)
            assert np.array_equal(made.values("c", digest), made.expected("ab"))

    run(play)


def test_an_average_that_was_never_whole_goes_with_its_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc") as made:
            digest = await made.all(made.record("ab"))
            full_from(monkeypatch, 2)
            with pytest.raises((DiskError, NetworkError)):
                await made.at["c"].fetch_result(0, 1, digest, start=0, size=SIZE, peers={n: made.peers[n] for n in "ab"})
            folder = tmp_path / "c" / "averages"
            made.at["c"].forget(0, 1)
            assert len(list(folder.iterdir())) == 1
            made.at["c"].forget(0, 2)
            assert not list(folder.iterdir())

    run(play)
