"""One full synchronisation over the test internet (benchmarks/netlab), under each condition that the exchange is made for; needs root.

    python benchmarks/wan.py                                      every condition, 25M values, int4 and int8, five rounds of each
    python benchmarks/wan.py --only slow outage --repeats 3       some
    python benchmarks/wan.py --json docs/results/wan.json

Wire efficiency is the time in which the lines could carry it at best, over the time it took: 2 (m - 1) / m x encoded bytes / line rate for
equal lines, and with unequal ones what the best sizes of parts allow (isles.protocol.parts). Line rates count IP packets whole, so headers alone
cost 4 %. Encoded bytes are the codec's; chunks travel packed (isles.exchange.packing), so the efficiency by the bytes that were sent is given, too. Before each round the lines are idle for two seconds, as they are in a run while clusters train; three rounds, in which the line is learned,
are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.agents import Job, measure, spread
from benchmarks.netlab import Lab, Line, Pair, Spec

from isles.codec import get_codec
from isles.protocol.parts import chunk_values
from isles.spec import CodecTable

MBIT = 125e3  # bytes/s
OUTAGE = 5.0  # seconds


@dataclass(frozen=True)
class Condition:
    """A row of the table. rate: Mbit/s of every line but those in `other`, which gives (up, down) by agent. bar: wire efficiency; or with an outage the
    seconds that it may cost beyond itself."""

    name: str
    agents: int = 2
    rate: float = 100
    rtt: float = 0.1
    loss: float = 0.0
    congestion: str = "bbr"
    other: dict[str, tuple[float, float]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    outage: bool = False
    bar: float = 0.9


CONDITIONS = [
    *(
        Condition(f"{m}x{rtt}ms-{c}", m, rtt=rtt / 1e3, congestion=c)
        for m in (2, 4) for rtt in (20, 100) for c in ("bbr", "cubic")
    ),
    Condition("loss0.1-bbr", loss=0.001, bar=0.88),
    Condition("loss0.1-cubic", loss=0.001, congestion="cubic", bar=0.80),
    Condition("loss1-bbr", loss=0.01, bar=0.80),
    Condition("300mbit", rate=300, rtt=0.05, bar=0.85),
    Condition("asymmetric", 4, rtt=0.02, other={"c3": (20, 100)}, bar=0.85),
    Condition("slow", 4, rtt=0.02, other={"c3": (20, 20)}, bar=0.85),
    Condition("hidden", 4, rtt=0.02, hidden=frozenset({"c3"}), bar=0.85),
    Condition("outage", outage=True, bar=3.0),
]  # fmt: skip


def best(condition: Condition, encoded: float) -> float:
    """Seconds in which the lines could carry it, with the best shares of the fragment: both ways of line i carry S (1 + p_i (m - 2))."""
    m, rates = condition.agents, []
    for i in range(m):
        up, down = condition.other.get(f"c{i}", (condition.rate, condition.rate))
        rates.append((min(up, down) * MBIT, f"c{i}" in condition.hidden))
    if m == 2:
        return max(encoded / rate for rate, _ in rates)

    def fits(seconds: float) -> bool:
        room = [(seconds * rate / encoded - 1) / (m - 2) for rate, _ in rates]
        owned = sum(min(1.0, r) for r, (_, hidden) in zip(room, rates, strict=True) if not hidden)
        return min(room) >= 0 and owned >= 1

    low, high = 0.0, 2 * (m - 1) * encoded / min(rate for rate, _ in rates)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def run(condition: Condition, codec: str, size: int, repeats: int) -> dict[str, Any]:
    names = [f"c{i}" for i in range(condition.agents)]
    other = {name: Line(up * MBIT, down * MBIT) for name, (up, down) in condition.other.items()}
    line = Line(condition.rate * MBIT, condition.rate * MBIT)
    speeds = {n: min(*condition.other.get(n, (condition.rate, condition.rate))) * MBIT for n in names}
    kind = get_codec(CodecTable(name=codec))  # type: ignore[arg-type]
    chunk = chunk_values(size, condition.agents)
    encoded = size // chunk * kind.encoded_size(chunk) + (kind.encoded_size(size % chunk) if size % chunk else 0)
    seconds = best(condition, encoded)
    with Lab(Spec.equal(condition.agents, line, Pair(condition.rtt, condition.loss), **other)) as lab:

        def strike() -> None:
            """The line of an agent dies in the middle, for some seconds."""

            def cut() -> None:
                time.sleep(seconds / 2)
                lab.cut(names[-1])
                time.sleep(OUTAGE)
                lab.cut(names[-1], dead=False)

            threading.Thread(target=cut).start()

        sites = tuple((lab.namespace(name), lab.address(name)) for name in names)
        job = Job(
            codec, size, condition.agents, repeats, sites, speeds, condition.hidden, condition.congestion, pause=2.0, warm=3
        )
        clean = measure(job)
        row = {"condition": condition.name, "best": seconds, "bar": condition.bar, **clean}
        if condition.outage:
            struck = measure(job, strike)
            row["struck"] = struck["seconds"]
            row["beyond"] = struck["seconds"]["median"] - clean["seconds"]["median"] - OUTAGE
            row["good"] = row["beyond"] <= condition.bar
        else:
            took = clean["seconds"]
            row["efficiency"] = spread([seconds / took[k] for k in ("min", "median", "max")])
            row["good"] = row["efficiency"]["median"] >= condition.bar
        row["packed"] = clean["sent_by_all"] / (2 * (condition.agents - 1) * encoded)
        counted = lab.counters()
        row["wire"] = {n: {"sent": c.sent, "lost": c.lost, "dropped": c.dropped} for n, c in counted.items()}
        row["forwarder_cpu"] = lab.cpu_seconds()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=[c.name for c in CONDITIONS], metavar="CONDITION", help="some of the conditions"
    )
    parser.add_argument("--codecs", nargs="+", default=["int4", "int8"])
    parser.add_argument("--values", type=float, default=25e6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for condition in CONDITIONS:
        if given.only and condition.name not in given.only:
            continue
        for codec in given.codecs:
            row = run(condition, codec, int(given.values), given.repeats)
            rows.append(row)
            s = row["seconds"]
            what = f"{s['min']:.2f} / {s['median']:.2f} / {s['max']:.2f} s of {row['best']:.2f}"
            if condition.outage:
                result = f"{row['beyond']:+.2f} s beyond the outage (bar {condition.bar:.1f})"
            else:
                e = row["efficiency"]
                result = f"efficiency {e['min']:.3f} / {e['median']:.3f} / {e['max']:.3f} (bar {condition.bar:.2f}), of bytes sent {e['median'] * row['packed']:.3f}"
            mark = "ok" if row["good"] else "MISSED"
            print(f"{mark:6} {condition.name:15} {codec:5} {what}, {result}, {row['cpu']['median']:.2f} CPU s", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
