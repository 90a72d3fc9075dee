"""Makes a test internet, and takes it away again whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.netlab.spec import Event, Line, Pair, Spec, pairs
from blake3 import blake3

SOURCE = Path(__file__).with_name("forwarder.c")
PREFIX = "netlab"
_TUNSETIFF, _TUN, _NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
BUFFER = 32 << 20  # bytes that a TCP connection in a site may hold
SYSCTLS = {
    "net/ipv4/tcp_rmem": f"4096 131072 {BUFFER}",
    "net/ipv4/tcp_wmem": f"4096 65536 {BUFFER}",
    "net/ipv4/tcp_no_metrics_save": "1",  # one experiment must not teach the next
}


class LabError(RuntimeError):
    """A sentence that says why a test internet cannot be had here."""


@dataclass(frozen=True)
class Counters:
    """Of a site's line, since it was made: IP bytes and packets. lost: on the way from it; dropped: its buffers were full, or it was cut."""

    sent: int
    sent_packets: int
    received: int
    received_packets: int
    lost: int
    dropped: int


class Lab:
    """A test internet. Use it as a context; it needs root, /dev/net/tun and a C compiler. Raises LabError on entering."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.names = list(spec.sites)
        self._lines = dict(spec.sites)
        self._ways = {frozenset((a, b)): way for a, b, way in pairs(spec)}
        self._made: list[str] = []
        self._forwarder: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[Any]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._events: list[threading.Thread] = []

    # --- making it

    def __enter__(self) -> Lab:
        program = compiled()
        sweep()
        try:
            devices = [self._site(name) for name in self.names]
            try:
                self._forwarder = subprocess.Popen(
                    [program, str(self.spec.seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
                    pass_fds=devices, start_new_session=True,
                )  # fmt: skip
            finally:
                for device in devices:
                    os.close(device)
            for name, device in zip(self.names, devices, strict=True):
                self._say_line(name, device)
            for pair in self._ways:
                self._say_way(pair)
            self.counters()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the sites, and take all away."""
        self._over.set()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if self._forwarder is not None:
            self._forwarder.kill()
            self._forwarder.wait()
            for pipe in (self._forwarder.stdin, self._forwarder.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for thread in self._events:
            thread.join()
        for namespace in self._made:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
        self._made.clear()

    def namespace(self, site: str) -> str:
        return f"{PREFIX}-{os.getpid()}-{id(self) % 10**6}-{self.names.index(site)}"

    def address(self, site: str) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{self.names.index(site) + 1}"

    def _site(self, name: str) -> int:
        """Make a namespace with its device; returns the device's descriptor."""
        namespace, device = self.namespace(name), "wan"
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        descriptor = _in_namespace(namespace, lambda: _tun(device))
        inside = ("-n", namespace)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "addr", "add", f"{self.address(name)}/24", "dev", device)
        _ip(*inside, "link", "set", device, "mtu", "1500", "up")
        for key, value in SYSCTLS.items():
            self.sysctl(name, key, value)
        return int(descriptor)

    def sysctl(self, site: str, key: str, value: str) -> None:
        """Set a kernel's setting of one site, as net/ipv4/tcp_slow_start_after_idle. Raises LabError."""
        try:
            _in_namespace(self.namespace(site), lambda: Path("/proc/thread-self/root/proc/sys", key).write_text(value))
        except OSError as error:
            raise LabError(f"{key} of a site cannot be set to {value} ({error.strerror})") from error

    # --- while it runs

    def command(self, site: str, argv: Sequence[str]) -> list[str]:
        """What runs a command in a site."""
        return ["ip", "netns", "exec", self.namespace(site), *argv]

    def popen(self, site: str, argv: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Start a command in a site; it is killed with the lab."""
        process: subprocess.Popen[Any] = subprocess.Popen(self.command(site, argv), **more)
        self._processes.append(process)
        return process

    def run(self, site: str, argv: Sequence[str], **more: Any) -> subprocess.CompletedProcess[Any]:
        return subprocess.run(self.command(site, argv), check=False, **more)

    def cut(self, site: str, *, dead: bool = True) -> None:
        """Let a site's line die, or live again."""
        self._say(f"cut {self.names.index(site)} {int(dead)}")

    def set_line(self, site: str, **changes: float) -> None:
        """Change a line while it runs: fields of `Line`."""
        self._lines[site] = replace(self._lines[site], **changes)
        self._say_line(site, -1)

    def set_way(self, a: str, b: str, **changes: float) -> None:
        """Change the way between two sites: fields of `Pair`."""
        pair = frozenset((a, b))
        self._ways[pair] = replace(self._ways[pair], **changes)
        self._say_way(pair)

    def counters(self) -> dict[str, Counters]:
        """By site. Raises LabError when the forwarder is gone."""
        with self._lock:
            self._say("count", locked=True)
            assert self._forwarder is not None and self._forwarder.stdout is not None
            rows = [self._forwarder.stdout.readline() for _ in self.names]
            end = self._forwarder.stdout.readline()
        if end.strip() != "end":
            raise LabError("the forwarder has ended; see what it said")
        return {name: Counters(*map(int, row.split())) for name, row in zip(self.names, rows, strict=True)}

    def cpu_seconds(self) -> float:
        """What the forwarder has used."""
        assert self._forwarder is not None
        words = Path(f"/proc/{self._forwarder.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def begin(self) -> None:
        """Let the spec's events come, counted from now."""
        for event in self.spec.events:
            thread = threading.Thread(target=self._play, args=(event,), daemon=True)
            thread.start()
            self._events.append(thread)

    def _play(self, event: Event) -> None:
        if not self._over.wait(event.at):
            self.cut(event.cut)
            if not self._over.wait(event.seconds):
                self.cut(event.cut, dead=False)

    # --- telling the forwarder

    def _say_line(self, name: str, device: int) -> None:
        line: Line = self._lines[name]
        self._say(f"site {self.names.index(name)} {device} {line.up} {line.down} {line.room(line.up)} {line.room(line.down)}")

    def _say_way(self, pair: frozenset[str]) -> None:
        way: Pair = self._ways[pair]
        a, b = (self.names.index(name) for name in pair)
        for one, other in ((a, b), (b, a)):
            self._say(f"pair {one} {other} {way.rtt / 2 * 1e9:.0f} {way.loss}")

    def _say(self, text: str, *, locked: bool = False) -> None:
        assert self._forwarder is not None and self._forwarder.stdin is not None
        with contextlib.nullcontext() if locked else self._lock, contextlib.suppress(BrokenPipeError):
            self._forwarder.stdin.write(text + "\n")
            self._forwarder.stdin.flush()


def enter(namespace: str) -> None:
    """Move the calling thread, and what it starts from now on, into a namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:  # noqa: PTH123 - a descriptor is wanted
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _in_namespace(namespace: str, work: Any) -> Any:
    """Do `work` in a thread of its own that has moved there."""
    result: list[Any] = []

    def moved() -> None:
        try:
            enter(namespace)
            result.append(work())
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=moved)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def _tun(device: str) -> int:
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN | _NO_PI))
    except OSError as error:
        raise LabError(f"no TUN device can be made ({error.strerror}); it takes root and /dev/net/tun") from error
    return descriptor


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LabError("there is no ip command; install iproute2") from error
    if done.returncode:
        raise LabError(f"ip {' '.join(words)}: {done.stderr.strip()}; a test internet needs root")


def compiled() -> str:
    """The forwarder's program, made when its source is new. Raises LabError."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "isles"
    program = folder / f"netlab-{blake3(SOURCE.read_bytes()).hexdigest()[:16]}"
    if program.exists():
        return str(program)
    folder.mkdir(parents=True, exist_ok=True)
    making = program.with_name(f"{program.name}.{os.getpid()}")
    try:
        done = subprocess.run(["cc", "-O2", "-o", str(making), str(SOURCE)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LabError("there is no C compiler (cc); install one") from error
    if done.returncode:
        raise LabError(f"the forwarder cannot be compiled: {done.stderr.strip()[:300]}")
    making.replace(program)
    return str(program)


def sweep() -> None:
    """Take away what a lab left that was killed."""
    for namespace in _namespaces():
        owner = re.match(rf"^{PREFIX}-(\d+)-", namespace)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _namespaces() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from sorted(path.name for path in Path("/run/netns").iterdir())
