"""The command line: every mistake is one sentence with its exit code and loses nothing; --json is one object and nothing else."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from isles.cli import main
from isles.cli.common import MAX_SENTENCE, Stop, print_json, stop_on_signals
from isles.simulate import RunFolder
from isles.watch import RunDisplay

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
def isles(capsys: pytest.CaptureFixture[str]) -> Isles:
    def run(*words: str | Path) -> Ended:
        capsys.readouterr()
        code = call(*map(str, words))
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def spec(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "run.toml"
    path.write_text(SPEC.format(data=tiny_dataset))
    return path


@pytest.fixture(scope="module")
def finished(spec: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run, for tests that read it or copy it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert call("simulate", str(spec), "--out", str(folder), "--quiet") == 0
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def parameters(folder: Path) -> bytes:
    """The global parameters of the newest checkpoint, byte for byte."""
    return RunFolder(folder).load_model()[1].numpy().tobytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT, times: int = 1) -> None:
    """Send this process a signal once the run shows a step."""

    def update(_self: RunDisplay, record: object) -> None:
        if getattr(record, "step") == step:  # noqa: B009 (the record's type is the display's business)
            for _ in range(times):
                os.kill(os.getpid(), number)

    monkeypatch.setattr(RunDisplay, "update", update)


def command_after(text: str) -> list[str]:
    """The words of the command that a message ends with, as a shell reads them."""
    words = shlex.split(text.strip().split("go on with: ")[1])
    assert words[0] == "isles"
    return words[1:]


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
    assert [r["method"] for r in compared["runs"]] == ["diloco", "ddp", "single"]  # type: ignore[index, attr-defined]


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
    number: int, code: int, as_json: list[str], tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Broken(number))
    assert call("data", "verify", str(tiny_dataset), *as_json) == code


@pytest.mark.parametrize("stream", [Broken(errno.EPIPE), Broken(errno.ENOSPC), None])
def test_progress_that_nobody_can_read_does_not_end_a_run(
    stream: Broken | None,
    spec: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        assert call("simulate", str(spec), "--out", str(tmp_path / "run"), "--json") == 0
        assert call("simulate", str(spec), "--out", str(tmp_path / "run2")) == 0
    assert parameters(tmp_path / "run2") == parameters(finished)


def test_a_closed_stdout_is_no_mistake(tiny_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert call("data", "verify", str(tiny_dataset), "--json") == 0
    assert call("data", "verify", str(tiny_dataset)) == 0


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

    monkeypatch.setattr("isles.simulate.simulate", refuse)
    ended = isles("simulate", spec, "--out", tmp_path / "out")
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (code, "", 1)


def test_a_bug_keeps_its_traceback(isles: Isles, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("isles.simulate.simulate", bug)
    with pytest.raises(ZeroDivisionError):
        isles("simulate", spec, "--out", "nowhere")


# --- folders of runs


def test_a_folder_that_holds_something_is_refused_and_untouched(
    isles: Isles, spec: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "picture.png").write_text("mine")
    before, run_before = contents(tmp_path), contents(finished)
    for words in (
        ["--out", tmp_path],
        ["--out", tmp_path, "--resume"],
        ["--out", tmp_path / "notes.txt"],
        ["--out", tmp_path / "notes.txt" / "x"],
    ):
        isles("simulate", spec, *words).is_mistake(2)
    for folder in (tmp_path, tmp_path / "notes.txt", finished):
        isles("simulate", spec, "--out", folder, "--compare").is_mistake(2)
    isles("simulate", spec, "--out", finished).is_mistake(2)
    for words in (
        ["--set", "optimizer.lr=0.1"],
        ["--baseline", "ddp"],
        ["--clusters", "3"],
        ["--checkpoint", "5"],
        ["--checkpoint", "-1"],
    ):
        isles("simulate", spec, "--out", finished, "--resume", *words).is_mistake(7)
    assert contents(tmp_path) == before
    assert contents(finished) == run_before


def test_a_complete_run_resumes_to_the_same_result(isles: Isles, spec: Path, finished: Path, run: Path) -> None:
    before = isles("compare", finished, "--json").json
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0
    assert isles("compare", run, "--json").json == before
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_run_that_another_process_works_on_is_left_alone(isles: Isles, spec: Path, run: Path) -> None:
    with RunFolder(run).held():
        assert "another process" in isles("simulate", spec, "--out", run, "--resume").is_mistake(2)
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0


def test_a_picture_that_cannot_be_drawn_does_not_hide_the_result(isles: Isles, spec: Path, run: Path) -> None:
    (run / "picture.png").unlink()
    (run / "picture.png").mkdir()
    ended = isles("simulate", spec, "--out", run, "--resume", "--json")
    assert (ended.code, len(ended.err.splitlines())) == (4, 1)
    assert ended.json["complete"] is True
    assert ended.json["picture"] is None


def test_a_damaged_checkpoint_names_the_one_before_and_that_one_completes_the_run(
    isles: Isles, spec: Path, finished: Path, run: Path
) -> None:
    (run / "checkpoints" / "step-000000012" / "global.safetensors").write_bytes(b"x")
    for words in (["simulate", spec, "--out", run, "--resume"], ["sample", run], ["export", run, "--out", run / "hf"]):
        assert "--checkpoint 8" in isles(*words).is_mistake(7)
    assert (
        isles("simulate", spec, "--out", run, "--resume", "--checkpoint", "8", "--quiet", "--set", "checkpoint.every=99").code
        == 0
    )
    assert parameters(run) == parameters(finished)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 12


def test_going_back_and_stopping_resumes_from_there_even_when_few_are_kept(
    isles: Isles, spec: Path, finished: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 6)
        ended = isles("simulate", spec, "--out", run, "--resume", "--checkpoint", "4", "--set", "checkpoint.keep=1")
    assert ended.code == 130
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000000006"]
    assert isles(*command_after(ended.err)).code == 0
    assert parameters(run) == parameters(finished)


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"[]", b"{}", b'{"format": 1}', b'{"format": 1, "spec": 5}'])
def test_a_damaged_record_of_a_run_is_one_sentence_and_resuming_mends_it(
    damage: bytes, isles: Isles, spec: Path, run: Path
) -> None:
    (run / "run.json").write_bytes(damage)
    for words in (["sample", run], ["export", run, "--out", run / "hf"]):
        isles(*words).is_mistake(7)
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0
    assert isles("sample", run, "--max-tokens", "2").code == 0


def test_a_run_killed_before_its_first_checkpoint_resumes_from_its_start(
    isles: Isles, spec: Path, finished: Path, run: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    isles("simulate", spec, "--out", run).is_mistake(2)
    isles("simulate", spec, "--out", run, "--resume", "--set", "optimizer.lr=0.1").is_mistake(7)
    assert isles("simulate", spec, "--out", run, "--resume", "--quiet").code == 0
    assert parameters(run) == parameters(finished)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 12


def test_a_run_killed_while_it_wrote_its_record_starts_again(isles: Isles, spec: Path, tmp_path: Path) -> None:
    (tmp_path / ".run.json.writing").write_text('{"form')
    (tmp_path / ".tokenizer.writing").mkdir()
    assert isles("simulate", spec, "--out", tmp_path, "--quiet", "--set", "run.steps=3").code == 0
    assert isles("sample", tmp_path, "--max-tokens", "2").code == 0


def test_the_data_may_be_gone_for_sampling_and_come_back_for_resuming(isles: Isles, spec: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("an island and an island " * 200)
    words = ["simulate", spec, "--set", f"data.path={tmp_path / 'data'}", "--set", f'data.inputs=["{tmp_path / "text.txt"}"]']
    words += ["--set", "data.held_out=0.2", "--out", tmp_path / "run", "--quiet"]
    assert isles(*words).code == 0
    shutil.rmtree(tmp_path / "data")
    assert isles("sample", tmp_path / "run", "--max-tokens", "2").code == 0
    assert isles(*words, "--resume").code == 0
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "text.txt").unlink()
    isles(*words, "--resume").is_mistake(4)
    (tmp_path / "text.txt").write_text("other text " * 300)
    isles(*words, "--resume").is_mistake(7)


def test_a_diverged_run_ends_with_its_code(isles: Isles, spec: Path, tmp_path: Path) -> None:
    isles("simulate", spec, "--out", tmp_path / "run", "--quiet", "--set", "optimizer.lr=1e30").is_mistake(8)


# --- comparisons


def test_a_comparison_is_resumed_where_it_stopped_and_never_with_another_spec(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["simulate", spec, "--out", tmp_path / "c", "--set", "run.steps=4", "--compare", "--json"]
    with monkeypatch.context() as patch:
        signal_at(patch, 4, signal.SIGTERM)  # the last step of the first run: that one is complete
        ended = isles(*words)
    assert ended.code == 143
    assert [r["complete"] for r in ended.json["runs"]] == [True]  # type: ignore[index, attr-defined]
    assert command_after(ended.err) == command_after("go on with: " + str(ended.json["resume"]))
    isles(*words).is_mistake(2)
    isles(*words, "--resume", "--set", "optimizer.lr=0.1").is_mistake(7)
    again = isles(*command_after(ended.err))
    assert again.code == 0
    assert [r["method"] for r in again.json["runs"]] == ["diloco", "ddp", "single"]  # type: ignore[index, attr-defined]


# --- stopping


def test_a_stopped_run_prints_the_command_that_completes_it(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "it's [a] ö"
    odd.mkdir()
    shutil.copy(spec, odd / "run.toml")
    words = [
        "simulate",
        odd / "run.toml",
        "--set",
        "run.name=odd",
        "--set",
        "optimizer.betas=[0.8, 0.9]",
        "--clusters",
        "3",
        "--baseline",
        "ddp",
    ]
    assert isles(*words, "--out", tmp_path / "whole", "--quiet").code == 0
    with monkeypatch.context() as patch:
        signal_at(patch, 6)
        ended = isles(*words, "--out", odd / "run", "--json")
    assert (ended.code, ended.json["complete"], ended.json["steps"]) == (130, False, 6)
    assert "stopped and saved at step 6" in ended.err
    assert isles(*command_after(ended.err)).json["complete"] is True
    assert parameters(odd / "run") == parameters(tmp_path / "whole")


def test_a_run_stopped_at_its_last_step_is_complete(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_at(monkeypatch, 12)
    ended = isles("simulate", spec, "--out", tmp_path / "run", "--json")
    assert (ended.code, ended.err, ended.json["complete"]) == (0, "", True)


def test_a_second_interrupt_leaves_at_once_and_loses_no_checkpoint(
    isles: Isles, spec: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, 6, times=2)
        ended = isles("simulate", spec, "--out", tmp_path / "run")
    assert (ended.code, ended.out) == (130, "")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000004"]
    assert isles(*command_after(ended.err), "--quiet").code == 0
    assert parameters(tmp_path / "run") == parameters(finished)


def test_text_is_prepared_anew_after_a_stop_and_nothing_half_done_stays(
    isles: Isles, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("an island and an island " * 200)
    words = ["simulate", spec, "--set", f"data.path={tmp_path / 'data'}", "--set", f'data.inputs=["{tmp_path / "text.txt"}"]']
    with monkeypatch.context() as patch:
        patch.setattr(RunDisplay, "prepare", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        ended = isles(*words, "--set", "data.held_out=0.2", "--out", tmp_path / "run")
    assert (ended.code, ended.out) == (143, "")
    assert not (tmp_path / "data").exists()
    assert isles(*command_after(ended.err), "--quiet").code == 0


def test_data_prepare_leaves_nothing_half_done_when_stopped(
    isles: Isles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("an island and an island " * 200)
    with monkeypatch.context() as patch:
        patch.setattr("isles.watch.PrepareDisplay.update", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        ended = isles("data", "prepare", tmp_path / "text.txt", "--out", tmp_path / "data")
    assert (ended.code, ended.out, len(ended.err.splitlines())) == (130, "", 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_ends_a_session_is_heard_and_handed_back(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    try:
        with stop_on_signals() as stop:
            assert not stop()
            os.kill(os.getpid(), number)
            assert stop()
            assert stop.exit_code == 128 + number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stop_that_never_came_lets_work_go_on() -> None:
    Stop().check("never said")


# --- models


def test_a_run_can_be_moved_sampled_and_exported(
    isles: Isles, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = run.rename(tmp_path / "it's [b] ö")
    monkeypatch.chdir(moved)
    words = ["--prompt", "[/x] :bug: \udcff", "--max-tokens", "5", "--json"]
    text = isles("sample", ".", *words).json["text"]
    assert str(text).startswith("[/x] :bug: ?")
    assert isles("export", ".", "--out", "hf").code == 0
    assert isles("sample", "hf", *words).json["text"] == text
    assert isles("export", ".", "--out", "hf", "--checkpoint", "8", "--json").json["step"] == 8  # an export may be replaced
    assert isles("sample", ".", "--checkpoint", "9").is_mistake(7)


@pytest.mark.parametrize("baseline", ["ddp", "single"])
def test_a_baseline_can_be_sampled_and_exported(baseline: str, isles: Isles, spec: Path, tmp_path: Path) -> None:
    assert isles("simulate", spec, "--baseline", baseline, "--set", "run.steps=3", "--out", tmp_path / "b", "--quiet").code == 0
    assert isles("export", tmp_path / "b", "--out", tmp_path / "hf").code == 0
    assert isles("sample", tmp_path / "hf", "--max-tokens", "2").code == 0


def test_an_export_replaces_nothing_but_an_export(
    isles: Isles, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "config.json").write_text("{}")
    (project / "src" / "precious").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    isles("export", finished, "--out", project).is_mistake(2)
    isles("export", finished, "--out", tmp_path / "file").is_mistake(2)
    isles("export", finished, "--out", tmp_path / "file" / "x").is_mistake(5)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    isles("export", finished, "--out", ".").is_mistake(2)
    assert contents(tmp_path) == before


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

    assert isles("--version") == Ended(0, f"{__version__}\n", "")
