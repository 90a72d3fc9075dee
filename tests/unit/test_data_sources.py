"""Text from files of every kind, streamed in small spans; every broken input has its sentence."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from isles.data.sources import SPAN_CHARACTERS, STDLIB, find_sources, read_spans
from isles.errors import DataError

Documents = list[str]
DOCUMENTS = ["first\ndocument", "naïve 你好 😀", "x" * 200_000, "line\n" * 40_000, "last"]


def read(path: Path, field: str = "text") -> Documents:
    """All documents of one file, reassembled; checks what holds of every span on the way."""
    documents, text = [], ""
    (source,) = find_sources([str(path)], Path())
    position = 0
    for span in read_spans(source, field):
        assert 0 < len(span.text) <= SPAN_CHARACTERS
        assert position <= span.position <= source.size
        position = span.position
        text += span.text
        if span.ends_document:
            documents.append(text)
            text = ""
    assert text == ""
    return documents


def jsonl(documents: Documents, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: d}).encode() + b"\n" for i, d in enumerate(documents))


def parquet(documents: list[str | None], field: str = "text", kind: pa.DataType | None = None) -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"id": list(range(len(documents))), field: pa.array(documents, type=kind or pa.string())})
    pq.write_table(table, buffer, row_group_size=2)
    return buffer.getvalue()


def zstd(raw: bytes) -> bytes:
    """One frame with a checksum, as the zstd command writes it."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(raw)


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    ".gz": gzip.compress,
    ".zst": lambda raw: zstd(raw[:100]) + zstd(raw[100:]),
}


@pytest.mark.parametrize("suffix", PACK)
def test_every_kind_reads_plain_and_compressed(tmp_path: Path, suffix: str) -> None:
    for name, raw, expected in [
        ("a.txt", DOCUMENTS[3].encode(), [DOCUMENTS[3]]),
        ("a.jsonl", jsonl(DOCUMENTS), DOCUMENTS),
        ("a.json", jsonl(DOCUMENTS), DOCUMENTS),
        ("b.json", b'{\n "pretty": 1\n}', ['{\n "pretty": 1\n}']),
        ("c.json", b'{"other": 1}\n', ['{"other": 1}\n']),
        ("a.parquet", parquet([*DOCUMENTS]), DOCUMENTS),
        ("no-suffix", b"words", ["words"]),
    ]:
        path = tmp_path / (name + suffix)
        path.write_bytes(PACK[suffix](raw))
        assert read(path) == expected, path


def test_other_fields_and_column_types(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["one", "two"], "content"))
    assert read(path, "content") == ["one", "two"]
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        path = tmp_path / "a.parquet"
        path.write_bytes(parquet(["one", None, "", "two"], "content", kind))
        assert read(path, "content") == ["one", "two"]


def test_nulls_empty_documents_and_blank_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": ""}\n{"text": null}\n  \n{"text": "two"}')
    assert read(path) == ["one", "two"]
    for name in ("empty.txt", "empty.jsonl", "empty.json", "empty.txt.gz", "empty.txt.zst"):
        (tmp_path / name).write_bytes(b"")
        assert read(tmp_path / name) == []


def test_long_documents_are_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = [f"{i} " + "w" * random.Random(i).randrange(200) + "\n" for i in range(3000)]
    path.write_text("".join(lines))
    spans = list(read_spans(find_sources([str(path)], Path())[0]))
    assert len(spans) > 3 and all(span.text.endswith("\n") for span in spans)
    assert [span.ends_document for span in spans] == [False] * (len(spans) - 1) + [True]


def test_bytes_that_are_not_utf8_are_replaced_and_a_bom_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfcaf\xe9 " + "é".encode() * 40_000 + b"\r\n\xc3")
    assert read(path) == ["caf\ufffd " + "é" * 40_000 + "\r\n\ufffd"]


