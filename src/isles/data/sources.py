"""Where text comes from: files, folders, globs and the interpreter's own library, as a stream of spans.

Everything downstream sees one thing, a `Span`: a piece of a document of at most SPAN_CHARACTERS, and whether the document ends
with it. So a 10 GB line-less file, a compressed one or a Parquet file of books takes the same small memory, and documents of
any length are tokenized piece by piece. Long documents are cut after a line's end where there is one.

Text is UTF-8. In text files, bytes that are not UTF-8 become U+FFFD, since a stray Latin-1 letter should not stop a corpus of
a million files; in JSONL, which has a grammar, they are an error. A file with a zero byte near its start is no text: named
directly it is an error, found in a folder it is passed over.
"""

from __future__ import annotations

import codecs
import errno
import glob
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from isles.errors import DataError

SPAN_CHARACTERS = 1 << 16
_READ = 1 << 16  # bytes read from a text file at a time
_BINARY_CHECK = 1 << 13  # bytes at a file's start that must hold no zero byte
_LONGEST_LINE = 1 << 28  # a JSONL line has to be in memory to be parsed
_FIRST_LINE = 1 << 24  # how far into a .json file its first line is looked for
_ZSTD_READ = 256  # compressed bytes per step; a block of 4 bytes can stand for 128 KiB, so at most 8 MiB come out
_PARQUET_ROWS = 256  # rows decoded at a time

STDLIB = "python:stdlib"
# Packages that are not the library's, caches, and test inputs in other encodings or with broken syntax on purpose.
_STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "cjkencodings", "encoded_modules", "tokenizedata"}
_STDLIB_SUFFIXES = {".py", ".txt", ".rst"}

Kind = Literal["text", "jsonl", "json", "parquet"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_COMPRESSIONS = {".gz", ".zst"}
# What is taken from a folder. Files named directly are taken whatever their suffix.
_TEXT_SUFFIXES = (
    ".txt .text .md .markdown .rst .tex .org .adoc .log .csv .tsv .html .htm .xml .yaml .yml .toml .ini .cfg .css .sql .srt "
    ".py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .cu .cuh .rs .go .java .kt .scala .js .mjs .ts .jsx .tsx .rb .php .pl .lua .r "
    ".jl .hs .ml .clj .ex .exs .erl .swift .m .cs .fs .sh .bash .zsh .ps1 .vue .proto .json .jsonl .ndjson .parquet"
)
TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES.split())


class Span(NamedTuple):
    """A piece of a document. `position`: bytes of the file (as it lies on disk) that have been read so far."""

    text: str
    ends_document: bool
    position: int


@dataclass(frozen=True)
class Source:
    """A file to read. `named`: the user gave it (or a glob that matches it), rather than a folder it lies in."""

    path: Path
    kind: Kind
    compression: str  # "", ".gz" or ".zst"
    size: int  # bytes on disk
    named: bool


def find_sources(inputs: Sequence[str], base: Path, *, skip: Path | None = None) -> list[Source]:
    """The files behind `inputs` (relative to `base`), each once, in the order of the inputs and sorted within each.

    Folders are searched recursively for TEXT_SUFFIXES (compressed or not), hidden entries and the folder `skip` left out.
    DataError: an input that matches nothing.
    """
    if not inputs:
        raise DataError(f"no input text is given; name files, folders, globs or {STDLIB!r}")
    found: dict[Path, Source] = {}
    for text in inputs:
        files = list(_find(text, base, skip.resolve() if skip is not None else None))
        if not files:
            raise DataError(
                f"input {text!r} holds no text files (searched in {base.resolve()}); check the path or name files directly"
            )
        for source in files:
            found.setdefault(source.path.resolve(), source)
    return list(found.values())


def _find(text: str, base: Path, skip: Path | None) -> Iterator[Source]:
    if text == STDLIB:
        yield from _stdlib()
        return
    path = base / Path(text).expanduser()
    if path.exists():
        matches = [path]
    elif glob.has_magic(text):
        matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 (absolute patterns)
        if not matches:
            raise DataError(f"no file matches {text!r} (searched in {base.resolve()}); check the pattern")
    else:
        raise DataError(f"input {path} does not exist; check the path")
    for match in matches:
        if match.is_dir():
            yield from _walk(match, skip)
        else:
            yield _source(match, named=True)


