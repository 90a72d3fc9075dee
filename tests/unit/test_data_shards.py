"""A dataset gives back exactly the tokens that went in, and says so when it cannot."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from isles.data import ByteTokenizer, Dataset, DatasetIndex, prepare
from isles.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """3,000 or so training tokens in shards of 97."""
    text = "".join(chr(33 + i * i % 90) for i in range(3300))
    (tmp_path / "text.txt").write_text(text)
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", tokenizer=ByteTokenizer(), held_out=0.1, shard_tokens=97)
    return tmp_path / "data"


def stream(folder: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    index = DatasetIndex.read(folder)
    raw = b"".join((folder / shard.file).read_bytes() for shard in index.shards_of("train"))
    return np.frombuffer(raw, dtype=index.numpy_dtype).astype(np.int64)


@pytest.mark.parametrize("length", [1, 8, 96, 97, 250, 1000])
def test_sequences_are_the_stream_across_shard_borders(folder: Path, length: int) -> None:
    dataset, whole = Dataset.open(folder, length), stream(folder)
    assert len(dataset) == (whole.size - 1) // length
    expected = np.stack([whole[i * length : i * length + length + 1] for i in range(len(dataset))])
    everything = dataset.batch(np.arange(len(dataset)))
    assert everything.dtype == np.int64 and np.array_equal(everything, expected)
    shuffled = np.random.default_rng(0).integers(0, len(dataset), size=50)
    assert np.array_equal(dataset.batch(shuffled), expected[shuffled])
    assert dataset.batch(np.array([], dtype=np.int64)).shape == (0, length + 1)


def test_a_sequence_that_ends_with_the_last_token_is_the_last(folder: Path) -> None:
    whole = stream(folder)
    dataset = Dataset.open(folder, whole.size - 1)
    assert len(dataset) == 1 and np.array_equal(dataset.batch(np.array([0]))[0], whole)
    with pytest.raises(DataError, match=rf"has {whole.size} tokens, one sequence needs {whole.size + 1}"):
        Dataset.open(folder, whole.size)


def test_indices_outside_are_refused(folder: Path) -> None:
    dataset = Dataset.open(folder, 8)
    for bad in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset.batch(np.array([0, bad]))


def test_a_dataset_travels_to_another_process_without_its_tokens(folder: Path) -> None:
    dataset = Dataset.open(folder, 8)
    expected = dataset.batch(np.arange(20))
    sent = pickle.dumps(dataset)
    assert len(sent) < 20_000
    assert np.array_equal(pickle.loads(sent).batch(np.arange(20)), expected)


def test_the_digest_follows_the_tokens(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    prepare([str(tmp_path / "text.txt")], again, tokenizer=ByteTokenizer(), held_out=0.1, shard_tokens=97)
    assert Dataset.open(again, 8).digest == Dataset.open(folder, 16).digest
    assert Dataset.open(again, 8).digest != Dataset.open(folder, 8, "held_out").digest


def test_an_intact_dataset_verifies_and_reports_its_bytes(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    dataset = Dataset.open(folder, 8)
    dataset.verify(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2 * dataset.tokens, 2 * dataset.tokens)


def test_missing_and_truncated_shards_are_seen_on_opening(folder: Path) -> None:
    shard = folder / "train-00003.bin"
    whole = shard.read_bytes()
    for size in (0, 2, len(whole) - 1):
        shard.write_bytes(whole[:size])
        with pytest.raises(DataError, match=rf"train-00003\.bin is damaged \({size} bytes instead of {len(whole)}\)"):
            Dataset.open(folder, 8)
    dataset = Dataset(folder, DatasetIndex.read(folder), 8, "train")
    with pytest.raises(DataError, match=r"train-00003\.bin is damaged"):
        dataset.batch(np.arange(len(dataset)))
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00003\.bin is missing; copy it again"):
        Dataset.open(folder, 8)
    Dataset.open(folder, 8, "held_out")


def test_a_flipped_bit_is_seen_on_verifying(folder: Path) -> None:
    shard = folder / "train-00007.bin"
    raw = bytearray(shard.read_bytes())
    raw[50] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(DataError, match=r"train-00007\.bin is damaged \(its hash differs"):
        Dataset.open(folder, 8).verify()


def test_a_token_outside_the_vocabulary_is_seen_on_verifying(folder: Path) -> None:
    shard = folder / "train-00001.bin"
    raw = np.frombuffer(shard.read_bytes(), dtype="<u2").copy()
    raw[5] = 257
    shard.write_bytes(raw.tobytes())
    change_index(folder, lambda index: index["shards"][1].update(blake3=blake3(raw.tobytes()).hexdigest()))
    with pytest.raises(DataError, match=r"train-00001\.bin is damaged \(token id 257 is outside the vocabulary of 257\)"):
        Dataset.open(folder, 8).verify()


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.update(version=2), "has format version 2, this isles reads version 1"),
        (lambda index: index.update(format="other"), "is no index of an isles dataset"),
        (lambda index: index.update(dtype="int8"), "is damaged .*dtype"),
        (lambda index: index.pop("shards"), "is damaged .*shards"),
        (lambda index: index.update(surprise=1), "is damaged .*surprise"),
        (lambda index: index["shards"][0].update(file="../../etc/passwd"), "is damaged .*shards.0.file"),
        (lambda index: index["shards"][0].update(tokens=-1), "is damaged .*shards.0.tokens"),
    ],
)
def test_a_changed_index_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any], words: str) -> None:
    change_index(folder, change)
    with pytest.raises(DataError, match=words):
        Dataset.open(folder, 8)


def test_folders_that_are_no_dataset_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match=r"there is no finished dataset in .*; make it with `isles data prepare`"):
        Dataset.open(tmp_path / "missing", 8)
    for raw, words in [(b"{", "no valid JSON"), (b"\xff\xfe", "no valid JSON"), (b"[]", "is no index of an isles dataset")]:
        (folder / "index.json").write_bytes(raw)
        with pytest.raises(DataError, match=words):
            Dataset.open(folder, 8)
    with pytest.raises(DataError, match="sequence_length must be at least 1"):
        Dataset.open(folder, 0)
