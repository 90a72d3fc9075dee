"""Runs that training scripts of one's own train: plain loops, a Trainer, several ranks; killed, late, and with a wrong model."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.processes.test_cli_join import ISLES, until
from torch import nn

import isles
from isles.agent.folder import ClusterFolder
from isles.agent.launch import running_agent
from isles.errors import ModelError, UsageError
from isles.store.server import free_port
from isles.worker.script import ScriptRank

ROOT = Path(__file__).resolve().parents[2]
PLAIN = str(ROOT / "examples" / "plain_loop.py")
OTHER = "import sys, torch, runpy; seed = torch.manual_seed; torch.manual_seed = lambda n: seed(n + 7); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
SPEC = """
[run]
name = "own"
steps = {steps}
[model]
module = "mine"
[train]
local_steps = 20
[outer]
lr = 0.9
momentum = 0.3
[codec]
name = "fp32"
[streaming]
fragments = 1
overlap = {overlap}
[clusters]
count = {count}
"""


class Hosts:
    """A run of scripts, its store, and the scripts; all in one folder. Ends what is still running of them."""

    def __init__(self, folder: Path, *, steps: int, count: int = 2, overlap: int = 0) -> None:
        self.folder, self.steps = folder, steps
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.begun: list[subprocess.Popen[str]] = []
        (folder / "run.toml").write_text(SPEC.format(steps=steps, count=count, overlap=overlap))
        self.isles("create", "run.toml", "--store", f"127.0.0.1:{free_port('127.0.0.1')}")
        store = self.begin("store", *ISLES, "store")
        until(lambda: "can be joined" in self.said("store") or store.poll() is not None)

    def isles(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [*ISLES, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def begin(self, name: str, *words: str) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.out").open("a") as output:
            process = subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=output, stderr=output, text=True)
        self.begun.append(process)
        return process

    def script(self, name: str, *words: str, python: tuple[str, ...] = (), path: str = PLAIN) -> subprocess.Popen[str]:
        """Start a host's script; the first time with an invite, later with the folder."""
        folder = self.folder / "runs" / name
        if not folder.exists() and not (self.folder / f"{name}.invite").exists():
            self.isles("invite", name)
        where = [f"runs/{name}"] if folder.exists() else [f"{name}.invite", "--out", f"runs/{name}"]
        return self.begin(name, sys.executable, *python, path, *where, "--steps", str(self.steps), *words)

    def cluster(self, name: str) -> ClusterFolder:
        return ClusterFolder(self.folder / "runs" / name)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def rounds(self, name: str) -> int:
        return sum(self.cluster(name).read_status().get("rounds", [0]))

    def ended_well(self, *names: str) -> None:
        """The scripts have ended with the run, their agents too, and the clusters hold the same bits."""
        for process in self.begun[1:]:
            process.wait(60)
        told = "\n".join(self.said(n) + self.cluster(n).log.read_text()[-3000:] for n in names)
        status = [self.cluster(n).read_status() for n in names]
        assert all(f"ends at step {self.steps}" in self.said(n) for n in names), told
        assert len({tuple(s["digests"]) for s in status}) == 1, told
        assert {s["state"] for s in status} == {"finished"}, told
        assert not any(running_agent(self.cluster(n)) for n in names), told

    def end(self) -> None:
        for process in reversed(self.begun):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for path in self.folder.glob("runs/*/cluster.json"):
            pid = running_agent(ClusterFolder(path.parent))
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def hosts(folder: Path, **run: int) -> Iterator[Hosts]:
    made = Hosts(folder, **run)
    try:
        yield made
    finally:
        made.end()


def begins(said: str) -> list[tuple[int, float]]:
    """Step and learning rate at each beginning of the plain loop."""
    return [(int(step), float(lr)) for step, lr in re.findall(r"begins at step (\d+) with lr ([\d.]+)", said)]


def test_two_scripts_train_together_and_one_that_began_with_other_parameters_takes_over(tmp_path: Path) -> None:
    with hosts(tmp_path, steps=60, overlap=3) as run:
        run.script("alice", "--seed", "1", "--save", "alice.safetensors")
        until(lambda: "a script trains" in (log.read_text() if (log := run.cluster("alice").log).exists() else ""))
        run.script("bob", "--seed", "2", "--save", "bob.safetensors", python=("-c", OTHER))
        run.ended_well("alice", "bob")
        assert run.rounds("alice") == run.rounds("bob") == 3
        assert "took over the state of step 0" in run.cluster("bob").log.read_text()
        assert begins(run.said("alice")) == begins(run.said("bob")) == [(0, 0.005)]
        assert (tmp_path / "alice.safetensors").read_bytes() == (tmp_path / "bob.safetensors").read_bytes()


def test_a_script_that_is_killed_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    with hosts(tmp_path, steps=400) as run:
        run.script("alice", "--pause", "0.03")
        bob = run.script("bob", "--pause", "0.03", "--seed", "1")
        until(lambda: run.rounds("bob") >= 2)
        bob.kill()
        bob.wait()
        agent = running_agent(run.cluster("bob"))
        run.script("bob", "--pause", "0.03", "--seed", "2")
        until(lambda: len(begins(run.said("bob"))) == 2)
        assert running_agent(run.cluster("bob")) == agent  # taken over
        other = running_agent(run.cluster("alice"))
        assert other is not None
        os.kill(other, signal.SIGKILL)  # the script starts it again
        run.ended_well("alice", "bob")
        step, lr = begins(run.said("bob"))[-1]
        assert step >= 20 and lr == pytest.approx(5e-3 * (1 - step / 401), abs=1e-6)
        steps = [json.loads(line)["step"] for line in run.cluster("alice").metrics.read_text().splitlines()]
        assert steps == sorted(set(steps)) and steps[-1] > 380


