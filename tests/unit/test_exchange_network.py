"""The exchange between real sockets with real certificates: the same bits everywhere, whatever goes wrong in between."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray
from tests.certificates import TestAuthority, peer_name

from isles.codec import Codec, NonFiniteError, get_codec
from isles.errors import NetworkError, RecordError
from isles.exchange import Exchange, Task, average, encode_contribution
from isles.exchange import exchange as module
from isles.exchange.frames import TAKEN, Head, Kind, Piece, Verdict, parse
from isles.exchange.reduction import OwnerReduction
from isles.protocol import Part, Participant, Phase, RoundRecord
from isles.protocol.parts import plan_parts, replan_parts
from isles.spec import CodecTable, OuterTable

Floats = NDArray[np.float32]
SIZE, CHUNK, TABLE = 50_000, 4096, OuterTable()


class Islands:
    """Clusters with an exchange each, on loopback, and what they would contribute."""

    def __init__(self, folder: Path, codec: Codec, names: str) -> None:
        self.folder, self.codec, self.names = folder, codec, list(names)
        self.authority = TestAuthority(folder)
        self.at: dict[str, Exchange] = {}
        self.peers: dict[str, str | None] = {}
        rng = np.random.default_rng(5)
        self.base = rng.standard_normal(SIZE).astype(np.float32)
        self.local = {n: self.base - rng.standard_normal(SIZE).astype(np.float32) for n in self.names}
        self.residual = {n: np.zeros(SIZE, np.float32) for n in self.names}
        self.encoded: dict[tuple[str, int], int] = {}  # how often a chunk was encoded

    async def start(self, name: str) -> None:
        server, client = self.authority.contexts(name)
        self.at[name] = Exchange(
            name,
            "run",
            codec=self.codec,
            table=TABLE,
            folder=self.folder / name,
            server_ssl=server,
            client_ssl=client,
            peer_name=peer_name,
        )
        self.peers[name] = f"127.0.0.1:{await self.at[name].start('127.0.0.1', 0)}"

    def record(self, names: str, attempt: int = 0, before: RoundRecord | None = None, number: int = 1) -> RoundRecord:
        owners = {n: 0.0 for n in names if self.peers[n]}
        parts = replan_parts(before.parts, owners, len(names)) if before else plan_parts(-(-SIZE // CHUNK), owners, len(names))
        participants = tuple(Participant(n, f"{ord(n):08x}", 10 + i) for i, n in enumerate(names))
        return RoundRecord(0, number, Phase.EXCHANGE, attempt, participants, parts, CHUNK, "a" * 64)

    def task(self, record: RoundRecord) -> Task:
        return Task("run", record, 0, SIZE, {p.cluster: self.peers[p.cluster] for p in record.participants}, seed=9)

    def contribution(self, name: str, task: Task) -> Callable[[int], memoryview]:
        def encode(chunk: int) -> memoryview:
            first, stop = task.bounds(chunk)
            self.encoded[name, chunk] = self.encoded.get((name, chunk), 0) + 1
            more = {"residual": self.residual[name][first:stop]} if self.codec.needs_residual else {}
            return self.codec.encode(self.base[first:stop], self.local[name][first:stop], offset=first, seed=7, **more)

        return encode

    def join(self, name: str, record: RoundRecord) -> Awaitable[str]:
        task = self.task(record)
        return self.at[name].exchange(task, self.contribution(name, task))

    async def all(self, record: RoundRecord) -> str:
        digests = await asyncio.wait_for(asyncio.gather(*(self.join(p.cluster, record) for p in record.participants)), 30)
        assert len(set(digests)) == 1
        return digests[0]

    def values(self, name: str, digest: str, number: int = 1) -> Floats:
        return np.concatenate(list(self.at[name].result(0, number, digest)))

    @staticmethod
    def owned(record: RoundRecord, owner: str) -> set[int]:
        return {chunk for part in record.parts if part.owner == owner for chunk in range(part.first, part.stop)}

    def received(self, owner: str, sender: str) -> set[int]:
        running = self.at[owner]._running.get(0)
        return set(running.reduction.received(sender, f"{ord(sender):08x}")) if running else set()

    def expected(self, names: str) -> Floats:
        """What the simulator makes of the same contributions."""
        made = [
            encode_contribution(
                self.codec, self.base, self.local[n], start=0, cluster=n, tokens=10 + i, seed=7,
                residual=np.zeros(SIZE, np.float32) if self.codec.needs_residual else None,
            )
            for i, n in enumerate(names)
        ]  # fmt: skip
        return average(self.codec, made, TABLE, [(0, SIZE)], start=0, size=SIZE, seed=9).values


@asynccontextmanager
async def islands(folder: Path, names: str, codec: str = "fp32", outbound: str = "", **more: Any) -> AsyncIterator[Islands]:
    made = Islands(folder, get_codec(CodecTable(name=codec, **more)), names)  # type: ignore[arg-type]
    try:
        for name in names:
            await made.start(name)
            if name in outbound:
                made.peers[name] = None
        yield made
    finally:
        for exchange in made.at.values():
            await exchange.stop()


def run(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(play(), 15))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize(
    ("codec", "more"),
    [("fp32", {}), ("bf16", {}), ("int8", {}), ("int4", {"rounding": "stochastic"}), ("topk", {})],
    ids=lambda v: str(v),
)
def test_everybody_gets_the_bits_that_the_simulator_gets(tmp_path: Path, names: str, codec: str, more: dict[str, Any]) -> None:
    async def play() -> None:
        async with islands(tmp_path, names, codec, **more) as made:
            digest = await made.all(made.record(names))
            for name in names:
                assert np.array_equal(made.values(name, digest), made.expected(names))

    run(play)


def test_a_cluster_that_nobody_can_reach_takes_part(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc", outbound="c") as made:
            record = made.record("abc")
            assert {p.owner for p in record.parts} == {"a", "b"}
            digest = await made.all(record)
            assert np.array_equal(made.values("c", digest), made.expected("abc"))

    run(play)


def test_survivors_resend_only_what_the_lost_owner_held(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc") as made:
            first = made.record("abc")
            tasks = [asyncio.create_task(made.join(n, first)) for n in "ab"]  # type: ignore[arg-type]
            while any(made.received(owner, sender) != made.owned(first, owner) for owner, sender in ("ab", "ba")):
                await asyncio.sleep(0.01)
            assert set(made.at["a"].blamed(0)) <= {"c"}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            made.encoded.clear()
            second = made.record("ab", attempt=1, before=first)
            digest = await made.all(second)
            assert np.array_equal(made.values("a", digest), made.expected("ab"))
            for name, other in ("ab", "ba"):
                kept, own = made.owned(first, other), made.owned(second, name)
                sent = {c for n, c in made.encoded if n == name} - own
                assert sent and not sent & kept

    run(play)


def test_a_chunk_that_arrives_when_the_next_attempt_has_begun_counts_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    store = OwnerReduction._store

    def slow(self: OwnerReduction, cluster: str, chunk: int, body: bytes, digest: bytes) -> None:
        if (self.me, cluster, self.task.record.attempt) == ("a", "b", 0):
            entered.set()
            release.wait(10)
        store(self, cluster, chunk, body, digest)

    monkeypatch.setattr(OwnerReduction, "_store", slow)

    async def play() -> None:
        async with islands(tmp_path, "abc") as made:
            first = made.record("abc")
            attempts = [asyncio.ensure_future(made.join(name, first)) for name in "ab"]
            await asyncio.to_thread(entered.wait, 10)
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
            second = made.record("ab", 1, first)
            ours = asyncio.ensure_future(made.join("a", second))
            while not (running := made.at["a"]._running.get(0)) or running.task.record.attempt == 0:
                await asyncio.sleep(0.01)
            before = made.received("a", "b")
            release.set()
            while made.received("a", "b") == before:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            theirs = await made.join("b", second)
            assert await ours == theirs

    run(play)


def test_a_residual_is_taken_once_over_all_attempts(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab", "topk") as made:
            first = made.record("ab")
            task = asyncio.create_task(made.join("a", first))  # type: ignore[arg-type]
            while not made.encoded:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            digest = await made.all(replace(first, attempt=1))
            assert set(made.encoded.values()) == {1}
            assert np.array_equal(made.values("b", digest), made.expected("ab"))

    run(play)


def test_a_peer_that_is_not_there_is_blamed_and_forgiven(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            record = made.record("ab")
            address = made.peers["b"]
            await made.at["b"].stop()
            joined = asyncio.create_task(made.join("a", record))  # type: ignore[arg-type]
            while made.at["a"].blamed(0) != ("b",):
                await asyncio.sleep(0.02)
            await made.start("b")
            made.peers["b"], moved = address, made.peers["b"]
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)
            made.peers["b"] = moved
            await made.all(replace(record, attempt=1))
            assert made.at["a"].blamed(0) == ()

    run(play)


def test_a_peer_that_went_away_and_came_back_is_not_held_to_refuse(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            peers = made.at["a"].peers
            for error, refused in [(ConnectionRefusedError(), True), (ConnectionResetError(), False)]:
                peers.failed("b", "127.0.0.1:1", aiohttp.ClientConnectorError(mock.Mock(), error))
                assert peers.health("b").refused == refused  # as the last try found it, and no longer

    run(play)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "isles.exchange" and r.levelname == "WARNING"]


def test_a_peer_that_declines_for_long_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            second = asyncio.create_task(made.join("b", made.record("ab", number=2)))  # type: ignore[arg-type]
            late = asyncio.create_task(made.join("a", made.record("ab", number=1)))  # type: ignore[arg-type]
            async with asyncio.timeout(30):
                while not warnings(caplog):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.8)  # some more tries
            for task in (second, late):
                task.cancel()
            await asyncio.gather(second, late, return_exceptions=True)

    run(play)
    said = warnings(caplog)
    assert 1 <= len(said) <= 2 and all("is over here" in text for text in said), said  # of a chunk and of a request


def test_a_contribution_that_is_not_finite_ends_the_attempt_of_its_cluster_only(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            made.local["a"][123] = np.nan
            other = asyncio.create_task(made.join("b", made.record("ab")))  # type: ignore[arg-type]
            with pytest.raises(NonFiniteError):
                await made.join("a", made.record("ab"))
            assert not other.done()
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)

    run(play)


def test_a_late_cluster_fetches_a_committed_average_from_several_and_again_after_a_restart(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc") as made:
            digest = await made.all(made.record("ab"))
            peers = {n: made.peers[n] for n in "ab"}
            await made.at["c"].fetch_result(0, 1, digest, start=0, size=SIZE, peers=peers)
            assert np.array_equal(made.values("c", digest), made.expected("ab"))
            await made.at["c"].stop()
            await made.start("c")
            assert made.at["c"].averages.held(0) == [(1, digest)]
            assert np.array_equal(made.values("c", digest), made.expected("ab"))
            made.at["c"].forget(0, 2)
            assert made.at["c"].averages.held(0) == [] and not list((tmp_path / "c" / "averages").iterdir())
            with pytest.raises(NetworkError, match="no cluster"):
                await made.at["c"].fetch_result(0, 1, "f" * 64, start=0, size=SIZE, peers=peers)

    run(play)


@pytest.mark.parametrize("codec", ["fp32", "topk"])
def test_a_description_whose_chunks_are_too_large_is_not_believed(tmp_path: Path, codec: str) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc", codec) as made:
            digest = await made.all(made.record("ab"))
            weights = (0.5, 0.5) if codec == "topk" else ()
            liar = made.at["a"].averages.get(0, 1, digest)
            assert liar is not None
            sizes = (1 << 29, *liar.manifest.sizes[1:])
            liar.manifest = replace(liar.manifest, sizes=sizes)  # which the digest does not cover
            with pytest.raises(NetworkError, match="no cluster"):
                await made.at["c"].fetch_result(0, 1, digest, start=0, size=SIZE, peers={"a": made.peers["a"]}, weights=weights)
            peers = {n: made.peers[n] for n in "ab"}
            await made.at["c"].fetch_result(0, 1, digest, start=0, size=SIZE, peers=peers, weights=weights)

    run(play)


def test_the_weights_of_a_bundle_are_those_that_its_giver_names_where_the_record_of_the_round_is_gone(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc", "topk") as made:
            digest = await made.all(made.record("ab"))
            peers = {n: made.peers[n] for n in "ab"}
            await made.at["c"].fetch_result(0, 1, digest, start=0, size=SIZE, peers=peers, weights=None)
            assert np.array_equal(made.values("c", digest), made.expected("ab"))

    run(play)


def test_a_kept_average_that_the_disk_altered_is_not_used(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "a") as made:
            digest = await made.all(made.record("a"))
            (spool,) = (tmp_path / "a" / "averages").glob("*.spool")
            content = bytearray(spool.read_bytes())
            content[5000] ^= 1
            spool.write_bytes(content)
            with pytest.raises(Exception, match="does not match its hash"):
                made.values("a", digest)

    run(play)


@asynccontextmanager
async def asking(made: Islands, name: str) -> AsyncIterator[Callable[..., Awaitable[tuple[int, str]]]]:
    """Requests of any kind with the certificate of a cluster."""
    _, client = TestAuthority.load(made.folder, name)
    async with aiohttp.ClientSession() as session:

        async def ask(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> tuple[int, str]:
            url = f"https://{made.peers['a']}{path}"
            async with session.request(
                method, url, data=body or None, headers=headers, ssl=client, server_hostname="a"
            ) as answer:
                return answer.status, await answer.text(errors="replace")

        yield ask


def test_bad_requests_are_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EARLY", 0.05)

    async def play() -> None:
        async with islands(tmp_path, "abc", "int8") as made:
            record = made.record("ab")
            joined = asyncio.create_task(made.join("a", record))  # type: ignore[arg-type]
            while 0 not in made.at["a"]._running:
                await asyncio.sleep(0.01)
            other = next(c for p in record.parts if p.owner == "b" for c in range(p.first, p.stop))
            async with asking(made, "b") as ask:
                for status, path in [
                    (404, "/v1/other/lane"),
                    (400, "/v1/run/lane"),  # no WebSocket
                    (403, f"/v1/run/0/1/contributions/a/{ord('a'):08x}"),
                    (425, f"/v1/run/0/2/contributions/b/{ord('b'):08x}"),
                    (410, f"/v1/run/0/0/contributions/b/{ord('b'):08x}"),
                    (404, f"/v1/run/0/1/results/{'0' * 64}"),
                    (409, f"/v1/run/0/1/0/averages/{other}"),
                    (404, f"/v1/run/0/1/0/averages/{'9' * 30}"),
                    (404, "/v1/run/0/1/../../../etc/passwd"),
                ]:
                    said = await ask("GET", path)
                    assert said[0] == status and said[1], (status, path, said)
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)

    run(play)


@asynccontextmanager
async def lane_of(made: Islands, name: str) -> AsyncIterator[Callable[[bytes], Awaitable[Verdict | None]]]:
    """A lane to a, with the certificate of a cluster: sends a frame, and gives the verdict on it, or None when the lane is closed."""
    _, client = TestAuthority.load(made.folder, name)
    async with aiohttp.ClientSession() as session:
        lane = await session.ws_connect(f"https://{made.peers['a']}/v1/run/lane", ssl=client, server_hostname="a")

        async def send(frame: bytes) -> Verdict | None:
            await lane.send_bytes(frame)
            async for message in lane:
                if message.type is aiohttp.WSMsgType.BINARY and isinstance(verdict := parse(message.data), Verdict):
                    return verdict
            return None

        yield send
        await lane.close()


def test_chunks_that_may_not_come_are_refused_and_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EARLY", 0.05)

    async def play() -> None:
        async with islands(tmp_path, "abc", "int8") as made:
            record = made.record("ab")
            made.peers["b"], address = None, made.peers["b"]  # so that a makes no lanes to it
            joined = asyncio.create_task(made.join("a", record))  # type: ignore[arg-type]
            while 0 not in made.at["a"]._running:
                await asyncio.sleep(0.01)
            chunk = next(c for p in record.parts if p.owner == "a" for c in range(p.first, p.stop))
            other = next(c for p in record.parts if p.owner == "b" for c in range(p.first, p.stop))
            good = bytes(made.contribution("b", made.task(record))(chunk))
            bad = bytearray(good)
            bad[32:34] = b"\xff\x7f"  # a scale that is no number
            nan = bytes(bad)
            digest, who, zstd = module.chunk_digest(good), f"{ord('b'):08x}", zstandard.ZstdCompressor().compress
            head = Head(Kind.CONTRIBUTION, 0, 1, 0, chunk, len(good), len(good), digest, who, 1)
            async with lane_of(made, "b") as send, lane_of(made, "c") as foreign:
                for status, changed, body in [
                    (400, head, good[:-1] + b"x"),
                    (400, replace(head, digest=module.chunk_digest(nan)), nan),
                    (413, replace(head, whole=len(good) + 1), good),
                    (413, replace(head, size=(1 << 32) - 1, whole=(1 << 32) - 1), good),
                    *(
                        (400, replace(head, size=len(body)), body)
                        for body in [
                            zstd(good[:-1]),
                            zstd(bytes(1 << 26)),
                            zstd(good)[:-1] + b"x",
                            zstd(good)[:-9],
                            zstd(good) + b"x",
                            good[:-20],
                            zstandard.ZstdCompressor(write_content_size=False).compress(good),
                        ]
                    ),
                    (409, replace(head, chunk=other), good),
                    (409, replace(head, chunk=(1 << 32) - 1), good),
                    (409, replace(head, incarnation="deadbeef"), good),
                    (425, replace(head, number=2), good),
                    (410, replace(head, number=0), good),
                    (409, replace(head, kind=Kind.AVERAGE), good),
                    (425, replace(head, kind=Kind.AVERAGE, attempt=9), good),
                    (425, replace(head, fragment=7), good),
                ]:
                    verdict = await send(Piece(changed, 0, body).frame(0))
                    assert verdict is not None and verdict.status == status and verdict.text, (status, changed, verdict)
                refused = await foreign(Piece(head, 0, good).frame(0))
                assert refused is not None and refused.status == 409
                assert made.received("a", "b") == set()
                for _ in range(2):  # the same once more changes nothing
                    assert await send(Piece(head, 0, good).frame(0)) == Verdict(1, TAKEN)
                assert made.received("a", "b") == {chunk}
            for frame in [b"", b"\x00", b"\x09abc", b"\x01short", b"\x03", Piece(replace(head, size=5), 3, good).frame(0)]:
                async with lane_of(made, "b") as send:
                    assert await send(frame) is None, frame
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)
            made.peers["b"] = address
            again = replace(record, attempt=1)
            digests = await asyncio.gather(made.join("a", again), made.join("b", again))
            assert len(set(digests)) == 1 and np.array_equal(made.values("a", digests[0]), made.expected("ab"))

    run(play)


def test_who_has_no_certificate_of_the_run_is_not_heard(tmp_path: Path) -> None:
    async def play() -> None:
        (tmp_path / "x").mkdir()
        async with islands(tmp_path, "a") as made:
            _, foreign = TestAuthority(tmp_path / "x").contexts("a")
            foreign.load_verify_locations(tmp_path / "ca.pem")
            plain = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            async with aiohttp.ClientSession() as session:
                for context in (foreign, plain):
                    with pytest.raises((aiohttp.ClientError, OSError)):
                        await session.get(f"https://{made.peers['a']}/v1/run/0/1/results/x", ssl=context, server_hostname="a")

    run(play)


def test_a_peer_that_is_somebody_else_is_not_believed(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "abc") as made:
            made.peers["b"] = made.peers["c"]
            joined = asyncio.create_task(made.join("a", made.record("ab")))  # type: ignore[arg-type]
            while not made.at["a"].peers.health("b").said:
                await asyncio.sleep(0.02)
            assert "does not prove that it is b" in made.at["a"].peers.health("b").said
            joined.cancel()
            await asyncio.gather(joined, return_exceptions=True)

    run(play)


def test_a_port_in_use_is_a_sentence(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "a") as made:
            port = int(str(made.peers["a"]).split(":")[1])
            server, client = made.authority.contexts("b")
            second = Exchange(
                "b",
                "run",
                codec=made.codec,
                table=TABLE,
                folder=tmp_path / "b",
                server_ssl=server,
                client_ssl=client,
                peer_name=peer_name,
            )
            with pytest.raises(NetworkError, match="another program listens there"):
                await second.start("127.0.0.1", port)

    run(play)


def test_the_cap_on_what_is_sent_is_kept(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            for name in "ab":
                made.at[name].cap.rate = 400_000.0
            began = asyncio.get_running_loop().time()
            await made.all(made.record("ab"))
            sent = sum(made.at["a"].counters.up.values())
            assert asyncio.get_running_loop().time() - began >= 0.8 * (sent - (1 << 18)) / 400_000
            assert sent == pytest.approx(made.codec.encoded_size(CHUNK) * -(-SIZE // CHUNK), rel=0.2)

    run(play)


def test_an_average_that_is_on_a_lane_is_not_sent_again_on_request(tmp_path: Path) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            record = made.record("ab")
            made.at["a"].cap.rate = 400_000.0
            last = max(made.owned(record, "a"))
            over = asyncio.create_task(made.all(record))
            while 0 not in made.at["a"]._running:
                await asyncio.sleep(0.01)
            answers = []
            async with asking(made, "b") as ask:
                while last not in made.at["b"]._running[0].reduction.averages:
                    answers.append(await ask("GET", f"/v1/run/0/1/0/averages/{last}"))
                await over
                once = made.at["a"].counters.up["averages"]
                assert (await ask("GET", f"/v1/run/0/1/0/averages/{last}"))[0] == 200  # it may have been lost there
            assert len(answers) > 1 and {status for status, _ in answers[:-1]} == {202}, answers
            assert once <= sum(len(made.at["a"]._running[0].reduction.averages.get(c)) for c in made.owned(record, "a")) * 1.3

    run(play)


@pytest.mark.parametrize("change", [{"chunk": 0}, {"parts": (Part("a", 0, 1 << 60),)}, {"parts": ()}])
def test_parts_that_are_not_of_the_fragment_are_refused_at_once(tmp_path: Path, change: dict[str, Any]) -> None:
    async def play() -> None:
        async with islands(tmp_path, "ab") as made:
            with pytest.raises(RecordError, match="the round is not taken part in"):
                made.task(replace(made.record("ab"), **change))

    run(play)
