"""Agents as processes of their own that synchronise a vector again and again, for the benchmarks of the exchange."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.certificates import TestAuthority, peer_name

from isles.codec import get_codec
from isles.exchange import Exchange, Task
from isles.exchange import peers as lines
from isles.protocol import Participant, Phase, RoundRecord
from isles.protocol.parts import chunk_values, plan_parts
from isles.spec import CodecTable, OuterTable

PR_SET_PDEATHSIG = 1
WARM = 200_000  # values of the warm-up rounds on loopback; elsewhere they are whole, and the line is learned in them


@dataclass(frozen=True)
class Job:
    """What to measure. sites: (namespace, address) of each agent; on loopback when there are none. speeds: bytes/s of each line, by which
    parts are sized. hidden: agents that cannot be reached. congestion: control to ask the kernel for. pause: seconds of idleness before a round. warm: rounds that are not
    measured."""

    codec: str
    size: int
    agents: int
    repeats: int
    sites: tuple[tuple[str, str], ...] = ()
    speeds: Mapping[str, float] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    congestion: str = "bbr"
    pause: float = 0.0
    warm: int = 2

    @property
    def names(self) -> list[str]:
        return [f"c{i}" for i in range(self.agents)]

    def record(self, number: int, size: int) -> RoundRecord:
        chunk = chunk_values(size, self.agents)
        owners = {name: self.speeds.get(name, 0.0) for name in self.names if name not in self.hidden}
        parts = plan_parts(-(-size // chunk), owners, self.agents)
        who = tuple(Participant(name, "0" * 8, 1) for name in self.names)
        return RoundRecord(0, number, Phase.EXCHANGE, 0, who, parts, chunk, "a" * 64)


@dataclass(frozen=True)
class Shared:
    """What the processes of a measurement have in common. under_way: number of the round that is measured, 0 between them."""

    folder: Path
    barrier: Any
    ports: Any
    under_way: Any
    results: Any


def measure(job: Job, during: Callable[[], None] | None = None) -> dict[str, Any]:
    """Seconds of the slowest agent as min, median and max, bytes, CPU seconds, memory, and the error of the average. during: done in this process when each
    measured round begins."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        authority = TestAuthority(Path(folder))
        for name in job.names:
            authority.contexts(name)
        shared = Shared(
            Path(folder), context.Barrier(job.agents), context.Array("i", job.agents), context.Value("i"), context.Queue()
        )
        processes = [context.Process(target=agent, args=(index, job, shared)) for index in range(job.agents)]
        for process in processes:
            process.start()
        try:
            reports = sorted(_reports(job, shared, processes, during), key=lambda r: r["index"])
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    assert len({r["digest"] for r in reports}) == 1, "the agents hold different averages"
    rounds = [[r["rows"][i] for r in reports] for i in range(job.repeats)]
    seconds = [max(r["ended"] for r in row) - min(r["began"] for r in row) for row in rounds]
    return {
        "codec": job.codec, "values": job.size, "agents": job.agents, "seconds": spread(seconds),
        "sent": max(r["sent"] for row in rounds for r in row), "sent_by_all": statistics.median(sum(r["sent"] for r in row) for row in rounds),
        "cpu": spread([max(r["cpu"] for r in row) for row in rounds]),
        "memory": max(r["memory"] for r in reports),
        "mean_error": reports[0]["mean_error"], "rms_error": reports[0]["rms_error"],
        "standard_error": reports[0]["rms_error"] / job.size**0.5,
    }  # fmt: skip


def _reports(job: Job, shared: Shared, processes: list[Any], during: Callable[[], None] | None) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = []
    seen, deadline = 0, time.monotonic() + 1800
    while len(reports) < job.agents:
        if during is not None and shared.under_way.value not in (0, seen):
            seen = shared.under_way.value
            during()
        while not shared.results.empty():
            reports.append(shared.results.get())
        if time.monotonic() > deadline or any(p.exitcode for p in processes):
            raise RuntimeError("an agent failed, or the measurement took half an hour")
        time.sleep(0.01)
    return reports


