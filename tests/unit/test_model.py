"""Models: presets of the right size, weights from the seed alone, the flat layout, and an export that others load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.data import ByteTokenizer
from isles.errors import ModelError, UsageError
from isles.model import FlatParameters, Layout, build_model, count_parameters, export_model, generate, load_exported, remap
from isles.model.presets import choose_shape
from isles.spec import ModelTable

FAMILIES = ("gpt2", "llama", "qwen3")
SIZES = ("0.1M", "0.13M", "0.8M", "3M", "30M", "124M", "1B", "8B", "30B", "50B")


def _build(table: ModelTable, seed: int = 0, base: Path = Path()) -> Any:
    return build_model(table, vocab_size=257, sequence_length=32, seed=seed, base=base)


def _tiny(family: str = "llama", **more: Any) -> ModelTable:
    return ModelTable(family=family, layers=3, hidden_size=32, heads=2, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_a_preset_comes_within_15_percent_of_the_size(family: str, size: str) -> None:
    table = ModelTable(family=family, parameters=size)  # type: ignore[arg-type]
    shape = choose_shape(table, vocab_size=257, sequence_length=1024 if size[-1] == "B" else 64)
    wanted = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert abs(shape.count() - wanted) <= 0.15 * wanted
    assert shape.hidden_size % shape.heads == 0 and shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "vocabulary"), [("0.13M", 257), ("3M", 1000), ("1B", 128_000), ("50B", 151_936)])
def test_the_closed_count_is_the_built_models(family: str, size: str, vocabulary: int) -> None:
    table = ModelTable(family=family, parameters=size)  # type: ignore[arg-type]
    shape = choose_shape(table, vocab_size=vocabulary, sequence_length=128)
    assert count_parameters(table, vocab_size=vocabulary, sequence_length=128, base=Path()) == shape.count()


@pytest.mark.parametrize(("size", "layers", "width", "count"), [("0.13M", 2, 64, 117_120), ("0.8M", 4, 128, 824_576)])
def test_presets_that_published_figures_rest_on_do_not_change(size: str, layers: int, width: int, count: int) -> None:
    shape = choose_shape(ModelTable(family="llama", parameters=size), vocab_size=257, sequence_length=64)
    assert (shape.layers, shape.hidden_size, shape.count()) == (layers, width, count)


def test_a_vocabulary_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"vocabulary of 151,936.*larger size or a tokenizer with fewer tokens"):
        choose_shape(ModelTable(family="llama", parameters="1M"), vocab_size=151_936, sequence_length=64)
    with pytest.raises(ModelError, match="heads 5 does not divide"):
        choose_shape(ModelTable(family="llama", layers=2, hidden_size=32, heads=5), vocab_size=257, sequence_length=64)


def test_shape_and_tying_can_be_given() -> None:
    model = _build(_tiny(tie_embeddings=False))
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.num_attention_heads) == (3, 32, 2)
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_from_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    a = _build(_tiny(family))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    b, c = _build(_tiny(family)), _build(_tiny(family), seed=5)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))
    torch.set_rng_state(state)
    before = torch.get_rng_state()
    _build(_tiny(family))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_have_no_dropout_and_train_in_fp32(family: str) -> None:
    model = _build(_tiny(family))
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    ids = torch.arange(16)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ["mistral", "gpt_neox"])
def test_any_config_json_of_a_causal_model_works(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = _build(ModelTable(config="config.json"), base=tmp_path)
    assert model.config.model_type == kind and model.config.attention_dropout == 0.0
    layout = Layout.of(model, fragments=3)
    assert layout.total == sum(p.numel() for p in model.parameters()) and len(layout.fragments) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [({"vocab_size": 100}, "vocabulary of 100.*needs 257"), ({"max_position_embeddings": 16}, "up to 16 tokens.*sequence_length is 32"),
     ({"model_type": "no-such-thing"}, "no config that transformers can read")],
)  # fmt: skip
def test_a_config_that_does_not_fit_says_why(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=words) as caught:
        _build(ModelTable(config="c.json"), base=tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_and_garbage_models_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "folder").mkdir()
    for table in (
        ModelTable(config="none.json"),
        ModelTable(config="bad.json"),
        ModelTable(pretrained="folder"),
        ModelTable(pretrained="nobody/no-such-model"),
    ):
        with pytest.raises(ModelError) as caught:
            _build(table, base=tmp_path)
        assert "\n" not in str(caught.value)


def test_a_tied_weight_has_one_slot() -> None:
    model = _build(_tiny())
    layout = Layout.of(model)
    assert layout.total == sum(p.numel() for p in model.parameters())
    assert sum("embed" in s.name or "lm_head" in s.name for s in layout.slots) == 1
    flat = FlatParameters(model, layout)
    flat.values.zero_()
    assert not model.get_output_embeddings().weight.any() and not model.get_input_embeddings().weight.any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["strided", "sequential"])
def test_fragments_are_contiguous_and_cover_everything(family: str, fragments: int, order: Any) -> None:
    layout = Layout.of(_build(_tiny(family)), fragments, order)
    assert layout.fragments[0][0] == 0 and layout.fragments[-1][1] == layout.total
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in zip(layout.fragments, layout.fragments[1:], strict=False))
    for slot in layout.slots:
        start, stop = layout.fragments[slot.fragment]
        assert start <= slot.offset and slot.offset + slot.numel <= stop


def test_blocks_are_dealt_out_strided_or_in_sequence() -> None:
    model = _build(ModelTable(family="llama", layers=4, hidden_size=32, heads=2))

    def fragment_of_blocks(order: Any) -> list[int]:
        slots = Layout.of(model, 3, order).slots
        return [next(s.fragment for s in slots if f".layers.{block}." in s.name) for block in range(4)]

    assert fragment_of_blocks("strided") == [1, 2, 1, 2] and fragment_of_blocks("sequential") == [1, 1, 2, 2]
    outside = [s for s in Layout.of(model, 3).slots if ".layers." not in s.name]
    assert outside and all(s.fragment == 0 for s in outside)


def test_more_fragments_than_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match="fragments 5 needs at least 4 transformer blocks, the model has 3"):
        Layout.of(_build(_tiny()), 5)


def test_ranges_and_names_are_found() -> None:
    layout = Layout.of(_build(_tiny()))
    first, second = layout.slots[:2]
    edge = second.offset
    assert layout.intersect(edge - 2, edge + 3) == [(first, first.numel - 2, first.numel), (second, 0, 3)]
    assert layout.name_at(edge - 1) == first.name and layout.name_at(edge) == second.name
    assert layout.intersect(5, 5) == []
    with pytest.raises(IndexError):
        layout.name_at(layout.total)


def test_a_layout_reads_back_and_its_digest_tells_models_apart() -> None:
    model = _build(_tiny())
    layout = Layout.of(model, 2)
    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout and again.digest() == layout.digest()
    digests = {
        Layout.of(model).digest(),
        layout.digest(),
        Layout.of(model, 3).digest(),
        Layout.of(_build(_tiny("qwen3"))).digest(),
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    "record", [{}, {"slots": [], "fragments": 1}, {"slots": [["a", [2], 1]], "fragments": 1}, {"slots": [["a", [-2], 0]], "fragments": 1},
               {"slots": [["a", [2], 1], ["b", [2], 0]], "fragments": 2}, {"slots": "x", "fragments": 1}],
)  # fmt: skip
def test_a_damaged_layout_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="layout is damaged"):
        Layout.from_dict(record)


def test_values_move_between_layouts_of_the_same_tensors() -> None:
    model = _build(_tiny())
    one, three = Layout.of(model), Layout.of(model, 3)
    values = torch.arange(one.total, dtype=torch.float32)
    moved = remap(values, one, three)
    assert torch.equal(remap(moved, three, one), values) and not torch.equal(moved, values)
    for slot in three.slots:
        origin = next(s for s in one.slots if s.name == slot.name)
        assert torch.equal(moved[slot.offset : slot.offset + slot.numel], values[origin.offset : origin.offset + origin.numel])
    with pytest.raises(ModelError, match="do not fit"):
        remap(values, one, Layout.of(_build(_tiny("qwen3"))))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_through_views_is_training(family: str) -> None:
    plain, viewed = _build(_tiny(family)), _build(_tiny(family))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, viewed)]
    flat = FlatParameters(viewed, Layout.of(viewed, 2))
    ids = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        for model, optimizer in zip((plain, viewed), optimizers, strict=True):
            logits = model(input_ids=ids[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), (_, q) in zip(plain.named_parameters(), viewed.named_parameters(), strict=True):
        assert torch.equal(p, q), name
        slot = next(s for s in flat.layout.slots if s.name == name)
        assert torch.equal(flat.values[slot.offset : slot.offset + slot.numel], p.detach().flatten())


def test_frozen_parameters_are_left_alone() -> None:
    model = _build(_tiny())
    frozen = model.get_input_embeddings().weight
    frozen.requires_grad_(False)
    layout = Layout.of(model)
    assert layout.total == sum(p.numel() for p in model.parameters() if p.requires_grad)
    FlatParameters(model, layout).values.zero_()
    assert frozen.any()


def test_a_model_that_does_not_fit_the_layout_is_refused() -> None:
    with pytest.raises(ModelError, match="does not fit the layout"):
        FlatParameters(_build(_tiny("gpt2")), Layout.of(_build(_tiny("llama"))))
    with pytest.raises(ModelError, match="master weights must be fp32"):
        FlatParameters(_build(_tiny()).bfloat16(), Layout.of(_build(_tiny())))


LOADER = """
import sys, torch, warnings
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = tokenizer("def f(x): # \\u00e9\\u4f60", return_tensors="pt")["input_ids"]
with torch.no_grad():
    logits = model(input_ids=ids).logits
