"""The canonical flat layout over models of any shape, and presets of any size: what every other room takes for granted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from isles.errors import ModelError
from isles.model import FlatParameters, Layout, count_parameters, remap
from isles.model.presets import choose_shape
from isles.spec import ModelTable

ORDERS = ("strided", "sequential")


class Block(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width + 1)
        self.experts = nn.ModuleList(nn.Linear(1, 2, bias=False) for _ in range(experts))


class Stack(nn.Module):
    """Embedding, blocks, norm, head: tied and frozen as asked."""

    def __init__(self, blocks: int, width: int, experts: int, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Block(width, experts) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.norm.requires_grad_(False)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Stack, int, Any]:
    """A model, a number of fragments it can have, and an order."""
    blocks = draw(st.integers(1, 9))
    model = Stack(blocks, draw(st.integers(1, 4)), draw(st.integers(0, 12)), draw(st.booleans()), draw(st.booleans()))
    return model, draw(st.integers(1, blocks + 1)), draw(st.sampled_from(ORDERS))


@given(stacks())
def test_every_trainable_value_has_one_place(case: tuple[Stack, int, Any]) -> None:
    model, fragments, order = case
    layout = Layout.of(model, fragments, order)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {s.name: s.shape for s in layout.slots} == {name: tuple(p.shape) for name, p in trainable.items()}
    edge = 0
    for slot in layout.slots:
        assert slot.offset == edge and slot.numel == trainable[slot.name].numel()
        start, stop = layout.fragments[slot.fragment]
        assert start <= slot.offset and slot.offset + slot.numel <= stop
        edge += slot.numel
    assert edge == layout.total == layout.fragments[-1][1] and layout.fragments[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(layout.fragments, layout.fragments[1:], strict=False))
    assert [s for i in range(fragments) for s in layout.of_fragment(i)] == list(layout.slots)


@given(stacks())
def test_blocks_are_spread_evenly_and_never_split(case: tuple[Stack, int, Any]) -> None:
    model, fragments, order = case
    assume(fragments > 1)
    places = [
        {s.fragment for s in Layout.of(model, fragments, order).slots if s.name.startswith(f"layers.{block}.")}
        for block in range(len(model.layers))
    ]
    assert all(len(p) == 1 for p in places)
    dealt = [p.pop() for p in places]
    sizes = [dealt.count(f) for f in range(1, fragments)]
    assert sum(sizes) == len(dealt) and max(sizes) - min(sizes) <= 1
    assert dealt == (sorted(dealt) if order == "sequential" else [1 + i % (fragments - 1) for i in range(len(dealt))])


@given(stacks(), st.integers(-3, 400), st.integers(-3, 400))
def test_a_range_is_found_as_by_looking_at_every_value(case: tuple[Stack, int, Any], start: int, stop: int) -> None:
    layout = Layout.of(*case)
    slow = [
        (slot, min(inside), max(inside) + 1)
        for slot in layout.slots
        if (inside := [i for i in range(slot.numel) if start <= slot.offset + i < stop])
    ]
    assert layout.intersect(start, stop) == slow
    if 0 <= start < layout.total:
        assert layout.name_at(start) == next(s.name for s in layout.slots if s.offset <= start < s.offset + s.numel)
    else:
        with pytest.raises(IndexError):
            layout.name_at(start)


@given(stacks(), st.integers(1, 10), st.sampled_from(ORDERS))
def test_a_vector_survives_the_way_to_another_layout_and_back(case: tuple[Stack, int, Any], fragments: int, order: Any) -> None:
    model = case[0]
    assume(fragments <= len(model.layers) + 1)
    one, other = Layout.of(*case), Layout.of(model, fragments, order)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = FlatParameters(model, one)
    there = remap(flat.values, one, other)
    assert torch.equal(remap(there, other, one), flat.values)
    flat.values.zero_()
    FlatParameters(model, other).copy_from(there, 0, other.total)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@given(stacks())
def test_a_layout_reads_back_as_itself(case: tuple[Stack, int, Any]) -> None:
    layout = Layout.of(*case)
    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout and again.digest() == layout.digest()


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["slots", "fragments"]), inner),
    max_leaves=12,
)


@settings(max_examples=200)
@given(junk, junk)
def test_no_record_is_believed(slots: Any, fragments: Any) -> None:
    try:
        layout = Layout.from_dict({"slots": slots, "fragments": fragments})
    except ModelError as error:
        assert "layout is damaged" in str(error)
    else:
        assert Layout.from_dict(layout.to_dict()) == layout and layout.total >= 0


@settings(max_examples=40)
@given(
    st.sampled_from(["gpt2", "llama", "qwen3"]),
    st.floats(5, 10.69),
    st.sampled_from([257, 32_000, 50_257, 128_256, 151_936]),
    st.sampled_from([64, 1024]),
)
def test_every_size_that_can_hold_its_vocabulary_has_a_sound_preset(
    family: Any, log_size: float, vocabulary: int, length: int
) -> None:
    size = int(10**log_size)
    positions = length if family == "gpt2" else 0
    smallest = 32 * (vocabulary + positions) * 1.1  # the narrowest width there is, with its blocks
    assume(size >= smallest or vocabulary > size)
    table = ModelTable(family=family, parameters=size)
    if vocabulary * 16 > size and size < smallest:
        with pytest.raises(ModelError, match="choose a larger size or a tokenizer with fewer tokens"):
            choose_shape(table, vocab_size=vocabulary, sequence_length=length)
        return
    shape = choose_shape(table, vocab_size=vocabulary, sequence_length=length)
    assert abs(shape.count() - size) <= 0.15 * size
    assert shape.hidden_size % shape.heads == 0 and shape.heads % shape.kv_heads == 0 and shape.head_dim % 2 == 0
    assert shape.count() == count_parameters(table, vocab_size=vocabulary, sequence_length=length, base=Path())
