"""Taking over a run's state from others: resumed where it was cut, from whoever still has it, and from nobody who lies about it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from blake3 import blake3
from tests.certificates import TestAuthority, peer_name

from isles.codec import get_codec
from isles.errors import CheckpointError, NetworkError
from isles.exchange import Exchange, joining, partial, state
from isles.exchange.joining import fetch_checkpoint
from isles.exchange.partial import Partial
from isles.exchange.state import Offer, StateServer
from isles.protocol import Board
from isles.spec import CodecTable, OuterTable

CHUNK = 1000
DATA = {3: bytes(range(256)) * 40, 7: bytes(reversed(range(256))) * 40}  # by round


class Givers:
    """Clusters that keep checkpoints, and one that joins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, TestAuthority(folder)
        self.at: dict[str, Exchange] = {}
        self.peers: dict[str, str] = {}
        self.kept: dict[str, list[tuple[Offer, Path]]] = {}
        self.asked: dict[str, int] = {}
        self.states: dict[str, StateServer] = {}
        self.fails_after: dict[str, int] = {}

    async def start(self, name: str, rounds: list[int]) -> None:
        server, client = self.authority.contexts(name)
        made = self.at[name] = Exchange(
            name, "run", codec=get_codec(CodecTable(name="fp32")), table=OuterTable(), folder=self.folder / name, server_ssl=server,
            client_ssl=client, peer_name=peer_name,
        )  # fmt: skip
        self.keep(name, rounds)

        def checkpoints() -> list[tuple[Offer, Path]]:
            self.asked[name] = self.asked.get(name, 0) + 1
            return [] if self.asked[name] > self.fails_after.get(name, 1 << 30) else self.kept[name]

        self.states[name] = StateServer(made.server, lambda _: [], checkpoints)
        self.peers[name] = f"127.0.0.1:{await made.start('127.0.0.1', 0)}"

    def keep(self, name: str, rounds: list[int]) -> None:
        self.kept[name] = []
        for number in rounds:
            path = self.folder / f"{name}-{number}"
            path.write_bytes(DATA[number])
            self.kept[name].append((Offer(number * 10, (number,), len(DATA[number]), blake3(DATA[number]).hexdigest()), path))

    async def join(self, *names: str, most: int = 7) -> int:
        """The round of the checkpoint that came, whole."""
        peers = {name: self.peers[name] for name in names}
        offer = await fetch_checkpoint(self.at["j"], peers, self.path, rounds=[most], size=20_000)
        assert self.path.read_bytes() == DATA[offer.applied[0]]
        return offer.applied[0]

    @property
    def path(self) -> Path:
        return self.folder / "joining.safetensors"


@asynccontextmanager
async def givers(folder: Path, **rounds: list[int]) -> AsyncIterator[Givers]:
    made = Givers(folder)
    try:
        for name, numbers in ({"j": []} | rounds).items():
            await made.start(name, numbers)
        yield made
    finally:
        for exchange in made.at.values():
            await exchange.stop()


def run(play: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joining, partial, state):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(joining, "TRIES", 3)
    monkeypatch.setattr(joining, "NOTED", 1)
    asyncio.run(asyncio.wait_for(play(), 30))  # type: ignore[arg-type]


def test_a_transfer_that_was_cut_goes_on_with_the_chunks_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[3], b=[3, 7]) as made:
            made.fails_after["a"] = 6  # the offers, the hashes, and four chunks
            with pytest.raises(NetworkError, match="going on when one is back"):
                await made.join("a")
            assert len(Partial(made.path).held) == 4
            assert await made.join("b") == 3  # which has a newer one too
            assert made.asked["b"] == 2 + len(DATA[3]) // CHUNK + 1 - 4
            assert made.states["a"].wanted() == made.states["b"].wanted() == [30]
            Partial(made.path).forget()
            assert await made.join("b") == 7
            assert made.states["b"].wanted() == [30, 70]
            monkeypatch.setattr(state, "HOLD", 0.0)
            assert made.states["b"].wanted() == []

    run(play, monkeypatch)


def test_what_one_giver_fails_to_give_another_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[7], b=[7]) as made:
            made.fails_after["a"] = 3
            assert await made.join("a", "b") == 7

    run(play, monkeypatch)


def test_a_checkpoint_that_nobody_keeps_any_more_is_begun_anew_with_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[3]) as made:
            made.fails_after["a"] = 6
            with pytest.raises(NetworkError):
                await made.join("a")
            made.fails_after.clear()
            made.keep("a", [7])
            assert await made.join("a") == 7

    run(play, monkeypatch)


