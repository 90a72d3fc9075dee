"""A run between machines by its commands: create, store, invite, join, status, leave, and what is said when something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isles.agent.folder import ClusterFolder
from isles.agent.launch import running_agent
from isles.cli import main
from isles.store.server import free_port

ISLES = [sys.executable, "-c", "from isles.cli import main; main()"]
SPEC = """
[run]
name = "trial"
steps = 100000
[model]
family = "llama"
layers = 1
hidden_size = 32
heads = 2
[data]
path = "{data}"
sequence_length = 16
[train]
local_steps = 40
batch_size = 2
threads = 1
device = "cpu"
[optimizer]
warmup_steps = 2
[clusters]
count = 2
"""


class Person:
    """Types commands in a folder. Ends what is still running of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun: list[subprocess.Popen[str]] = []
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(self, *words: str, code: int = 0, given: str | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*ISLES, *words], cwd=self.folder, env=self.environment, input=given, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done

    def begin(self, *words: str, given: str | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*ISLES, *words], cwd=self.folder, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(given or "")
        process.stdin.close()
        self.begun.append(process)
        return process

    def end(self) -> None:
        for process in self.begun:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.begun:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for path in self.folder.glob("runs/*/cluster.json"):
            folder = ClusterFolder(path.parent)
            for pid in [running_agent(folder), *folder.read_status().get("workers", [])]:
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.1)