def agent(index: int, job: Job, shared: Shared) -> None:
    """A process of the measurement."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive a benchmark that is killed
    if job.sites:
        from benchmarks.netlab import enter

        enter(job.sites[index][0])
    lines.CONGESTION = job.congestion
    asyncio.run(_agent(index, job, shared))


async def _agent(index: int, job: Job, shared: Shared) -> None:
    me, codec, size = job.names[index], get_codec(CodecTable(name=job.codec)), job.size  # type: ignore[arg-type]
    server, client = TestAuthority.load(shared.folder, me)
    exchange = Exchange(
        me, "bench", codec=codec, table=OuterTable(), folder=shared.folder / me, server_ssl=server, client_ssl=client, peer_name=peer_name
    )  # fmt: skip
    hosts = [address for _, address in job.sites] or ["127.0.0.1"] * job.agents
    shared.ports[index] = await exchange.start(hosts[index], 0)
    base = np.zeros(size, np.float32)
    local = np.random.default_rng(index).standard_normal(size, dtype=np.float32)
    residual = np.full(size, 0, np.float32) if codec.needs_residual else None  # written, so that it counts as state
    await _together(shared)
    peers = {n: None if n in job.hidden else f"{hosts[i]}:{shared.ports[i]}" for i, n in enumerate(job.names)}

    async def once(number: int, count: int) -> str:
        task = Task("bench", job.record(number, count), 0, count, peers)

        def contribution(chunk: int, out: memoryview | None = None) -> memoryview:
            first, stop = task.bounds(chunk)
            more: dict[str, Any] = {} if residual is None else {"residual": residual[first:stop]}
            return codec.encode(base[first:stop], local[first:stop], offset=first, out=out, **more)

        return await exchange.exchange(task, contribution)

    for number in range(1, 1 + job.warm):
        exchange.forget(0, number)
        if job.sites:
            await asyncio.sleep(job.pause)
            await exchange.warm(peers)
        await once(number, size if job.sites else min(size, WARM))
        await _together(shared)  # who begins the next round no longer serves this one
    rows, digest = [], ""
    before = peak_rss()
    for number in range(1 + job.warm, 1 + job.warm + job.repeats):
        exchange.forget(0, number)
        if job.pause:
            await asyncio.sleep(job.pause)
            await exchange.warm(peers)
        await _together(shared)
        if index == 0:
            shared.under_way.value = number
        sent, cpu, began = sum(exchange.counters.up.values()), cpu_seconds(), time.monotonic()
        digest = await once(number, size)
        ended = time.monotonic()
        await _together(shared)  # a peer may still want something from us
        rows.append(
            {"began": began, "ended": ended, "sent": sum(exchange.counters.up.values()) - sent, "cpu": cpu_seconds() - cpu}
        )
    memory = peak_rss() - before
    error = errors(exchange, digest, job.warm + job.repeats, job) if index == 0 else {}
    speed = {"up": exchange.speed.up.speed, "down": exchange.speed.down.speed}
    shared.results.put({"index": index, "rows": rows, "memory": memory, "digest": digest, "speed": speed, **error})
    await _together(shared)
    await exchange.stop()


async def _together(shared: Shared) -> None:
    await asyncio.to_thread(shared.barrier.wait)


def errors(exchange: Exchange, digest: str, number: int, job: Job) -> dict[str, float]:
    """Mean and rms error of the average, in standard deviations of a pseudo-gradient."""
    streams = [np.random.default_rng(i) for i in range(job.agents)]
    total, square = 0.0, 0.0
    for values in exchange.result(0, number, digest):
        exact = -sum(s.standard_normal(values.size, dtype=np.float32).astype(np.float64) for s in streams) / job.agents
        off = values - exact
        total, square = total + float(off.sum()), square + float(np.square(off).sum())
    return {"mean_error": total / job.size, "rms_error": (square / job.size) ** 0.5}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss() -> int:
    """Bytes: the largest the process has been."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}
