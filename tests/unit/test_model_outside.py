"""The model room and what lies outside it: other people's folders, unlikely names, a killed process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isles.data import ByteTokenizer
from isles.errors import ModelError, UsageError
from isles.model import Layout, build_model, check_export_target, export_model, generate, load_exported
from isles.spec import ModelTable

TINY = {"family": "llama", "layers": 1, "hidden_size": 32, "heads": 2}


def _build(base: Path = Path(), *, length: int = 32, **table: Any) -> Any:
    return build_model(ModelTable(**(table or TINY)), vocab_size=257, sequence_length=length, seed=0, base=base)


def _export(out: Path, value: float = 0.5) -> None:
    model = _build()
    export_model(model, torch.full((Layout.of(model).total,), value), ByteTokenizer().save, out)


@pytest.mark.parametrize("name", ["tokenizer_research", "model_of_mine.safetensors", "chat_template_drafts"])
def test_a_folder_inside_an_export_is_somebodys_work(name: str, tmp_path: Path) -> None:
    _export(tmp_path / "hf")
    (tmp_path / "hf" / name).mkdir()
    (tmp_path / "hf" / name / "notes.txt").write_text("precious")
    with pytest.raises(UsageError, match=f"holds {name}, which no export wrote"):
        _export(tmp_path / "hf")
    assert (tmp_path / "hf" / name / "notes.txt").read_text() == "precious"


def test_a_tokenizer_alone_is_no_export(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    with pytest.raises(UsageError, match=r"holds tokenizer\.json, which no export wrote"):
        _export(tmp_path)


@pytest.mark.parametrize("here", [".", "inside"])
def test_an_export_never_replaces_the_ground_one_stands_on(here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hf" / here).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "hf" / here)
    with pytest.raises(UsageError, match="holds the folder you are in"):
        check_export_target(tmp_path / "hf")
    with pytest.raises(UsageError, match="holds the folder you are in"):
        _export(tmp_path / "hf")


def test_an_export_target_that_no_disk_can_hold_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / ("x" * 300), tmp_path / "file"):
        with pytest.raises(UsageError, match="choose another --out"):
            _export(out)


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from isles.model import Layout, build_model, export_model
from isles.spec import ModelTable
model = build_model(ModelTable(**TINY), vocab_size=257, sequence_length=32, seed=0, base=Path())
export_model(model, torch.zeros(Layout.of(model).total), lambda _: os.kill(os.getpid(), signal.SIGKILL), Path(sys.argv[1]))
""".replace("TINY", repr(TINY))


@pytest.mark.parametrize("before", [False, True])
def test_a_killed_export_leaves_nothing_new_and_the_earlier_one_whole(before: bool, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    if before:
        _export(out, 0.25)
    done = subprocess.run([sys.executable, "-c", KILLED, str(out)], env=os.environ, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert out.exists() == before
    assert not before or (load_exported(out).model.norm.weight == 0.25).all()
    _export(out, 0.75)
    assert (load_exported(out).model.norm.weight == 0.75).all()


def test_a_model_that_lacks_weights_is_not_filled_with_random_ones(tmp_path: Path) -> None:
    _export(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.0\.mlp\.up_proj\.weight; export the run again"):
        load_exported(tmp_path)


def test_a_missing_export_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="gpt2 is no folder; name one that `isles export` wrote"):
        load_exported(Path("gpt2"))


@pytest.mark.parametrize("source", ["config", "pretrained"])
@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-that-name/model", "zero\0byte"])
def test_a_name_that_no_disk_can_hold_is_one_sentence(source: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        _build(tmp_path, **{source: name})
    assert "\n" not in str(caught.value)


def test_the_longest_sequence_is_known_under_every_name_it_has(tmp_path: Path) -> None:
    shape = {"n_layers": 1, "n_heads": 2, "d_model": 32, "vocab_size": 257, "max_seq_len": 32}
    (tmp_path / "c.json").write_text(json.dumps({"model_type": "mpt", **shape}))
    with pytest.raises(ModelError, match="sequences of up to 32 tokens"):
        _build(tmp_path, length=33, config="c.json")
    model = _build(tmp_path, config="c.json")
    assert generate(model, ByteTokenizer(), "x" * 60, max_new_tokens=2).startswith("x" * 60)


BUILD = """
import hashlib, torch
from pathlib import Path
from isles.model import build_model
from isles.spec import ModelTable
torch.set_num_threads(2)
torch.manual_seed(2)
torch.set_default_dtype(torch.float64)
model = build_model(ModelTable(family="gpt2", parameters="0.8M"), vocab_size=257, sequence_length=64, seed=5, base=Path())
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""


def test_threads_hash_seeds_and_defaults_of_a_process_do_not_change_its_weights() -> None:
    code = [sys.executable, "-c", BUILD]
    done = subprocess.run(code, env=os.environ | {"PYTHONHASHSEED": "2"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    table = ModelTable(family="gpt2", parameters="0.8M")
    model = build_model(table, vocab_size=257, sequence_length=64, seed=5, base=Path())
    assert done.stdout.strip() == hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
