"""What the tests of the command line share: `isles` in this process, a small spec, a finished run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from isles.cli import main
from isles.cli.common import MAX_SENTENCE

SPEC = """
[run]
steps = 12
[model]
family = "llama"
layers = 1
hidden_size = 32
heads = 2
[data]
path = "{data}"
sequence_length = 16
[train]
local_steps = 3
batch_size = 2
threads = 1
[optimizer]
warmup_steps = 2
[clusters]
count = 2
[eval]
sequences = 4
[checkpoint]
every = 4
keep = 3
"""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, object]:
        lines = self.out.splitlines()
        assert len(lines) == 1, f"stdout must be one JSON object, not {self.out!r}"
        value = json.loads(lines[0], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert isinstance(value, dict)
        return value

    def is_mistake(self, code: int) -> str:
        """One sentence on stderr, nothing on stdout, the exit code of its class."""
        assert (self.code, self.out) == (code, "")
        assert self.err.startswith("error: ")
        assert len(self.err.splitlines()) == 1
        assert len(self.err) < MAX_SENTENCE + 50
        return self.err


Isles = Callable[..., Ended]


def call(*words: str) -> int:
    before = sys.argv
    sys.argv = ["isles", *words]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    raise AssertionError("main() ends with an exit code")


@pytest.fixture
def call_isles() -> Callable[..., int]:
    """The exit code of a command, for tests that look after stdout and stderr themselves."""
    return call


@pytest.fixture
def isles(capsys: pytest.CaptureFixture[str]) -> Isles:
    def run(*words: str | Path) -> Ended:
        capsys.readouterr()
        code = call(*map(str, words))
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def cli_spec(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "run.toml"
    path.write_text(SPEC.format(data=tiny_dataset))
    return path


@pytest.fixture(scope="session")
def finished(cli_spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, for tests that read it or copy it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert call("simulate", str(cli_spec), "--out", str(folder), "--quiet") == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