def test_a_script_that_comes_late_begins_at_the_runs_step_with_the_others_parameters(tmp_path: Path) -> None:
    with hosts(tmp_path, steps=300, count=1) as run:
        run.script("alice", "--pause", "0.06")
        until(lambda: run.rounds("alice") >= 2)
        run.script("bob", "--seed", "1", python=("-c", OTHER))
        run.ended_well("alice", "bob")
        ((step, lr),) = begins(run.said("bob"))
        assert step >= 40 and lr == pytest.approx(5e-3 * (1 - step / 301), abs=1e-6)
        assert "took over the state of step" in run.cluster("bob").log.read_text()


def test_a_trainer_with_the_callback_trains(tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("a transformers Trainer needs accelerate")
    with hosts(tmp_path, steps=40, count=1) as run:
        trainer = run.script("alice", path=str(ROOT / "examples" / "trainer_callback.py"))
        assert trainer.wait(60) == 0, run.said("alice")
        assert run.cluster("alice").read_status()["state"] == "finished" and run.rounds("alice") == 2
        last = json.loads(run.cluster("alice").metrics.read_text().splitlines()[-1])
        assert last["step"] == 40 and last["tokens"] == 8 * 16 and 0 < last["loss"] < 5
        assert running_agent(run.cluster("alice")) is None


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_two_ranks_train_with_one(tmp_path: Path, kind: str) -> None:
    path = PLAIN
    more = ["--save", "alice.safetensors"] if kind == "replicas" else []
    if kind == "shards":
        path = str(tmp_path / "sharded.py")
        Path(path).write_text(
            Path(PLAIN)
            .read_text()
            .replace("nn.parallel.DistributedDataParallel(model), ", "split(model), ")
            .replace(
                "def main(",
                "def split(model):\n    from torch.distributed.fsdp import fully_shard\n    fully_shard(model)\n"
                "    model.set_force_sum_reduction_for_comms(True)\n    return model\n\n\ndef main(",
            )
        )
    with hosts(tmp_path, steps=60) as run:
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1")
        run.script("alice", *more, python=(*torchrun, "--master-port", str(free_port("127.0.0.1"))), path=path)
        run.script("bob", "--seed", "1", "--save", "bob.safetensors")
        run.ended_well("alice", "bob")
        assert run.rounds("alice") == 3 and run.said("alice").count("ends at step 60") == 2
        rows = [json.loads(line) for line in run.cluster("alice").metrics.read_text().splitlines()]
        if more:
            assert (tmp_path / "alice.safetensors").read_bytes() == (tmp_path / "bob.safetensors").read_bytes()
        assert rows[-1]["tokens"] == 2 * 8 * 16 and rows[-1]["step"] > 40


def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"weight is torch.bfloat16, and master weights must be fp32"):
        ScriptRank(nn.Linear(2, 2).bfloat16())
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="cannot be read"), isles.Cluster(model, tmp_path / "nobody.invite"):
        pass
    with pytest.raises(UsageError, match="comes within"):
        isles.Cluster(model, tmp_path / "nobody.invite").step(loss=1.0, tokens=1)
    with hosts(tmp_path, steps=1000) as run:
        assert "trained by the hosts' own scripts" not in run.isles("invite", "dora")
        assert "start the script" in run.isles("join", "dora.invite", "--quiet", code=2)
        assert "names a model that a training script builds" in run.isles("simulate", "run.toml", "--out", "simulated", code=3)
        assert "names a model that a training script builds" in run.isles("up", "run.toml", "--out", "up", code=3)
        run.script("alice", "--pause", "0.05")
        until(lambda: "a script trains" in (log.read_text() if (log := run.cluster("alice").log).exists() else ""))
        bob = run.script("bob", "--width", "16")
        assert bob.wait(60) == 1
        assert "trainable parameters and the run's has" in run.said("bob").splitlines()[-1]
        assert running_agent(run.cluster("bob")) is None
        second = run.script("alice")
        assert second.wait(60) == 1 and "another process is at work" in run.said("alice")
        assert "has left" in run.isles("leave", "runs/alice")
        until(lambda: "ends at step" in run.said("alice") or time.sleep(0.1))


POISONED = """
import runpy, sys, torch, isles
done, step = [], isles.Cluster.step
def poisoned(self, **more):
    done.append(1)
    if len(done) == 25:
        with torch.no_grad():
            next(self._model.parameters()).fill_(float("nan"))
    step(self, **more)
isles.Cluster.step = poisoned
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_contribution_that_is_no_number_is_sent_to_nobody_and_costs_the_others_nothing(tmp_path: Path) -> None:
    with hosts(tmp_path, steps=1000) as run:
        run.script("alice", "--pause", "0.03")
        bob = run.script("bob", python=("-c", POISONED))
        until(lambda: bob.poll() is not None, 250)
        log = run.cluster("bob").log.read_text()
        assert "is not finite, so it is sent to nobody" in log and "start the script again" in run.said("bob")
        assert run.begun[1].poll() is None  # alice goes on
        run.script("bob")
        run.ended_well("alice", "bob")
