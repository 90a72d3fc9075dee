"""The test internet: it delays, limits, loses and cuts, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.netlab import Lab, LabError, Line, Pair, Spec
from benchmarks.netlab.check import listening, probe, tcp

missing = os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not shutil.which("cc") or not shutil.which("ip")
pytestmark = pytest.mark.skipif(missing, reason="a test internet takes root, /dev/net/tun, iproute2 and a C compiler")
ROOT = Path(__file__).parents[2]


def namespaces() -> set[str]:
    return {path.name for path in Path("/run/netns").glob("netlab-*")} if Path("/run/netns").exists() else set()


def spec(rate: float = 2.5e6, rtt: float = 0.05, loss: float = 0.0) -> Spec:
    return Spec.equal(2, Line(rate, rate), Pair(rtt, loss))


def test_rate_round_trip_and_loss_are_those_that_were_asked_for() -> None:
    with Lab(spec()) as lab:
        listening(lab, "c1", "echo")
        assert 0.05 <= float(probe(lab, "c0", "ping", lab.address("c1"), 5201, 15)) < 0.15
        lab.set_way("c0", "c1", rtt=0.2)
        assert 0.2 <= float(probe(lab, "c0", "ping", lab.address("c1"), 5201, 5)) < 0.35
        lab.set_way("c0", "c1", rtt=0.02)
        assert 0.4 < tcp(lab, 2, "cubic") / 2.5e6 < 1.02
        lab.set_line("c0", up=5e5)
        assert 0.4 < tcp(lab, 2, "cubic") / 5e5 < 1.02
        before = lab.counters()["c0"]
        lab.set_line("c0", up=12.5e6)
        lab.set_way("c0", "c1", loss=0.2)
        probe(lab, "c0", "flood", lab.address("c1"), 9, 1, 10)
        after = lab.counters()["c0"]
        assert 0.1 < (after.lost - before.lost) / (after.sent_packets - before.sent_packets) < 0.3


def test_a_line_that_is_cut_carries_nothing_and_then_does_again() -> None:
    with Lab(spec(rtt=0.01)) as lab:
        listening(lab, "c1", "echo")
        lab.cut("c1")
        probe(lab, "c0", "flood", lab.address("c1"), 9, 0.3, 5)
        counted = lab.counters()
        assert counted["c0"].sent > 0 and counted["c1"].received == 0 and counted["c0"].dropped == counted["c0"].sent_packets
        lab.cut("c1", dead=False)
        assert float(probe(lab, "c0", "ping", lab.address("c1"), 5201, 3)) < 1
        counted = lab.counters()
        assert counted["c1"].received > 0


def test_nothing_is_left_after_an_end_an_error_or_a_kill() -> None:
    before = namespaces()
    with pytest.raises(ZeroDivisionError), Lab(spec()) as lab:
        sleeping = lab.popen("c0", ["sleep", "60"])
        assert len(namespaces() - before) == 2
        raise ZeroDivisionError
    assert namespaces() == before and sleeping.poll() is not None
    code = (
        "import sys, time\nfrom benchmarks.netlab import *\nwith Lab(Spec.equal(2, Line(), Pair())) as lab:\n"
        "  print(lab._forwarder.pid, flush=True)\n  time.sleep(60)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    forwarder = int(killed.stdout.readline())
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{forwarder}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert namespaces() != before
    with Lab(spec()):
        pass
    assert namespaces() == before


def test_the_command_runs_in_every_site_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('[way]\nrtt = "2ms"\n[sites.a]\n[sites.b]\n')

    def netlab(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.netlab", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    done = netlab("run", str(path), "--", "sh", "-c", "echo {site} is {address} of {sites}, $NETLAB_SITE; ip -br addr show wan")
    assert done.returncode == 0, done.stderr
    assert "a is 10.77.0.1 of a,b, a" in done.stdout and "10.77.0.2/24" in done.stdout and "received" in done.stderr
    assert netlab("run", str(path), "--only", "b", "--", "sh", "-c", "exit 7").returncode == 7
    wrong = netlab("run", str(path), "--only", "x", "--", "true")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ") and "has no site 'x'" in wrong.stderr
    assert netlab("run", str(tmp_path / "none.toml"), "--", "true").returncode == 2


def test_a_setting_that_the_kernel_refuses_is_a_sentence() -> None:
    with Lab(spec()) as lab:
        lab.sysctl("c0", "net/ipv4/tcp_slow_start_after_idle", "0")
        assert lab.run("c0", ["cat", "/proc/sys/net/ipv4/tcp_slow_start_after_idle"], capture_output=True).stdout == b"0\n"
        with pytest.raises(LabError, match="cannot be set"):
            lab.sysctl("c0", "net/ipv4/tcp_congestion_control", "no-such")
