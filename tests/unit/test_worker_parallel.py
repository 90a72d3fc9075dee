"""Several ranks train what one would, and each touches its own rows only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import sharded
from tests.unit.group import Group, group_of

from isles.errors import NetworkError, SpecError
from isles.worker.held import rows_of
from isles.worker.parameters import FlatView
from isles.worker.ranks import rank_device
from isles.worker.saved import SavedState


@pytest.fixture(scope="module")
def two() -> Iterator[Group]:
    with group_of(2) as group:
        yield group


def together(parts: list[np.ndarray]) -> np.ndarray:
    """The whole vector from what each rank holds, when each value is held by exactly one."""
    assert (sum(~np.isnan(part) for part in parts) == 1).all()
    return np.nansum(parts, axis=0, dtype=np.float32)


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_row_is_held_once_and_as_torch_cuts_them(rows: int, size: int) -> None:
    ranges = [rows_of(rows, rank, size) for rank in range(size)]
    assert [i for first, stop in ranges for i in range(first, stop)] == list(range(rows))
    chunks = [len(chunk) for chunk in torch.empty(rows).chunk(size)] if rows else []
    assert [stop - first for first, stop in ranges][: len(chunks)] == chunks


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", ()),
        ("llama", ("train.micro_batch_size=1", "optimizer.clip_norm=0.05")),
        ("llama", ("model.activation_checkpointing=true", "model.tie_embeddings=true")),
        ("odd", ("train.micro_batch_size=1",)),
    ],
)
def test_two_ranks_train_what_one_does(two: Group, kind: str, overrides: tuple[str, ...]) -> None:
    (first, a), (second, b) = two.call(sharded.train, kind, *overrides)
    one = sharded.one_rank(kind, *overrides)
    one.rewarm(1, 3)
    expected = [sharded.plain(one.step(sharded.batch(at), at)) for at in range(sharded.STEPS)]
    assert first == second
    assert np.allclose(first, expected, rtol=1e-4)
    assert [row[2:] for row in first] == [row[2:] for row in expected]  # tokens and learning rate
    assert np.allclose(together([a, b]), one.read(0, one.layout.total), atol=1e-4)


def test_ranks_that_hold_nothing_of_a_tensor_train_too() -> None:
    with group_of(3) as three:
        answers = three.call(sharded.train, "odd", "train.batch_size=3")
    one = sharded.one_rank("odd")
    one.rewarm(1, 3)
    for at in range(sharded.STEPS):
        one.step(sharded.batch(at)[:3], at)
    assert np.allclose(together([values for _, values in answers]), one.read(0, one.layout.total), atol=1e-4)


def test_bf16_keeps_fp32_master_weights(two: Group) -> None:
    (results, a), (_, b) = two.call(sharded.train, "llama", "train.precision=bf16")
    one = sharded.one_rank("llama", "train.precision=bf16")
    one.rewarm(1, 3)
    for at in range(sharded.STEPS):
        assert results[at][0] == pytest.approx(float(one.step(sharded.batch(at), at).loss), rel=2e-3)
    values = together([a, b])
    assert not np.array_equal(values, torch.from_numpy(values).bfloat16().float().numpy())


@pytest.mark.parametrize("kind", ["llama", "odd"])
def test_ranges_are_read_and_written_as_by_one_rank(two: Group, kind: str) -> None:
    one = sharded.one_rank(kind)
    layout, total = one.layout, one.layout.total
    cut = [layout.fragments[0], layout.fragments[1], (layout.fragments[2][0] + 7, total - 3), (0, 1), (total // 2, total)]
    other = np.random.default_rng(0).normal(size=total).astype(np.float32)
    (out_a, a), (out_b, b) = two.call(sharded.change, kind, cut, other)
    one.step(sharded.batch(0), 0)
    view = FlatView(one.flat.values)
    for (start, stop), left, right in zip(cut, out_a, out_b, strict=True):
        written = ~np.isnan(left), ~np.isnan(right)
        inside = np.zeros(total, bool)
        inside[start:stop] = True
        assert np.array_equal(written[0] ^ written[1], inside) and not (written[0] & written[1]).any()
        values = np.where(written[0], left, right)
        assert np.allclose(values[start:stop], one.flat.values[start:stop], atol=1e-4)
        view.subtract(other, start, stop)
        view.add(other * 3, start, stop)
        view.mix(other, start, stop, 0.25)
    view.read_in(other, *cut[0])
    assert np.allclose(together([a, b]), one.flat.values, atol=1e-4)
    assert np.array_equal(together([a, b])[slice(*cut[0])], other[slice(*cut[0])])


@pytest.mark.parametrize(("kind", "overrides"), [("odd", ()), ("llama", ("model.tie_embeddings=true",))])
def test_tied_weights_stay_tied_and_have_one_slot(two: Group, kind: str, overrides: tuple[str, ...]) -> None:
    slots = len(sharded.one_rank(kind, *overrides).layout.slots)
    assert two.call(sharded.tied, kind, *overrides) == [(True, slots)] * 2


@pytest.mark.parametrize("kind", ["llama", "odd"])
def test_state_survives_a_round_trip_bit_for_bit(two: Group, kind: str) -> None:
    assert two.call(sharded.goes_on, kind) == [True, True]


def test_a_saved_state_counts_when_all_ranks_have_it(two: Group, tiny_dataset: Path, tmp_path: Path) -> None:
    folder = sharded.cluster_folder(tmp_path / "cluster", tiny_dataset)
    assert two.call(sharded.saves, folder, [5, 5]) == [[None, (7,)]] * 2
    assert two.call(sharded.saves, folder, [5, 6]) == [[(7,), None]] * 2
    assert SavedState(folder / "worker" / "rank-0.safetensors", 1).rounds() is None
    assert SavedState(folder / "worker" / "rank-0.safetensors", 2).rounds() == (7,)


def test_mistakes_are_sentences(two: Group) -> None:
    said = [two.call(sharded.mistake, *words)[0] for words in (
        ("", "train.batch_size=3"), ("", "optimizer.name=muon"), ("scalar",),
    )]  # fmt: skip
    assert "batch_size 3 cannot be split evenly over 2 ranks" in said[0]
    assert "'muon' needs whole matrices and 2 ranks hold rows" in said[1]
    assert "temperature is a single number, which 2 ranks cannot split" in said[2]
    if not torch.cuda.is_available():
        with pytest.raises(SpecError, match="'cuda' is not on this machine"):
            rank_device("cuda", 1, 2)
    assert rank_device("cpu", 1, 2).type == "cpu"


def test_ranks_hear_what_is_told(two: Group) -> None:
    two.ask(1, sharded.hears)
    two.ask(0, sharded.tells, ["step", [[0, 4]], 7])
    assert (two.answer(0), two.answer(1)) == (None, ["step", [[0, 4]], 7])
    assert two.call(sharded.gathers) == [[{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 100}]] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_gone_is_noticed_at_once(victim: int) -> None:
    with group_of(2) as group:
        assert len(group.call(sharded.gathers)) == 2
        left = 1 - victim
        group.ask(left, sharded.hears if left else sharded.gathers)
        time.sleep(0.3)  # it waits by now
        group.processes[victim].kill()
        began = time.monotonic()
        with pytest.raises(NetworkError, match="a rank of this cluster's workers is gone"):
            group.answer(left)
        assert time.monotonic() - began < 5
