"""Models: presets of the right size, and weights from the seed alone or from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from isles.data import ByteTokenizer
from isles.errors import ModelError
from isles.model import (
    Layout,
    build_model,
    count_parameters,
    export_model,
    prepare_for_training,
)
from isles.model.presets import choose_shape
from isles.spec import ModelTable

FAMILIES = ("gpt2", "llama", "qwen3")


SIZES = ("0.1M", "0.13M", "0.8M", "3M", "30M", "124M", "1B", "8B", "30B", "50B")


def _build(table: ModelTable, seed: int = 0, base: Path = Path()) -> Any:
    return build_model(table, vocab_size=257, sequence_length=32, seed=seed, base=base)


def _tiny(family: str = "llama", **more: Any) -> ModelTable:
    return ModelTable(family=family, layers=3, hidden_size=32, heads=2, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_a_preset_comes_within_15_percent_of_the_size(family: str, size: str) -> None:
    table = ModelTable(family=family, parameters=size)  # type: ignore[arg-type]
    shape = choose_shape(table, vocab_size=257, sequence_length=1024 if size[-1] == "B" else 64)
    wanted = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert abs(shape.count() - wanted) <= 0.15 * wanted
    assert shape.hidden_size % shape.heads == 0 and shape.heads % shape.kv_heads == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "vocabulary"), [("0.13M", 257), ("3M", 1000), ("1B", 128_000), ("50B", 151_936)])
def test_the_closed_count_is_the_built_models(family: str, size: str, vocabulary: int) -> None:
    table = ModelTable(family=family, parameters=size)  # type: ignore[arg-type]
    shape = choose_shape(table, vocab_size=vocabulary, sequence_length=128)
    assert count_parameters(table, vocab_size=vocabulary, sequence_length=128, base=Path()) == shape.count()


@pytest.mark.parametrize(("size", "layers", "width", "count"), [("0.13M", 2, 64, 117_120), ("0.8M", 4, 128, 824_576)])
def test_presets_that_published_figures_rest_on_do_not_change(size: str, layers: int, width: int, count: int) -> None:
    shape = choose_shape(ModelTable(family="llama", parameters=size), vocab_size=257, sequence_length=64)
    assert (shape.layers, shape.hidden_size, shape.count()) == (layers, width, count)


PUBLISHED = [  # family, size as people say it, vocabulary, sequence length, parameters as published
    ("gpt2", "124M", 50_257, 1024, 124_439_808), ("gpt2", "355M", 50_257, 1024, 354_823_168),
    ("gpt2", "774M", 50_257, 1024, 774_030_080), ("gpt2", "1.5B", 50_257, 1024, 1_557_611_200),
    ("llama", "1.24B", 128_256, 2048, 1_235_814_400), ("llama", "3B", 128_256, 2048, 3_212_749_824),
    ("llama", "7B", 32_000, 2048, 6_738_415_616), ("llama", "8B", 128_256, 2048, 8_030_261_248),
    ("llama", "13B", 32_000, 2048, 13_015_864_320), ("llama", "34B", 32_000, 2048, 33_743_970_304),
    ("qwen3", "0.6B", 151_936, 2048, 596_049_920), ("qwen3", "1.7B", 151_936, 2048, 1_720_574_976),
    ("qwen3", "4B", 151_936, 2048, 4_022_468_096), ("qwen3", "8B", 151_936, 2048, 8_190_735_360),
    ("qwen3", "14B", 151_936, 2048, 14_768_307_200), ("qwen3", "32B", 151_936, 2048, 32_762_123_264),
]  # fmt: skip


@pytest.mark.parametrize(("family", "size", "vocabulary", "length", "count"), PUBLISHED)
def test_a_published_size_gives_the_published_model(family: str, size: str, vocabulary: int, length: int, count: int) -> None:
    table = ModelTable(family=family, parameters=size)  # type: ignore[arg-type]
    assert choose_shape(table, vocab_size=vocabulary, sequence_length=length).count() == count
    assert count_parameters(table, vocab_size=vocabulary, sequence_length=length, base=Path()) == count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [8, 34, 50, 100, 2050])
def test_any_even_width_is_a_model(family: str, width: int) -> None:
    table = ModelTable(family=family, layers=1, hidden_size=width)  # type: ignore[arg-type]
    shape = choose_shape(table, vocab_size=257, sequence_length=32)
    assert shape.heads * shape.head_dim == width and shape.head_dim % 2 == 0
    assert shape.count() == count_parameters(table, vocab_size=257, sequence_length=32, base=Path())
    if width < 1000:
        assert _build(table)(input_ids=torch.arange(4)[None]).logits.isfinite().all()


@pytest.mark.parametrize(
    ("table", "words"),
    [({"layers": 2, "hidden_size": 33}, "hidden_size 33 is odd.*choose a multiple of 64"),
     ({"layers": 2, "hidden_size": 33, "heads": 3}, "heads 3 does not divide model.hidden_size 33 into heads of an even size"),
     ({"layers": 2, "hidden_size": 32, "heads": 64}, "heads 64 does not divide model.hidden_size 32"),
     ({"parameters": "10M", "hidden_size": 16}, "and hidden_size 16 comes near 10,000,000.*choose another size"),
     ({"parameters": "1M", "heads": 1009}, "heads 1009 does not divide the width of any preset of this size")],
)  # fmt: skip
def test_a_shape_that_cannot_be_says_why(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        choose_shape(ModelTable(family="llama", **table), vocab_size=257, sequence_length=64)
    assert "\n" not in str(caught.value)


def test_what_a_preset_leaves_open_follows_from_what_is_given() -> None:
    wide = choose_shape(ModelTable(family="gpt2", parameters="3M", hidden_size=64), vocab_size=257, sequence_length=64)
    assert wide.hidden_size == 64 and abs(wide.count() - 3e6) <= 0.45e6
    many = choose_shape(ModelTable(family="llama", parameters="1M", heads=7), vocab_size=257, sequence_length=64)
    assert many.heads == 7 and abs(many.count() - 1e6) <= 1.5e5
    deep = choose_shape(ModelTable(family="qwen3", parameters="1M", layers=3), vocab_size=257, sequence_length=64)
    assert deep.layers == 3 and abs(deep.count() - 1e6) <= 1.5e5
    exact = ModelTable(family="gpt2", parameters="10M", layers=1, hidden_size=32)
    assert choose_shape(exact, vocab_size=257, sequence_length=64).layers == 1


def test_a_vocabulary_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"vocabulary of 151,936.*larger size or a tokenizer with fewer tokens"):
        choose_shape(ModelTable(family="llama", parameters="1M"), vocab_size=151_936, sequence_length=64)
    with pytest.raises(ModelError, match="heads 5 does not divide"):
        choose_shape(ModelTable(family="llama", layers=2, hidden_size=32, heads=5), vocab_size=257, sequence_length=64)


def test_shape_and_tying_can_be_given() -> None:
    model = _build(_tiny(tie_embeddings=False))
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.num_attention_heads) == (3, 32, 2)
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_from_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    a = _build(_tiny(family))
    torch.manual_seed(2)
    b, c = _build(_tiny(family)), _build(_tiny(family), seed=5)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))
    torch.manual_seed(1234)  # a state that no build leaves behind by itself
    before = torch.get_rng_state()
    _build(_tiny(family))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_have_no_dropout_and_train_in_fp32(family: str) -> None:
    model = _build(_tiny(family))
    assert model.training and all(p.dtype == torch.float32 for p in model.parameters())
    ids = torch.arange(16)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ["mistral", "gpt_neox"])
def test_any_config_json_of_a_causal_model_works(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.3}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = _build(ModelTable(config="config.json"), base=tmp_path)
    assert model.config.model_type == kind and model.config.attention_dropout == 0.0
    layout = Layout.of(model, fragments=3)
    assert layout.total == sum(p.numel() for p in model.parameters()) and len(layout.fragments) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [({"vocab_size": 100}, "vocabulary of 100.*needs 257"), ({"max_position_embeddings": 16}, "up to 16 tokens.*sequence_length is 32"),
     ({"model_type": "no-such-thing"}, "no config that transformers can read"), ({"model_type": "t5"}, "cannot build a causal language"),
     ({"model_type": "musicgen"}, "no config that transformers can read"), ({"hidden_act": "nope"}, "cannot build.*KeyError 'nope'"),
     ({"hidden_size": "x"}, "expected int, got str"), ({"hidden_size": -4}, "cannot build"),
     ({"num_key_value_heads": 3}, "2 attention heads, which 3 key-value heads cannot share")],
)  # fmt: skip
def test_a_config_that_does_not_fit_says_why(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    (tmp_path / "c.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=words) as caught:
        _build(ModelTable(config="c.json"), base=tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_and_garbage_models_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "folder").mkdir()
    for table, words in (
        (ModelTable(config="none.json"), "does not exist"),
        (ModelTable(config="bad.json"), "no config that transformers can read"),
        (ModelTable(pretrained="folder"), "cannot be loaded"),
        (ModelTable(pretrained="./nowhere"), "does not exist"),
        (ModelTable(pretrained="nobody/no-such-model"), "cannot be loaded.*hub id and be online"),
    ):
        for use in (build_model, count_parameters):
            seed = {"seed": 0} if use is build_model else {}
            with pytest.raises(ModelError, match=words) as caught:
                use(table, vocab_size=257, sequence_length=32, base=tmp_path, **seed)  # type: ignore[operator]
            assert "\n" not in str(caught.value)

    def ask_the_hub(*_: object, **__: object) -> None:
        raise AssertionError("a path became a question to the hub")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", ask_the_hub)
    with pytest.raises(ModelError, match=r"model\.config mine/llama does not exist"):
        _build(ModelTable(config="mine/llama"), base=tmp_path)


def _config_file(folder: Path, **values: Any) -> ModelTable:
    common = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    (folder / "c.json").write_text(json.dumps(common | values))
    return ModelTable(config="c.json")


def test_weights_start_in_fp32_whatever_the_config_says(tmp_path: Path) -> None:
    narrow, wide = (_build(_config_file(tmp_path, dtype=dtype), base=tmp_path) for dtype in ("bfloat16", "float32"))
    assert all(torch.equal(p, q) for p, q in zip(narrow.parameters(), wide.parameters(), strict=True))
    assert narrow.config.dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_neox", "opt", "bloom", "bert"])
def test_every_model_attends_to_the_past_only(kind: str, tmp_path: Path) -> None:
    model = _build(
        _config_file(tmp_path, model_type=kind, n_layer=2, n_head=2, ffn_dim=64, word_embed_proj_dim=32), base=tmp_path
    )
    ids = torch.arange(10, 22)[None]
    changed = ids.clone()
    changed[0, 8:] += 100
    a, b = model(input_ids=ids).logits, model(input_ids=changed).logits
    assert torch.allclose(a[:, :8], b[:, :8], atol=1e-6) and not torch.allclose(a[:, 8:], b[:, 8:], atol=1e-6)


def test_token_ids_outside_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    config = _build(
        _config_file(tmp_path, bos_token_id=128_000, eos_token_id=[1, 99_999], pad_token_id=5), base=tmp_path
    ).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, [1], 5)


def test_building_says_nothing(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _build(_config_file(tmp_path, bos_token_id=128_000, attention_dropout=0.1), base=tmp_path)
    _build(_tiny("gpt2"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_gradients(family: str) -> None:
    passes, gradients = [], []
    for table in (_tiny(family), _tiny(family, activation_checkpointing=True)):
        model = _build(table)
        assert prepare_for_training(model, table) is model
        calls: list[int] = []
        next(m for n, m in model.named_modules() if n.endswith(".mlp")).register_forward_pre_hook(
            lambda *_, c=calls: c.append(1)
        )
        model(input_ids=torch.arange(16)[None]).logits.square().sum().backward()
        passes.append(len(calls))
        gradients.append([p.grad for p in model.parameters()])
    assert passes == [1, 2]
    assert all(torch.equal(p, q) for p, q in zip(*gradients, strict=True))


def _pretrained(folder: Path, **table: Any) -> Any:
    return _build(ModelTable(pretrained=folder.name, **table), base=folder.parent)


def test_pretrained_weights_are_kept_and_broken_ones_refused(tmp_path: Path) -> None:
    model = _build(_tiny(), seed=9)
    export_model(model, _values(model), ByteTokenizer().save, tmp_path / "hf")
    state = torch.get_rng_state()
    again = _pretrained(tmp_path / "hf")
    assert torch.equal(torch.get_rng_state(), state) and again.training and not again.config.use_cache
    assert torch.equal(_values(again), _values(model))
    assert (
        count_parameters(ModelTable(pretrained="hf"), vocab_size=257, sequence_length=32, base=tmp_path)
        == _values(model).numel()
    )
    with pytest.raises(ModelError, match="tie_embeddings false contradicts the weights"):
        _pretrained(tmp_path / "hf", tie_embeddings=False)
    with pytest.raises(ModelError, match="vocabulary of 257, the data's tokenizer needs 300"):
        build_model(ModelTable(pretrained="hf"), vocab_size=300, sequence_length=32, seed=0, base=tmp_path)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    for broken in (weights, {**weights, "model.norm.weight": norm[:5]}):
        save_file(broken, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"no weights, or of another shape, for model.norm.weight \(1 such"):
            _pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelError, match="cannot be loaded"):
        _pretrained(tmp_path / "hf")


def _values(model: Any) -> torch.Tensor:
    """A copy of a model's parameters in its own layout."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