def _walk(folder: Path, skip: Path | None) -> Iterator[Source]:
    for here, folders, files in os.walk(folder):
        root = Path(here)
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(".") and f != "__pycache__" and (skip is None or (root / f).resolve() != skip)
        )
        if skip is not None and root.resolve() == skip:
            folders[:] = []
            continue
        for name in sorted(files):
            suffix = Path(name.removesuffix(Path(name).suffix) if Path(name).suffix in _COMPRESSIONS else name).suffix
            if not name.startswith(".") and suffix.lower() in TEXT_SUFFIXES and (root / name).is_file():
                yield _source(root / name, named=False)


def _stdlib() -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    for here, folders, files in os.walk(root):
        inside = Path(here).relative_to(root)
        folders[:] = sorted(f for f in folders if f not in _STDLIB_SKIPPED and (inside / f).as_posix() != "lib2to3/tests")
        for name in sorted(files):
            if Path(name).suffix in _STDLIB_SUFFIXES:
                yield _source(Path(here) / name, named=False)


def _source(path: Path, *, named: bool) -> Source:
    suffixes = [s.lower() for s in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    kind = _KINDS.get(suffixes[-1] if suffixes else "", "text")
    try:
        return Source(path, kind, compression, path.stat().st_size, named)
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); check the file and its permissions") from None


def read_spans(source: Source, field: str = "text") -> Iterator[Span]:
    """The file's documents as spans, streamed. `field`: the text's field in JSONL, its column in Parquet.

    A text file is one document, a line of JSONL or a row of Parquet is one; empty documents and nulls yield nothing. A .json
    file is read as JSONL when its first line is an object with the field, else as text. DataError: unreadable, binary, corrupt
    or truncated files, a bad JSONL line (with its number), a Parquet file without the column.
    """
    path = source.path
    try:
        with path.open("rb") as raw:
            if source.kind == "parquet":
                yield from _parquet_spans(source, raw, field)
                return
            stream = _decompressed(raw, source.compression)
            kind: Kind = source.kind
            if kind == "json":
                kind = "jsonl" if _is_json_lines(stream, field) else "text"
                raw.seek(0)
                stream = _decompressed(raw, source.compression)
            spans = _jsonl_spans(source, stream, raw, field) if kind == "jsonl" else _text_spans(source, stream, raw)
            yield from spans
    except (EOFError, zlib.error, _ZstdError) as error:
        raise _corrupt(source, str(error)) from None
    except OSError as error:
        if error.errno is None:  # gzip's BadGzipFile
            raise _corrupt(source, str(error)) from None
        raise DataError(f"cannot read {path} ({error.strerror}); check the file and its permissions") from None


class _ZstdError(Exception):
    """A zstd stream that is damaged or ends early."""


def _corrupt(source: Source, why: str) -> DataError:
    kind = {".gz": "gzip", ".zst": "zstd"}.get(source.compression, source.kind)
    why = why.splitlines()[0].rstrip(". ") if why else "it cannot be decompressed"
    return DataError(f"{source.path} is a damaged or truncated {kind} file ({why}); fetch it again or leave it out")


def _decompressed(raw: IO[bytes], compression: str) -> io.BufferedReader:
    if compression == ".gz":
        import gzip

        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 18)
    if compression == ".zst":
        return io.BufferedReader(_ZstdReader(raw), 1 << 18)
    assert isinstance(raw, io.BufferedReader)
    return raw


