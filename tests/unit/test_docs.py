"""The documents tell the truth: every command they show runs, every file they name exists, the reference is current."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.conftest import Isles

from isles.spec.template import render_reference
from isles.store.server import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = [
    "--set",
    "run.steps=20",
    "--set",
    "train.local_steps=5",
    "--set",
    "eval.sequences=8",
    "--set",
    "optimizer.warmup_steps=5",
]
MADE_ELSEWHERE = {"make demo", "make test", "lint-imports", "python -m pytest tests/simulation"}  # by CI itself, and by hand


def _blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def _commands(page: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for body in _blocks(page, "sh") for line in body.splitlines()]
    return [line for line in lines if line]


@pytest.fixture
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the one a reader has: some documents of their own, and a run.toml over little text."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "docs" / "deep").mkdir(parents=True)
    for i in range(40):
        (folder / "docs" / "deep" / f"{i}.md").write_text(
            f"# Page {i}\n\n" + "An island is land with water all around it. " * 40
        )
    subprocess.run([sys.executable, "-m", "isles", "init", str(folder)], check=True, env=_environment(), capture_output=True)
    _little_text(folder, Path("docs"))
    return folder


def _little_text(folder: Path, docs: Path) -> None:
    """Let the run.toml in a folder train on less than all of Python's own sources."""
    text = (folder / "run.toml").read_text().replace('"python:stdlib"', f'"{docs}"')
    (folder / "run.toml").write_text(text)


class Attended:
    """Commands that go on until somebody says to stop: begun, seen to work, and stopped."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.begun: list[tuple[str, subprocess.Popen[str], Path]] = []

    def begin(self, words: list[str]) -> None:
        output = self.where / f"output-{len(self.begun)}"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=self.where,
                env=_environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.begun.append((shlex.join(words), process, output))
        seen = {"store": lambda: "can be joined" in output.read_text(), "watch": lambda: "step" in output.read_text()}
        joined = self.where / words[words.index("--out") + 1] / "status.json" if "--out" in words else None
        working = seen.get(words[1], lambda: joined is not None and joined.exists())
        deadline = time.monotonic() + 60
        while not working():
            assert process.poll() is None and time.monotonic() < deadline, f"{shlex.join(words)}\n{output.read_text()}"
            time.sleep(0.1)

    def end(self) -> None:
        """Stop them, the last first; each must end in order."""
        for command, process, output in reversed(self.begun):
            if process.poll() is None:
                process.terminate()
            assert process.wait(40) in (0, 143, -signal.SIGTERM), f"{command}\n{output.read_text()}"
        self.begun.clear()


@pytest.fixture
def attended(workplace: Path) -> Iterator[Attended]:
    made = Attended(workplace)
    yield made
    for _, process, _ in reversed(made.begun):  # a test that failed
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_shown_runs(
    page: Path, workplace: Path, attended: Attended, isles: Isles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace)
    for command in _commands(page):
        words = shlex.split(command)
        if command in MADE_ELSEWHERE:
            assert words[0] != "make" or f"{words[1]}:" in (ROOT / "Makefile").read_text()
            continue
        if words[:2] in (["isles", "simulate"], ["isles", "up"]):
            attended.end()  # another scene
            words += SMALL
        if words[:2] == ["isles", "create"]:
            words += [
                "--set",
                "run.steps=100000",
                "--set",
                "eval.sequences=8",
                "--store",
                f"127.0.0.1:{free_port('127.0.0.1')}",
            ]
        if words[:2] in (["isles", "store"], ["isles", "join"], ["isles", "watch"]):
            attended.begin(words)
            continue
        if words[0] == "isles":
            ended = isles(*words[1:])  # in this process: that the console script starts is seen by others
            assert ended.code == 0, f"{command}\n{ended.out}\n{ended.err}"
            if words[1] == "init":
                _little_text(workplace / words[2], workplace / "docs")
            continue
        if words[:3] == ["python", "-m", "tests.simulation"]:
            one = ["apply before commit"] if words[-1] == "--mutations" else []
            words = [sys.executable, *words[1:], *one, "--seeds", "200", "--jobs", "1"]
        elif words[:3] == ["python", "-m", "benchmarks.netlab"]:
            assert "--" not in words or (ROOT / words[4]).exists()
            words = [sys.executable, *words[1:4], "--help"]
        elif words[0] == "python":
            words = [sys.executable, str(ROOT / words[1]), "--help"]  # measurements are long: their options must parse
        else:
            pytest.fail(f"{page.name} shows {command!r}, which this test does not know how to run")
        where = ROOT if {"tests.simulation", "benchmarks.netlab"} & set(words) else workplace
        done = subprocess.run(words, cwd=where, env=_environment(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    attended.end()


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "python")], ids=lambda p: p.name)
def test_every_python_example_runs(page: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "isles", "init", "demo"], check=True, cwd=tmp_path, env=_environment(), capture_output=True
    )
    for body in _blocks(page, "python"):
        done = subprocess.run(
            [sys.executable, "-c", body], cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_named_in_code_style_exists(page: Path) -> None:
    for path in re.findall(r"`((?:src|tests|docs|recipes|benchmarks|examples)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_reference_of_run_toml_is_current() -> None:
    assert (ROOT / "docs" / "spec.md").read_text() == render_reference(), "run: python -m isles.spec.template > docs/spec.md"


def test_every_recipe_is_a_valid_spec() -> None:
    import importlib.util
    import tomllib

    from isles.spec import load_spec, spec_from

    loader = importlib.util.spec_from_file_location("campaign", ROOT / "benchmarks" / "campaign.py")
    assert loader and loader.loader
    campaign = importlib.util.module_from_spec(loader)
    sys.modules["campaign"] = campaign
    loader.loader.exec_module(campaign)
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        recipe = tomllib.loads(path.read_text())
        if "runs" not in recipe:
            load_spec(path)
            continue
        jobs = list(campaign.expand(recipe))
        assert len({job.key for job in jobs}) == len(jobs), f"{path.name} names a run twice"
        for job in jobs:
            spec_from(job.tables)
