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
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.agents import Job, measure

BARS = {("int8", 25e6, 2): 0.30, ("fp32", 25e6, 2): 0.80}  # seconds


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
                row = measure(Job(codec, int(values), agents, given.repeats))
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