def test_half_a_surrogate_pair_in_json_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x\\ud83d y \\ud83d\\ude00"}\n')
    assert read(path) == ["x\ufffd y 😀"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_memory_does_not_grow_with_a_compressed_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"big.txt{suffix}"
    with gzip.open(path, "wb", compresslevel=1) if suffix == ".gz" else zstandard.open(path, "wb") as file:
        for i in range(50):
            file.write(f"line {i} without an end ".encode() * 45_000)  # 50 MB and not one newline
    source = find_sources([str(path)], Path())[0]
    tracemalloc.start()
    characters = sum(len(span.text) for span in read_spans(source))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters > 45_000_000
    assert peak < 8_000_000


def test_folders_globs_and_files_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in [
        "b/z.md",
        "b/a.txt",
        "b/.hidden.txt",
        "b/.git/x.txt",
        "b/__pycache__/x.py",
        "b/c/d.jsonl.gz",
        "b/pic.png",
        "e.weird",
        "out/x.txt",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"text")

    def names(*inputs: str) -> list[str]:
        return [s.path.relative_to(tmp_path).as_posix() for s in find_sources(inputs, tmp_path, skip=tmp_path / "out")]

    assert names("b") == ["b/a.txt", "b/z.md", "b/c/d.jsonl.gz"]
    assert names("e.weird", "b/*.md", "b") == ["e.weird", "b/z.md", "b/a.txt", "b/c/d.jsonl.gz"]
    assert names("**/*.txt") == ["b/a.txt", "out/x.txt"]  # named by the glob, so not skipped
    assert names(".") == ["b/a.txt", "b/z.md", "b/c/d.jsonl.gz"]
    assert names(str(tmp_path / "b" / "z.md")) == ["b/z.md"]


def test_the_standard_library_is_text_and_always_in_the_same_order() -> None:
    sources = find_sources([STDLIB], Path())
    assert sum(source.size for source in sources) > 8_000_000
    assert [s.path for s in sources] == [s.path for s in find_sources([STDLIB], Path())]
    parts = {part for source in sources for part in source.path.parts}
    assert not parts & {"site-packages", "__pycache__"}
    assert any(source.path.name == "argparse.py" for source in sources)


def test_binary_files_are_an_error_when_named_and_passed_over_in_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "picture.txt"
    path.write_bytes(b"\x89PNG\0\0\0")
    with pytest.raises(DataError, match=r"picture\.txt is not text"):
        read(path)
    (source,) = find_sources([str(tmp_path)], Path())
    assert list(read_spans(source)) == []


def test_inputs_that_match_nothing_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for inputs, words in [
        ([], "no input text is given"),
        (["missing.txt"], r"missing\.txt does not exist"),
        (["*.nothing"], "no file matches"),
        (["empty"], "holds no text files"),
    ]:
        with pytest.raises(DataError, match=words):
            find_sources(inputs, tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"body": "x", "id": 3}', r"line 2 of .*bad\.jsonl has no field 'text' \(it has 'body', 'id'\)"),
        (b"[1, 2]", "line 2 of .* has no field 'text'"),
        (b"{}", "line 2 of .* has no field 'text'"),
        (b'{"text": ', "line 2 of .* is not valid JSON"),
        (b'{"text": "\xff"}', "line 2 of .* is not valid JSON"),
        (b"[" * 100_000, "line 2 of .* is not valid JSON"),
        (b'{"text": 5}', r"field 'text' of line 2 of .* is no text \(int\)"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=words):
        read(path)


def test_a_line_too_long_for_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isles.data.sources._LONGEST_LINE", 1 << 20)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(jsonl(["x" * (1 << 21)]))
    with pytest.raises(DataError, match=r"line 1 of .* is longer than 1 MiB"):
        read(path)


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(["one"], "content"))
    with pytest.raises(DataError, match=r"has no column 'text' \(it has 'id', 'content'\)"):
        read(path)
    with pytest.raises(DataError, match=r"column 'id' of .* is no text \(int64\)"):
        read(path, "id")
    whole = parquet(["some text to damage " * 50] * 20)
    for raw in (b"", b"no parquet at all", whole[: len(whole) // 2], whole[:60] + bytes(200) + whole[260:]):
        path.write_bytes(raw)
        with pytest.raises(DataError, match="is no Parquet file or is damaged"):
            read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_corrupt_and_truncated_compression_is_named(tmp_path: Path, suffix: str, name: str) -> None:
    text = "".join(random.Random(0).choices("abcdefgh \n", k=50_000))
    raw = {"a.txt": text.encode(), "a.jsonl": jsonl([text]), "a.parquet": parquet([text])}[name]
    whole = PACK[suffix](raw)
    path = tmp_path / (name + suffix)
    for bad in (whole[:-1], whole[: len(whole) // 2], b"not compressed", whole[:1000] + bytes(64) + whole[1064:]):
        path.write_bytes(bad)
        with pytest.raises(DataError, match=rf"{name}{suffix} is a damaged or truncated"):
            read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    (source,) = find_sources([str(path)], Path())
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt \(No such file"):
        list(read_spans(source))


def test_a_full_temporary_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(parquet(["one"])))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(DataError, match=r"there is no room in .* set TMPDIR"):
        read(path)
