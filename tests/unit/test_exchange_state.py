"""Taking over a run's state from others: resumed where it was cut, from whoever still has it, and from nobody who lies about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from blake3 import blake3
from tests.certificates import TestAuthority, peer_name

from isles.codec import get_codec
from isles.errors import CheckpointError, NetworkError
from isles.exchange import Exchange
from isles.exchange import state as module
from isles.exchange.state import Offer, Partial, StateServer, fetch_checkpoint
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

        StateServer(made.server, lambda _: [], checkpoints)
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
    monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(module, "TRIES", 3)
    monkeypatch.setattr(module, "NOTED", 1)
    asyncio.run(asyncio.wait_for(play(), 30))  # type: ignore[arg-type]


def test_a_transfer_that_was_cut_goes_on_with_the_chunks_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[3], b=[3, 7]) as made:
            made.fails_after["a"] = 5  # the offers, and four chunks
            with pytest.raises(NetworkError, match="going on when one is back"):
                await made.join("a")
            assert len(Partial(made.path).held) == 4
            assert await made.join("b") == 3  # which has a newer one too
            assert made.asked["b"] == 1 + len(DATA[3]) // CHUNK + 1 - 4
            Partial(made.path).forget()
            assert await made.join("b") == 7

    run(play, monkeypatch)


def test_what_one_giver_fails_to_give_another_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[7], b=[7]) as made:
            made.fails_after["a"] = 2
            assert await made.join("a", "b") == 7

    run(play, monkeypatch)


def test_a_checkpoint_that_nobody_keeps_any_more_is_begun_anew_with_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        async with givers(tmp_path, a=[3]) as made:
            made.fails_after["a"] = 5
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


@pytest.mark.parametrize(
    "change", [{"step": float("inf")}, {"applied": [float("nan")]}, {"size": 0}, {"digest": "0"}, {"applied": 3}]
)
def test_a_description_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        Offer.of({"step": 1, "applied": [1], "size": 5, "digest": "0" * 64} | change)


@pytest.mark.parametrize("key", ["ready.².a", "done.٣.a", "rounds.²", "rounds.99999999999", "ready..a", "rounds.-1"])
def test_keys_of_no_fragment_are_nobodys(key: str) -> None:
    assert Board().put(key, b"{}", 1, 0.0) is False
