"""The outer step: its sign, its Nesterov form, its first steps, and the bits it must give everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isles.outer import OuterOptimizer, outer_optimizer
from isles.spec import OuterTable


def _tensors(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_first_step_is_minus_1_33_times_the_pseudo_gradient() -> None:
    g = _tensors(0.0, 10.0)
    OuterOptimizer([g], lr=0.7, momentum=0.9).step([_tensors(1.0, -2.0)])
    assert torch.allclose(g, _tensors(-1.33, 10 + 2.66), atol=1e-6)


def test_second_step_follows_the_closed_form() -> None:
    g, outer = _tensors(0.0), OuterOptimizer([_tensors(0.0)], lr=0.7, momentum=0.9)
    outer = OuterOptimizer([g], lr=0.7, momentum=0.9)
    outer.step([_tensors(3.0)])
    before = g.clone()
    outer.step([_tensors(5.0)])
    assert torch.allclose(before - g, _tensors(0.7 * (1.9 * 5.0 + 0.81 * 3.0)), atol=1e-5)


def test_a_constant_gradient_approaches_a_gain_of_seven() -> None:
    g = _tensors(0.0)
    outer = OuterOptimizer([g], lr=0.7, momentum=0.9)
    for _ in range(300):
        before = g.clone()
        outer.step([_tensors(1.0)])
    assert torch.allclose(before - g, _tensors(7.0), atol=1e-3)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.4, 0.9), (1.0, 0.0), (0.8, 0.6)])
def test_it_is_torch_sgd_with_nesterov(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(11)
    ours = [torch.randn(7, 13, generator=generator), torch.randn(5, generator=generator)]
    theirs = [p.clone().requires_grad_() for p in ours]
    outer = OuterOptimizer(ours, lr=lr, momentum=momentum)
    sgd = torch.optim.SGD(theirs, lr=lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(3):
        gradients = [torch.randn(p.shape, generator=generator) for p in ours]
        outer.step(gradients)
        for p, gradient in zip(theirs, gradients, strict=True):
            p.grad = gradient.clone()
        sgd.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b.detach(), rtol=1e-6, atol=1e-6)


def test_every_operation_is_rounded_once_as_ieee_says() -> None:
    """numpy rounds each product and each sum; a fused multiply-add would differ in the last bit somewhere in 10,000 values."""
    rng = np.random.default_rng(3)
    g, d, b = (rng.standard_normal(10_001).astype(np.float32) for _ in range(3))
    ours = torch.from_numpy(g.copy())
    outer = OuterOptimizer([ours], lr=0.7, momentum=0.9)
    outer.load_state_dict({"buffers": [torch.from_numpy(b.copy())]})
    outer.step([torch.from_numpy(d)])
    lr, mu = np.float32(0.7), np.float32(0.9)
    buffer = mu * b + d
    assert np.array_equal(ours.numpy(), g - lr * (d + mu * buffer))
    assert np.array_equal(outer.momentum_range(0, g.size), buffer)


def test_lr_one_without_momentum_is_parameter_averaging() -> None:
    rng = np.random.default_rng(5)
    g = rng.standard_normal(100).astype(np.float32)
    locals_ = [g + rng.standard_normal(100).astype(np.float32) * 0.01 for _ in range(4)]
    values = torch.from_numpy(g.copy())
    mean = np.mean([g - x for x in locals_], axis=0, dtype=np.float64).astype(np.float32)
    OuterOptimizer([values], lr=1.0, momentum=0.0).step([torch.from_numpy(mean)])
    assert np.allclose(values.numpy(), np.mean(locals_, axis=0), atol=1e-7)


def test_ranges_together_are_the_whole_step_bit_for_bit() -> None:
    rng = np.random.default_rng(9)
    start = [rng.standard_normal(n).astype(np.float32) for n in (10, 1, 25)]
    whole = [torch.from_numpy(v.copy()) for v in start]
    ranged = [torch.from_numpy(v.copy()) for v in start]
    a, b = OuterOptimizer(whole), OuterOptimizer(ranged)
    for _ in range(3):
        d = rng.standard_normal(36).astype(np.float32)
        a.step([torch.from_numpy(p) for p in np.split(d, [10, 11])])
        for low, high in ((0, 4), (4, 11), (11, 11), (11, 36)):  # across tensors, and an empty one
            b.step_range(low, high, d[low:high])
    for x, y in zip(whole, ranged, strict=True):
        assert torch.equal(x, y)
    assert np.array_equal(a.momentum_range(5, 20), b.momentum_range(5, 20))


def test_a_tensor_without_gradient_keeps_its_momentum() -> None:
    params = [_tensors(1.0), _tensors(1.0)]
    outer = OuterOptimizer(params)
    outer.step([_tensors(1.0), _tensors(1.0)])
    outer.step([_tensors(1.0), None])
    assert outer.momentum_range(0, 2).tolist() == pytest.approx([1.9, 1.0])


def test_state_survives_a_round_trip() -> None:
    a, b = OuterOptimizer([_tensors(1.0, 2.0)]), OuterOptimizer([_tensors(1.0, 2.0)])
    a.step([_tensors(0.5, 0.25)])
    b.load_state_dict(a.state_dict())
    assert np.array_equal(a.momentum_range(0, 2), b.momentum_range(0, 2))


def test_wrong_input_is_refused() -> None:
    outer = OuterOptimizer([torch.zeros(4)])
    with pytest.raises(ValueError, match="fp32"):
        OuterOptimizer([torch.zeros(4, dtype=torch.float64)])
    with pytest.raises(ValueError, match="contiguous"):
        OuterOptimizer([torch.zeros(4, 4).t()[:2]])
    with pytest.raises(ValueError, match="gradients for"):
        outer.step([torch.zeros(4), torch.zeros(4)])
    with pytest.raises(ValueError, match="values"):
        outer.step([torch.zeros(5)])
    with pytest.raises(ValueError, match="range"):
        outer.step_range(2, 6, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="momentum"):
        OuterOptimizer([torch.zeros(1)], momentum=1.0)
    with pytest.raises(ValueError, match="sizes"):
        outer.load_state_dict({"buffers": [torch.zeros(3)]})


def test_sparseloco_steps_without_momentum() -> None:
    values = _tensors(1.0)
    outer = outer_optimizer(OuterTable(name="sparseloco", lr=1.0), values)
    outer.step([_tensors(0.25)])
    assert values.item() == 0.75 and outer.momentum == 0


def test_it_goes_on_elsewhere_with_its_momentum() -> None:
    first, second = torch.ones(5), torch.ones(5)
    moved, stayed = OuterOptimizer([first]), OuterOptimizer([second])
    for outer in (moved, stayed):
        outer.step([torch.full((5,), 0.5)])
    there = first.clone()
    moved.move_to([there])
    before = first.clone()
    for outer in (moved, stayed):
        outer.step([torch.full((5,), 0.25)])
    assert torch.equal(there, second) and torch.equal(first, before)
    with pytest.raises(ValueError, match="in place of"):
        moved.move_to([torch.ones(4)])
