"""A finished dataset, memory-mapped: fixed-length sequences over packed documents.

The tokens of a split are one long stream, documents one after the other with the end-of-text token between them, cut into
shards only because files should be of a handy size. Sample i is the L + 1 tokens from i * L on (the last one is only ever a
target), wherever shard borders fall. Nothing is loaded: the operating system pages in what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from isles.data.index import TOKENIZER_FOLDER, DatasetIndex, ShardInfo, Split
from isles.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, load_tokenizer
from isles.errors import DataError

_VERIFY_BLOCK = 1 << 24  # bytes hashed and range-checked at a time


class Dataset:
    """One split of a dataset as `len(dataset)` sequences of `sequence_length` tokens and the one that follows.

    Opening checks the index and every file's size. `verify()` reads everything and checks hashes and token ids.
    """

    def __init__(self, folder: Path, index: DatasetIndex, sequence_length: int, split: Split) -> None:
        self.folder, self.index, self.sequence_length, self.split = folder, index, sequence_length, split
        self.vocab_size = index.vocab_size
        self.shards = index.shards_of(split)
        # tokens before each shard, and the total at the end: int64 [shards + 1]
        self._starts = np.concatenate([[0], np.cumsum([s.tokens for s in self.shards], dtype=np.int64)]).astype(np.int64)
        self._maps: dict[int, NDArray[Any]] = {}

    @classmethod
    def open(cls, path: Path | str, sequence_length: int, split: Split = "train") -> Dataset:
        """Open a dataset folder. DataError: no dataset there, a file missing or of the wrong size, or less than one sequence."""
        folder = Path(path)
        if sequence_length < 1:
            raise DataError(f"sequence_length must be at least 1, not {sequence_length}")
        index = DatasetIndex.read(folder)
        dataset = cls(folder, index, sequence_length, split)
        for shard in dataset.shards:
            _check_size(folder, shard, index.numpy_dtype.itemsize)
        if len(dataset) < 1:
            raise DataError(
                f"the {split} split of {folder} has {dataset.tokens} tokens, one sequence needs {sequence_length + 1}; prepare "
                f"more text{' or a larger held-out share' if split == 'held_out' else ''}, or use shorter sequences"
            )
        return dataset

    @property
    def tokens(self) -> int:
        """Tokens in the split."""
        return int(self._starts[-1])

    @property
    def digest(self) -> str:
        """Hex blake3 over the split's shard hashes: two datasets with the same digest hold the same tokens."""
        return blake3("".join(shard.blake3 for shard in self.shards).encode()).hexdigest()

    def __len__(self) -> int:
        """Whole sequences in the split; tokens left over at its end are not used."""
        return max(0, self.tokens - 1) // self.sequence_length

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids, from the copy beside the shards. DataError when it is missing or was changed."""
        info = self.index.tokenizer
        byte_level = ByteTokenizer()
        if info.name == BYTES and info.fingerprint == byte_level.fingerprint:
            return byte_level
        loaded = load_tokenizer(str((self.folder / TOKENIZER_FOLDER).resolve()), self.folder, name_as=info.name)
        if loaded.fingerprint != info.fingerprint:
            raise DataError(
                f"the tokenizer in {self.folder / TOKENIZER_FOLDER} is not the one that made this dataset; make the dataset "
                "again with `isles data prepare`"
            )
        return loaded

    def batch(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sequences `indices` (int64 [B], each in [0, len)): int64 [B, sequence_length + 1]. IndexError outside."""
        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"sequence indices must lie in [0, {len(self)})")
        length = self.sequence_length + 1
        rows = np.empty((wanted.size, length), dtype=np.int64)
        begins = wanted * self.sequence_length
        shards = np.searchsorted(self._starts, begins, side="right") - 1
        for row, begin, shard in zip(rows, begins.tolist(), shards.tolist(), strict=True):
            filled = 0
            while filled < length:
                tokens = self._map(shard)
                at = begin + filled - int(self._starts[shard])
                piece = tokens[at : at + length - filled]
                row[filled : filled + piece.size] = piece
                filled += piece.size
                shard += 1
        return rows

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every shard of the split: DataError when a hash differs or a token id is outside the vocabulary.

        `progress(done, total)` is told bytes.
        """
        dtype = self.index.numpy_dtype
        total, done = self.tokens * dtype.itemsize, 0
        for shard in self.shards:
            path = self.folder / shard.file
            _check_size(self.folder, shard, dtype.itemsize)
            hasher, largest = blake3(), 0
            try:
                with path.open("rb") as file:
                    while block := file.read(_VERIFY_BLOCK):
                        hasher.update(block)
                        largest = max(largest, int(np.frombuffer(block, dtype=dtype).max()))
                        done += len(block)
                        if progress is not None:
                            progress(done, total)
            except OSError as error:
                raise _damaged(path, error.strerror or "it cannot be read") from None
            if hasher.hexdigest() != shard.blake3:
                raise _damaged(path, "its hash differs from the index")
            if largest >= self.vocab_size:
                raise _damaged(path, f"token id {largest} is outside the vocabulary of {self.vocab_size}")

    def _map(self, shard: int) -> NDArray[Any]:
        """The shard's tokens, mapped on first use: a split may have more shards than a process may hold files open."""
        mapped = self._maps.get(shard)
        if mapped is None:
            info = self.shards[shard]
            _check_size(self.folder, info, self.index.numpy_dtype.itemsize)
            # A plain array over the map: slicing the memmap class itself costs microseconds a sequence.
            mapped = np.asarray(np.memmap(self.folder / info.file, dtype=self.index.numpy_dtype, mode="r"))
            self._maps[shard] = mapped
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        """Pickled (to a data-loading process) without the maps, which would travel as whole arrays."""
        return self.__dict__ | {"_maps": {}}


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"shard {path} is damaged ({what}); copy it again or make the dataset again with `isles data prepare`")


def _check_size(folder: Path, shard: ShardInfo, itemsize: int) -> None:
    path = folder / shard.file
    try:
        size = path.stat().st_size
    except OSError:
        raise DataError(f"shard {path} is missing; copy it again or make the dataset again with `isles data prepare`") from None
    if size != shard.tokens * itemsize:
        raise _damaged(path, f"{size} bytes instead of {shard.tokens * itemsize}")
