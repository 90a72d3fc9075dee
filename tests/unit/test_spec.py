"""run.toml: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from isles.cli.init import STARTER
from isles.errors import SpecError
from isles.spec import Spec, load_spec, parse_size, render_spec, spec_from

TINY: dict[str, Any] = {"model": {"family": "gpt2", "parameters": "0.13M"}}


def _with(**tables: Any) -> dict[str, Any]:
    return TINY | tables


def test_defaults_follow_the_published_recipe() -> None:
    spec = spec_from(TINY)
    assert (spec.outer.lr, spec.outer.momentum, spec.train.local_steps) == (0.7, 0.9, 1000)
    assert (spec.optimizer.name, spec.optimizer.betas, spec.optimizer.clip_norm) == ("adamw", (0.9, 0.95), 1.0)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, ["model is missing"]),
        ({"modle": {}}, ["modle is not a key", "did you mean model?"]),
        (_with(train={"local_stps": 5}), ["train.local_stps", "did you mean local_steps?"]),
        (_with(train={"lr": 1e-3}), ["train.lr", "did you mean optimizer.lr?"]),
        (_with(outer={"zzz": 1}), ["outer.zzz", "known here: name, lr, momentum"]),
        (_with(train={"local_steps": "many"}), ["train.local_steps = 'many'", "integer"]),
        (_with(train={"local_steps": 0}), ["train.local_steps = 0", "greater than 0"]),
        (_with(optimizer={"lr": float("nan")}), ["optimizer.lr", "finite"]),
        (_with(optimizer={"lr": float("inf")}), ["optimizer.lr", "finite"]),
        (_with(optimizer={"betas": [0.9, 1.0]}), ["betas must lie in [0, 1)"]),
        (_with(train={"batch_size": 10, "micro_batch_size": 4}), ["batch_size 10 must be a multiple of micro_batch_size 4"]),
        (_with(train={"local_steps": 10}, streaming={"fragments": 3}), ["multiples of streaming.fragments 3"]),
        (_with(train={"local_steps": 10}, streaming={"overlap": 11}), ["overlap 11 is longer than a round"]),
        (_with(train={"local_steps": 10}, streaming={"merge": "eager", "overlap": 5}), ["eager", "whole round"]),
        (_with(train={"local_steps_schedule": [[10, 5], [5, 10]]}), ["rising steps"]),
        (_with(clusters={"count": 2, "quorum": 3}), ["quorum 3 is more than the 2 clusters"]),
        (_with(clusters={"count": 2, "speeds": [1.0]}), ["speeds names 1 clusters, count is 2"]),
        (_with(clusters={"count": 1, "speeds": [1.5]}), ["(0, 1]"]),
        (_with(clusters={"events": [{"cluster": 9, "kind": "leave", "step": 1}]}), ["cluster 9", "there are 4"]),
        (_with(clusters={"events": [{"cluster": 0, "kind": "late", "step": 5}]}), ["needs until"]),
        (_with(clusters={"events": [{"cluster": 0, "kind": "late", "step": 5, "until": 5}]}), ["needs until"]),
        (_with(outer={"name": "sparseloco", "momentum": 0.9}), ["has no momentum"]),
        (_with(run={"name": "../evil"}), ["run.name"]),
        (_with(train={"device": "tpu"}), ["train.device"]),
        ({"model": {"family": "gpt2", "parameters": "1T"}}, ["0.1M to 50B"]),
        ({"model": {"family": "gpt2", "parameters": "big"}}, ["'big' is not a size"]),
        ({"model": {"family": "gpt2"}}, ["family needs parameters"]),
        ({"model": {}}, ["exactly one of family, config, pretrained and module"]),
        ({"model": {"family": "gpt2", "config": "c.json", "parameters": "1M"}}, ["family and config are given"]),
        ({"model": {"config": "c.json", "layers": 3}}, ["layers goes with family"]),
        ({"model": {"module": "mine", "compile": True}}, ["compile is the script's own business"]),
        ({"model": {"module": "mine", "config": "c.json"}}, ["config and module are given"]),
        ({"model": 3}, ["model"]),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_place(tables: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from(tables, source="run.toml")
    text = str(caught.value)
    assert text.startswith("run.toml: ") and "\n" not in text
    for word in words:
        assert word in text


def test_overrides_are_typed_as_toml_and_bare_words_are_strings() -> None:
    spec = spec_from(
        TINY, ["train.local_steps=50", "codec.name=int4", "optimizer.betas=[0.8, 0.99]", 'run.name="x"', "eval.every = 7"]
    )
    assert (spec.train.local_steps, spec.codec.name, spec.optimizer.betas, spec.run.name, spec.eval.every) == (
        50,
        "int4",
        (0.8, 0.99),
        "x",
        7,
    )


@pytest.mark.parametrize("text", ["train.local_steps", "local_steps=5", "=5", "train.=5", ""])
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"table\.key=value"):
        spec_from(TINY, [text])


def test_what_init_writes_reads_back_as_the_same_spec() -> None:
    spec = spec_from(STARTER)
    text = render_spec(spec, head="two\nlines")
    assert spec_from(tomllib.loads(text)) == spec
    assert text.startswith("# two\n# lines\n")


def test_every_key_is_documented() -> None:
    for name, table in Spec.model_fields.items():
        for key, field in table.annotation.model_fields.items():  # type: ignore[union-attr]
            assert field.description, f"{name}.{key} has no description"


def test_a_rendered_spec_with_every_key_set_reads_back() -> None:
    events = [{"cluster": 1, "kind": "leave", "step": 5}, {"cluster": 0, "kind": "late", "step": 1, "until": 9}]
    spec = spec_from(
        _with(
            run={"name": "a", "seed": 3},
            train={"local_steps_schedule": [[0, 5], [100, 10]], "micro_batch_size": 8},
            clusters={"events": events, "speeds": [1, 1, 0.5, 1], "quorum": 3},
            data={"inputs": ['with "quotes"', "back\\slash"]},
        )
    )
    assert spec_from(tomllib.loads(render_spec(spec))) == spec


def test_local_steps_grow_by_the_schedule() -> None:
    train = spec_from(_with(train={"local_steps": 7, "local_steps_schedule": [[10, 20], [100, 50]]})).train
    assert [train.local_steps_at(s) for s in (0, 9, 10, 99, 100, 10**9)] == [7, 7, 20, 20, 50, 50]


@pytest.mark.parametrize(
    ("text", "count"), [("0.13M", 130_000), ("30B", 30_000_000_000), ("1.5k", 1500), (124, 124), (" 2 M ", 2_000_000)]
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "M", "-1M", "1e6", "0", "nan", "1,5M"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="isles init"):
        load_spec(tmp_path / "none.toml")
    with pytest.raises(SpecError, match="is a folder"):
        load_spec(tmp_path)
    bad = tmp_path / "run.toml"
    bad.write_text("[model\n")
    with pytest.raises(SpecError, match=r"not valid TOML.*line 1"):
        load_spec(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not valid TOML"):
        load_spec(bad)
    bad.write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(SpecError, match="larger than"):
        load_spec(bad)


def test_what_a_spec_sets_is_written_open_and_the_rest_as_comments() -> None:
    text = render_spec(spec_from(_with(data={"path": "data"}, eval={"every": None})))
    assert '\npath = "data"' in text and "\n# inputs = []" in text and "\n# every = ..." in text


@pytest.mark.parametrize("override", ["run.steps=true", "optimizer.lr=true", "model.layers=false", "optimizer.betas=true"])
def test_true_is_no_number(override: str) -> None:
    with pytest.raises(SpecError, match="does not fit"):
        spec_from({"model": {"family": "llama", "parameters": "0.13M"}}, [override])


def test_true_is_true_where_it_belongs() -> None:
    tables = {"model": {"family": "llama", "parameters": "0.13M", "tie_embeddings": True, "compile": False}}
    assert spec_from(tables).model.tie_embeddings is True
