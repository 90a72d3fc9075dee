"""The command line: every mistake is one sentence with its exit code and loses nothing; --json is one object and nothing else."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.cli.common import print_json
from isles.simulator import RunFolder

Isles = Callable[..., Any]  # the fixture of conftest.py


@pytest.fixture
def spec(cli_spec: Path) -> Path:
    return cli_spec


def parameters(folder: Path) -> bytes:
    """The global parameters of the newest checkpoint, byte for byte."""
    return RunFolder(folder).load_model()[1].numpy().tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- mistakes on the command line


@pytest.mark.parametrize(
    "words",
    [
        "nosuch",
        "--nosuch",
        "init",
        "init ''",
        "init a b",
        "data nosuch",
        "data prepare",
        "data prepare x",
        "data prepare '' --out d",
        "data prepare x --out ''",
        "data prepare x --out d --held-out 0.9",
        "data prepare x --out d --held-out nan",
        "data verify",
        "simulate",
        "simulate ''",
        "simulate x.toml --set",
        "simulate x.toml --clusters 0",
        "simulate x.toml --clusters many",
        "simulate x.toml --baseline nosuch",
        "simulate x.toml --compare --baseline ddp",
        "simulate x.toml --checkpoint 5",
        "simulate x.toml --resume --compare --checkpoint 5",
        "compare",
        "compare ''",
        "export nosuch",
        "export nosuch --out x",
        "export . --out x",
        "sample nosuch",
        "sample .",
        "sample . --max-tokens 0",
        "sample . --temperature nan",
        "sample . --temperature 1e-320",
        "sample . --temperature inf",
        "sample . --seed 99999999999999999999999",
        "sample . --seed -1",
        "sample . --top-k -1",
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(
    words: str, isles: Isles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    isles(*shlex.split(words)).is_mistake(2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["data"]])
def test_a_command_without_words_prints_its_help(words: list[str], isles: Isles) -> None:
    ended = isles(*words)
    assert (ended.code, ended.err) == (2, "")
    assert "Usage: isles" in ended.out


@pytest.mark.parametrize(
    "change",
    [
        "a",
        "=",
        "train=5",
        "train.local_step=5",
        "train.local_steps=0",
        "train.local_steps=",
        "train.local_steps=1e99",
        "train.threads=1000000000",
        "run.steps=" + "9" * 5000,
        "run.steps=" + "[" * 5000,
        "run.name=../x",
        "run.seed=99999999999999999999999",
        "data.path=",
        "optimizer.lr=nan",
        "clusters.events=[{cluster=0,kind='leave',step=1,foo=1}]",
        "nosuch.key=[/red]",
    ],
)
def test_a_wrong_override_is_one_sentence_and_exit_code_3(change: str, isles: Isles, spec: Path, tmp_path: Path) -> None:
    isles("simulate", spec, "--out", tmp_path / "out", "--set", change).is_mistake(3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x7fELF\x00\xff",
        b"not toml",
        b"x = " + b"[" * 100_000,
        b"[run]\nsteps = " + b"9" * 5000,
        b"model = 5",
        b"[[model]]",
        b"\xff\xfe[\x00",
        b"#" * (1 << 21),
    ],
)
def test_a_file_that_is_no_spec_is_one_sentence_and_exit_code_3(text: bytes, isles: Isles, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(text)
    isles("simulate", tmp_path / "run.toml", "--out", tmp_path / "out").is_mistake(3)
    isles("simulate", tmp_path).is_mistake(3)
    isles("simulate", tmp_path / "nosuch.toml").is_mistake(3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.toml"]


def test_a_spec_saved_with_a_byte_order_mark_is_read(isles: Isles, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + spec.read_bytes())
    assert isles("simulate", tmp_path / "run.toml", "--set", "run.steps=3", "--out", tmp_path / "out", "--quiet").code == 0


@pytest.mark.parametrize(
    "words",
    [
        "data prepare nosuch --out d",
        "data prepare zeros.bin --out d",
        "data prepare empty.txt --out d",
        "data prepare text.txt --out text.txt",
        "data prepare text.txt --out text.txt/d",
        "data prepare text.txt --out d --tokenizer text.txt",
        "data prepare text.txt --out d --tokenizer ./nosuch",
        "data verify nosuch",
        "data verify text.txt",
        "data verify .",
        "compare nosuch",
        "compare text.txt",
        "compare .",
    ],
)
def test_unusable_data_is_one_sentence_and_exit_code_4(
    words: str, isles: Isles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "zeros.bin").write_bytes(bytes(100))
    (tmp_path / "empty.txt").touch()
    before = contents(tmp_path)
    isles(*shlex.split(words)).is_mistake(4)
    assert contents(tmp_path) == before


def test_a_long_value_is_not_quoted_whole(isles: Isles, spec: Path) -> None:
    assert " ... " in isles("simulate", spec, "--set", "run.seed=" + "x" * 50_000).is_mistake(3)


# --- names


@pytest.mark.parametrize("name", ["a b", "[/x] [bold]", ":bug:", "ünï 島", "it's", "-dash", "two\nlines"])
def test_any_name_of_a_folder_works_and_the_printed_command_finds_it(
    name: str, isles: Isles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text " * 99)
    ended = isles("init", "--", name)
    assert ended.code == 0
    _, command = ended.out.split("start it with: ")
    assert shlex.split(command) == ["isles", "simulate", f"{'./' if name.startswith('-') else ''}{name}/run.toml"]
    assert isles("init", "--json", "--", name).is_mistake(2)
    assert isles("data", "prepare", "text.txt", f"--out={name}/data").code == 0
    assert isles("data", "verify", "--", f"{name}/data").code == 0


def test_a_terminal_of_few_characters_shows_the_others_escaped(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-c", "from isles.cli import main; main()", "init", os.fsencode(tmp_path) + b"/\xc3\xbc\xff"]
    ended = subprocess.run(words, env=environment, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"run.toml" in ended.stdout


# --- init


def test_a_failed_init_leaves_the_file_that_was_there(isles: Isles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text("mine")

    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        isles("init", tmp_path, "--force").is_mistake(2)
    assert contents(tmp_path) == {"run.toml": b"mine"}


# --- --json


def test_json_is_one_object_on_stdout_and_nothing_else(isles: Isles, finished: Path, spec: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("text " * 999)
    assert isles("init", tmp_path / "i", "--json").json == {"path": str(tmp_path / "i" / "run.toml")}
    assert isles("data", "prepare", text, "--out", tmp_path / "d", "--json").json["vocab_size"] == 257
    assert isles("data", "verify", tmp_path / "d", "--json").json["vocab_size"] == 257
    assert isles("compare", finished, "--json", "--picture", tmp_path / "p.png").json["picture"] == str(tmp_path / "p.png")
    assert isles("sample", finished, "--json", "--max-tokens", "3", "--prompt", "[/x]").json["prompt"] == "[/x]"
    assert isles("export", finished, "--out", tmp_path / "hf", "--json").json["step"] == 12
    assert isles("simulate", spec, "--out", tmp_path / "s", "--json").json["complete"] is True
    compared = isles("simulate", spec, "--out", tmp_path / "c", "--compare", "--set", "run.steps=3", "--json").json
    assert [r["method"] for r in compared["runs"]] == ["diloco", "ddp", "single"]


def test_json_has_null_where_there_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), {"c": (-float("inf"), 1.5)}]})
    assert capsys.readouterr().out == '{"a": null, "b": [null, {"c": [null, 1.5]}]}\n'


# --- output that cannot be written


class Broken:
    """A stream whose reader went away, or whose disk is full."""

    encoding = "utf-8"

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, _text: str) -> int:
        raise OSError(self._number, os.strerror(self._number))

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, 141), (errno.ENOSPC, 1)])
@pytest.mark.parametrize("as_json", [["--json"], []])
def test_a_result_that_nobody_can_read_ends_the_command(
    call_isles: Callable[..., int],
    number: int,
    code: int,
    as_json: list[str],
    tiny_dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(number))
    assert call_isles("data", "verify", str(tiny_dataset), *as_json) == code


@pytest.mark.parametrize("stream", [Broken(errno.EPIPE), Broken(errno.ENOSPC), None])
def test_progress_that_nobody_can_read_does_not_end_a_run(
    call_isles: Callable[..., int],
    stream: Broken | None,
    spec: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        assert call_isles("simulate", str(spec), "--out", str(tmp_path / "run"), "--json") == 0
        assert call_isles("simulate", str(spec), "--out", str(tmp_path / "run2")) == 0
    assert parameters(tmp_path / "run2") == parameters(finished)


def test_a_closed_stdout_is_no_mistake(
    call_isles: Callable[..., int], tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert call_isles("data", "verify", str(tiny_dataset), "--json") == 0
    assert call_isles("data", "verify", str(tiny_dataset)) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_stdout_is_one_sentence(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "from isles.cli import main; main()", "init", str(tmp_path), "--json"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "somewhere"), 1),
        (OSError("a bare one"), 1),
        (MemoryError(), 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1028000000000000 bytes"), 1),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(
    error: BaseException, code: int, isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("isles.simulator.simulate", refuse)
    ended = isles("simulate", spec, "--out", tmp_path / "out")
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (code, "", 1)


def test_a_bug_keeps_its_traceback(isles: Isles, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("isles.simulator.simulate", bug)
    with pytest.raises(ZeroDivisionError):
        isles("simulate", spec, "--out", "nowhere")


# --- quick to start


def test_help_is_quick_and_loads_no_heavy_library() -> None:
    script = """
import resource, sys
from isles.cli import main
sys.argv = ["isles", "--help"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
heavy = {"torch", "transformers", "numpy", "matplotlib", "tokenizers", "numba"} & set(sys.modules)
print("LOADED", sorted(heavy), resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    _, loaded, seconds = ended.stderr.strip().splitlines()[-1].split(maxsplit=2)
    assert loaded == "[]"
    assert float(seconds) < 1
    assert "simulate" in ended.stdout


def test_the_version_is_printed(isles: Isles) -> None:
    from isles import __version__

    ended = isles("--version")
    assert (ended.code, ended.out, ended.err) == (0, f"{__version__}\n", "")
