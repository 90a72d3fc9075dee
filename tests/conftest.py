"""Shared by all tests: one torch thread (several test processes share two cores), and no hub look-ups."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("ci", deadline=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set of the byte tokenizer, from text that is made here."""
    from isles.data import ByteTokenizer, prepare

    folder = tmp_path_factory.mktemp("tiny")
    words = ["def", "return", "island", "cluster", "round", "average", "self", "for", "in", "while"]
    text = [" ".join(words[(i * j + i) % len(words)] for j in range(1, 60)) for i in range(1, 120)]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in text))
    prepare([str(folder / "text.jsonl")], folder / "data", tokenizer=ByteTokenizer(), held_out=0.1, base=folder)
    return folder / "data"
