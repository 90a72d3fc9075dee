"""A training script's processes: what they hold of the flat layout, however the model is wrapped or split, and what they are told apart by."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from tests.unit import scripted
from tests.unit.group import Group, group_of
from tests.unit.sharded import Odd
from torch import nn

from isles.agent.guests import Guests
from isles.agent.supervisor import Process
from isles.errors import ModelError
from isles.model import FlatParameters, Layout
from isles.spec import spec_from
from isles.spec.digest import spec_digest
from isles.worker.memory import SharedParameters
from isles.worker.script import ScriptRank, bare


@pytest.fixture(scope="module")
def two() -> Iterator[Group]:
    with group_of(2) as group:
        yield group


@pytest.mark.parametrize("kind", ["replicas", "rows", "copies", "mixed"])
def test_values_go_out_and_come_back_however_the_model_is_split(two: Group, kind: str, tmp_path: Path) -> None:
    answers = two.call(scripted.there_and_back, kind, str(tmp_path))
    torch.manual_seed(0)
    model = Odd()
    layout = Layout.of(model, 3)
    values = FlatParameters(model, layout).values.detach().numpy()
    assert answers == [(layout.digest(), (0.5, 7, 1.0))] * 2
    shared = SharedParameters(tmp_path / "parameters.f32", layout.total)
    assert (shared.globals == values).all() and (shared.sent == 2 * values).all()


def test_a_tensor_that_is_split_by_columns_is_refused(two: Group) -> None:
    assert all("split by rows, as FSDP2 does" in said for said in two.call(scripted.columns))


def test_one_process_needs_no_group_and_unusual_tensors_are_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.scale = nn.Parameter(torch.tensor(2.0))
    member = ScriptRank(torch.compile(model, backend="eager"))
    assert member.ranks is None and member.leads and bare(member.model) is model
    member.open(str(tmp_path), 1, "strided")
    shared = SharedParameters(tmp_path / "parameters.f32", member.layout.total, create=True)
    member.change("write_out", "globals", 0, member.layout.total)
    assert sorted(shared.globals.tolist()) == sorted([2.0, *model.weight.flatten().tolist(), *model.bias.tolist()])
    assert member.sum_up(1.5, 10, 0.5) == (1.5, 10, 0.5)
    model.weight = nn.Parameter(torch.zeros(3, 2).t())
    with pytest.raises(ModelError, match="weight is not contiguous"):
        member.open(str(tmp_path), 1, "strided")


def test_the_agent_knows_the_script_that_an_earlier_one_knew(tmp_path: Path) -> None:
    record = tmp_path / "workers.json"

    def guests() -> Guests:
        return Guests(record=record, gone=lambda: None, over=lambda: False, connected=lambda: True, leave=lambda: None)

    first = guests()
    assert first.pids == []
    first.came(os.getpid())
    assert guests().pids == [os.getpid()]
    record.write_text(json.dumps([{"pid": os.getpid(), "born": Process.of(os.getpid()).born + "0"}]))  # another of that number
    assert guests().pids == []
    first.went()
    assert first.pids == [] and not record.exists()


def test_the_name_of_a_module_makes_another_run_and_none_leaves_digests_as_they_were() -> None:
    assert spec_digest(spec_from({"model": {"module": "a"}})) != spec_digest(spec_from({"model": {"module": "b"}}))
    spec = spec_from({"model": {"family": "llama", "parameters": "1M"}})
    before = spec.model_dump_json(exclude={"checkpoint": True, "eval": True}).replace('"module":null,', "")
    assert spec_digest(spec) == blake3(before.encode()).hexdigest()