torch.save({"ids": ids, "logits": logits, "eos": tokenizer.eos_token_id}, sys.argv[2])
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_gives_the_same_logits_in_a_fresh_process(family: str, tmp_path: Path) -> None:
    model, tokenizer = _build(_tiny(family)), ByteTokenizer()
    layout = Layout.of(model)
    values = torch.randn(layout.total, generator=torch.Generator().manual_seed(3)) * 0.05
    export_model(model, values, tokenizer.save, tmp_path / "hf", eos_id=tokenizer.eos_id)
    assert list((tmp_path / "hf").glob("*.safetensors")) and not list(tmp_path.glob(".hf*"))
    done = subprocess.run(
        [sys.executable, "-c", LOADER, str(tmp_path / "hf"), str(tmp_path / "out.pt")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "out.pt")
    assert theirs["ids"][0].tolist() == tokenizer.encode("def f(x): # é你").tolist() and theirs["eos"] == tokenizer.eos_id
    with torch.no_grad():
        ours = model.eval()(input_ids=theirs["ids"]).logits
    assert torch.equal(ours, theirs["logits"])
    flat = FlatParameters(model, layout)
    loaded = load_exported(tmp_path / "hf")
    assert np.array_equal(FlatParameters(loaded, Layout.of(loaded)).values.numpy(), flat.values.numpy())


def test_a_failed_export_leaves_nothing_and_a_foreign_folder_is_safe(tmp_path: Path) -> None:
    model = _build(_tiny())
    values = torch.zeros(Layout.of(model).total)

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="No space left"):
        export_model(model, values, full, tmp_path / "hf")
    assert not list(tmp_path.iterdir())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("precious")
    with pytest.raises(UsageError, match="which no export wrote"):
        export_model(model, values, ByteTokenizer().save, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "precious"
    export_model(model, values, ByteTokenizer().save, tmp_path / "hf")
    export_model(model, values + 1, ByteTokenizer().save, tmp_path / "hf")  # an export may be replaced
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
