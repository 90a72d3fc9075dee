"""The worker's loop, its schedule and its optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.errors import SpecError
from isles.model import Layout, build_model
from isles.spec import OptimizerTable, Spec, spec_from
from isles.worker import Trainer, choose_device, held_out_loss, lr_factor

CPU = torch.device("cpu")


def _spec(*overrides: str) -> Spec:
    tables: dict[str, Any] = {
        "run": {"steps": 20},
        "model": {"family": "llama", "layers": 2, "hidden_size": 16, "heads": 2},
        "data": {"sequence_length": 16},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    }
    return spec_from(tables, overrides)


def _trainer(spec: Spec) -> Trainer:
    model = build_model(spec.model, vocab_size=257, sequence_length=16, seed=0, base=Path())
    return Trainer(model, Layout.of(model), spec, CPU)


def _batch(seed: int = 0, size: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, 17))


def test_cosine_warms_up_and_ends_at_the_floor() -> None:
    table = OptimizerTable(warmup_steps=10, min_lr_ratio=0.1)
    assert lr_factor(0, 100, table) == pytest.approx(0.1) and lr_factor(9, 100, table) == 1.0
    assert lr_factor(10, 100, table) == 1.0 and lr_factor(55, 100, table) == pytest.approx(0.55)
    assert lr_factor(100, 100, table) == pytest.approx(0.1) and lr_factor(500, 100, table) == pytest.approx(0.1)


def test_wsd_is_flat_then_falls_linearly() -> None:
    table = OptimizerTable(schedule="wsd", warmup_steps=10, decay_ratio=0.2, min_lr_ratio=0.0)
    assert [lr_factor(s, 100, table) for s in (10, 50, 80)] == [1.0, 1.0, 1.0]
    assert lr_factor(90, 100, table) == pytest.approx(0.5) and lr_factor(100, 100, table) == 0.0
    assert lr_factor(99, 100, OptimizerTable(schedule="constant", warmup_steps=0)) == 1.0


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    whole, parts = _trainer(_spec()), _trainer(_spec())
    for at in range(3):
        a, b = whole.step(_batch(at), at), parts.step(_batch(at), at, micro_batch_size=1)
        assert torch.allclose(a.loss, b.loss, atol=1e-6) and torch.allclose(a.grad_norm, b.grad_norm, rtol=1e-4)
    assert np.allclose(whole.read(0, whole.layout.total), parts.read(0, parts.layout.total), atol=1e-4)


def test_gradients_are_clipped_to_the_norm() -> None:
    trainer = _trainer(_spec("optimizer.clip_norm=1e-9", "optimizer.weight_decay=0", "optimizer.eps=1"))
    before = trainer.read(0, trainer.layout.total).copy()
    result = trainer.step(_batch(), 5)
    assert result.grad_norm > 1e-3  # the norm before clipping is what is reported
    assert np.abs(trainer.read(0, trainer.layout.total) - before).max() < 1e-9


def test_what_is_written_is_what_is_trained_from() -> None:
    trainer = _trainer(_spec())
    zeros = np.zeros(trainer.layout.total, np.float32)
    trainer.write(0, zeros)
    assert not any(p.abs().sum() for p in trainer.model.parameters())
    trainer.write(5, np.ones(3, np.float32))
    assert trainer.read(0, 10).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_survives_a_round_trip_bit_for_bit(name: str) -> None:
    a, b = _trainer(_spec(f"optimizer.name={name}")), _trainer(_spec(f"optimizer.name={name}"))
    for at in range(3):
        a.step(_batch(at), at)
    a.rewarm(3, 4)
    b.load_state_tensors({k: v.clone() for k, v in a.state_tensors().items()})
    for at in range(3, 6):
        assert a.step(_batch(at), at).lr == b.step(_batch(at), at).lr
    assert np.array_equal(a.read(0, a.layout.total), b.read(0, b.layout.total))


def test_muon_takes_the_blocks_matrices_and_learns() -> None:
    trainer = _trainer(_spec("optimizer.name=muon"))
    first = float(trainer.step(_batch(), 0).loss)
    for at in range(1, 20):
        last = float(trainer.step(_batch(), at).loss)
    assert last < first - 0.5
    adamw, muon = (part[0] for part in trainer._optimizer._parts)
    assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])
    embeddings = trainer.model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    assert any(p is embeddings for g in adamw.param_groups for p in g["params"])


def test_bf16_keeps_fp32_master_weights() -> None:
    trainer = _trainer(_spec("train.precision=bf16"))
    before = trainer.read(0, trainer.layout.total).copy()
    loss = trainer.step(_batch(), 0).loss
    after = trainer.read(0, trainer.layout.total)
    assert after.dtype == np.float32 and torch.isfinite(loss)
    assert not np.array_equal(after, torch.from_numpy(after).bfloat16().float().numpy())
    assert np.abs(after - before).max() > 0


def test_activation_checkpointing_changes_memory_not_numbers() -> None:
    plain, saving = _trainer(_spec()), _trainer(_spec("model.activation_checkpointing=true"))
    for at in range(2):
        plain.step(_batch(at), at)
        saving.step(_batch(at), at)
    assert np.allclose(plain.read(0, plain.layout.total), saving.read(0, saving.layout.total), atol=1e-6)


def test_a_joiners_learning_rate_warms_up_from_where_it_entered() -> None:
    trainer = _trainer(_spec("optimizer.schedule=constant"))
    trainer.rewarm(10, 4)
    lrs = [trainer.step(_batch(), at).lr for at in (10, 11, 13, 14)]
    assert lrs == pytest.approx([0.0025, 0.005, 0.01, 0.01])


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(SpecError, match="'cuda' is not on this machine; use one of"):
        choose_device("cuda")
    with pytest.raises(SpecError, match="cuda:3"):
        choose_device("cuda:3")
    assert choose_device("cpu").type == "cpu"


def test_held_out_loss_is_the_mean_over_all_tokens() -> None:
    spec = _spec()
    model = build_model(spec.model, vocab_size=257, sequence_length=16, seed=0, base=Path())
    batch = _batch(size=6)
    one = held_out_loss(model, [batch], CPU)
    two = held_out_loss(copy.deepcopy(model), [batch[:4], batch[4:]], CPU)
    assert one == pytest.approx(two, rel=1e-6) and 5.0 < one < 6.5 and model.training
