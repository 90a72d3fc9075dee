"""Text into a dataset: tokenized once, cut into shards, split into training and held-out, indexed and hashed.

The split is made by document, so that no held-out text has its other half in the training set: document i is held out when a
hash of (seed, i) falls below the share. Only a document of more than a million tokens is split, into pieces of that size. A
cap keeps one large document from making the held-out set many times too large, and when chance, or a corpus of one
document, leaves it at less than half its share, the end of the training stream moves over, cut at a document's end if one is
near. So both splits are never empty, and the same inputs, tokenizer and seed give the same bytes on every machine.

Memory stays at some tens of MB whatever the size of the inputs: about a megabyte of text is tokenized at a time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from isles.data.index import DatasetIndex, SourceInfo, TokenizerInfo
from isles.data.order import mix
from isles.data.sources import Source, Span, find_sources, read_spans
from isles.data.tokenizer import Ids, Tokenizer
from isles.data.writer import ShardWriter, claimed_folder, publish
from isles.errors import DataError

SHARD_TOKENS = 100_000_000  # 200 MB of uint16: a size that copies, hashes and resumes well
_BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at once
_UNIT_TOKENS = 1 << 20  # a document above this is split there


@dataclass(frozen=True)
class Progress:
    """How far preparing is. Bytes are of the input files as they lie on disk (compressed where they are)."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    file: str  # the file being read


@dataclass
class _Counts:
    """Running totals of the stream below."""

    bytes_total: int
    bytes_done: int = 0
    files: int = 0  # that held text
    documents: int = 0
    file: str = ""

    def reporter(
        self, train: ShardWriter, kept: ShardWriter, progress: Callable[[Progress], None] | None
    ) -> Callable[[bool], None]:
        """A function that tells `progress` where we are: once for each batch of text that was read, and when it is told True."""
        told = -1

        def report(at_end: bool) -> None:
            nonlocal told
            if progress is not None and (at_end or told != self.bytes_done):
                told = self.bytes_done
                tokens = train.tokens + kept.tokens
                progress(Progress(self.bytes_done, self.bytes_total, self.documents, tokens, self.file))

        return report

    def summary(self, inputs: Sequence[str], found: int) -> SourceInfo:
        return SourceInfo(
            inputs=tuple(inputs),
            files=self.files,
            skipped=found - self.files,
            bytes=self.bytes_total,
            documents=self.documents,
        )


class _Unit(NamedTuple):
    """What goes to one side as a whole: a document with its end-of-text token, or a piece of a very long one."""

    ids: Ids
    starts_document: bool


def prepare(
    inputs: Sequence[str],
    out: Path,
    *,
    tokenizer: Tokenizer,
    held_out: float = 0.01,
    base: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 0,
    field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    force: bool = False,
) -> DatasetIndex:
    """Write the dataset folder `out` from `inputs` (files, folders, globs, 'python:stdlib'; relative to `base`).

    `held_out`: share of the tokens kept from training, in (0, 1). `field`: the text's field in JSONL, column in Parquet.
    `shard_tokens`: tokens in a shard. `force`: replace a finished dataset, which stays whole until the new one is complete.
    DataError: unusable input, no text, no room on the disk, a folder that is taken. Whatever ends it, `out` is left as it was.
    """
    if not 0 < held_out < 1:
        raise DataError(f"held_out must be a share between 0 and 1, not {held_out}")
    if shard_tokens < 1:
        raise DataError(f"shard_tokens must be at least 1, not {shard_tokens}")
    sources = find_sources(inputs, base if base is not None else Path(), skip=out)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    train = ShardWriter(out, "train", dtype, shard_tokens)
    kept = ShardWriter(out, "held_out", dtype, shard_tokens)
    counts = _Counts(bytes_total=sum(source.size for source in sources))
    try:
        with claimed_folder(out, force=force):
            try:
                units = _units(sources, tokenizer, field, counts)
                report = counts.reporter(train, kept, progress)
                _write_splits(units, train, kept, held_out, seed, tokenizer.eos_id, report)
                if not train.tokens:
                    raise DataError(f"the {len(sources)} input files hold no text; name others")
                _top_up(train, kept, held_out, tokenizer.eos_id)
                report(True)
                index = DatasetIndex(
                    dtype="uint16" if dtype.itemsize == 2 else "uint32",
                    vocab_size=tokenizer.vocab_size,
                    tokenizer=TokenizerInfo(name=tokenizer.name, fingerprint=tokenizer.fingerprint, eos_id=tokenizer.eos_id),
                    held_out=held_out,
                    seed=seed,
                    tokens={"train": train.tokens, "held_out": kept.tokens},
                    sources=counts.summary(inputs, len(sources)),
                    shards=(),  # known once they are published
                )
                return publish(out, index, tokenizer, [train, kept])
            finally:
                train.close()
                kept.close()
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"there is no room to write the dataset in {out} ({why}); free some, or choose another disk"
            ) from None
        raise DataError(f"cannot write the dataset in {out} ({why}); check the folder and its permissions") from None


