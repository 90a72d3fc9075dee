"""The dataset that a spec names, prepared on first use when the spec also names the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from isles.data.index import INDEX_NAME
from isles.data.prepare import Progress, prepare
from isles.data.shards import Dataset
from isles.data.tokenizer import load_tokenizer
from isles.errors import DataError
from isles.spec import DataTable


def open_or_prepare(table: DataTable, base: Path, progress: Callable[[Progress], None] | None = None) -> Dataset:
    """The training split of `table.path`; made from `table.inputs` first when it is not there.

    base: folder that relative paths count from. Raises DataError: nothing is there and no inputs are named, the shards are damaged, or they
    were made with another tokenizer than the spec's."""
    folder = base / table.path
    if not (folder / INDEX_NAME).exists():
        if not table.inputs:
            raise DataError(
                f"{folder} holds no dataset; make it with `isles data prepare INPUT... --out {folder}`, or name data.inputs in run.toml"
            )
        tokenizer = load_tokenizer(table.tokenizer, base)
        prepare(table.inputs, folder, tokenizer=tokenizer, held_out=table.held_out, base=base, progress=progress)
    dataset = Dataset.open(folder, table.sequence_length)
    made_with = dataset.index.tokenizer
    if (
        table.inputs
        and made_with.name != table.tokenizer
        and made_with.fingerprint != load_tokenizer(table.tokenizer, base).fingerprint
    ):
        raise DataError(
            f"{folder} was made with the tokenizer {made_with.name!r}, the spec asks for {table.tokenizer!r}; choose another data.path or data.tokenizer"
        )
    return dataset
