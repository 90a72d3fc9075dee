"""Weights and merging rules."""

from __future__ import annotations

import numpy as np
import pytest

from isles.outer import contribution_weights, radial_rescale, radial_weights, tensor_norms
from isles.spec import OuterTable


def _radial(deltas: list[np.ndarray], weights: list[float], ranges: list[tuple[int, int]]) -> np.ndarray:
    norms = [tensor_norms(d, ranges) for d in deltas]
    factors = radial_weights(weights, norms)
    total = np.zeros_like(deltas[0])
    for d, row in zip(deltas, factors, strict=True):
        for (a, b), f in zip(ranges, row, strict=True):
            total[a:b] += np.float32(f) * d[a:b]
    radial_rescale(total, ranges, weights, norms)
    return total


def test_weights_follow_the_tokens_or_not() -> None:
    assert contribution_weights(OuterTable(), [100, 300]) == [0.25, 0.75]
    assert contribution_weights(OuterTable(weighting="uniform"), [100, 300]) == [0.5, 0.5]


@pytest.mark.parametrize("tokens", [[], [0, 0], [-1, 2]])
def test_no_weights_without_tokens(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="no weights"):
        contribution_weights(OuterTable(), tokens)


def test_radial_of_one_contribution_is_itself() -> None:
    d = np.random.default_rng(0).standard_normal(20).astype(np.float32)
    assert np.allclose(_radial([d], [1.0], [(0, 7), (7, 20)]), d, rtol=1e-6)


@pytest.mark.parametrize("m", [2, 4, 8])
def test_radial_keeps_the_step_size_whatever_the_number_of_clusters(m: int) -> None:
    rng = np.random.default_rng(m)
    deltas = [v / np.linalg.norm(v) for v in rng.standard_normal((m, 4096)).astype(np.float32)]
    mean = np.mean(deltas, axis=0)
    radial = _radial(deltas, [1 / m] * m, [(0, 4096)])
    assert np.linalg.norm(mean) == pytest.approx(m**-0.5, rel=0.1)
    assert np.linalg.norm(radial) == pytest.approx(1.0, rel=1e-5)
    assert np.dot(radial, mean) / np.linalg.norm(mean) == pytest.approx(1.0, rel=1e-5)


def test_radial_weighs_norms_and_directions_per_tensor() -> None:
    a, b = np.float32([3, 0, 0, 2]), np.float32([0, 4, 0, 2])
    merged = _radial([a, b], [0.5, 0.5], [(0, 2), (2, 4)])
    assert np.allclose(merged, [3.5 / 2**0.5, 3.5 / 2**0.5, 0, 2], atol=1e-6)


def test_radial_of_opposite_or_zero_directions_is_no_step() -> None:
    d = np.float32([1, 2, 3])
    assert not _radial([d, -d], [0.5, 0.5], [(0, 3)]).any()
    assert not _radial([d * 0, d * 0], [0.5, 0.5], [(0, 3)]).any()
