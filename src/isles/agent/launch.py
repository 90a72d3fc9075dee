"""An agent process of a cluster's folder: started, watched, and started again when it was killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from isles.agent.folder import ClusterFolder
from isles.errors import IslesError

log = logging.getLogger("isles.agent")

RESTARTS, WINDOW = 5, 600.0  # more restarts than that in so many seconds are a mistake that restarting does not mend
GRACE = 28.0  # seconds that an agent has to leave; a container gives 30
LAST_WORDS = 1 << 16  # bytes at the end of the log in which the agent's last error stands


class AgentFailed(IslesError):
    """An agent ended with an error. exit_code is the agent's."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def running_agent(folder: ClusterFolder) -> int | None:
    """Process number of the agent that works in a folder."""
    pid = int(folder.read_status().get("pid", 0))
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"isles.agent" in words and os.fsencode(folder.path.resolve()) in words:
            return pid
    return None


def start_agent(folder: ClusterFolder) -> subprocess.Popen[bytes]:
    """Start the agent of a cluster; what it says goes to the folder's agent.log, and it outlives who started it."""
    with folder.log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "isles.agent", str(folder.path.resolve())], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


class AgentProcess:
    """The agent of one cluster, kept going."""

    def __init__(self, folder: ClusterFolder) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._found = running_agent(folder)  # left by a command that was killed
        self._ends: list[float] = []

    def start(self) -> subprocess.Popen[bytes]:
        self._process = start_agent(self.folder)
        return self._process

    def keep(self) -> int | None:
        """Look at the process: None while it runs, or was killed and is started again; else its exit code. Raises AgentFailed when it ended with
        an error of its own, or is killed again and again."""
        if self._found is not None:
            if running_agent(self.folder) == self._found:
                return None
            self._found = None
            if self.folder.read_status().get("state") in ("finished", "leaving"):
                return 0
        code = self.start().poll() if self._process is None else self._process.poll()
        if code is None or code == 0:
            return code
        if code > 0:
            raise AgentFailed(self.last_words() or f"the agent ended with exit code {code}; see {self.folder.log}", code)
        self._ends = [t for t in self._ends if time.monotonic() - t < WINDOW] + [time.monotonic()]
        if len(self._ends) > RESTARTS:
            raise AgentFailed(
                f"the agent was killed {len(self._ends)} times in {WINDOW / 60:.0f} minutes; see {self.folder.log}", 128 - code
            )
        log.warning("the agent was ended by signal %d; starting it again", -code)
        self.start()
        return None

    def leave(self) -> None:
        """Tell the agent to save and leave."""
        if self._found is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._found, signal.SIGTERM)
        elif self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, grace: float = GRACE) -> None:
        """Have the agent leave; after `grace` seconds, make it end."""
        self.leave()
        deadline = time.monotonic() + grace
        while self._found is not None and running_agent(self.folder) == self._found and time.monotonic() < deadline:
            time.sleep(0.1)
        if self._process is None:
            return
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """The last error in the agent's log, without its date; empty when there is none."""
        try:
            with self.folder.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            if " ERROR isles" in line:
                return line.partition(": ")[2]
        return ""
