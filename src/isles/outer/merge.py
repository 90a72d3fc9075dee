"""How several pseudo-gradients become one: the weights and the rules.

*mean*: sum of w_i d_i over sum of w_i. *radial* (radial-directional, after Decoupled DiLoCo, arXiv 2604.21428): per tensor, the
weighted mean of the norms times the direction of the weighted mean of the unit vectors. Pseudo-gradients of clusters that
trained on different data are nearly orthogonal, so the norm of their mean falls like 1/sqrt(M): with *mean* the size of
the outer step changes whenever a cluster joins or leaves; with *radial* it does not.

Both are a weighted sum of the d_i followed by one factor a tensor, so that an owner can still add contributions as they
arrive; for *radial* the weights need the norms beforehand, one number a tensor and contribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from isles.jit import kernel
from isles.spec import OuterTable

Floats = NDArray[np.float32]
Ranges = Sequence[tuple[int, int]]


def contribution_weights(table: OuterTable, tokens: Sequence[int]) -> list[float]:
    """Normalised weight of each contribution: by the tokens behind it, or one each. They sum to 1 within fp64 rounding.

    Raises ValueError when there is no contribution or no token at all."""
    raw = [1.0] * len(tokens) if table.weighting == "uniform" else [float(t) for t in tokens]
    total = sum(raw)
    if not raw or not total > 0 or min(raw) < 0:
        raise ValueError(f"no weights can be made of {len(tokens)} contributions with {list(tokens)} tokens")
    return [w / total for w in raw]


@kernel
def _sum_of_squares(values: Floats) -> float:
    total = 0.0  # fp64, in order: the same bits on every machine
    for i in range(values.size):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


def tensor_norms(values: Floats, ranges: Ranges) -> NDArray[np.float64]:
    """Euclidean norm of each tensor's range of `values`. Returns fp64, shape [len(ranges)]."""
    return np.sqrt(np.array([_sum_of_squares(values[start:stop]) for start, stop in ranges], dtype=np.float64))


def radial_weights(weights: Sequence[float], norms: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Per contribution and tensor, w_i / |d_i|: the factors that turn a sum into the weighted mean of unit vectors.

    norms: one `tensor_norms` a contribution. Returns fp64, shape [contributions, tensors]; a zero tensor gets factor 0."""
    stacked = np.stack(norms)
    return np.asarray(weights)[:, None] * np.divide(1.0, stacked, out=np.zeros_like(stacked), where=stacked > 0)


def radial_rescale(direction: Floats, ranges: Ranges, weights: Sequence[float], norms: Sequence[NDArray[np.float64]]) -> None:
    """Scale the summed unit vectors in place, per tensor, to the weighted mean of the norms.

    Where the directions cancel to nothing (norm below 1e-12 of a unit vector) the step is zero."""
    target = np.asarray(weights) @ np.stack(norms)
    for (start, stop), size, length in zip(ranges, target, tensor_norms(direction, ranges), strict=True):
        direction[start:stop] *= np.float32(size / length if length > 1e-12 else 0.0)
