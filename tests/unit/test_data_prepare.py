"""Preparing a dataset: every token in its place, both splits filled, and no crash that leaves something that looks whole."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.data import ByteTokenizer, Dataset, DatasetIndex, Progress, load_tokenizer, prepare
from isles.data.index import Split
from isles.data.writer import LOCK_NAME
from isles.errors import DataError

EOS = 256
RNG = np.random.default_rng(0)
DOCUMENTS = ["".join(chr(97 + c) for c in RNG.integers(0, 26, size=n)) for n in RNG.integers(1, 900, size=400)]


def write_jsonl(path: Path, documents: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents), encoding="utf-8")
    return path


def tokens(folder: Path, split: Split) -> list[int]:
    index = DatasetIndex.read(folder)
    raw = b"".join((folder / shard.file).read_bytes() for shard in index.shards_of(split))
    return np.frombuffer(raw, dtype=index.numpy_dtype).tolist()  # type: ignore[no-any-return]


def documents(folder: Path, split: Split) -> list[str]:
    ids = np.array(tokens(folder, split))
    assert ids[-1] == EOS
    return [ByteTokenizer().decode(part[part != EOS]) for part in np.split(ids, np.flatnonzero(ids == EOS) + 1)[:-1]]


def contents(folder: Path) -> dict[str, str]:
    """Every file under `folder` and the hash of its bytes."""
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()
    }


def build(tmp_path: Path, texts: Sequence[str] = DOCUMENTS, name: str = "out", **options: Any) -> Path:
    source = write_jsonl(tmp_path / "in" / "text.jsonl", texts)
    prepare([str(source)], tmp_path / name, tokenizer=ByteTokenizer(), **options)
    return tmp_path / name


@pytest.mark.parametrize("shard_tokens", [7, 1000, 10**8])
def test_every_document_is_whole_in_exactly_one_split(tmp_path: Path, shard_tokens: int) -> None:
    out = build(tmp_path, DOCUMENTS[:12] if shard_tokens == 7 else DOCUMENTS, held_out=0.1, shard_tokens=shard_tokens)
    train, held_out = documents(out, "train"), documents(out, "held_out")
    assert sorted(train + held_out) == sorted(DOCUMENTS[:12] if shard_tokens == 7 else DOCUMENTS)
    index = DatasetIndex.read(out)
    assert index.tokens == {"train": sum(len(d) + 1 for d in train), "held_out": sum(len(d) + 1 for d in held_out)}
    assert index.sources.documents == len(train) + len(held_out)
    for split in ("train", "held_out"):
        sizes = [shard.tokens for shard in index.shards_of(split)]
        assert all(size == shard_tokens for size in sizes[:-1]) and sizes[-1] <= shard_tokens
    share = index.tokens["held_out"] / sum(index.tokens.values())
    assert 0.05 <= share <= 0.2 or shard_tokens == 7  # of twelve documents one is held out, short or long


def test_the_split_is_seeded_and_the_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    first, second = build(tmp_path, name="a"), build(tmp_path, name="b")
    assert contents(first) == contents(second)
    other = build(tmp_path, name="c", seed=1)
    assert documents(other, "held_out") != documents(first, "held_out")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.4])
@pytest.mark.parametrize("shard_tokens", [10_000, 10**8])
def test_one_document_alone_fills_both_splits(tmp_path: Path, share: float, shard_tokens: int) -> None:
    text = "".join(DOCUMENTS)
    out = build(tmp_path, [text], held_out=share, shard_tokens=shard_tokens)
    (train,), (held_out,) = documents(out, "train"), documents(out, "held_out")
    assert train + held_out == text
    assert abs(len(held_out) / len(text) - share) < 0.001
    Dataset.open(out, 8, "train").verify()
    Dataset.open(out, 8, "held_out").verify()


def test_the_smallest_corpus_fills_both_splits(tmp_path: Path) -> None:
    out = build(tmp_path, ["a"])
    assert (tokens(out, "train"), tokens(out, "held_out")) == ([97, EOS], [EOS])


def test_a_short_held_out_set_is_filled_up_with_whole_documents(tmp_path: Path) -> None:
    for seed in range(8):
        out = build(tmp_path, ["x" * 90] * 30, name=f"out{seed}", seed=seed)  # a share of 1% is a third of a document
        assert set(documents(out, "train") + documents(out, "held_out")) == {"x" * 90}
        assert 1 <= len(documents(out, "held_out")) <= 2


def test_one_large_document_does_not_make_the_held_out_set_many_times_too_large(tmp_path: Path) -> None:
    texts = ["x" * 1000] * 12  # one of them would be 8%, where 1% is asked for
    for seed in range(25):
        out = build(tmp_path, texts, name=f"out{seed}", seed=seed)
        assert DatasetIndex.read(out).tokens["held_out"] < 0.02 * 12_000


def test_a_giant_document_is_split_into_pieces_and_none_of_its_tokens_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["isles.data.prepare"]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "_UNIT_TOKENS", 1000)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 10)
    monkeypatch.setattr("isles.data.sources.SPAN_CHARACTERS", 500)
    text = "".join(f"{i:07d}\n" for i in range(10_000))
    out = build(tmp_path, [text, "after"], held_out=0.1)
    train, held_out = documents(out, "train"), documents(out, "held_out")
    assert len(held_out) > 2
    assert sorted("".join(train + held_out).replace("after", "").split()) == sorted(text.split())
    assert all(len(piece) % 8 == 0 for piece in [*train, *held_out] if piece != "after")
    assert 0.05 < len("".join(held_out)) / len(text) < 0.2


def test_files_of_all_kinds_make_one_dataset_with_a_summary(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_jsonl(folder / "a.jsonl", ["one", "", "two"])
    (folder / "b.txt").write_text("three")
    (folder / "c.txt").write_text("")
    (folder / "d.txt").write_bytes(b"\0\0")
    index = prepare(["in"], tmp_path / "out", tokenizer=ByteTokenizer(), base=tmp_path, held_out=0.4)
    assert sorted("".join(documents(tmp_path / "out", "train") + documents(tmp_path / "out", "held_out"))) == sorted(
        "onetwothree"
    )
    assert (index.sources.files, index.sources.skipped, index.sources.documents) == (2, 2, 3)
    assert index.sources.bytes == sum(p.stat().st_size for p in folder.iterdir())
    assert DatasetIndex.read(tmp_path / "out") == index


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    class Large(ByteTokenizer):
        vocab_size = 70_000
        eos_id = 69_999

        def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
            return super().encode(text) + 69_000

    source = write_jsonl(tmp_path / "text.jsonl", ["ab"])
    index = prepare([str(source)], tmp_path / "out", tokenizer=Large())
    assert index.dtype == "uint32"
    assert tokens(tmp_path / "out", "train")[:2] == [69_097, 69_098]
    with pytest.raises(DataError, match=r"tokenizer in .* is not the one that made this dataset"):
        Dataset.open(tmp_path / "out", 1).tokenizer()


def test_the_tokenizer_travels_with_the_dataset(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "byte-level")
    source = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)
    index = prepare([str(source)], tmp_path / "out", tokenizer=load_tokenizer("byte-level", tmp_path))
    assert index.tokenizer.name == "byte-level"
    (tmp_path / "byte-level").rename(tmp_path / "gone")
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    tokenizer = Dataset.open(moved, 8).tokenizer()
    assert tokenizer.name == "byte-level" and tokenizer.encode("né").tolist() == [110, 195, 169]
    (moved / "tokenizer" / "tokenizer.json").unlink()
    (moved / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="holds no tokenizer"):
        Dataset.open(moved, 8).tokenizer()


def test_progress_ends_at_everything(tmp_path: Path) -> None:
    seen: list[Progress] = []
    out = build(tmp_path, ["x" * 400_000] * 12, progress=seen.append)
    index = DatasetIndex.read(out)
    assert len(seen) >= 4
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert seen[-1].bytes_done == seen[-1].bytes_total == index.sources.bytes
    assert seen[-1].documents == 12 and seen[-1].tokens == sum(index.tokens.values())
    assert seen[-1].file.endswith("text.jsonl")


def test_a_finished_dataset_is_only_replaced_by_force_and_only_at_the_end(tmp_path: Path) -> None:
    out = build(tmp_path, shard_tokens=20_000)
    before = contents(out)
    with pytest.raises(DataError, match="already holds a finished dataset"):
        build(tmp_path, ["new text"])
    assert contents(out) == before

    def fail(_: Progress) -> None:
        assert contents(out).items() >= before.items()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        build(tmp_path, ["new text"], force=True, progress=fail)
    assert contents(out) == before
    build(tmp_path, ["new text"], force=True)
    assert "".join(documents(out, "train") + documents(out, "held_out")) == "new text"
    assert sorted(contents(out)) == [
        "held_out-00000.bin",
        "index.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "train-00000.bin",
    ]


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "train-00000.bin.old").write_text("mine too")
    theirs = contents(out)
    build(tmp_path)
    assert contents(out).items() >= theirs.items()
    for name in ("train-00000.bin", "held_out-00001.bin.partial", "index.json", "tokenizer/x"):
        other = tmp_path / name.replace("/", "-")
        (other / name).parent.mkdir(parents=True)
        (other / name).write_text("not of isles")
        before = contents(other)
        for force in (False, True):
            with pytest.raises(DataError, match=r"in the way|not of an isles dataset"):
                prepare([str(tmp_path / "in")], other, tokenizer=ByteTokenizer(), force=force)
            assert contents(other) == before


@pytest.mark.parametrize("broken", [KeyboardInterrupt, RuntimeError])
def test_what_fails_leaves_the_folder_as_it_was(tmp_path: Path, broken: type[BaseException]) -> None:
    def fail(_: Progress) -> None:
        raise broken

    with pytest.raises(broken):
        build(tmp_path, progress=fail)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(broken):
        build(tmp_path, progress=fail)
    assert list(contents(tmp_path / "out")) == ["notes.txt"]


@pytest.mark.parametrize("number", [28, 122])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"there is no room to write the dataset in .*out"):
        build(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_file_size_limit_in_the_middle_of_a_write_leaves_nothing(tmp_path: Path) -> None:
    """A real failed write, not a pretended one: the kernel refuses what goes beyond the limit."""
    code = """
    import resource, signal, sys
    from pathlib import Path
    from isles.data import ByteTokenizer, prepare
    from isles.errors import DataError
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        prepare([sys.argv[1]], Path(sys.argv[2]), tokenizer=ByteTokenizer())
    except DataError as error:
        print(error)
    """
    source = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(source), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert run.stdout.startswith("there is no room to write the dataset") and run.returncode == 0, run.stderr
    assert not (tmp_path / "out").exists()


# Runs `prepare` and kills itself with SIGKILL at the n-th call that changes a name or syncs a file.
KILLER = """
import os, signal, sys
from pathlib import Path
from isles.data import ByteTokenizer, prepare
left = int(sys.argv[3])
def counted(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
os.fsync = counted(os.fsync)
Path.replace = counted(Path.replace)
Path.unlink = counted(Path.unlink)
def progress(_):
    global left
    if left == -1:
        os.kill(os.getpid(), signal.SIGKILL)
prepare([sys.argv[1]], Path(sys.argv[2]), tokenizer=ByteTokenizer(), shard_tokens=50_000, force="force" in sys.argv, progress=progress)
print("finished")
"""


def kill_at(source: Path, out: Path, moment: int, *words: str) -> bool:
    """Whether the process was killed (False: it finished before)."""
    run = subprocess.run(
        [sys.executable, "-c", KILLER, str(source), str(out), str(moment), *words], capture_output=True, text=True
    )
    if run.returncode == -signal.SIGKILL:
        return True
    assert run.stdout == "finished\n", run.stderr
    return False


def test_kill_9_never_leaves_what_looks_whole_and_the_next_run_starts_cleanly(tmp_path: Path) -> None:
    clean = build(tmp_path, name="clean")  # fewer shards than the killed run, so that nothing is overwritten by chance
    source = tmp_path / "in" / "text.jsonl"
    killed = 0
    for moment in (-1, 1, 3, 5, 7, 9, 10, 12, 14, 16, 18, 20, 22, 24):
        out = tmp_path / f"out{moment}"
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        if kill_at(source, out, moment):
            killed += 1
            assert (out / LOCK_NAME).exists()
            if (out / "index.json").exists():  # killed after the last rename: whole
                Dataset.open(out, 8).verify()
                build(tmp_path, name=out.name, force=True)
            else:
                with pytest.raises(DataError, match="no finished dataset"):
                    Dataset.open(out, 8)
                with pytest.raises(DataError, match="has no field"):  # also a run that fails cleans up first
                    build(tmp_path, name=out.name, field="missing")
                assert list(contents(out)) == ["notes.txt"]
                build(tmp_path, name=out.name)
        else:
            build(tmp_path, name=out.name, force=True)
        assert contents(out) == contents(clean) | {"notes.txt": hashlib.sha256(b"mine").hexdigest()}
    assert killed >= 10


def test_kill_9_while_replacing_leaves_the_old_the_new_or_no_dataset(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in" / "text.jsonl", DOCUMENTS)
    states = set()
    for moment in (1, 8, 11, 13, 16, 22):
        out = build(tmp_path, ["the old text"] * 50, name=f"out{moment}")
        old = tokens(out, "train")
        write_jsonl(source, DOCUMENTS)
        kill_at(source, out, moment, "force")
        try:
            dataset = Dataset.open(out, 8)
            dataset.verify()
            states.add("old" if tokens(out, "train") == old else "new")
        except DataError as error:
            assert "no finished dataset" in str(error)
            states.add("none")
        build(tmp_path, name=out.name, force=True)
        assert len(documents(out, "train")) > 300
    assert states == {"old", "new", "none"}


def test_two_at_once_are_told_apart(tmp_path: Path) -> None:
    build(tmp_path, name="other")

    def second(_: Progress) -> None:
        with pytest.raises(DataError, match="another `isles data prepare` is writing"):
            prepare([str(tmp_path / "in")], tmp_path / "out", tokenizer=ByteTokenizer(), force=True)

    build(tmp_path, progress=second)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_mistakes_get_one_sentence(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "text.jsonl", DOCUMENTS)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty.txt").write_text("")

    def attempt(inputs: list[Path], out: str, **options: Any) -> None:
        prepare([str(p) for p in inputs], tmp_path / out, tokenizer=ByteTokenizer(), **options)

    for words, inputs, out, options in [
        ("hold no text", [tmp_path / "empty.txt"], "out", {}),
        ("is, or lies in, a file", [source], "file", {}),
        ("is, or lies in, a file", [source], "file/out", {}),
        ("held_out must be a share", [source], "out", {"held_out": 1.0}),
        ("held_out must be a share", [source], "out", {"held_out": 0.0}),
        ("shard_tokens must be at least 1", [source], "out", {"shard_tokens": 0}),
        ("has no field 'body'", [source], "out", {"field": "body"}),
        ("does not exist", [tmp_path / "missing"], "out", {}),
    ]:
        with pytest.raises(DataError, match=words):
            attempt(inputs, out, **options)
        assert not (tmp_path / "out").exists()
