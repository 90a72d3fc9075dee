"""Simulated runs: the pinning checks, exact resuming, exact bytes, and clusters that are slow, late, leave or join."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.errors import CheckpointError, DivergedError, UsageError
from isles.metrics import StepRecord, Summary
from isles.simulator import RunFolder, Simulation, records, simulate
from isles.simulator.methods import Baseline, Diloco
from isles.spec import Spec, spec_from


@pytest.fixture
def tables(tiny_dataset: Path) -> dict[str, Any]:
    """A run that takes a fraction of a second: 10 steps, rounds of 5, four clusters of 2 x 16 tokens a step."""
    return {
        "run": {"steps": 10, "seed": 1},
        "model": {"family": "llama", "layers": 2, "hidden_size": 16, "heads": 2},
        "data": {"path": str(tiny_dataset), "sequence_length": 16},
        "train": {"local_steps": 5, "batch_size": 2, "threads": 1, "device": "cpu"},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "outer": {"lr": 0.7, "momentum": 0.5},
        "codec": {"name": "fp32"},
        "eval": {"sequences": 8},
    }


def _spec(tables: dict[str, Any], *overrides: str) -> Spec:
    return spec_from(tables, overrides)


def _run(spec: Spec, baseline: Baseline = "none") -> Simulation:
    run = Simulation(spec, base=Path(), baseline=baseline)
    while not run.done:
        run.advance()
    return run


def _clusters(run: Simulation) -> Diloco:
    assert isinstance(run.method, Diloco)
    return run.method


def test_one_cluster_lr_one_no_momentum_is_plain_adamw(tables: dict[str, Any]) -> None:
    plain = ("clusters.count=1", "outer.lr=1", "outer.momentum=0", "train.local_steps=1")
    diloco, alone = _run(_spec(tables, *plain)), _run(_spec(tables, *plain), "single")
    assert np.allclose(diloco.method.values, alone.method.values, rtol=1e-5, atol=1e-6)


def test_lr_one_no_momentum_is_the_mean_of_what_each_cluster_would_have_alone(tables: dict[str, Any]) -> None:
    """One round with eta 1 and mu 0 must give the average of the clusters' parameters: the sign test of the pseudo-gradient."""
    run = Simulation(_spec(tables, "outer.lr=1", "outer.momentum=0", "run.steps=5"), base=Path())
    clusters = _clusters(run).clusters
    for _ in range(4):
        run.advance()
    seen: list[np.ndarray] = []
    for cluster in clusters:
        original = cluster.step

        def step(*args: Any, original: Any = original, cluster: Any = cluster) -> Any:
            result = original(*args)
            seen.append(cluster.trainer.read(0, run.layout.total).copy())
            return result

        cluster.step = step  # type: ignore[method-assign]
    start = run.method.values.copy()
    run.advance()
    assert len(seen) == 4
    assert np.allclose(run.method.values, np.mean(seen, axis=0), atol=1e-6)
    assert not np.allclose(run.method.values, start, atol=1e-6)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
def test_after_a_round_every_cluster_holds_the_same_bits(tables: dict[str, Any], codec: str) -> None:
    run = _run(_spec(tables, f"codec.name={codec}"))
    for cluster in _clusters(run).clusters:
        assert np.array_equal(cluster.trainer.read(0, run.layout.total), run.method.values)


RESUMED = {
    "plain": (),
    "int4 stochastic": ("codec.name=int4", "codec.rounding=stochastic"),
    "topk": ("codec.name=topk", "outer.name=sparseloco", "outer.momentum=0", "outer.lr=1"),
    "streaming": ("streaming.fragments=3", "train.local_steps=3", "streaming.overlap=2"),
    "mixed": ("streaming.overlap=2", "streaming.merge=mix"),
    "eager": ("streaming.overlap=5", "streaming.merge=eager"),
    "unequal": ("clusters.speeds=[1,1,0.5,0.7]", "clusters.quorum=2", "clusters.grace=1"),
    "leave and join": ('clusters.events=[{cluster=3,kind="leave",step=1},{cluster=3,kind="join",step=4}]',),
    "join from a peer": ('clusters.events=[{cluster=3,kind="join",step=4}]', "clusters.join_state=peer"),
    "muon": ("optimizer.name=muon",),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tables: dict[str, Any], tmp_path: Path, name: str) -> None:
    spec = _spec(tables, *RESUMED[name])
    whole: list[StepRecord] = []
    simulate(spec, out=tmp_path / "whole", observer=whole.append)
    for cut in (3, 6):
        counter = itertools.count()
        part = simulate(spec, out=tmp_path / f"cut{cut}", stop=lambda counter=counter, cut=cut: next(counter) >= cut)
        assert part.steps == cut and not part.complete
        again = simulate(spec, out=tmp_path / f"cut{cut}", resume=True)
        assert again.complete
        got = records(tmp_path / f"cut{cut}")
        assert [_timeless(r) for r in got] == [_timeless(r) for r in whole]
        a, b = (RunFolder(tmp_path / n).load_model()[1] for n in ("whole", f"cut{cut}"))
        assert np.array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("baseline", ["ddp", "single"])