@pytest.fixture
def person(tiny_dataset: Path, tmp_path: Path) -> Iterator[Person]:
    (tmp_path / "run.toml").write_text(SPEC.format(data=tiny_dataset))
    made = Person(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_two_hosts_train_together_and_one_leaves_and_comes_back(person: Person) -> None:
    port = free_port("127.0.0.1")
    made = json.loads(person.run("create", "run.toml", "--store", f"127.0.0.1:{port}", "--json").stdout)
    person.run("invite", "alice")
    line = person.run("invite", "bob", "--line").stdout
    assert line.startswith("isles1-") and not (person.folder / "bob.invite").exists()
    assert (person.folder / "alice.invite").stat().st_mode & 0o777 == 0o600
    store = person.begin("store")
    assert store.stdout is not None
    assert "listens" in store.stdout.readline() and "can be joined" in store.stdout.readline()

    alice = person.begin("join", "alice.invite", "--quiet", "--max-upload", "100Mbit")
    bob = person.begin("join", "-", "--outbound-only", "--quiet", "--out", "runs/bob", given=line)

    def shown() -> dict[str, dict[str, object]]:
        status = json.loads(person.run("status", "alice.invite", "--json").stdout)
        assert status["run"] == made["run"]
        return {row["cluster"]: row for row in status["clusters"]} | {"run": status}

    until(lambda: sum(shown()["run"]["rounds"]) >= 2)  # type: ignore[arg-type]
    rows = shown()
    assert rows["bob"]["address"] is None and str(rows["alice"]["address"]).startswith("127.0.0.1:")
    assert rows["bob"]["state"] == rows["alice"]["state"] == "active"

    assert "takes part as alice now" in person.run("join", "alice.invite", "--quiet", "--out", "runs/again", code=2).stderr
    agent = running_agent(ClusterFolder(person.folder / f"runs/{made['run']}-alice"))
    assert agent is not None
    os.kill(agent, signal.SIGKILL)  # the command starts it again

    assert "has left at step" in person.run("leave", "runs/bob").stdout
    assert bob.wait(20) == 0
    assert shown()["bob"]["state"] == "leaving"
    bob = person.begin("join", "runs/bob", "--outbound-only", "--quiet")
    until(lambda: shown()["bob"]["state"] == "active")

    for host in (alice, bob):
        host.send_signal(signal.SIGINT)
    assert alice.wait(40) == bob.wait(40) == 130
    assert alice.stdout is not None
    assert f"come back with: isles join runs/{made['run']}-alice" in alice.stdout.read()
    assert "agent" not in person.run("status", "runs/trial").stdout


def test_what_is_wrong_is_said_in_a_sentence(
    person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port("127.0.0.1")
    address = f"127.0.0.1:{port}"

    def isles(*words: str, given: str = "") -> int:
        monkeypatch.setattr(sys, "argv", ["isles", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    def mistake(code: int, *words: str, given: str = "") -> str:
        capsys.readouterr()
        assert isles(*words, given=given) == code
        said = capsys.readouterr().err
        assert said.startswith("error: ") and len(said.splitlines()) == 1
        return said

    assert "one, three or five" in mistake(2, "create", "run.toml", "--store", address, "--store", "b:1")
    assert "HOST:PORT" in mistake(2, "create", "run.toml", "--store", "nowhere")
    assert isles("create", "run.toml", "--store", address) == 0
    assert "already holds a run" in mistake(2, "create", "run.toml")
    assert "no name for a cluster" in mistake(2, "invite", "Alice!")
    for name in ("localhost", "store-2"):
        assert "a name of the run's store" in mistake(2, "invite", name)
    assert isles("invite", "alice") == 0
    assert "exists" in mistake(2, "invite", "alice")

    text = (tmp_path / "alice.invite").read_text()
    assert "read by everybody" in mistake(2, "join", text.strip())
    assert "cut or altered" in mistake(2, "join", "-", given=text[:200])
    assert "no invite" in mistake(2, "join", "run.toml")
    assert "cannot be read" in mistake(2, "join", "nobody.invite")
    assert "nobody answers there" in mistake(10, "join", "alice.invite")
    assert "no cluster's folder" in mistake(2, "leave", ".")

    (papers,) = (tmp_path / "runs").glob("*/store-1.papers")
    old = json.loads(papers.read_text())
    del old["papers"]["secret"]
    (tmp_path / "old.papers").write_text(json.dumps(old))
    assert "make the run anew" in mistake(2, "store", "old.papers")
    (tmp_path / "old.papers").write_text("{}")
    assert "no papers of a store's member" in mistake(2, "store", "old.papers")

    with socket.create_server(("127.0.0.1", port)):
        assert "choose another port" in mistake(10, "store")
    store = person.begin("store")
    assert store.stdout is not None
    assert "listens" in store.stdout.readline() and "can be joined" in store.stdout.readline()
    assert "is no rate" in mistake(2, "join", "alice.invite", "--max-upload", "fast")
    assert "leave --advertise out" in mistake(2, "join", "alice.invite", "--advertise", "127.0.0.1:7000", "--outbound-only")
    assert "is not known" in mistake(2, "join", "alice.invite", "--advertise", "no.such.host.invalid:7000")
    (tmp_path / "other.txt").write_text("An island is land with water all around it. " * 400)
    assert isles("data", "prepare", "other.txt", "--tokenizer", "bytes", "--out", "other") == 0
    assert "other data" in mistake(4, "join", "alice.invite", "--data", "other")
    assert not list((tmp_path / "runs").glob("*-alice"))  # nothing is left of a join that did not come about
    with socket.create_server(("127.0.0.1", 0)) as taken:
        capsys.readouterr()
        assert isles("join", "alice.invite", "--quiet", "--advertise", f"127.0.0.1:{taken.getsockname()[1]}") == 10
        assert "choose another" in capsys.readouterr().err

    assert isles("create", "run.toml", "--store", address, "--set", "train.local_steps=50", "--out", "runs/second") == 0
    assert isles("invite", "alice", "--run", "runs/second", "--out", "second.invite") == 0
    assert "not of this run" in mistake(10, "join", "second.invite")


def test_a_store_of_three_members_outlives_one(person: Person) -> None:
    ports = [free_port("127.0.0.1") for _ in range(3)]
    members = [word for port in ports for word in ("--store", f"127.0.0.1:{port}")]
    person.run("create", "run.toml", *members)
    person.run("invite", "alice")
    stores = [
        person.begin("store", "runs/trial"),
        *(person.begin("store", f"runs/trial/store-{n}.papers", "--listen", "127.0.0.1") for n in (2, 3)),
    ]
    for store in stores:
        assert store.stdout is not None and "listens" in store.stdout.readline()
    assert stores[0].stdout is not None
    assert any("can be joined" in line for line in iter(stores[0].stdout.readline, ""))  # it waits for the others first
    pid = int((person.folder / "runs/trial/store-2/pid").read_text())
    stores[1].kill()
    os.kill(pid, signal.SIGKILL)
    assert json.loads(person.run("status", "alice.invite", "--json").stdout)["name"] == "trial"
