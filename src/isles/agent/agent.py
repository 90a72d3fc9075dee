"""The agent: a cluster's one process that talks to the internet and owns the outer state.

It keeps five things going: what the store shows (`_follow`), that the cluster lives (`_beat`), the rounds of every fragment (`_drive`, by the
drivers), the samples (`_claims`), and the workers. None decides anything about rounds; that is the protocol's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any

from isles.agent.catchup import catch_up, offers_of, rounds_of
from isles.agent.driver import FragmentDriver
from isles.agent.folder import ClusterFolder, ClusterSettings
from isles.agent.guests import Guests
from isles.agent.membership import Membership
from isles.agent.restore import Restored
from isles.agent.samples import Samples
from isles.agent.saving import Saving
from isles.agent.supervisor import Supervisor
from isles.agent.tasks import end
from isles.agent.workers import WorkerLink
from isles.errors import DivergedError, IslesError, NetworkError
from isles.exchange import Exchange
from isles.exchange.state import StateServer
from isles.files import write_whole
from isles.identity import Invite, client_context, peer_name, server_context
from isles.protocol import BEAT, Board, Rules, State
from isles.store import Store
from isles.worker.link import OVER, HandedOff, Hello, Merge, Start, Stepped, Stop, Stopped

log = logging.getLogger("isles.agent")

TICK = 0.25  # seconds between looks at what only time changes
LINGER = 30.0  # seconds that a finished cluster stays for those that are still fetching
SPOILS = 3  # contributions in a row that are not finite, after which the cluster gives up
SAVING = 600.0  # seconds in which workers save at the run's end before they are made to end
GRACE = 10.0  # seconds that workers have to save, of the 30 that a container gives


class Agent:
    """One cluster's agent. `run` returns when the run is over for this cluster, or `leave` was called."""

    def __init__(self, folder: ClusterFolder, settings: ClusterSettings, invite: Invite, restored: Restored) -> None:
        self.folder, self.settings, self.invite, self.restored = folder, settings, invite, restored
        self.spec, self.state, self.journal = settings.spec, restored.state, restored.journal
        self.incarnation = secrets.token_hex(8)
        self.board, self.member = Board(), State.JOINING
        self.rules = Rules(
            tuple(stop - start for start, stop in restored.layout.fragments), start=settings.start,
            quorum=self.spec.clusters.quorum, grace=self._grace(), steps=self.spec.run.steps,
        )  # fmt: skip
        self.exchange = Exchange(
            invite.cluster, invite.run, codec=restored.codec, table=self.spec.outer, folder=folder.exchange,
            server_ssl=server_context(invite.authority, invite.certified), client_ssl=client_context(invite.authority, invite.certified),
            peer_name=peer_name, max_upload=settings.max_upload,
        )  # fmt: skip
        states = StateServer(self.exchange.server, lambda fragment: rounds_of(self, fragment), lambda: offers_of(self))
        self._saving = Saving(
            self.state, restored.checkpoints, self.journal, self.exchange, every=self.spec.checkpoint.every or 0, step=restored.step,
            wanted=states.wanted,
        )  # fmt: skip
        self.guests = self._make_guests() if settings.ranks == 0 else None
        self.supervisor: Supervisor | Guests = self._make_supervisor() if self.guests is None else self.guests
        self.link = WorkerLink(folder.path, alive=lambda: bool(self.supervisor.pids))
        self.link.on_hello, self.link.on_stepped = self._on_hello, self._on_stepped
        self.link.on_handed_off, self.link.on_stopped = self._on_handed_off, self._on_stopped
        self.samples = Samples(
            invite.cluster, len(restored.dataset or ()), store=lambda: self.store, board=self.board, journal=self.journal, give=self.link.claim
        )  # fmt: skip
        self.link.on_need = self.samples.need
        self._store: Store | None = None
        self._group: asyncio.TaskGroup | None = None
        self._failure: Exception | None = None
        self.drivers: list[FragmentDriver] = []
        self._woken, self._over = asyncio.Event(), asyncio.Event()
        self.lock, self._catching = asyncio.Lock(), asyncio.Lock()
        self.address = ""
        self.status: dict[str, Any] = {
            "cluster": invite.cluster,
            "pid": os.getpid(),
            "incarnation": self.incarnation,
            "step": restored.step,
            "state": "joining",
            "tokens": 0,
            "stalled": 0.0,
        }
        self.finished = self._done = self._leaving = False  # _done: there is nothing left to train
        self.membership = Membership(self, before=str(folder.read_status().get("incarnation", "")))
        self._spoils = 0  # contributions in a row that were not finite
        self._metrics = folder.metrics.open("ab", buffering=0)

        # whether the global parameters are still those of this cluster's own script, which may not be those that the run began with
        self.own_beginning = restored.dataset is None and not any(f.applied for f in restored.state.fragments)

    def _make_supervisor(self) -> Supervisor:
        return Supervisor(
            [sys.executable, "-m", "isles.worker", str(self.folder.path)], self.settings.ranks, record=self.folder.path / "workers.json",
            log_file=self.folder.worker_log, started=self._workers_gone, over=lambda: self._done,
        )  # fmt: skip

    def _make_guests(self) -> Guests:
        return Guests(
            record=self.folder.path / "workers.json", gone=self._workers_gone, over=lambda: self._done,
            connected=lambda: self.link.connected, leave=self.leave,
        )  # fmt: skip

    def _grace(self) -> float:
        """The grace window as a share of a round's training: what the spec says, and the slack that overlap leaves."""
        return (self.spec.clusters.grace + self.spec.streaming.overlap) / self.spec.train.local_steps

    @property
    def store(self) -> Store:
        if self._store is None:
            raise NetworkError("the store is not connected yet")
        return self._store

    # --- life

    async def run(self) -> None:
        """Take part until the run is over for this cluster. Raises IslesError when it cannot."""
        port = await self.exchange.start(self.settings.host, self.settings.port)
        self.address = self.settings.advertise or f"{self.settings.host}:{port}"
        try:
            self._write_status()
            await self._connect()
            if self._over.is_set():
                return
            await self.membership.claim_name()
            self._make_drivers()
            await self.link.start()  # not before the drivers can take what workers say that were found running
            async with asyncio.TaskGroup() as self._group:
                group = self._group
                tasks = [
                    group.create_task(work) for work in (self._follow(), self._beat(), self._drive(), self.samples.serve())
                ]
                tasks.append(group.create_task(self._keep_workers()))
                await self._over.wait()
                await end(tasks)
            if self._failure is not None:
                raise self._failure
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._close()

    def wake(self) -> None:
        """Something has changed: decide anew."""
        self._woken.set()

    def _fail(self, error: Exception) -> None:
        """Something went wrong that no sentence foresees: the agent ends, and says so."""
        self._failure = self._failure or error
        self._over.set()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the rest; if it fails, so does the agent."""
        if self._group is not None:
            self._group.create_task(work)
        else:  # told to leave before it had begun
            work.close()
            self._over.set()

    async def _connect(self) -> None:
        """Connect to the store; it may come up later than the cluster."""
        said = ""
        context = client_context(self.invite.authority, self.invite.certified)
        while not self._over.is_set():
            try:
                self._store = await Store.connect(self.invite.store, self.invite.user, context)
                self._store.on_state = self._on_store
                return
            except NetworkError as error:
                if "does not let" in str(error) or "certificate" in str(error):
                    raise
                if str(error) != said:
                    said = str(error)
                    log.warning("%s; trying again", error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._over.wait()

    def _on_store(self, connected: bool) -> None:
        if connected:
            self.board.connected(time.monotonic())
            log.info("the store is back")
        else:
            self.board.disconnected(time.monotonic())
            log.warning("the store cannot be reached; training goes on, rounds wait")
        self._woken.set()

    def _make_drivers(self) -> None:
        self.drivers = [
            FragmentDriver(
                index, cluster=self.invite.cluster, incarnation=self.incarnation, run=self.invite.run, seed=self.spec.run.seed,
                state=self.state, codec=self.restored.codec, table=self.spec.outer, rules=self.rules, board=self.board,
                store=self.store, exchange=self.exchange, workers=self.link, journal=self.journal, lock=self.lock,
                wake=self.wake, committed=self._committed, catch_up=self._catch_up, failed=self._fail,
                spoiled=self._spoiled, step=lambda: int(self.status["step"]),
            )
            for index in range(len(self.state.fragments))
        ]  # fmt: skip

    async def _close(self) -> None:
        if self.drivers:
            self._write_status()
        for driver in self.drivers:
            await driver.close()
        await self.link.stop()
        await self.exchange.stop()
        if self._store is not None:
            self._store.on_state = lambda _: None
            await self._store.close()
        self._metrics.close()

    def leave(self) -> None:
        """Take leave: workers save and end, an exchange under way is finished, the others are told."""
        if not self._leaving:
            self._leaving = True
            self.member = State.LEAVING
            self._background(self._take_leave())

    async def _take_leave(self) -> None:
        log.info("leaving")
        await self.membership.refresh()
        self.link.send(Stop("the cluster leaves the run"))
        await self._stop_workers()
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(d.attempt is not None for d in self.drivers):
            await asyncio.sleep(0.05)
        async with self.lock:
            await self.checkpoint()
        await self.membership.refresh()
        self._over.set()

    def _is_over(self) -> bool:
        """Whether the run's last rounds are committed, and in this cluster's global parameters."""
        rounds = [self.board.rounds.get(index) for index in range(len(self.state.fragments))]
        return all(
            seen is not None and self.rules.over(seen.record) and seen.record.number == fragment.applied
            for seen, fragment in zip(rounds, self.state.fragments, strict=True)
        )

    async def _end_workers(self) -> None:
        """The run is over: workers that are behind stop where they are, the others are ending by themselves."""
        self.link.send(Stop(OVER))
        deadline = time.monotonic() + SAVING
        while self.link.connected and time.monotonic() < deadline:
            await asyncio.sleep(TICK)
        await self._stop_workers()

    async def _stop_workers(self) -> None:
        await self.supervisor.stop(GRACE)
        self.link.gone()

    async def _finish(self) -> None:
        """The run is over, or the workers have done its last step: stay while others may need something of us."""
        async with self.lock:
            await self.checkpoint()
        self.finished, self.member = True, State.LEAVING
        deadline = time.monotonic() + LINGER
        await self.membership.refresh()
        while time.monotonic() < deadline and not self.membership.all_have_all():
            await asyncio.sleep(TICK)
        self._over.set()

    # --- what the store shows

    async def _follow(self) -> None:
        async for entry in self.store.watch():
            try:
                news = self.board.put(entry.key, entry.value, entry.revision, time.monotonic())
            except IslesError as error:
                log.warning("%s: %s", entry.key, error)
                continue
            if news:
                self._woken.set()

    async def _beat(self) -> None:
        while True:
            try:
                await self.membership.refresh()
            except NetworkError as error:
                log.debug("%s", error)
            self._write_status()
            await asyncio.sleep(BEAT)

    # --- rounds

    async def _drive(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # not wait_for, which may swallow being cancelled (before Python 3.12)
                async with asyncio.timeout(TICK):
                    await self._woken.wait()
            self._woken.clear()
            if self.member is State.JOINING and self.membership.in_step():  # at once: the next round may be open a moment only
                self.member = State.ACTIVE
                self._background(self.membership.refresh())
            now = time.monotonic()
            if self.member is State.ACTIVE or self.board.rounds:
                for driver in self.drivers:
                    driver.act(now)
            if not self._done and self._is_over():
                log.info("the run is over")
                self._done = True
                self.status["step"] = self.spec.run.steps
                self._background(self._end_workers())
            self._maybe_start()

    async def _committed(self, index: int, number: int) -> None:
        """A round was applied: count its samples, save now and then, forget what nobody needs."""
        seen = self.board.rounds.get(index)
        if index == 0 and seen is not None:
            await self.samples.count(seen.record)
        last = self.journal.last(index)
        self._spoils = 0 if last is not None and last.landed else self._spoils
        if self._saving.due(index, number, int(self.status["step"])):
            async with self.lock:
                await self.checkpoint()
        log.debug("fragment %d: round %d is done", index, number)

    async def checkpoint(self) -> None:
        """Save the outer state; the lock must be held."""
        await self._saving.save(int(self.status["step"]))

    async def _catch_up(self, index: int, renew: bool) -> None:
        async with self._catching:  # a checkpoint brings all fragments up at once
            seen = self.board.rounds.get(index)
            if seen is None or (not renew and seen.record.open <= self.state.fragments[index].applied + 1):
                return
            if renew and self.membership.in_step():  # the checkpoint that another fragment took has mended this one
                return
            if self.member is State.ACTIVE:
                self.member = State.JOINING
            await catch_up(self, index, renew=renew)

    # --- workers

    def _workers_gone(self) -> None:
        self.link.gone()
        for driver in self.drivers:
            driver.workers_gone()

    async def _keep_workers(self) -> None:
        await self.supervisor.run()
        if self._done and not self._leaving:
            await self._finish()

    async def begin_anew(self, why: str) -> None:
        """Have the workers drop what they hold and begin from the global parameters, once the cluster is in step."""
        if self.link.holding:
            log.info("the workers begin anew: %s", why)
            if self.guests is not None:
                self.link.dismiss(f"{why}; start the script again, and it goes on from the global parameters")
            await self.supervisor.restart()

    async def _spoiled(self, index: int, position: int) -> None:
        """What the workers handed off is not finite: they begin anew, with fresh moments. The agent ends when it goes on like that."""
        self._spoils += 1
        name = self.restored.layout.name_at(position)
        what = f"fragment {index}: the parameter {name} that the workers handed off is not finite"
        if self._spoils > SPOILS:
            self._fail(DivergedError(f"{what}, for the {self._spoils}th time in a row; lower optimizer.lr, or outer.lr"))
            return
        log.error("%s, so it is sent to nobody; the workers begin anew from the global parameters", what)
        await self.begin_anew("what they trained is not finite")
        shutil.rmtree(self.folder.path / "worker", ignore_errors=True)

    def _on_hello(self, hello: Hello) -> None:
        if hello.layout != self.restored.layout.digest():
            raise NetworkError("the workers train another model than the run's; start them with the run's spec")
        if self.guests is not None:
            self.guests.came(hello.pid)
        if hello.fresh:
            for driver in self.drivers:
                driver.workers_gone()
            self._maybe_start()
            return
        for index, driver in enumerate(self.drivers):
            missed = driver.found(hello.flights.get(index), hello.merged[index], released=index in hello.released)
            if missed is not None:
                late, landed = missed
                self.link.send(Merge(index, driver.applied, late, landed))
        self._woken.set()

    def _maybe_start(self) -> None:
        """Let fresh workers begin, once the cluster is in step and the run has begun."""
        hello = self.link.hello
        if hello is None or not hello.fresh or self.link.holding or not self.link.connected or self.member is not State.ACTIVE:
            return
        if self._done or self.lock.locked() or not self._begun() or not self.membership.in_step():
            return
        self.link.holding = True  # from now on rounds wait for what they hold
        self._background(self._start_workers(hello))

    def _begun(self) -> bool:
        if len(self.board.rounds) < len(self.state.fragments):
            return False
        if any(seen.record.open > 1 for seen in self.board.rounds.values()):
            return True
        view = self.board.view(0, time.monotonic())
        return (
            sum(m.record.state is State.ACTIVE and view.alive(n) for n, m in self.board.members.items()) >= self.settings.start
        )

    async def _start_workers(self, hello: Hello) -> None:
        """Give back what an earlier process had claimed and not trained, and begin."""
        prepared = self.drivers[0].prepared
        rounds = tuple(f.applied for f in self.state.fragments)
        busy = tuple(d.index for d in self.drivers if d.prepared is not None)
        resume = hello.saved == rounds and not busy
        keep = (*(prepared.ranges if prepared is not None else ()), *(hello.kept if resume else ()))
        async with self.lock:
            try:
                await self.samples.give_back(keep)
            except NetworkError as error:
                log.warning("%s", error)
                self.link.holding = False
                return
            step = max([seen.record.step for seen in self.board.rounds.values()], default=0)
            self.status["step"] = step
            self.link.begin(
                Start(
                    step, resume, self.spec.clusters.join_warmup_steps if any(rounds) else 0, rounds, busy, self.journal.taken
                )
            )
        log.info("workers begin at step %d%s", step, " where they had stopped" if resume else "")

    def _on_stepped(self, message: Stepped) -> None:
        total = int(self.status["tokens"]) + message.tokens
        self.status |= {
            "step": max(message.step, int(self.status["step"])),
            "loss": message.loss,
            "lr": message.lr,
            "tokens": total,
            "grad_norm": message.grad_norm,
        }
        self.status["seconds_per_step"] = message.seconds
        for name, more in (("stalled", message.stalled), ("trained_seconds", message.seconds)):
            self.status[name] = round(float(self.status.get(name, 0.0)) + more, 4)
        with contextlib.suppress(OSError):
            row = asdict(message) | {"time": round(time.time(), 3), "rounds": [f.applied for f in self.state.fragments]}
            self._metrics.write(json.dumps(row).encode() + b"\n")

    def _on_handed_off(self, message: HandedOff) -> None:
        self.drivers[message.fragment].handed_off(message.flight)

    def _on_stopped(self, message: Stopped) -> None:
        self._done = self._done or message.finished
        if self.guests is not None:
            self.guests.went()
        log.info("workers stopped at step %d%s", message.step, ", the run's last" if message.finished else "")

    def _write_status(self) -> None:
        counters = self.exchange.counters.as_dict()
        self.status |= {
            "state": "finished" if self.finished else str(self.member), "rounds": [f.applied for f in self.state.fragments],
            "digests": [f.digest for f in self.state.fragments], "time": time.time(),
            "connected": self._store is not None and self._store.connected,
            "exchange_seconds": [round(d.exchange_seconds, 3) for d in self.drivers], "address": self.address,
            "bytes_up": sum(counters["up"].values()), "bytes_down": sum(counters["down"].values()), "workers": self.supervisor.pids,
            "trouble": self.membership.trouble,
        }  # fmt: skip
        with contextlib.suppress(OSError):
            write_whole(self.folder.status, json.dumps(self.status).encode(), durable=False)