def test_a_resumed_baseline_is_the_uninterrupted_one_bit_for_bit(
    tables: dict[str, Any], tmp_path: Path, baseline: Baseline
) -> None:
    spec = _spec(tables)
    whole = simulate(spec, baseline=baseline)
    counter = itertools.count()
    simulate(spec, baseline=baseline, out=tmp_path / "run", stop=lambda: next(counter) >= 4)
    again = simulate(spec, baseline=baseline, out=tmp_path / "run", resume=True)
    assert (again.held_out_loss, again.loss, again.bytes) == (whole.held_out_loss, whole.loss, whole.bytes)


def _timeless(record: StepRecord) -> tuple[Any, ...]:
    return (
        record.step,
        record.round,
        record.tokens,
        record.loss,
        record.held_out_loss,
        record.bytes,
        record.lr,
        record.grad_norm,
    )


def test_two_runs_of_a_spec_are_equal_and_another_seed_is_not(tables: dict[str, Any]) -> None:
    a, b, c = (_run(_spec(tables, f"run.seed={seed}")).method.values for seed in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_data_parallel_is_one_cluster_with_all_the_batches(tables: dict[str, Any]) -> None:
    ddp = _run(_spec(tables, "train.micro_batch_size=2"), "ddp")
    big = _run(_spec(tables, "train.batch_size=8", "train.micro_batch_size=2"), "single")
    assert np.array_equal(ddp.method.values, big.method.values) and ddp.tokens == big.tokens


@pytest.mark.parametrize("m", [1, 2, 4])
def test_bytes_are_what_the_exchange_would_send(tables: dict[str, Any], m: int) -> None:
    run = _run(_spec(tables, f"clusters.count={m}"))
    rounds, dense = 2, 4 * run.layout.total
    headers = run.method.bytes - rounds * 2 * (m - 1) * dense
    assert 0 <= headers <= rounds * 2 * (m - 1) * 64
    ddp = _run(_spec(tables, f"clusters.count={m}"), "ddp")
    assert ddp.method.bytes == 10 * 2 * (m - 1) * dense


def test_every_sample_is_trained_once(tables: dict[str, Any]) -> None:
    run = _run(_spec(tables, 'clusters.events=[{cluster=0,kind="leave",step=3},{cluster=0,kind="join",step=4}]'))
    ledger = _clusters(run)._ledger
    assert sum(ledger.trained().values()) * 16 == run.tokens
    assert ledger.complete + sum(stop - start for start, stop, _ in ledger.trained_ranges()) >= run.tokens // 16


def test_fragments_take_even_turns_and_all_are_merged_at_the_end(tables: dict[str, Any]) -> None:
    run = Simulation(_spec(tables, "streaming.fragments=3", "train.local_steps=6", "run.steps=12"), base=Path())
    rounds = []
    while not run.done:
        record = run.advance()
        assert record is not None
        rounds.append(record.round)
    assert rounds[:-1] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert rounds[-1] == 6 + 2  # the two fragments with unsent progress had a last round
    for cluster in _clusters(run).clusters:
        assert all(s.since_sent == 0 for s in cluster.standings)


def test_overlap_merges_later_and_keeps_training(tables: dict[str, Any]) -> None:
    run = Simulation(_spec(tables, "streaming.overlap=2"), base=Path())
    rounds = [record.round for _ in range(10) if (record := run.advance())]
    assert rounds == [0, 0, 0, 0, 0, 0, 1, 1, 1, 2]


def test_a_late_cluster_contributes_all_its_progress_to_the_next_round(tables: dict[str, Any]) -> None:
    late = 'clusters.events=[{cluster=3,kind="late",step=4,until=8}]'
    run = Simulation(_spec(tables, late, "clusters.quorum=3", "run.steps=11"), base=Path())
    cluster = _clusters(run).clusters[3]
    for _ in range(5):
        run.advance()
    x = cluster.trainer.read(0, run.layout.total)
    assert cluster.standings[0].since_sent == 5 and run.method.rounds == 1
    assert not np.array_equal(x, run.method.values)
    for _ in range(5):
        run.advance()
    assert run.method.rounds == 2 and cluster.standings[0].since_sent == 0
    assert np.array_equal(cluster.trainer.read(0, run.layout.total), run.method.values)
    assert run.tokens == 10 * 4 * 32  # it never stood still


def test_without_a_quorum_everyone_waits_for_the_slowest(tables: dict[str, Any]) -> None:
    run = Simulation(_spec(tables, "clusters.speeds=[1,1,1,0.5]"), base=Path())
    trained = []
    for _ in range(10):
        record = run.advance()
        trained.append(record.clusters if record else 0)
    assert sum(trained) == 4 * 5 and run.method.rounds == 1


def test_pace_scale_makes_all_ready_together(tables: dict[str, Any]) -> None:
    run = _run(_spec(tables, "clusters.speeds=[1,1,1,0.6]", "clusters.pace=scale"))
    assert run.method.rounds == 2 and run.tokens == (30 + 6) * 32


def test_pace_train_never_stands_still(tables: dict[str, Any]) -> None:
    run = _run(_spec(tables, "clusters.speeds=[1,1,1,0.5]", "clusters.pace=train"))
    assert run.tokens == 35 * 32 and run.method.rounds == 1


def test_a_quorum_and_its_grace_close_the_round(tables: dict[str, Any]) -> None:
    spec = _spec(tables, "clusters.speeds=[1,1,1,0.5]", "clusters.quorum=3", "clusters.grace=2", "clusters.pace=train")
    run = Simulation(spec, base=Path())
    rounds = [record.round for _ in range(9) if (record := run.advance())]
    assert rounds == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_a_joiner_enters_at_a_rounds_edge_with_the_runs_learning_rate(tables: dict[str, Any]) -> None:
    spec = _spec(tables, 'clusters.events=[{cluster=3,kind="join",step=2}]', "clusters.join_warmup_steps=0")
    run = Simulation(spec, base=Path())
    counts = []
    for _ in range(10):
        record = run.advance()
        assert record is not None
        counts.append(record.clusters)
        lrs = {run.method.clusters[i].trainer._optimizer._parts[0][0].param_groups[0]["lr"] for i in range(3)}  # type: ignore[attr-defined]
    joiner = _clusters(run).clusters[3].trainer._optimizer._parts[0][0].param_groups[0]["lr"]
    assert counts == [3] * 5 + [4] * 5 and lrs == {joiner}


def test_a_run_that_everyone_left_stands_still_until_someone_joins(tables: dict[str, Any]) -> None:
    events = ",".join(f'{{cluster={i},kind="leave",step=2}}' for i in range(4))
    run = Simulation(_spec(tables, f'clusters.events=[{events},{{cluster=1,kind="join",step=6}}]'), base=Path())
    trained = [record.clusters if (record := run.advance()) else 0 for _ in range(10)]
    assert trained == [4, 4, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_growing_h_is_followed(tables: dict[str, Any]) -> None:
    run = Simulation(_spec(tables, "train.local_steps_schedule=[[0,2],[4,3]]"), base=Path())
    assert [record.round for _ in range(10) if (record := run.advance())] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4]


@pytest.mark.parametrize("baseline", ["none", "single"])
def test_a_run_that_diverges_says_so(tables: dict[str, Any], baseline: Baseline) -> None:
    with pytest.raises(DivergedError, match=r"lower optimizer\.lr"):
        _run(_spec(tables, "optimizer.lr=1e30", "optimizer.clip_norm=0", "optimizer.warmup_steps=0"), baseline)


def test_a_folder_is_not_taken_twice_nor_resumed_as_another_run(tables: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(UsageError, match="no run to resume"):
        simulate(_spec(tables), out=out, resume=True)
    summary = simulate(_spec(tables), out=out)
    assert isinstance(summary, Summary) and summary.complete
    with pytest.raises(UsageError, match="already holds a run"):
        simulate(_spec(tables), out=out)
    with pytest.raises(CheckpointError, match="another run"):
        simulate(_spec(tables, "outer.lr=0.5"), out=out, resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="not empty"):
        simulate(_spec(tables), out=tmp_path / "other")
    assert simulate(_spec(tables), out=out, resume=True).held_out_loss == summary.held_out_loss  # complete: nothing left to do


def test_evaluation_is_of_the_global_parameters_and_leaves_no_trace(tables: dict[str, Any]) -> None:
    often, never = _run(_spec(tables, "eval.every=1")), _run(_spec(tables, "eval.every=10"))
    assert np.array_equal(often.method.values, never.method.values) and often.held_out_loss == never.held_out_loss