def test_who_offers_rounds_that_were_never_committed_or_too_much_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[3], b=[7]) as made:
            assert await made.join("a", "b", most=3) == 3
            huge = Offer(70, (3,), 1 << 40, "0" * 64)
            Partial(made.path).forget()
            made.kept["b"] = [(huge, tmp_path / "b-7")]
            assert await made.join("a", "b") == 3
            with pytest.raises(NetworkError, match="has a checkpoint to join from"):
                await made.join("b")

    run(play, monkeypatch)


def test_one_giver_with_an_altered_file_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[7], b=[7], c=[7]) as made:
            (tmp_path / "a-7").write_bytes(b"!" + DATA[7][1:])
            assert await made.join("a", "b", "c") == 7
            assert made.asked["a"] == 2, "the offers and the hashes"

    run(play, monkeypatch)


@pytest.mark.parametrize("bad", ["a", "b"])
def test_of_two_givers_that_differ_the_other_is_tried(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[7], b=[7]) as made:
            (tmp_path / f"{bad}-7").write_bytes(b"!" + DATA[7][1:])
            if bad == "a":
                with pytest.raises(NetworkError, match="trying others"):
                    await made.join("a", "b")
                assert len(Partial(made.path).wrong) == 1
            assert await made.join("a", "b") == 7

    run(play, monkeypatch)


def test_only_chunks_that_the_disk_lost_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[7]) as made:
            made.fails_after["a"] = 6
            with pytest.raises(NetworkError):
                await made.join("a")
            made.fails_after.clear()
            with made.path.open("r+b") as file:
                file.write(b"!")
            with pytest.raises(NetworkError, match="1 chunks of the checkpoint that came are damaged on this disk"):
                await made.join("a")
            asked = made.asked["a"]
            assert await made.join("a") == 7
            assert made.asked["a"] == asked + 3, "the offers, the hashes, and one chunk"

    run(play, monkeypatch)


def test_when_no_list_of_hashes_is_believed_all_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[7]) as made:
            (tmp_path / "a-7").write_bytes(b"!" + DATA[7][1:])
            for match in ("trying others", "gives a whole checkpoint"):
                with pytest.raises(NetworkError, match=match):
                    await made.join("a")
            await made.at["a"].stop()
            await made.start("a", [7])  # its disk was mended
            assert await made.join("a") == 7

    run(play, monkeypatch)


def test_a_giver_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = state._read_chunk
    silent = threading.Event()

    def read(path: Path, chunk: int) -> bytes:
        if path.name == "a-7" and len(asked) >= 2 * (len(DATA[7]) // CHUNK + 1):  # both have made their hashes
            silent.wait(20)
        asked.append(chunk)
        return reading(path, chunk)

    async def play() -> None:
        async with givers(tmp_path, a=[7], b=[7]) as made:
            assert await made.join("a", "b") == 7 and made.asked["a"] > 2, "the offers, the hashes, and a chunk that never came"
            silent.set()

    asked: list[int] = []
    monkeypatch.setattr(state, "_read_chunk", read)
    monkeypatch.setattr(joining, "LOOK", 0.05)
    monkeypatch.setattr("isles.exchange.peers.PATIENCE", 0.3)
    monkeypatch.setattr("isles.exchange.peers.TIMES", 1)
    run(play, monkeypatch)


def test_a_giver_that_is_still_reading_its_file_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = state._read_chunk

    def read(path: Path, chunk: int) -> bytes:
        time.sleep(0.05)
        return reading(path, chunk)

    async def play() -> None:
        async with givers(tmp_path, a=[7]) as made:
            assert await made.join("a") == 7
            assert made.asked["a"] > 2 + len(DATA[7]) // CHUNK + 1, "more than the offers, the hashes once and the chunks"

    monkeypatch.setattr(state, "_read_chunk", read)
    monkeypatch.setattr(state, "LONG_POLL", 0.1)
    monkeypatch.setattr(joining, "LOOK", 0.05)
    run(play, monkeypatch)


@pytest.mark.parametrize(
    "change", [{"step": float("inf")}, {"applied": [float("nan")]}, {"size": 0}, {"digest": "0"}, {"applied": 3}]
)
def test_a_description_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        Offer.of({"step": 1, "applied": [1], "size": 5, "digest": "0" * 64} | change)


@pytest.mark.parametrize("key", ["ready.².a", "done.٣.a", "rounds.²", "rounds.99999999999", "ready..a", "rounds.-1"])
def test_keys_of_no_fragment_are_nobodys(key: str) -> None:
    assert Board().put(key, b"{}", 1, 0.0) is False
