"""A real store: compare-and-set, permissions, kills, three members, and sentences where it cannot work."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from isles.errors import NetworkError
from isles.identity import Authority, client_context
from isles.store import Entry, Store, StorePapers, StoreServer
from isles.store.server import free_port


class Ground:
    """An authority, its store, and connections that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority.create()
        self.servers: list[StoreServer] = []
        self.stores: list[Store] = []

    async def serve(self, name: str = "store", **more: object) -> StoreServer:
        server = StoreServer(self.folder / name, StorePapers.issue(self.authority, name, ["127.0.0.1"]), name=name, **more)  # type: ignore[arg-type]
        self.servers.append(server)
        await server.start()
        return server

    async def serve_three(self) -> tuple[Store, list[str]]:
        """A store of three members, with its bucket: the organiser's connection, and where members reach each other."""
        ports = [free_port("127.0.0.1") for _ in range(3)]
        members = [f"127.0.0.1:{port}" for port in ports]
        await asyncio.gather(*(self.serve(f"s{i}", cluster_port=ports[i], members=members) for i in range(3)))
        organiser = await self.connect("organiser", organiser=True)
        await patiently(lambda: organiser.create_bucket(replicas=3))
        return organiser, members

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    async def connect(self, name: str, *, organiser: bool = False, patience: float = 10.0) -> Store:
        user = self.authority.admit_organiser() if organiser else self.authority.admit(name)
        context = client_context(self.authority.certified.certificate, self.authority.certify(name))
        store = await Store.connect(self.urls, user, context, patience=patience)
        self.stores.append(store)
        return store


@asynccontextmanager
async def ground(folder: Path, *, bucket: bool = True) -> AsyncIterator[Ground]:
    made = Ground(folder)
    try:
        if bucket:
            await made.serve()
            await (await made.connect("organiser", organiser=True)).create_bucket()
        yield made
    finally:
        for store in made.stores:
            await store.close()
        for server in made.servers:
            await server.stop()


def run(play: Callable[[], Awaitable[None]], seconds: float = 40) -> None:
    asyncio.run(asyncio.wait_for(play(), seconds))  # type: ignore[arg-type]