class _ZstdReader(io.RawIOBase):
    """A zstd file, any number of frames. Unlike the library's own reader it raises when the last frame is cut short."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._library, self._raw = zstandard, raw
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._raw.read(_ZSTD_READ)
                if not self._compressed:
                    if self._frame is not None:
                        raise _ZstdError("its last frame is cut short")
                    return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._compressed))
            except self._library.ZstdError as error:
                raise _ZstdError(str(error)) from None
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken


def _text_spans(source: Source, stream: io.BufferedReader, raw: IO[bytes]) -> Iterator[Span]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    block = stream.read(_READ)
    if b"\0" in block[:_BINARY_CHECK]:
        if source.named:
            raise DataError(
                f"{source.path} is not text (it has zero bytes); give UTF-8 text, JSONL or Parquet, plain or as .gz or .zst"
            )
        return
    rest = ""
    while block:
        rest += decoder.decode(block)
        block = stream.read(_READ)
        if not block:
            rest += decoder.decode(b"", final=True)
        start = 0
        while len(rest) - start > SPAN_CHARACTERS:
            stop = _cut(rest, start)
            yield Span(rest[start:stop], False, raw.tell())
            start = stop
        rest = rest[start:]
    if rest:
        yield Span(rest, True, raw.tell())


def _cut(text: str, start: int) -> int:
    """Where to end a span that begins at `start`: after the last line's end within reach, else at full length."""
    newline = text.rfind("\n", start, start + SPAN_CHARACTERS)
    return newline + 1 if newline >= 0 else start + SPAN_CHARACTERS


def _document_spans(text: str, position: int) -> Iterator[Span]:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, UTF-8 cannot
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    start = 0
    while len(text) - start > SPAN_CHARACTERS:
        stop = _cut(text, start)
        yield Span(text[start:stop], False, position)
        start = stop
    if start < len(text):
        yield Span(text[start:], True, position)


def _is_json_lines(stream: io.BufferedReader, field: str) -> bool:
    """Whether the stream's first line is a JSON object with `field`."""
    line = stream.readline(_FIRST_LINE)
    while line.isspace():
        line = stream.readline(_FIRST_LINE)
    try:
        first = json.loads(line)
    except ValueError:
        return False
    return isinstance(first, dict) and field in first


def _jsonl_spans(source: Source, stream: io.BufferedReader, raw: IO[bytes], field: str) -> Iterator[Span]:
    number = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        number += 1
        where = f"line {number} of {source.path}"
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{where} is longer than {_LONGEST_LINE >> 20} MiB; JSONL has one document a line")
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(
                f"{where} is not valid JSON; repair the line, or give the file as text with another suffix"
            ) from None
        if not isinstance(record, dict) or field not in record:
            has = (
                f"has {', '.join(repr(k) for k in list(record)[:8])}"
                if isinstance(record, dict) and record
                else "has no fields"
            )
            raise DataError(f"{where} has no field {field!r} (it {has}); name the field that holds the text")
        text = record[field]
        if text is not None and not isinstance(text, str):
            raise DataError(
                f"field {field!r} of {where} is no text ({type(text).__name__}); name the field that holds the text"
            )
        if text:
            yield from _document_spans(text, raw.tell())


def _parquet_spans(source: Source, raw: IO[bytes], field: str) -> Iterator[Span]:
    import pyarrow
    import pyarrow.parquet

    path = source.path
    with _seekable(raw, source) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
            names = table.schema_arrow.names
            if field not in names:
                raise DataError(
                    f"{path} has no column {field!r} (it has {', '.join(map(repr, names[:8]))}); name the column of the text"
                )
            kind = table.schema_arrow.field(field).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)):
                raise DataError(f"column {field!r} of {path} is no text ({kind}); name the column that holds the text")
            rows, done = max(1, table.metadata.num_rows), 0
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[field], use_threads=False):
                done += batch.num_rows
                yield from _rows(batch.column(0).to_pylist(), source.size * done // rows)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            why = str(error).strip().splitlines()[0].rstrip(". ") if str(error).strip() else "it cannot be read"
            raise DataError(f"{path} is no Parquet file or is damaged ({why[:120]}); fetch it again or leave it out") from None


def _rows(texts: Iterable[str | None], position: int) -> Iterator[Span]:
    for text in texts:
        if text:
            yield from _document_spans(text, position)


def _seekable(raw: IO[bytes], source: Source) -> IO[bytes]:
    """Parquet is read from its end; a compressed one is first unpacked into an unnamed temporary file."""
    if not source.compression:
        return raw
    import shutil
    import tempfile

    spool = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    try:
        shutil.copyfileobj(_decompressed(raw, source.compression), spool, 1 << 20)
        spool.seek(0)
    except BaseException as error:
        spool.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"there is no room in {tempfile.gettempdir()} to unpack {source.path}; free some or set TMPDIR"
            ) from None
        raise
    return spool
