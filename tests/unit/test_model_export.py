"""What leaves a run: an export that others load, and text."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from isles.data import ByteTokenizer
from isles.errors import ModelError, UsageError
from isles.model import (
    FlatParameters,
    Layout,
    build_model,
    export_model,
    generate,
    load_exported,
)
from isles.spec import ModelTable

FAMILIES = ("gpt2", "llama", "qwen3")


def _build(table: ModelTable, seed: int = 0, base: Path = Path()) -> Any:
    return build_model(table, vocab_size=257, sequence_length=32, seed=seed, base=base)


def _tiny(family: str = "llama", **more: Any) -> ModelTable:
    return ModelTable(family=family, layers=3, hidden_size=32, heads=2, **more)  # type: ignore[arg-type]


def _config_file(folder: Path, **values: Any) -> ModelTable:
    common = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    (folder / "c.json").write_text(json.dumps(common | values))
    return ModelTable(config="c.json")


def _values(model: Any) -> torch.Tensor:
    """A copy of a model's parameters in its own layout."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


EXPORTED: dict[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2"}, "llama": {"family": "llama"}, "qwen3": {"family": "qwen3"},
    "untied": {"family": "llama", "tie_embeddings": False}, "gpt_neox": {"config": "c.json"},
}  # fmt: skip