def _write_splits(
    units: Iterator[_Unit],
    train: ShardWriter,
    kept: ShardWriter,
    share: float,
    seed: int,
    eos_id: int,
    report: Callable[[bool], None],
) -> None:
    """Send every unit to its side."""
    threshold = int(share * 2.0**64)
    last = train
    for number, unit in enumerate(units):
        size = unit.ids.size
        drawn = number > 0 and mix(seed, number) < threshold
        fits = kept.tokens + size <= 2 * share * (train.tokens + kept.tokens + size)
        side = kept if drawn and fits else train
        if side is not last and not unit.starts_document:
            last.append(np.array([eos_id]))  # the document ends here for the side that does not get its next piece
        side.append(unit.ids)
        last = side
        report(False)


def _units(sources: Sequence[Source], tokenizer: Tokenizer, field: str, counts: _Counts) -> Iterator[_Unit]:
    eos = np.array([tokenizer.eos_id], dtype=np.int64)
    pieces: list[Ids] = []
    size, starts = 0, True
    for batch in _batches(sources, field, counts):
        for span, ids in zip(batch, tokenizer.encode_batch([span.text for span in batch]), strict=True):
            if size >= _UNIT_TOKENS:
                yield _Unit(np.concatenate(pieces), starts)
                pieces, size, starts = [], 0, False
            pieces.append(ids)
            size += ids.size
            if span.ends_document:
                if size:
                    counts.documents += 1
                    yield _Unit(np.concatenate([*pieces, eos]), starts)
                pieces, size, starts = [], 0, True


def _batches(sources: Sequence[Source], field: str, counts: _Counts) -> Iterator[list[Span]]:
    """About _BATCH_CHARACTERS of text at a time, over the borders of documents and files."""
    batch: list[Span] = []
    characters, before = 0, 0
    for source in sources:
        counts.file, has_text = str(source.path), False
        for span in read_spans(source, field):
            batch.append(span)
            characters += len(span.text)
            has_text = True
            if characters >= _BATCH_CHARACTERS:
                counts.bytes_done = before + min(span.position, source.size)
                yield batch
                batch, characters = [], 0
        counts.files += has_text
        before += source.size
        counts.bytes_done = before
    if batch:
        yield batch


def _top_up(train: ShardWriter, kept: ShardWriter, share: float, eos_id: int) -> None:
    """Move the end of the training stream to a held-out set of less than half its share."""
    missing = round(share * (train.tokens + kept.tokens)) - kept.tokens
    if kept.tokens and missing <= kept.tokens:
        return
    missing = max(1, min(missing, train.tokens - 1))
    # A twentieth of a small corpus is searched for a document's end, so that a whole one is found even if it is a bit long.
    window = max(2 * missing, min(train.tokens // 20, _UNIT_TOKENS))
    tail = train.tail(min(window, train.tokens - 1))
    ends = np.flatnonzero(tail[:-1] == eos_id) + 1  # where a document begins in the tail
    moved = tail.size - ends
    near = moved[moved >= missing / 2]
    count = int(near[np.argmin(np.abs(near - missing))]) if near.size else missing
    train.drop_tail(count)
    if not near.size:
        train.append(np.array([eos_id]))
    kept.append(tail[tail.size - count :])