async def patiently(work: Callable[[], Awaitable[object]], seconds: float = 15) -> object:
    """Try again while the store is away."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await work()
        except NetworkError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


def test_compare_and_set_has_one_winner(tmp_path: Path) -> None:
    async def play() -> None:
        async with ground(tmp_path) as g:
            stores = [await g.connect(f"c{i}") for i in range(4)]
            made = await asyncio.gather(*(store.create("rounds.0", b"0") for store in stores))
            assert sum(revision is not None for revision in made) == 1
            for _ in range(5):
                entry = await stores[0].get("rounds.0")
                assert entry is not None
                tried = await asyncio.gather(*(stores[i % 4].update("rounds.0", b"%d" % i, entry.revision) for i in range(20)))
                (winner,) = [i for i, revision in enumerate(tried) if revision is not None]
                assert await stores[1].get("rounds.0") == Entry("rounds.0", b"%d" % winner, tried[winner] or 0)
            assert await stores[0].get("rounds.1") is None

    run(play)


def test_a_cluster_writes_its_own_records_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isles.store.client.DEADLINE", 0.3)

    async def play() -> None:
        async with ground(tmp_path) as g:
            organiser = g.stores[0]
            await organiser.put("spec", b"the spec")
            store = await g.connect("a")
            for key in ("members.a", "ready.0.a", "done.3.a", "rounds.0", "ledger"):
                assert await store.put(key, b"mine")
            for key in ("members.b", "ready.0.b", "done.0.b", "spec", "members.a.b", "other"):
                with pytest.raises(NetworkError, match="does not allow this"):
                    await store.put(key, b"not mine")
            entry = await store.get("spec")
            assert entry is not None and entry.value == b"the spec"
            for subject in ("$JS.API.STREAM.DELETE.KV_run", "$JS.API.STREAM.PURGE.KV_run", "$JS.API.STREAM.MSG.DELETE.KV_run"):
                with pytest.raises(Exception, match="timeout"):
                    await store._client.request(subject, b"", timeout=0.3)
            await store._client.publish("$KV.run.members.a", b"all mine", headers={"Nats-Rollup": "all"})
            await store._client.flush()
            for key, value in {"spec": b"the spec", "members.a": b"mine", "rounds.0": b"mine"}.items():
                entry = await organiser.get(key)
                assert entry is not None and entry.value == value

    run(play)


def test_a_bucket_that_was_made_with_looser_settings_is_brought_up_to_date(tmp_path: Path) -> None:
    async def play() -> None:
        async with ground(tmp_path, bucket=False) as g:
            await g.serve()
            organiser = await g.connect("organiser", organiser=True)
            await organiser._js.add_stream(
                name="KV_run", subjects=["$KV.run.>"], max_msgs_per_subject=1, allow_rollup_hdrs=True
            )
            await organiser.put("spec", b"the spec")
            await organiser.create_bucket()
            config = (await organiser._js.stream_info("KV_run")).config
            assert config.deny_delete and config.deny_purge and not config.allow_rollup_hdrs
            entry = await organiser.get("spec")
            assert entry is not None and entry.value == b"the spec"

    run(play)


def test_records_and_watches_survive_a_killed_server(tmp_path: Path) -> None:
    async def play() -> None:
        async with ground(tmp_path) as g:
            store, seen = await g.connect("a"), {}
            states: list[bool] = []
            store.on_state = states.append

            async def follow() -> None:
                async for entry in store.watch():
                    seen[entry.key] = entry.value

            following = asyncio.create_task(follow())
            await store.put("members.a", b"1")
            for number in range(3):
                pid = g.servers[0].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await patiently(lambda n=number: store.put(f"ready.{n}.a", b"after"))
                entry = await store.get("members.a")
                assert entry is not None and entry.value == b"1"
                deadline = time.monotonic() + 5
                while f"ready.{number}.a" not in seen:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.02)
            following.cancel()
            assert seen["members.a"] == b"1" and states.count(True) == states.count(False) == 3

    run(play)


def test_a_restarted_store_is_the_same_at_the_same_address(tmp_path: Path) -> None:
    async def play() -> None:
        async with ground(tmp_path) as g:
            await g.stores[0].put("spec", b"kept")
            first = g.servers[0].url
            await g.servers[0].stop()
            with pytest.raises(NetworkError, match=r"cannot be reached|did not do it"):
                await g.stores[0].put("spec", b"lost")
            again = StoreServer(tmp_path / "store", g.servers[0].papers)
            g.servers[0] = again
            await again.start()
            assert again.url == first
            entry = await (await g.connect("b")).get("spec")
            assert entry is not None and entry.value == b"kept"

    run(play)


def test_one_of_three_members_may_die(tmp_path: Path) -> None:
    async def play() -> None:
        async with ground(tmp_path, bucket=False) as g:
            await g.serve_three()
            store = await g.connect("a")
            await patiently(lambda: store.put("members.a", b"1"))
            victim = next(s for s in g.servers if s.url.endswith(f":{store._client.connected_url.port}"))  # type: ignore[union-attr]
            assert victim._watch is not None and victim.pid is not None
            victim._watch.cancel()  # this machine stays dead
            os.kill(victim.pid, signal.SIGKILL)
            await patiently(lambda: store.put("ready.0.a", b"2"))
            entry = await patiently(lambda: store.get("members.a"))
            assert isinstance(entry, Entry) and entry.value == b"1"

    run(play)


def test_a_host_cannot_make_itself_a_member_of_the_store(tmp_path: Path) -> None:
    """Its certificate is of the run, and the account is named in its token: that is all that a server of its own would have."""

    async def play() -> None:
        async with ground(tmp_path, bucket=False) as g:
            organiser, members = await g.serve_three()
            await patiently(lambda: organiser.put("spec", b"the spec"))
            papers = StorePapers.issue(g.authority, "alice", ["127.0.0.1"])
            rogue_port = free_port("127.0.0.1")
            rogue = StoreServer(
                tmp_path / "rogue", replace(papers, secret="guess"), name="rogue", cluster_port=rogue_port, members=members
            )
            g.servers.append(rogue)
            await rogue.start()
            log = tmp_path / "rogue" / "server.log"
            deadline = time.monotonic() + 15
            while "Authorization Violation" not in "".join(p.read_text() for p in tmp_path.glob("*/server.log")):
                assert time.monotonic() < deadline, log.read_text()
                await asyncio.sleep(0.1)
            for i in range(3):
                said = (tmp_path / f"s{i}" / "server.log").read_text()
                assert "rogue" not in said and g.authority.members_secret() not in said
            context = client_context(g.authority.certified.certificate, g.authority.certify("alice"))
            with pytest.raises(NetworkError):  # it has nothing of the run, not even for who may read everything
                inside = await Store.connect([rogue.url], g.authority.admit_organiser(), context, patience=2)
                g.stores.append(inside)
                await inside.get("spec")
            assert g.authority.members_secret() not in repr(rogue) + repr(papers)

    run(play)


def test_who_is_of_another_run_is_not_let_in(tmp_path: Path) -> None:
    async def play() -> None:
        async with ground(tmp_path) as g:
            stranger = Authority.create()
            ours = client_context(g.authority.certified.certificate, g.authority.certify("a"))
            theirs = client_context(stranger.certified.certificate, stranger.certify("a"))
            with pytest.raises(NetworkError, match="does not let this cluster in"):
                await Store.connect(g.urls, stranger.admit("a"), ours, patience=2)
            with pytest.raises(NetworkError, match="certificate is not of this run"):
                await Store.connect(g.urls, g.authority.admit("a"), theirs, patience=2)

    run(play)


def test_nobody_there_and_a_port_in_use_are_sentences(tmp_path: Path) -> None:
    async def play() -> None:
        g = Ground(tmp_path)
        context = client_context(g.authority.certified.certificate, g.authority.certify("a"))
        with pytest.raises(NetworkError, match="nobody answers there"):
            await Store.connect(["tls://127.0.0.1:1"], g.authority.admit("a"), context, patience=1)
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(NetworkError, match="cannot listen"):
            await g.serve(port=taken.getsockname()[1])

    run(play)
