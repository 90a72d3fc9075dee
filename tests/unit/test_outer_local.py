"""Overlap, late clusters and the eager form: no progress is lost, none is counted twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isles.outer import LocalFragment, OuterOptimizer
from isles.outer.local import Rule

N = 16


def _vector(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(N).astype(np.float32)


def test_without_overlap_everyone_restarts_from_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    local, g, x, g_new = LocalFragment(overlap=False), *(_vector(rng) for _ in range(3))
    assert local.base(g) is g
    local.handed_off(x, g)
    local.merge(x, g, g_new, contributed=True)
    assert np.array_equal(x, g_new) and not local.state_dict()


def test_a_late_cluster_keeps_its_progress_for_the_next_round() -> None:
    rng = np.random.default_rng(1)
    local, g, progress, step = LocalFragment(overlap=False), *(_vector(rng) for _ in range(3))
    x, g_new = g - progress, g - step
    local.merge(x, g, g_new, contributed=False)
    assert np.allclose(local.base(g_new) - x, progress, atol=1e-5)


def test_keep_holds_the_progress_made_since_sending() -> None:
    rng = np.random.default_rng(2)
    local, g, first, second, step = LocalFragment(overlap=True, rule="keep"), *(_vector(rng) for _ in range(4))
    x = g - first
    local.handed_off(x, g)
    x -= second
    g_new = g - step
    local.merge(x, g, g_new, contributed=True)
    assert np.allclose(x, g_new - second, atol=1e-5)
    assert np.allclose(local.base(g_new) - x, second, atol=1e-5)  # sent next time, and only that


def test_mix_is_the_streaming_papers_rule() -> None:
    rng = np.random.default_rng(3)
    local, g, x, g_new = LocalFragment(overlap=True, rule="mix", alpha=0.25), *(_vector(rng) for _ in range(3))
    local.handed_off(x, g)
    now = x.copy()
    local.merge(x, g, g_new, contributed=True)
    assert np.allclose(x, 0.25 * now + 0.75 * g_new, atol=1e-6)
    assert local.base(g_new) is g_new


@pytest.mark.parametrize(
    ("rule", "overlap"), [("keep", 0), ("keep", 3), ("keep", 10), ("mix", 0), ("mix", 3), ("mix", 10), ("eager", 10)]
)
def test_with_plain_averaging_all_sent_progress_reaches_the_global_parameters_once(rule: Rule, overlap: int) -> None:
    """One cluster, lr 1, no momentum, H = 10: whatever a cluster hands off arrives in g exactly once."""
    rng = np.random.default_rng(4)
    g = _vector(rng)
    start = g.copy()
    outer = OuterOptimizer([torch_of(g)], lr=1.0, momentum=0.0)
    local = LocalFragment(overlap=overlap > 0, rule=rule, alpha=0.0, lr=1.0, momentum=0.0)
    x, in_flight, sent = g.copy(), [], np.zeros(N)
    for now in range(1, 61):
        x += 0.01 * _vector(rng)
        if now % 10 == 0:
            d = (local.base(g) - x).astype(np.float32)
            sent += d
            local.handed_off(x, g, own=d)
            in_flight.append((now + overlap, d))
        while in_flight and in_flight[0][0] <= now:
            old = g.copy()
            outer.step_range(0, N, in_flight.pop(0)[1])
            local.merge(x, old, g, contributed=True)
    for _, d in in_flight:
        outer.step_range(0, N, d)
    assert np.allclose(start - g, sent, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("overlap", [3, 9, 10])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_with_several_clusters_local_parameters_are_the_global_ones_and_what_is_not_in_them(
    lr: float, momentum: float, overlap: int, late: bool
) -> None:
    """x = g + progress that no merged round holds, after every merge, however many hand-offs are in flight."""
    clusters, rng = 3, np.random.default_rng(8)
    g = _vector(rng)
    outer = OuterOptimizer([torch_of(g)], lr=lr, momentum=momentum)
    local = [LocalFragment(overlap=True, rule="keep") for _ in range(clusters)]
    xs, unmerged = [g.copy() for _ in range(clusters)], [np.zeros(N) for _ in range(clusters)]
    flights: list[tuple[int, dict[int, np.ndarray]]] = []
    for now in range(1, 201):
        for m in range(clusters):
            step = 0.01 * _vector(rng)
            xs[m] += step
            unmerged[m] += step
        if now % 10 == 0:
            present = [m for m in range(clusters) if not (late and m == 2 and now % 20)]
            sent = {m: local[m].base(g) - xs[m] for m in present}
            for m in present:
                local[m].handed_off(xs[m], g)
            flights.append((now + overlap, sent))
        while flights and flights[0][0] <= now:
            _, sent = flights.pop(0)
            old = g.copy()
            outer.step_range(0, N, (sum(sent.values()) / len(sent)).astype(np.float32))
            for m in range(clusters):
                local[m].merge(xs[m], old, g, contributed=m in sent)
                unmerged[m] += sent.get(m, 0)  # d is old minus new
                assert np.allclose(xs[m], g + unmerged[m], atol=1e-3), (now, m)


def test_keep_with_one_cluster_and_plain_averaging_is_undisturbed_training() -> None:
    """With eta 1, mu 0 and one cluster, merging must change nothing, at any overlap up to a whole round."""
    for overlap in (0, 1, 7, 10):
        rng = np.random.default_rng(5)
        g = _vector(rng)
        outer = OuterOptimizer([torch_of(g)], lr=1.0, momentum=0.0)
        local, x, alone, in_flight = LocalFragment(overlap=overlap > 0), g.copy(), g.copy(), []
        for now in range(1, 101):
            step = 0.01 * _vector(rng)
            x += step
            alone += step
            if now % 10 == 0:
                d = local.base(g) - x
                local.handed_off(x, g)
                in_flight.append((now + overlap, d))
            while in_flight and in_flight[0][0] <= now:
                old = g.copy()
                outer.step_range(0, N, in_flight.pop(0)[1])
                local.merge(x, old, g, contributed=True)
        assert np.allclose(x, alone, atol=1e-5), overlap


def test_eager_gives_the_papers_parameters_on_every_cluster() -> None:
    """The paper's form: every cluster steps its own copy with mean(t-1) + share (d_m(t) - d_m(t-1)). Ours: a common g and an offset."""
    clusters, rounds, lr, mu = 3, 6, 0.7, 0.9
    rng = np.random.default_rng(6)
    start = _vector(rng)
    g = start.copy()
    outer = OuterOptimizer([torch_of(g)], lr=lr, momentum=mu)
    ours = [LocalFragment(overlap=True, rule="eager", lr=lr, momentum=mu) for _ in range(clusters)]
    xs = [g.copy() for _ in range(clusters)]
    theirs = [start.copy() for _ in range(clusters)]
    steppers = [OuterOptimizer([torch_of(t)], lr=lr, momentum=mu) for t in theirs]
    means: list[np.ndarray] = []
    before = [np.zeros(N, np.float32) for _ in range(clusters)]
    for t in range(rounds):
        progress = [_vector(rng) for _ in range(clusters)]
        mean = (sum(progress) / clusters).astype(np.float32)
        old = g.copy()
        if means:
            outer.step_range(0, N, means[-1])
        for m in range(clusters):
            xs[m] -= progress[m]
            assert np.allclose(ours[m].base(old) - xs[m], progress[m], atol=1e-4)
            ours[m].handed_off(xs[m], old, own=progress[m] / np.float32(clusters))
            if means:
                ours[m].merge(xs[m], old, g, contributed=True)
            eager = (progress[m] - before[m]) / np.float32(clusters) + (means[-1] if means else 0)
            steppers[m].step_range(0, N, eager.astype(np.float32))
            assert np.allclose(xs[m], theirs[m], atol=1e-3), (t, m)
        means.append(mean)
        before = progress


@pytest.mark.parametrize("rule", ["keep", "mix", "eager"])
def test_state_in_flight_survives_a_round_trip(rule: Rule) -> None:
    rng = np.random.default_rng(7)
    g, x, g_new = (_vector(rng) for _ in range(3))
    a = LocalFragment(overlap=True, rule=rule)
    a.handed_off(x, g, own=_vector(rng))
    b = LocalFragment(overlap=True, rule=rule)
    b.load_state_dict(a.state_dict())
    xa, xb = x.copy(), x.copy()
    for _ in range(2):
        own = _vector(rng)
        a.merge(xa, g, g_new, contributed=True)
        b.merge(xb, g, g_new, contributed=True)
        a.handed_off(xa, g_new, own=own)
        b.handed_off(xb, g_new, own=own)
        assert np.array_equal(xa, xb)


def torch_of(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)
