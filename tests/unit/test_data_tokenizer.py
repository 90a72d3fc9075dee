"""Tokenizers: ids, exact decoding, and a saved copy that transformers loads with the same ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from isles.data import ByteTokenizer, load_tokenizer
from isles.errors import DataError

TEXTS = [
    "plain",
    " two  spaces \n\ttab\r\n",
    "naïve 你好 мир 😀 e\u0301",
    "\x00\x01 control",
    "<|endoftext|> spelt out",
    "a<|endoftext|>",
    "don't , stop .",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer.json with </s> and <s>, trained here."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, the end"] * 3, trainer)
    backend.enable_truncation(4)  # a setting that published files carry; a document must not be cut by it
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    backend.save(str(path))
    return path


@given(st.text())
def test_bytes_decode_to_what_was_encoded(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_decoding_takes_any_ids() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 256, 105, 300, 256]) == "h<|endoftext|>i<|endoftext|>"
    assert tokenizer.decode([0xFF, 104, 0xE4]) == "\ufffdh\ufffd"
    assert tokenizer.decode(np.array([], dtype=np.int64)) == ""
    assert tokenizer.encode("\ud800x").tolist() == [63, 120]


def test_transformers_in_a_fresh_process_gives_the_same_byte_ids(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.save(tmp_path / "saved")
    code = (
        "import json, sys; from transformers import AutoTokenizer; t = AutoTokenizer.from_pretrained(sys.argv[1]);"
        "ids = [t(x)['input_ids'] for x in json.loads(sys.argv[2])];"
        "print(json.dumps([ids, [t.decode(i) for i in ids], len(t), t.eos_token_id, t.decode([65, 256])]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "saved"), json.dumps(TEXTS)], capture_output=True, text=True, check=True
    )
    ids, texts, size, eos, ended = json.loads(run.stdout)
    assert ids == [tokenizer.encode(text).tolist() for text in TEXTS]
    assert texts == TEXTS
    assert (size, eos, ended) == (tokenizer.vocab_size, tokenizer.eos_id, "A<|endoftext|>")


def test_the_saved_byte_tokenizer_loads_as_a_folder_with_equal_behaviour(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "saved")
    loaded = load_tokenizer("saved", tmp_path)
    assert loaded.fingerprint == ByteTokenizer().fingerprint
    assert (loaded.vocab_size, loaded.eos_id) == (257, 256)
    for text in TEXTS:
        assert loaded.encode(text).tolist() == list(text.encode())
        assert loaded.decode(loaded.encode(text)) == text


def test_a_tokenizer_file_is_used_and_saved_whole(bpe: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(bpe.name, bpe.parent)
    assert tokenizer.eos_id == 1 and tokenizer.vocab_size == len(Backend.from_file(str(bpe)).get_vocab())
    text = "the cat sat on the mat, the end of a long text that is not cut"
    ids = tokenizer.encode(text)
    assert ids.size > 4 and ids.size < len(text) and tokenizer.decode(ids) == text
    assert [i.tolist() for i in tokenizer.encode_batch([text, "", "mat"])] == [
        tokenizer.encode(t).tolist() for t in (text, "", "mat")
    ]
    tokenizer.save(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.eos_token == "</s>"
    for sample in [text, *TEXTS]:
        assert again(sample, add_special_tokens=False)["input_ids"] == tokenizer.encode(sample).tolist()
    reloaded = load_tokenizer("saved", tmp_path)
    assert reloaded.fingerprint == tokenizer.fingerprint != ByteTokenizer().fingerprint


def test_the_end_token_is_read_from_the_config_beside_the_file(bpe: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<s>"}}))
    assert load_tokenizer(str(tmp_path / "tokenizer.json"), Path()).eos_id == 0
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json.*cannot be read as JSON"):
        load_tokenizer("tokenizer.json", tmp_path)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="names no end-of-text token"):
        load_tokenizer("tokenizer.json", tmp_path)


def test_mistakes_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, words in {
        "broken.json": "no usable tokenizer.json",
        "empty": "holds no tokenizer",
        "missing.json": "there is no tokenizer file or folder",
        "./missing": "there is no tokenizer file or folder",
        "no-such-owner/no-such-tokenizer": "Hugging Face hub",
    }.items():
        with pytest.raises(DataError, match=words) as caught:
            load_tokenizer(name, tmp_path)
        assert "\n" not in str(caught.value)


def test_the_data_room_imports_nothing_heavy() -> None:
    code = "import sys, isles.data; print([m for m in ('torch', 'transformers', 'tokenizers', 'pyarrow', 'pandas') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
