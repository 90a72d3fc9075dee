"""index.json: what makes a folder of shards a dataset.

A dataset is whole when, and only when, its index is there: `prepare` writes it last. The index names every shard with its
size and blake3 hash, so that a truncated file is seen on opening (size) and a flipped bit on verifying (hash). Shards are raw
little-endian token ids without a header: nothing but the index is needed to read them, with any tool.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isles.errors import DataError

FORMAT: Final = "isles-dataset"
VERSION: Final = 1
INDEX_NAME = "index.json"
TOKENIZER_FOLDER = "tokenizer"
Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardInfo(_Record):
    """One file of token ids. `blake3` is the hex hash of all its bytes."""

    file: str = Field(pattern=r"^[a-z_]+-\d{5,}\.bin$")
    split: Split
    tokens: int = Field(gt=0)
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")


class TokenizerInfo(_Record):
    """Which tokenizer made the ids. `fingerprint` depends on its behaviour, not on how its files are written."""

    name: str
    fingerprint: str
    eos_id: int = Field(ge=0)


class SourceInfo(_Record):
    """What the dataset was made of. `skipped`: files of the inputs that held no text; `bytes`: sizes on disk."""

    inputs: tuple[str, ...]
    files: int
    skipped: int
    bytes: int
    documents: int


class DatasetIndex(_Record):
    """All of index.json. `tokens` counts the tokens of each split; `held_out` is the share that was asked for."""

    format: Literal["isles-dataset"] = FORMAT
    version: Literal[1] = VERSION
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(gt=0)
    tokenizer: TokenizerInfo
    held_out: float
    seed: int
    tokens: dict[Split, int]
    sources: SourceInfo
    shards: tuple[ShardInfo, ...]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """dtype of the ids on disk, little-endian on every machine."""
        return np.dtype(self.dtype).newbyteorder("<")

    def shards_of(self, split: Split) -> tuple[ShardInfo, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def read(cls, folder: Path) -> DatasetIndex:
        """Read a dataset's index.json. DataError when it is missing, damaged, of another version or not ours."""
        path = folder / INDEX_NAME
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"there is no finished dataset in {folder} ({INDEX_NAME} is missing); make it with `isles data prepare`"
            ) from None
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}); check that it is a readable file") from None
        except ValueError:
            raise DataError(f"{path} is damaged (no valid JSON); make the dataset again with `isles data prepare`") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DataError(f"{path} is no index of an isles dataset; give a folder made by `isles data prepare`")
        if content.get("version") != VERSION:
            raise DataError(
                f"{path} has format version {content.get('version')}, this isles reads version {VERSION}; make the dataset again with "
                "`isles data prepare`"
            )
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the index"
            raise DataError(
                f"{path} is damaged ({where}: {first['msg']}); make the dataset again with `isles data prepare`"
            ) from None


def is_dataset_index(path: Path) -> bool:
    """Whether the file is the index of an isles dataset, of whatever version."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT
