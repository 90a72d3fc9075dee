"""What faults cost a run of real processes on loopback: a cluster killed in an exchange, one frozen, the store killed.

    python benchmarks/faults.py                                       four clusters, five of each
    python benchmarks/faults.py --repeats 3 --json docs/results/faults.json

Uploads are capped so that an exchange takes a second or so and the fault falls into it. Times are read from the agents' logs: of a round, from
the moment in which its first exchange begins until the last survivor has applied it. `clean` are rounds of four in which nothing happens.
Detection is from the fault until the survivors' next attempt begins; `rest` is from there until they are done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.processes.runs import SLOW, spec_of, write_text

from isles.agent.local import LocalRun

LINE = re.compile(r"^(\S+ \S+) INFO isles.agent: fragment 0: round (\d+)(?:, attempt (\d+) (begins)| (applied))")
VICTIM = 3


def events(run: LocalRun, number: int) -> list[tuple[float, int, str]]:
    """(time, round, 'begins 0' or 'applied'), of one cluster."""
    rows = []
    for line in run.cluster(number).log.read_text().splitlines():
        if found := LINE.match(line):
            when = dt.datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            rows.append((when, int(found[2]), f"begins {found[3]}" if found[4] else "applied"))
    return rows


def spans(run: LocalRun, clusters: range) -> dict[int, tuple[float, float]]:
    """When each round that all of the clusters took part in began for the first, and was applied by the last."""
    begun: dict[int, list[float]] = {}
    done: dict[int, list[float]] = {}
    for number in clusters:
        for when, round_, what in events(run, number):
            if what == "applied":
                done.setdefault(round_, []).append(when)
            elif what == "begins 0":
                begun.setdefault(round_, []).append(when)
    whole = [r for r in done if len(done[r]) == len(begun.get(r, [])) == len(clusters)]
    return {r: (min(begun[r]), max(done[r])) for r in whole}


async def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run did not come to that")
        await asyncio.sleep(0.01)


def newest(run: LocalRun, number: int, what: str) -> int:
    return max((r for _, r, w in events(run, number) if w == what), default=0)


async def all_take_part(run: LocalRun) -> None:
    """Wait until two rounds in a row were begun by all."""
    base = newest(run, 0, "applied")
    await until(
        lambda: all(len([1 for _, r, w in events(run, n) if w == "begins 0" and r > base]) >= 2 for n in range(run.count))
    )


async def fault(run: LocalRun, strike: Callable[[], None]) -> dict[str, float]:
    """Strike when a new exchange has just begun for the victim; how long the survivors then took."""
    before = newest(run, VICTIM, "begins 0")
    await until(lambda: newest(run, VICTIM, "begins 0") > before)
    round_ = newest(run, VICTIM, "begins 0")
    struck = time.time()
    strike()
    survivors = range(VICTIM)
    await until(lambda: round_ in spans(run, survivors))
    begun, done = spans(run, survivors)[round_]
    again = [t for n in survivors for t, r, w in events(run, n) if r == round_ and w.startswith("begins") and w != "begins 0"]
    detected = min(again) if again else done
    return {
        "round": done - begun,
        "detection": max(0.0, detected - struck),
        "rest": done - detected,
        "attempts": float(1 + bool(again)),
    }


def pids(run: LocalRun) -> list[int]:
    return [run.agents[VICTIM].pid, *run.cluster(VICTIM).read_status().get("workers", [])]


def send(run: LocalRun, number: int) -> None:
    for pid in pids(run):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def measure(folder: Path, repeats: int) -> dict[str, Any]:
    write_text(folder / "text")
    spec = spec_of(folder / "text", VICTIM + 1, "run.steps=1000000")
    run = LocalRun(folder / "run", spec, Path(), max_upload=SLOW)
    results: dict[str, Any] = {"killed": [], "frozen": [], "store": []}
    try:
        await run.start()
        await all_take_part(run)
        for _ in range(repeats):
            await all_take_part(run)
            results["killed"].append(await fault(run, lambda: send(run, signal.SIGKILL)))
            run.agents[VICTIM].wait()
            run.start_agent(VICTIM)
            await all_take_part(run)
            results["frozen"].append(await fault(run, lambda: send(run, signal.SIGSTOP)))
            send(run, signal.SIGCONT)
            await all_take_part(run)
            results["store"].append(await without_store(run))
        results["clean"] = clean(run)
    finally:
        await run.stop(5.0)
    return results


def clean(run: LocalRun) -> list[float]:
    """Seconds of the rounds that all clusters made in one attempt."""
    everybody = range(VICTIM + 1)
    again = {r for n in everybody for _, r, what in events(run, n) if what.startswith("begins") and what != "begins 0"}
    return [done - begun for round_, (begun, done) in spans(run, everybody).items() if round_ not in again]


async def without_store(run: LocalRun) -> dict[str, float]:
    """Kill the store: how long until the next round is applied, and whether a worker missed a step."""
    workers = [run.cluster(n).read_status()["workers"] for n in range(run.count)]
    before = newest(run, 0, "applied")
    assert run.server is not None and run.server.pid is not None
    os.kill(run.server.pid, signal.SIGKILL)
    began = time.monotonic()
    await until(lambda: newest(run, 0, "applied") >= before + 2)
    seconds = time.monotonic() - began
    await asyncio.sleep(1.5)  # statuses are written every second
    same = [run.cluster(n).read_status()["workers"] for n in range(run.count)] == workers
    return {"two rounds": seconds, "workers restarted": float(not same), "steps missed": float(gaps(run))}


def gaps(run: LocalRun) -> int:
    """Steps that a cluster which was never struck has left out or done twice."""
    steps = [json.loads(line)["step"] for line in run.cluster(0).metrics.read_text().splitlines()]
    return sum(b - a != 1 for a, b in itertools.pairwise(steps))


def row(name: str, values: list[float]) -> str:
    return f"{name:22s} {min(values):8.2f} {statistics.median(values):8.2f} {max(values):8.2f}   n={len(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(Path(folder), given.repeats))
    print(f"{'seconds':22s} {'min':>8s} {'median':>8s} {'max':>8s}")
    print(row("clean round", results["clean"]))
    for kind in ("killed", "frozen"):
        for what in ("round", "detection", "rest"):
            print(row(f"{kind}: {what}", [r[what] for r in results[kind]]))
    for what in ("two rounds", "workers restarted", "steps missed"):
        print(row(f"store: {what}", [r[what] for r in results["store"]]))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
