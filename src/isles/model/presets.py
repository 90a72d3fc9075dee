"""Shapes of models by size: GPT-2, Llama and Qwen3 families from 0.1M to 50B parameters.

A size is turned into layers and width along the aspect ratios (width / layers) of published models: 64 for GPT-2 (768 x 12), 128 for
Llama 3 8B (4096 x 32) and 80 for Qwen3 32B (5120 x 64); tiny models are narrower (64 x 2). Among all shapes whose exact parameter
count is near the target, the one that fits both best is taken. Counts are closed formulas, so that a planner can ask for
thousands of shapes; a test holds them to the built models.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from isles.errors import ModelError
from isles.spec import ModelTable, parse_size

Family = Literal["gpt2", "llama", "qwen3"]
_TOLERANCE = 0.15  # a preset's count may differ this much from the size asked for
_MAX_LAYERS = 128
_ASPECT: dict[str, tuple[tuple[float, float], ...]] = {  # (parameters, width / layers), interpolated in log size
    "gpt2": ((1e5, 32), (1e6, 32), (1.24e8, 64), (5e10, 110)),
    "llama": ((1e5, 32), (1e6, 32), (1.2e9, 128), (8e9, 128), (7e10, 102)),
    "qwen3": ((1e5, 32), (1e6, 32), (6e8, 37), (8e9, 114), (3.2e10, 80), (5e10, 80)),
}


@dataclass(frozen=True)
class Shape:
    """What fixes a preset's parameter count."""

    family: Family
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool
    vocab_size: int
    sequence_length: int

    def count(self) -> int:
        """Trainable parameters, exactly."""
        return _COUNT[self.family](self)


def _count_gpt2(s: Shape) -> int:
    d = s.hidden_size
    block = 4 * d * d + 4 * d + 2 * d * s.intermediate_size + s.intermediate_size + d + 4 * d
    return s.vocab_size * d * (1 if s.tied else 2) + s.sequence_length * d + s.layers * block + 2 * d


def _count_llama(s: Shape) -> int:
    d = s.hidden_size
    attention = 2 * d * s.heads * s.head_dim + 2 * d * s.kv_heads * s.head_dim
    block = attention + 3 * d * s.intermediate_size + 2 * d
    return s.vocab_size * d * (1 if s.tied else 2) + s.layers * block + d


def _count_qwen3(s: Shape) -> int:
    return _count_llama(s) + s.layers * 2 * s.head_dim  # norms of queries and keys


_COUNT: dict[str, Callable[[Shape], int]] = {"gpt2": _count_gpt2, "llama": _count_llama, "qwen3": _count_qwen3}


def choose_shape(table: ModelTable, *, vocab_size: int, sequence_length: int) -> Shape:
    """The shape of a preset. Raises ModelError when no shape comes within 15% of the size (the vocabulary alone may be larger)."""
    assert table.family is not None
    target = parse_size(table.parameters) if table.parameters is not None else None
    shapes = list(_candidates(table, target, vocab_size, sequence_length))
    if not shapes:
        raise ModelError(
            f"model.heads {table.heads} does not divide the width {table.hidden_size or 'of any preset'}; choose a divisor"
        )
    if target is None:
        return shapes[0]
    best = min(shapes, key=lambda s: _misfit(s, target))
    explicit = table.layers is not None or table.hidden_size is not None
    if abs(best.count() - target) > _TOLERANCE * target and not explicit:
        raise ModelError(
            f"no {table.family} with a vocabulary of {vocab_size:,} comes near {target:,} parameters (the nearest has {best.count():,}); "
            "choose a larger size or a tokenizer with fewer tokens"
        )
    return best


def _misfit(shape: Shape, target: int) -> float:
    aspect = _interpolate(_ASPECT[shape.family], target)
    size = max(0.0, abs(math.log(shape.count() / target)) - 0.05)  # closer than 5% buys nothing; a usual shape does
    odd_heads = 0.1 if shape.hidden_size >= 512 and shape.heads % 4 else 0.5 if shape.head_dim < 32 else 0.0
    return 20 * size + abs(math.log(shape.hidden_size / shape.layers / aspect)) + odd_heads


def _interpolate(points: tuple[tuple[float, float], ...], size: float) -> float:
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if size <= x1:
            share = max(0.0, (math.log(size) - math.log(x0)) / (math.log(x1) - math.log(x0)))
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return points[-1][1]


def _candidates(table: ModelTable, target: int | None, vocab_size: int, sequence_length: int) -> Iterator[Shape]:
    widths = [table.hidden_size] if table.hidden_size else _widths()
    for width in widths:
        if target is not None and table.hidden_size is None and 12 * width * width > 4 * target:
            break  # a single block would be too large
        deepest = min(_MAX_LAYERS, width // 8)  # deeper and thinner than any model anybody trains
        for layers in [table.layers] if table.layers else range(2, deepest + 1):
            shape = _shape(table, width, layers, vocab_size, sequence_length, target)
            if shape is not None:
                yield shape


def _widths() -> list[int]:
    return [32, 48, *range(64, 256, 32), *range(256, 1024, 64), *range(1024, 4096, 128), *range(4096, 10241, 256)]


def _shape(
    table: ModelTable, width: int, layers: int, vocab_size: int, sequence_length: int, target: int | None
) -> Shape | None:
    family = table.family
    assert family is not None
    heads = table.heads or max(1, width // _head_dim(width))
    if width % heads:
        return None
    head_dim = width // heads
    large = width >= 2048
    kv_heads = heads // 4 if family != "gpt2" and large and heads % 4 == 0 else heads
    intermediate = {"gpt2": 4 * width, "llama": _round_up(8 * width / 3, 256 if large else 8), "qwen3": 3 * width}[family]
    small = (target or 0) < 3 * 10**9
    tied = table.tie_embeddings if table.tie_embeddings is not None else family == "gpt2" or (small and width < 2560)
    return Shape(family, layers, width, heads, kv_heads, head_dim, intermediate, tied, vocab_size, sequence_length)


def _head_dim(width: int) -> int:
    return next(dim for dim in ((128 if width >= 2048 else 64 if width >= 512 else 32), 64, 32, 16, width) if width % dim == 0)


def _round_up(value: float, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


def preset_config(shape: Shape) -> Any:
    """The transformers config of a shape."""
    common: dict[str, Any] = {"vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied, "use_cache": False}
    if shape.family == "gpt2":
        from transformers import GPT2Config

        return GPT2Config(
            n_positions=shape.sequence_length, n_embd=shape.hidden_size, n_layer=shape.layers, n_head=shape.heads,
            n_inner=shape.intermediate_size, bos_token_id=None, eos_token_id=None, **common,
        )  # fmt: skip
    from transformers import LlamaConfig, Qwen3Config

    kind = LlamaConfig if shape.family == "llama" else Qwen3Config
    return kind(
        hidden_size=shape.hidden_size, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.sequence_length, bos_token_id=None, eos_token_id=None, pad_token_id=None, **common,
    )  # fmt: skip
