"""The canonical flat layout, and a model whose parameters are views of one vector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from isles.errors import ModelError
from isles.model import (
    FlatParameters,
    Layout,
    build_model,
    prepare_for_training,
    remap,
)
from isles.model.layout import transformer_blocks
from isles.spec import ModelTable

FAMILIES = ("gpt2", "llama", "qwen3")


def _build(table: ModelTable, seed: int = 0, base: Path = Path()) -> Any:
    return build_model(table, vocab_size=257, sequence_length=32, seed=seed, base=base)


def _tiny(family: str = "llama", **more: Any) -> ModelTable:
    return ModelTable(family=family, layers=3, hidden_size=32, heads=2, **more)  # type: ignore[arg-type]


def test_a_compiled_model_has_the_layout_of_the_model_it_compiles() -> None:
    model = _build(_tiny())
    compiled = prepare_for_training(model, _tiny(compile=True))
    assert compiled is not model and Layout.of(compiled, 2) == Layout.of(model, 2)
    FlatParameters(compiled, Layout.of(model)).values.zero_()
    assert not any(p.any() for p in model.parameters())


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
               {"slots": [["a", [2], 1], ["b", [2], 0]], "fragments": 2}, {"slots": "x", "fragments": 1}, [], None,
               {"slots": [["a", [2], 0]], "fragments": 10**12}, {"slots": [["a", [2], 0]], "fragments": 2}, {"slots": [["a", [2], 0]]},
               {"slots": [["a", [2], 0]], "fragments": 1.0}, {"slots": [["a", [2], 0]], "fragments": True},
               {"slots": [["a", [2], 0], ["a", [2], 0]], "fragments": 1}, {"slots": [["a", [2.5], 0]], "fragments": 1},
               {"slots": [["a", ["2"], 0]], "fragments": 1}, {"slots": [[5, [2], 0]], "fragments": 1}, {"slots": [["a", [2]]], "fragments": 1},
               {"slots": [["a", [10**30], 0]], "fragments": 1}, {"slots": [["a", [2], 0], ["b", [0], 1]], "fragments": 2},
               {"slots": [["a", [2], 0], ["b", [2], 2]], "fragments": 2}, {"slots": [["a", "22", 0]], "fragments": 1}],
)  # fmt: skip
def test_a_damaged_layout_is_refused(record: Any) -> None:
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
    with pytest.raises(ModelError, match="belongs to another run"):
        remap(values[:-1], one, three)


def test_experts_are_no_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(8))

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 2)
            self.layers = nn.ModuleList(Block() for _ in range(3))

    model = Mixture()
    assert transformer_blocks(model) is model.layers
    assert len(Layout.of(model, 4).fragments) == 4
    with pytest.raises(ModelError, match="no stack of equal blocks"):
        Layout.of(nn.Linear(2, 2), 2)
    assert Layout.of(nn.Linear(2, 2)).total == 6


def test_fragments_that_cannot_be_are_refused() -> None:
    model = _build(_tiny())
    with pytest.raises(ModelError, match="fragments 0 is less than one"):
        Layout.of(model, 0)
    model.model.layers[1].requires_grad_(False)
    with pytest.raises(ModelError, match="fragment 2 of 4 would hold no trainable parameters"):
        Layout.of(model, 4)
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameters; unfreeze some"):
        Layout.of(model)


def test_a_range_is_written_whole_or_not_at_all() -> None:
    flat = FlatParameters(model := _build(_tiny()), layout := Layout.of(model, 2))
    start, stop = layout.fragments[1]
    flat.copy_from(torch.full((stop - start,), 7.0), start, stop)
    assert (flat.fragment(1) == 7).all() and not (flat.fragment(0) == 7).any()
    assert all((p == 7).all() == (".layers." in name) for name, p in model.named_parameters())
    assert [s.name for s in layout.of_fragment(1)] == [s.name for s in layout.slots if ".layers." in s.name]
    for piece, low, high in ((1, 0, 5), (5, -5, 0), (5, layout.total - 1, layout.total + 4), (0, 9, 8)):
        with pytest.raises(ValueError, match="is not range"):
            flat.copy_from(torch.zeros(piece), low, high)


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
