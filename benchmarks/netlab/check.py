"""Whether the test internet does what it was asked: rates, round trips, buffers, loss, an outage, and what it costs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.spec import Line, Pair, Spec

PROBE = Path(__file__).with_name("probe.py")
HEADERS = 1448 / 1500  # of a full packet, what TCP carries with timestamps
PORT = 5201


@dataclass(frozen=True)
class Row:
    """What was measured, in `unit`. least, most: the bar; None: none on that side."""

    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def bar(self) -> str:
        least = "" if self.least is None else f">= {self.least:g}"
        most = "" if self.most is None else f"<= {self.most:g}"
        return " and ".join(filter(None, (least, most)))

    @property
    def good(self) -> bool:
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


def probe(lab: Lab, site: str, *words: object) -> str:
    done = lab.run(site, [sys.executable, str(PROBE), *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the probe {words[0]} failed: {done.stderr.strip()[-300:]}")
    return str(done.stdout)


def listening(lab: Lab, site: str, kind: str) -> subprocess.Popen[bytes]:
    process = lab.popen(site, [sys.executable, str(PROBE), kind, lab.address(site), str(PORT)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # it listens
    return process


def tcp(lab: Lab, seconds: float, congestion: str, streams: int = 1) -> float:
    """Bytes/s that arrive from c0 at c1 in the second half of so many seconds."""
    server = listening(lab, "c1", "sink")
    said = probe(lab, "c0", "send", lab.address("c1"), PORT, seconds, congestion, streams)
    server.kill()
    server.wait()
    return float(said)


def lines(rate: float, rtt: float, loss: float = 0.0, buffer: float = 0.1) -> Spec:
    return Spec.equal(2, Line(rate * 125e3, rate * 125e3, buffer), Pair(rtt, loss))


def rates() -> Iterator[Row]:
    for rate in (20, 100, 300):
        for rtt in (0.02, 0.1):
            with Lab(lines(rate, rtt)) as lab:
                for congestion in ("cubic", "bbr"):
                    before, began = lab.cpu_seconds(), time.monotonic()
                    got = tcp(lab, 6 if rtt < 0.1 else 12, congestion) / (rate * 125e3 * HEADERS)
                    cores = (lab.cpu_seconds() - before) / (time.monotonic() - began)
                    yield Row(f"{congestion}, {rate} Mbit/s, {rtt * 1e3:.0f} ms: share of the rate", got, "", 0.9, 1.01)
                if rate == 300 and rtt == 0.02:
                    yield Row("cores of the forwarder at 300 Mbit/s", cores, "", None, 0.7)


def round_trips() -> Iterator[Row]:
    for rtt in (0.005, 0.02, 0.1, 0.3):
        with Lab(lines(100, rtt)) as lab:
            listening(lab, "c1", "echo")
            off = (float(probe(lab, "c0", "ping", lab.address("c1"), PORT, 30)) - rtt) * 1e3
            yield Row(f"median round trip less {rtt * 1e3:.0f} ms", off, "ms", -2, 2)


def buffers() -> Iterator[Row]:
    with Lab(lines(20, 0.02, buffer=0.2)) as lab:
        listening(lab, "c1", "echo")
        filling = lab.popen("c0", [sys.executable, str(PROBE), "flood", lab.address("c1"), str(PORT + 1), "9"])
        time.sleep(2)
        rtt = float(probe(lab, "c0", "ping", lab.address("c1"), PORT, 20))
        filling.kill()
        yield Row("round trip of 20 ms behind a full buffer of 200 ms", rtt * 1e3, "ms", 180, 235)


def losses() -> Iterator[Row]:
    with Lab(lines(100, 0.02, loss=0.01)) as lab:
        probe(lab, "c0", "flood", lab.address("c1"), PORT, 4, 50)
        counted = lab.counters()["c0"]
        yield Row("loss of 1 %", 100 * counted.lost / counted.sent_packets, "%", 0.8, 1.2)
    for loss, most in ((0.001, 25.0), (0.01, 6.0)):
        with Lab(lines(100, 0.1, loss)) as lab:
            for congestion, bars in (("cubic", (None, most)), ("bbr", (60.0, None))):
                got = tcp(lab, 12, congestion) * 8e-6
                yield Row(f"{congestion} at 100 ms and {loss * 100:g} % of loss on 100 Mbit/s", got, "Mbit/s", *bars)


def outage() -> Iterator[Row]:
    with Lab(lines(20, 0.02)) as lab:
        server = listening(lab, "c1", "sink")
        sending = lab.popen("c0", [sys.executable, str(PROBE), "send", lab.address("c1"), str(PORT), "8", "cubic", "1"])
        time.sleep(2)
        lab.cut("c1")
        time.sleep(0.3)
        before = lab.counters()["c1"].received
        time.sleep(2)
        during = lab.counters()["c1"].received - before
        lab.cut("c1", dead=False)
        time.sleep(3)
        after = lab.counters()["c1"].received - before
        sending.wait()
        server.kill()
        yield Row("bytes that come through in 2 s of outage", during, "B", None, 0)
        yield Row("MB that come in the 3 s after", after / 1e6, "MB", 0.5)


def measured() -> Iterator[Row]:
    """Everything, in about three minutes. Raises LabError."""
    for part in (round_trips, buffers, losses, outage, rates):
        yield from part()
