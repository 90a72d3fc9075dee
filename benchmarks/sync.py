"""One full synchronisation between agents on loopback: seconds, bytes, CPU seconds, memory, and the error of the average.

    python benchmarks/sync.py                                    25M values, 2 agents, every codec
    python benchmarks/sync.py --values 100e6 --agents 2 3 4      and more
    python benchmarks/sync.py --json docs/results/sync.json

Every agent is a process of its own with mutual TLS, as in a run: contributions are encoded, sent to their owners, averaged, fetched back and
on disk when the clock stops. The parameters are gaussian; the error is that of the decoded average against the exact mean of
the pseudo-gradients, in their standard deviations, and "+-" is the standard error of that mean: what chance alone gives a
codec without bias over that many values. The slowest agent counts. Memory is what the process peaked at beyond what it
held before the first round (with a warm-up round on a small vector), so the state itself does not count and the exchange does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.certificates import TestAuthority, peer_name

from isles.codec import get_codec
from isles.exchange import Exchange, Task
from isles.protocol import Participant, Phase, RoundRecord
from isles.protocol.parts import chunk_values, plan_parts
from isles.spec import CodecTable, OuterTable

WARM = 200_000  # values of the warm-up round
BARS = {("int8", 25e6, 2): 0.30, ("fp32", 25e6, 2): 0.80}  # seconds


def record(number: int, size: int, names: list[str]) -> RoundRecord:
    chunk = chunk_values(size, len(names))
    parts = plan_parts(-(-size // chunk), dict.fromkeys(names, 0.0), len(names))
    return RoundRecord(0, number, Phase.EXCHANGE, 0, tuple(Participant(n, "0" * 8, 1) for n in names), parts, chunk, "a" * 64)


def agent(
    index: int,
    names: list[str],
    codec_name: str,
    size: int,
    repeats: int,
    folder: str,
    contexts: Any,
    barrier: Any,
    ports: Any,
    results: Any,
) -> None:
    asyncio.run(_agent(index, names, codec_name, size, repeats, Path(folder), contexts, barrier, ports, results))


async def _agent(
    index: int,
    names: list[str],
    codec_name: str,
    size: int,
    repeats: int,
    folder: Path,
    authority: Path,
    barrier: Any,
    ports: Any,
    results: Any,
) -> None:
    me, codec = names[index], get_codec(CodecTable(name=codec_name))
    server, client = TestAuthority.load(authority, me)
    exchange = Exchange(
        me,
        "bench",
        codec=codec,
        table=OuterTable(),
        folder=folder / me,
        server_ssl=server,
        client_ssl=client,
        peer_name=peer_name,
    )
    ports[index] = await exchange.start("127.0.0.1", 0)
    rng = np.random.default_rng(index)
    base = np.zeros(size, np.float32)
    local = rng.standard_normal(size, dtype=np.float32)
    residual = np.full(size, 0, np.float32) if codec.needs_residual else None  # written, so that it counts as state
    await asyncio.to_thread(barrier.wait)
    peers = {name: f"127.0.0.1:{ports[i]}" for i, name in enumerate(names)}

    async def once(number: int, count: int) -> str:
        task = Task("bench", record(number, count, names), 0, count, peers)

        def contribution(chunk: int) -> memoryview:
            first, stop = task.bounds(chunk)
            more = {} if residual is None else {"residual": residual[first:stop]}
            return codec.encode(base[first:stop], local[first:stop], offset=first, **more)

        return await exchange.exchange(task, contribution)

    for number in (1, 2):
        await once(number, min(size, WARM))
        await asyncio.to_thread(barrier.wait)  # who begins the next round no longer serves this one
    rows, digest = [], ""
    before = peak_rss()
    for number in range(3, 3 + repeats):
        exchange.forget(0, number)
        await asyncio.to_thread(barrier.wait)
        sent, cpu, began = sum(exchange.counters.up.values()), cpu_seconds(), time.monotonic()
        digest = await once(number, size)
        ended = time.monotonic()
        await asyncio.to_thread(barrier.wait)  # a peer may still want something from us
        rows.append(
            {"began": began, "ended": ended, "sent": sum(exchange.counters.up.values()) - sent, "cpu": cpu_seconds() - cpu}
        )
    error = {}
    if index == 0:
        error = errors(exchange, digest, 2 + repeats, size, len(names))
    results.put({"index": index, "rows": rows, "memory": peak_rss() - before, "digest": digest, **error})
    await exchange.stop()


def errors(exchange: Exchange, digest: str, number: int, size: int, agents: int) -> dict[str, float]:
    """Mean and rms error of the average, in standard deviations of a pseudo-gradient."""
    streams = [np.random.default_rng(i) for i in range(agents)]
    total, square, at = 0.0, 0.0, 0
    for values in exchange.result(0, number, digest):
        exact = -sum(s.standard_normal(values.size, dtype=np.float32).astype(np.float64) for s in streams) / agents
        off = values - exact
        total, square, at = total + float(off.sum()), square + float(np.square(off).sum()), at + values.size
    return {"mean_error": total / size, "rms_error": (square / size) ** 0.5}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss() -> int:
    """Bytes: the largest the process has been."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(codec: str, size: int, agents: int, repeats: int) -> dict[str, Any]:
    names, context = [f"c{i}" for i in range(agents)], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        authority = TestAuthority(Path(folder))
        for name in names:
            authority.contexts(name)
        barrier, ports, results = context.Barrier(agents), context.Array("i", agents), context.Queue()
        processes = [
            context.Process(target=agent, args=(i, names, codec, size, repeats, folder, Path(folder), barrier, ports, results))
            for i in range(agents)
        ]
        for process in processes:
            process.start()
        try:
            reports = sorted((results.get(timeout=600) for _ in names), key=lambda r: r["index"])
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    assert len({r["digest"] for r in reports}) == 1, "the agents hold different averages"
    rounds = [[r["rows"][i] for r in reports] for i in range(repeats)]
    seconds = [max(r["ended"] for r in row) - min(r["began"] for r in row) for row in rounds]
    return {
        "codec": codec, "values": size, "agents": agents, "seconds": spread(seconds),
        "sent": max(r["sent"] for row in rounds for r in row),
        "cpu": spread([max(r["cpu"] for r in row) for row in rounds]),
        "memory": max(r["memory"] for r in reports),
        "mean_error": reports[0]["mean_error"], "rms_error": reports[0]["rms_error"],
        "standard_error": reports[0]["rms_error"] / size**0.5,
    }  # fmt: skip


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--values", type=float, nargs="+", default=[25e6])
    parser.add_argument("--agents", type=int, nargs="+", default=[2])
    parser.add_argument("--codecs", nargs="+", default=["fp32", "bf16", "int8", "int4", "topk"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for values in given.values:
        for agents in given.agents:
            for codec in given.codecs:
                row = measure(codec, int(values), agents, given.repeats)
                rows.append(row)
                s, bar = row["seconds"], BARS.get((codec, values, agents))
                print(
                    f"{codec:5} {values / 1e6:5.0f}M x {agents}: {s['min']:.3f} / {s['median']:.3f} / {s['max']:.3f} s"
                    f"{f' (bar {bar:.2f})' if bar else ''}, {row['sent'] / 1e6:.1f} MB sent each, {row['cpu']['median']:.2f} CPU s, "
                    f"{row['memory'] / 2**20:.0f} MiB, mean error {row['mean_error']:+.1e} +- {row['standard_error']:.0e}, "
                    f"rms {row['rms_error']:.1e}",
                    flush=True,
                )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
