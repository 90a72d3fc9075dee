"""Isles beside what a user would otherwise choose, on the same test internet and over the same values; needs root, and `pip install 'isles[peers]'` for hivemind.

    python -m benchmarks.peers                                    every condition and side
    python -m benchmarks.peers --only clean-cubic --repeats 3     some
    python -m benchmarks.peers --json docs/results/peers.json

A kernel lets a network namespace choose only what it allows to everybody; if need be: sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr".
Two sites, 100 Mbit/s, 100 ms unless said. A side takes its rounds one after another on a test internet that it has for itself; the others follow. Of hivemind only
the all-reduce is counted, not the seconds in which it finds its group.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.agents import Job, measure, spread
from benchmarks.netlab import Lab, Line, Pair, Spec

MBIT = 125e3  # bytes/s
HERE = Path(__file__).parent
SIDES = {
    "isles int4": "int4", "isles int8": "int8", "isles fp32": "fp32",
    "gloo fp32": ("gloo.py", "--device", "wan"),
    "gloo fp32 in buckets": ("gloo.py", "--device", "wan", "--buckets"),
    "hivemind fp32": ("averager.py",),
    "hivemind float16": ("averager.py", "--compression", "float16"),
    "hivemind 8 bits": ("averager.py", "--compression", "8bit"),
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """congestion: of isles; of the others it is the site's default, which is set to the same."""

    name: str
    congestion: str
    loss: float = 0.0
    sites: int = 2
    rate: float = 100 * MBIT
    rtt: float = 0.1


CONDITIONS = [
    Condition("clean-cubic", "cubic"),
    Condition("clean-bbr", "bbr"),
    Condition("loss0.1-cubic", "cubic", 0.001),
    Condition("loss0.1-bbr", "bbr", 0.001),
]


def isles(condition: Condition, codec: str, lab: Lab, values: int, repeats: int) -> dict[str, Any]:
    sites = tuple((lab.namespace(name), lab.address(name)) for name in lab.names)
    row = measure(Job(codec, values, condition.sites, repeats, sites, congestion=condition.congestion, pause=2.0, warm=3))
    return {"seconds": row["seconds"], "cpu": row["cpu"], "rms_error": row["rms_error"]}


def other(script: tuple[str, ...], lab: Lab, values: int, repeats: int) -> dict[str, Any]:
    """Raises RuntimeError when a site fails."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        addresses = ",".join(lab.address(name) for name in lab.names)
        running = [
            lab.popen(
                name,
                [sys.executable, str(HERE / script[0]), *script[1:], "--index", str(i), "--addresses", addresses, "--folder", folder,
                 "--values", str(values), "--repeats", str(repeats)],
                stdout=subprocess.PIPE, stderr=said, text=True,
            )
            for i, name in enumerate(lab.names)
        ]  # fmt: skip
        lines = [process.communicate(timeout=3600)[0].splitlines()[-1:] for process in running]
        if any(process.returncode for process in running):
            said.seek(0)
            raise RuntimeError(f"{' '.join(script)} failed: {said.read()[-6000:]}")
    reports = [json.loads(line[0]) for line in lines]
    rounds = [[r["rows"][i] for r in reports] for i in range(repeats)]
    return {
        "seconds": spread([max(r["ended"] for r in row) - min(r["began"] for r in row) for row in rounds]),
        "cpu": spread([max(r["cpu"] for r in row) for row in rounds]),
        "rms_error": reports[0]["rms_error"],
    }


def run(condition: Condition, side: str, values: int, repeats: int) -> dict[str, Any]:
    with Lab(Spec.equal(condition.sites, Line(condition.rate, condition.rate), Pair(condition.rtt, condition.loss))) as lab:
        for name in lab.names:
            lab.sysctl(name, "net/ipv4/tcp_congestion_control", condition.congestion)
        before = sum(c.sent for c in lab.counters().values())
        what = SIDES[side]
        row = isles(condition, what, lab, values, repeats) if isinstance(what, str) else other(what, lab, values, repeats)
        wire = sum(c.sent for c in lab.counters().values()) - before
    return {"condition": condition.name, "side": side, "repeats": repeats, **row, "wire": wire}


def main() -> None:
    parser = argparse.ArgumentParser(prog="peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[c.name for c in CONDITIONS], metavar="CONDITION")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), metavar="SIDE")
    parser.add_argument("--values", type=float, default=25e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow", type=int, default=2, help="rounds of fp32 over lines with loss, which take minutes each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for condition in CONDITIONS:
        for side in SIDES:
            if (given.only and condition.name not in given.only) or (given.sides and side not in given.sides):
                continue
            if "hivemind" in side and find_spec("hivemind") is None:
                print(f"left out {side}: hivemind is not installed (pip install 'isles[peers]')", flush=True)
                continue
            slow = condition.loss and "isles" not in side
            row = run(condition, side, int(given.values), min(given.repeats, given.slow) if slow else given.repeats)
            rows.append(row)
            s = row["seconds"]
            print(
                f"{condition.name:14} {side:21} {s['min']:.2f} / {s['median']:.2f} / {s['max']:.2f} s, error {row['rms_error']:.2e}, "
                f"{row['cpu']['median']:.2f} CPU s", flush=True,
            )  # fmt: skip
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
