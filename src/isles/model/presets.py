"""Shapes of models by size: GPT-2, Llama and Qwen3 families from 0.1M to 50B parameters.

A size that a published model of the family has, with the vocabulary at hand, gives that model's own shape. Any other is turned into
layers and width along the aspect ratios (width / layers) of published models: 64 for GPT-2 (768 x 12), 128 for Llama 3 8B (4096 x
32) and 80 for Qwen3 32B (5120 x 64); tiny models are narrower (64 x 2). Among all shapes whose exact parameter count is near the
target, the one that fits both best is taken. Counts are closed formulas, so that a planner can ask for
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
_FREE = 0.05  # closer to the size than this buys nothing; a usual shape does
_FREE_PUBLISHED = 0.08  # sizes in the names of models are rounded: "14B" has 14.8B parameters, "3B" has 3.2B
_MAX_LAYERS = 128
_ASPECT: dict[str, tuple[tuple[float, float], ...]] = {  # (parameters, width / layers), interpolated in log size
    "gpt2": ((1e5, 32), (1e6, 32), (1.24e8, 64), (5e10, 110)),
    "llama": ((1e5, 32), (1e6, 32), (1.2e9, 128), (8e9, 128), (7e10, 102)),
    "qwen3": ((1e5, 32), (1e6, 32), (6e8, 37), (8e9, 114), (3.2e10, 80), (5e10, 80)),
}
# layers, width, heads, key-value heads, head size, intermediate size, tied embeddings, as the models' own config.json files have them,
# and the parameters they have with their own vocabulary, which is what their names say.
_PUBLISHED: dict[str, tuple[tuple[int, int, int, int, int, int, bool, int], ...]] = {
    "gpt2": (
        (12, 768, 12, 12, 64, 3072, True, 124_439_808),
        (24, 1024, 16, 16, 64, 4096, True, 354_823_168),
        (36, 1280, 20, 20, 64, 5120, True, 774_030_080),
        (48, 1600, 25, 25, 64, 6400, True, 1_557_611_200),
    ),
    "llama": (  # Llama 3.2 1B and 3B, Llama 2 7B, Llama 3 8B, Llama 2 13B, Code Llama 34B
        (16, 2048, 32, 8, 64, 8192, True, 1_235_814_400),
        (28, 3072, 24, 8, 128, 8192, True, 3_212_749_824),
        (32, 4096, 32, 32, 128, 11008, False, 6_738_415_616),
        (32, 4096, 32, 8, 128, 14336, False, 8_030_261_248),
        (40, 5120, 40, 40, 128, 13824, False, 13_015_864_320),
        (48, 8192, 64, 8, 128, 22016, False, 33_743_970_304),
    ),
    "qwen3": (
        (28, 1024, 16, 8, 128, 3072, True, 596_049_920),
        (28, 2048, 16, 8, 128, 6144, True, 1_720_574_976),
        (36, 2560, 32, 8, 128, 9728, True, 4_022_468_096),
        (36, 4096, 32, 8, 128, 12288, False, 8_190_735_360),
        (40, 5120, 40, 8, 128, 17408, False, 14_768_307_200),
        (64, 5120, 64, 8, 128, 25600, False, 32_762_123_264),
    ),
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
    """The shape of a preset; layers, width and heads that the table gives are kept.

    Raises ModelError when no shape comes within 15% of the size (the vocabulary alone may be larger), or the heads do not fit the width.
    With both layers and width given, the size is theirs."""
    assert table.family is not None
    target = parse_size(table.parameters) if table.parameters is not None else None
    fixed = table.layers is not None and table.hidden_size is not None
    best: Shape | None = None
    for widths in (_widths(), _finer_widths()):
        given = [table.hidden_size] if table.hidden_size else widths
        shapes = list(_candidates(table, target, given, vocab_size, sequence_length))
        if shapes and (target is None or fixed):
            return shapes[0]
        if shapes and target is not None:
            best = min([*shapes, best] if best else shapes, key=lambda s: _misfit(s, target))
            if abs(best.count() - target) <= _TOLERANCE * target:
                return best
    if best is None or target is None:
        raise ModelError(_no_heads(table))
    raise ModelError(
        f"no {table.family} with a vocabulary of {vocab_size:,} {_given(table)}comes near {target:,} parameters (the nearest has "
        f"{best.count():,}); choose {'a larger' if best.count() > target else 'another'} size or a tokenizer with fewer tokens"
    )


def _given(table: ModelTable) -> str:
    given = [f"{key} {value}" for key in ("layers", "hidden_size", "heads") if (value := getattr(table, key)) is not None]
    return f"and {' and '.join(given)} " if given else ""


def _no_heads(table: ModelTable) -> str:
    """Why no width and number of heads go together."""
    width = f"model.hidden_size {table.hidden_size}" if table.hidden_size else "the width of any preset of this size"
    if table.heads is not None:
        even = "" if table.family == "gpt2" else " of an even size"
        return f"model.heads {table.heads} does not divide {width} into heads{even}; choose another number of heads"
    return f"{width} is odd, and rotary positions need heads of an even size; choose a multiple of 64"


def _misfit(shape: Shape, target: int) -> float:
    off = abs(math.log(shape.count() / target))
    published = _published_count(shape)
    if published is not None:  # its name must say the size, and the vocabulary at hand leave it that size
        off = max(off, abs(math.log(published / target)))
        return 20 * max(0.0, off - _FREE_PUBLISHED)
    size = max(0.0, off - _FREE)
    aspect = _interpolate(_ASPECT[shape.family], target)
    odd_heads = 0.1 if shape.hidden_size >= 512 and shape.heads % 4 else 0.5 if shape.head_dim < 32 else 0.0
    return 20 * size + abs(math.log(shape.hidden_size / shape.layers / aspect)) + odd_heads


def _published_count(s: Shape) -> int | None:
    row = (s.layers, s.hidden_size, s.heads, s.kv_heads, s.head_dim, s.intermediate_size)
    return next((published[7] for published in _PUBLISHED[s.family] if published[:6] == row), None)


def _interpolate(points: tuple[tuple[float, float], ...], size: float) -> float:
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if size <= x1:
            share = max(0.0, (math.log(size) - math.log(x0)) / (math.log(x1) - math.log(x0)))
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return points[-1][1]


def _candidates(
    table: ModelTable, target: int | None, widths: list[int], vocab_size: int, sequence_length: int
) -> Iterator[Shape]:
    family = table.family
    assert family is not None
    if table.layers is None and table.hidden_size is None and table.heads is None:
        for layers, width, heads, kv_heads, head_dim, intermediate, habit, _ in _PUBLISHED[family]:
            tied = habit if table.tie_embeddings is None else table.tie_embeddings
            yield Shape(family, layers, width, heads, kv_heads, head_dim, intermediate, tied, vocab_size, sequence_length)
    for width in widths:
        if target is not None and table.hidden_size is None and 12 * width * width > 4 * target:
            break  # a single block would be too large
        # Unless the width is asked for, nothing deeper and thinner than anybody trains.
        deepest = _MAX_LAYERS if table.hidden_size else min(_MAX_LAYERS, width // 8)
        for layers in [table.layers] if table.layers else range(2, deepest + 1):
            shape = _shape(table, width, layers, vocab_size, sequence_length, target)
            if shape is not None:
                yield shape


def _widths() -> list[int]:
    return [32, 48, *range(64, 256, 32), *range(256, 1024, 64), *range(1024, 4096, 128), *range(4096, 10241, 256)]


def _finer_widths() -> list[int]:
    """For sizes that lie between usual widths: a small model with a large vocabulary is little else than vocabulary x width."""
    return list(range(32, 1024, 8))


def _shape(
    table: ModelTable, width: int, layers: int, vocab_size: int, sequence_length: int, target: int | None
) -> Shape | None:
    """The shape of a width and depth; none when no heads fit the width."""
    family = table.family
    assert family is not None
    head_dim = _head_dim(width) if table.heads is None else width // table.heads
    if head_dim == 0 or width % head_dim or (table.heads and width % table.heads) or (head_dim % 2 and family != "gpt2"):
        return None
    heads = width // head_dim
    large = width >= 2048
    kv_heads = heads // 4 if family != "gpt2" and large and heads % 4 == 0 else heads
    intermediate = {"gpt2": 4 * width, "llama": _round_up(8 * width / 3, 256 if large else 8), "qwen3": 3 * width}[family]
    small = (target or 0) < 3 * 10**9
    tied = table.tie_embeddings if table.tie_embeddings is not None else family == "gpt2" or (small and width < 2560)
    return Shape(family, layers, width, heads, kv_heads, head_dim, intermediate, tied, vocab_size, sequence_length)


def _head_dim(width: int) -> int:
    """The usual size of a head at this width: 128, 64 or 32; where none divides it, the largest that does, even if it can be."""
    usual = 128 if width >= 2048 else 64 if width >= 512 else 32
    found = next((dim for dim in (usual, 64, 32, 16) if width % dim == 0), None)
    if found is not None:
        return found
    divisors = [dim for dim in range(1, min(width, max(usual, 64)) + 1) if width % dim == 0]
    return max((d for d in divisors if d % 2 == 0), default=max(divisors))


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