LOADER = """
import hashlib, sys, torch
from pathlib import Path
import isles.model
assert "transformers" not in sys.modules, "import isles.model must be quick"
from isles.spec import ModelTable
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
found, base = {}, Path(sys.argv[1])
for name in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(base / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(base / name)
    ids = tokenizer("def f(x): # \u00e9\u4f60", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    text = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    table = ModelTable(family=name, layers=3, hidden_size=32, heads=2) if name in ("gpt2", "llama", "qwen3") else None
    built = table and isles.model.build_model(table, vocab_size=257, sequence_length=32, seed=11, base=base)
    digest = built and hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in built.parameters())).hexdigest()
    found[name] = {"ids": ids, "logits": logits, "eos": tokenizer.eos_token_id, "tied": tied, "text": text, "built": digest,
                   "dtype": str(model.dtype), "cache": model.generation_config.use_cache, "stop": model.generation_config.eos_token_id}
torch.save(found, base / "found.pt")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, torch.Tensor, dict[str, Any]]]:
    """Each exported model (with its trained values put in after the export), and what a fresh process found in the folder."""
    base, tokenizer, models = tmp_path_factory.mktemp("export"), ByteTokenizer(), {}
    _config_file(base, model_type="gpt_neox", vocab_size=257)
    for name, given in EXPORTED.items():
        model = _build(ModelTable(**given) if "config" in given else _tiny(**given), base=base)
        values = torch.randn(Layout.of(model).total, generator=torch.Generator().manual_seed(3)) * 0.05
        before = _values(model)
        export_model(model, values, tokenizer.save, base / name, eos_id=tokenizer.eos_id)
        assert torch.equal(_values(model), before) and not model.config.use_cache and model.config.eos_token_id != 256
        FlatParameters(model, Layout.of(model)).copy_from(values, 0, values.numel())
        models[name] = (model, values)
    done = subprocess.run([sys.executable, "-c", LOADER, str(base), *EXPORTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = torch.load(base / "found.pt")
    return {name: (*models[name], found[name] | {"folder": base / name, "stderr": done.stderr}) for name in EXPORTED}


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_gives_the_same_logits_in_a_fresh_process(name: str, exported: Any) -> None:
    model, values, theirs = exported[name]
    assert theirs["ids"][0].tolist() == ByteTokenizer().encode("def f(x): # é你").tolist()
    assert theirs["eos"] == theirs["stop"] == ByteTokenizer().eos_id and theirs["cache"] and theirs["dtype"] == "torch.float32"
    with torch.no_grad():
        ours = model.eval()(input_ids=theirs["ids"]).logits
    assert torch.equal(ours, theirs["logits"])
    assert theirs["tied"] == (name not in ("untied", "gpt_neox")) and theirs["text"].shape[1] > theirs["ids"].shape[1]
    assert np.array_equal(_values(load_exported(theirs["folder"])), values)
    assert "Warning" not in theirs["stderr"] and "not initialized" not in theirs["stderr"]
    assert not list(theirs["folder"].parent.glob(".*"))


@pytest.mark.parametrize("family", FAMILIES)
def test_another_process_builds_the_same_bits(family: str, exported: Any) -> None:
    ours = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in _build(_tiny(family), seed=11).parameters()))
    assert exported[family][2]["built"] == ours.hexdigest()


def test_a_run_is_exported_while_it_trains(tmp_path: Path) -> None:
    model = _build(_tiny())
    flat = FlatParameters(model, Layout.of(model))
    model.get_input_embeddings().weight.requires_grad_(False)
    frozen = model.get_input_embeddings().weight.detach().clone()
    layout = Layout.of(model)
    export_model(torch.compile(model), torch.zeros(layout.total), ByteTokenizer().save, tmp_path / "hf", max_shard_size="50KB")
    flat.values.fill_(7.0)
    assert all((p == 7).all() for p in model.parameters())  # still views of the vector that trains
    loaded = load_exported(tmp_path / "hf")
    assert torch.equal(loaded.get_input_embeddings().weight, frozen) and not loaded.model.norm.weight.any()
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1  # large models come in several files


@pytest.mark.parametrize("wrong", [torch.zeros(5), torch.zeros(33_472 + 32, dtype=torch.bfloat16)])
def test_values_of_another_model_are_no_export(wrong: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"an export needs .* fp32 values for this model"):
        export_model(_build(_tiny()), wrong, ByteTokenizer().save, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build(_tiny())
    values = torch.zeros(Layout.of(model).total)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    def writer_full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(ModelError, match="No space left"):
        export_model(model, values, full, tmp_path / "hf")
    monkeypatch.setattr(type(model), "save_pretrained", writer_full)
    with pytest.raises(ModelError, match="No space left"):
        export_model(model, values, ByteTokenizer().save, tmp_path / "hf")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _build(_tiny())
    values, save = torch.zeros(Layout.of(model).total), ByteTokenizer().save
    for name, files in (
        ("thesis", ["chapter.txt"]),
        ("project", ["config.json", "chapter.txt"]),
        ("words", ["tokenizer.json"]),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("precious")
        with pytest.raises(UsageError, match="which no export wrote"):
            export_model(model, values, save, tmp_path / name)
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == sorted(files)
    with pytest.raises(UsageError, match="is a file; choose another"):
        export_model(model, values, save, tmp_path / "thesis" / "chapter.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the folder you are in"):
        export_model(model, values, save, Path())
    export_model(model, values, save, tmp_path / "hf")
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    export_model(model, values + 1, save, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load_exported(tmp_path / "hf").model.norm.weight.all()
    earlier = (tmp_path / "hf" / "model.safetensors").read_bytes()

    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(model, values, interrupted, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == earlier and not list(tmp_path.glob(".*"))
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="export the run again"):
        load_exported(tmp_path / "hf")


def test_generated_text_follows_the_seed_and_fits_the_context() -> None:
    model, tokenizer = _build(_tiny()), ByteTokenizer()
    a, b, c = (generate(model, tokenizer, "x" * 100, max_new_tokens=20, seed=seed) for seed in (1, 1, 2))
    assert a == b != c and a.startswith("x" * 100)
    greedy = {generate(model, tokenizer, "abc", max_new_tokens=5, temperature=0, seed=seed) for seed in (1, 2)}
    assert len(greedy) == 1 and model.training
    assert isinstance(generate(model, tokenizer, "", max_new_tokens=3, top_k=0), str)


def test_generation_stops_at_the_end_of_text() -> None:
    model, tokenizer = _build(_tiny("gpt2")), ByteTokenizer()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.get_output_embeddings().weight[tokenizer.eos_id].fill_(1.0)
    assert generate(model, tokenizer, "abc", max_new_tokens=50, temperature=0) == "abc"


def test_generation_refuses_what_it_cannot_draw_from() -> None:
    model, tokenizer = _build(_tiny()), ByteTokenizer()
    cold = {generate(model, tokenizer, "abc", max_new_tokens=5, temperature=t) for t in (0, 1e-300, 1e-5)}
    assert len(cold) == 1
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}):
        with pytest.raises(UsageError, match="numbers from 0 on"):
            generate(model, tokenizer, "abc", **wrong)
    FlatParameters(model, Layout.of(model)).values.fill_(float("nan"))
    for temperature in (0, 1.0):
        with pytest.raises(ModelError, match="it has diverged"):
            generate(model, tokenizer, "abc", temperature=temperature)
    assert model.training


def test_only_the_end_of_a_long_prompt_counts() -> None:
    model, tokenizer = _build(_tiny()), ByteTokenizer()
    end = "the last thirty-two characters!!"
    long, short = (generate(model, tokenizer, p + end, max_new_tokens=8, temperature=0) for p in ("x" * 50, ""))
    assert len(end) == 32 and long[50 + 32 :] == short[32:]
