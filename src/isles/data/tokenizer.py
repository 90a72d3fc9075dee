"""Text to token ids and back: built-in bytes, a tokenizer.json, a transformers folder or a hub id.

The byte tokenizer needs no vocabulary file and no download: the id of a byte is the byte, id 256 is the end of text. It is
saved in the Hugging Face format as byte-level BPE without a single merge, so that whoever loads an exported model with
transformers gets the same ids. Its end-of-text token never comes from text: a document that spells out "<|endoftext|>" is
thirteen bytes. Other tokenizers follow their own files, special tokens written in the text included, just as transformers
would; only the ones they put around every text (BOS and the like) are left out, because documents are packed.

Only `import tokenizers` / `transformers` where they are used: the byte tokenizer costs numpy alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from isles.errors import DataError

Ids = NDArray[np.int64]
BYTES = "bytes"  # the built-in tokenizer's name
END_OF_TEXT = "<|endoftext|>"
# Names that published tokenizers give their end-of-text token, tried in this order where the files do not say which it is.
_EOS_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|end▁of▁sentence|>", "<|im_end|>")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
# Behaviour that a fingerprint covers beside the vocabulary: spaces, indentation, digits, accents, scripts, an emoji.
_PROBE = "  The quick brown fox,\n\tdef f(x1): return 12345\r\n naïve café Ⅷ 你好 мир שלום 😀 </s>"


class Tokenizer(Protocol):
    """What the rest of isles asks of a tokenizer. Ids are int64 in [0, vocab_size)."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> Ids: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str: ...
    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens: ids 0..255 are the bytes, 256 ends a document."""

    name = BYTES
    vocab_size = 257
    eos_id = 256

    @cached_property
    def fingerprint(self) -> str:
        vocabulary = {**_byte_vocabulary(), END_OF_TEXT: self.eos_id}
        return _fingerprint(vocabulary, self.eos_id, self.encode(_PROBE))

    def encode(self, text: str) -> Ids:
        """int64 [bytes]. Lone surrogates, which UTF-8 cannot carry, become '?'."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        """Exact for whole UTF-8 text; bytes that are none become U+FFFD; ids above 256 (a padded vocabulary) are left out."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        pieces = np.split(array, np.flatnonzero(array == self.eos_id))
        texts = [piece[piece < 256].astype(np.uint8).tobytes().decode("utf-8", "replace") for piece in pieces]
        return END_OF_TEXT.join(texts)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json: what AutoTokenizer loads from there gives the same ids."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        backend = Backend(models.BPE(vocab=_byte_vocabulary(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
        # Written by hand: the class name is one that every transformers version knows, and nothing heavy is imported.
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            "model_max_length": 10**9,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(backend.to_str(pretty=True) + "\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


class PretrainedTokenizer:
    """A tokenizer of the transformers library behind the same few methods."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self._inner = name, inner
        self._backend = getattr(inner, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = bool(getattr(inner, "split_special_tokens", False))
        self.eos_id = _find_eos(name, inner)
        self._vocabulary: dict[str, int] = inner.get_vocab()
        self.vocab_size = max(max(self._vocabulary.values(), default=0) + 1, len(inner))

    @cached_property
    def fingerprint(self) -> str:
        return _fingerprint(self._vocabulary, self.eos_id, self.encode(_PROBE))

    def encode(self, text: str) -> Ids:
        """int64 [tokens], without the special tokens that a template would put around the text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        if self._backend is not None:
            lists = [e.ids for e in self._backend.encode_batch_fast(clean, add_special_tokens=False)]
        else:
            lists = self._inner(clean, add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(ids, dtype=np.int64) for ids in lists]

    def decode(self, ids: Iterable[int] | NDArray[Any]) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return str(self._inner.decode(known, clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._inner.save_pretrained(str(folder))
        except OSError:
            raise
        except Exception as error:  # the tokenizers library reports even a full disk as a bare Exception
            raise DataError(
                f"tokenizer {self.name} cannot be saved in {folder} ({_first_line(error)}); check the disk"
            ) from None


def load_tokenizer(name: str, base: Path, *, name_as: str | None = None) -> Tokenizer:
    """Load 'bytes', a tokenizer.json file, a transformers folder (both relative to `base`) or a hub id.

    Only a hub id that is not in the local cache is downloaded. `name_as` is the name to report instead of the path. DataError
    when there is nothing of that name, it cannot be loaded, or it names no end-of-text token.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = base / Path(name).expanduser()
    if path.is_file():
        inner = _from_file(name, path)
    elif path.is_dir():
        if not any(
            (path / f).is_file()
            for f in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
        ):
            raise DataError(f"{path} holds no tokenizer (no tokenizer.json); give a folder that transformers saved, or 'bytes'")
        inner = _from_transformers(name, str(path), local=True)
    elif _HUB_ID.match(name) and not name.endswith(".json"):
        inner = _from_transformers(name, name, local=False)
    else:
        raise DataError(f"there is no tokenizer file or folder {path}; give 'bytes', a tokenizer.json, a folder or a hub id")
    return PretrainedTokenizer(name_as or name, inner)


def _from_file(name: str, path: Path) -> Any:
    """A tokenizer.json; which token ends a text is read from tokenizer_config.json where one lies beside it."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(
            f"{path} is no usable tokenizer.json ({_first_line(error)}); give the file that tokenizers saved"
        ) from None
    special: dict[str, str] = {}
    config = path.with_name("tokenizer_config.json")
    if path.name == "tokenizer.json" and config.is_file():
        try:
            eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            raise DataError(f"{config}, beside tokenizer {name}, cannot be read as JSON; repair or remove it") from None
        eos = eos.get("content") if isinstance(eos, dict) else eos
        if isinstance(eos, str) and backend.token_to_id(eos) is not None:
            special["eos_token"] = eos
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def _from_transformers(name: str, source: str, *, local: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local)
    except Exception as error:  # missing files, no network, a bad JSON, a class that needs remote code: each its own class
        if local:
            raise DataError(f"tokenizer folder {source} cannot be loaded ({_first_line(error)}); check its files") from None
        raise DataError(
            f"tokenizer {name!r} is neither a file or folder here nor one that could be fetched from the Hugging Face hub "
            f"({_first_line(error)}); check the name and the connection, or use 'bytes'"
        ) from None


def _first_line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:;, ")
    return text if len(text) <= 200 else text[:197] + "..."


def _find_eos(name: str, inner: Any) -> int:
    if inner.eos_token_id is not None:
        return int(inner.eos_token_id)
    vocabulary = inner.get_vocab()
    for token in _EOS_NAMES:
        if token in vocabulary:
            inner.eos_token = token  # so that the saved copy says it too
            return int(vocabulary[token])
    raise DataError(
        f"tokenizer {name} names no end-of-text token, which separates documents; set eos_token in its tokenizer_config.json"
    )


def _fingerprint(vocabulary: dict[str, int], eos_id: int, probe: Ids) -> str:
    """Hex blake3 of vocabulary, end-of-text id and the ids of a probe text: equal for tokenizers that behave alike."""
    parts = [sorted((i, token) for token, i in vocabulary.items()), eos_id, probe.tolist()]
    return blake3(json.dumps(parts, ensure_ascii=True).encode()).hexdigest()


def _byte_vocabulary() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table), with the byte as its id."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        characters.setdefault(byte, chr(256 + len(characters) - len(printable)))
    return {characters[byte]: byte for byte in range(256)}
