"""Building a model: a preset, any config.json that transformers knows, or pretrained weights to go on from.

Weights are initialised from the seed alone, in fp32, whatever random numbers were drawn before and whatever dtype a config names, so
that every cluster of a run starts from the same bits. Each model is first made on the meta device, where it takes no memory: a config
that cannot be built is refused in a moment, before 50B parameters are. Nothing is downloaded unless the spec names a hub id.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isles.errors import ModelError, SpecError
from isles.model.presets import choose_shape, preset_config
from isles.spec import ModelTable

_LONGEST_REASON = 200  # characters of somebody else's error message that still fit into a sentence


def build_model(table: ModelTable, *, vocab_size: int, sequence_length: int, seed: int, base: Path) -> Any:
    """A transformers causal language model: fp32, on the CPU, in train mode, no dropout, no KV cache.

    vocab_size: tokens of the data's tokenizer; sequence_length: tokens a sequence; base: folder that paths count from. The random state of
    torch is left as it was. Raises ModelError: the config or weights cannot be read, the vocabulary or the sequence length does not fit.
    Raises SpecError: a script builds the model."""
    check_built_here(table)
    with quiet_transformers():
        config = _config(table, vocab_size, sequence_length, base)
        if table.pretrained is not None:
            model = _from_pretrained(table.pretrained, config, base)
        else:
            attention = _on_meta(config, table)[1]
            with torch.device("cpu"), _seeded(seed):
                model = _from_config(config, attention)
    _drop_dropout(model)
    return model.float().train()


def check_built_here(table: ModelTable) -> None:
    """Raises SpecError when not isles builds the model but a training script."""
    if table.module is not None:
        raise SpecError(
            f"model.module {table.module!r} names a model that a training script builds, so isles has none to train by itself; "
            "run the script, which joins by isles.Cluster, or give model.family, config or pretrained"
        )


def count_parameters(table: ModelTable, *, vocab_size: int, sequence_length: int, base: Path) -> int:
    """Trainable parameters, tied weights once, without allocating them. Raises ModelError as `build_model` does."""
    with quiet_transformers():
        model, _ = _on_meta(_config(table, vocab_size, sequence_length, base), table)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def prepare_for_training(model: Any, table: ModelTable) -> Any:
    """Apply the spec's training options. Order matters: checkpointing changes the modules that compile then sees."""
    if table.activation_checkpointing:
        options = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.23
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return torch.compile(model) if table.compile else model


def _config(table: ModelTable, vocab_size: int, sequence_length: int, base: Path) -> Any:
    """The transformers config that the table means, ready to train."""
    if table.family is not None:
        shape = choose_shape(table, vocab_size=vocab_size, sequence_length=sequence_length)
        return _prepare_config(preset_config(shape))
    config = _read_config(table, base)
    named = _named(table)
    _check_fits(config, vocab_size, sequence_length, named)
    if table.tie_embeddings is not None:
        tied = bool(getattr(config, "tie_word_embeddings", False))
        if table.pretrained is not None and table.tie_embeddings != tied:
            raise ModelError(
                f"model.tie_embeddings {str(table.tie_embeddings).lower()} contradicts the weights of {named}; leave tie_embeddings out"
            )
        config.tie_word_embeddings = table.tie_embeddings
    return _prepare_config(config)


def _named(table: ModelTable) -> str:
    """What a sentence calls the model's source."""
    if table.family is not None:
        return f"model.family {table.family}"
    return f"model.config {table.config}" if table.config is not None else f"model.pretrained {table.pretrained}"


def _read_config(table: ModelTable, base: Path) -> Any:
    from transformers import AutoConfig

    if table.config is not None:  # always a path: a misspelt one must not become a question to the hub
        path = _path(table.config, base)
        if path is None:
            raise ModelError(f"{_named(table)} does not exist in {base}; name a config.json of a causal language model")
        try:
            config = AutoConfig.from_pretrained(str(path))
            config.get_text_config()  # raises where it is not clear which model reads the text
            return config
        except Exception as error:  # transformers raises many kinds for what is none of its configs
            raise ModelError(
                f"{_named(table)} is no config that transformers can read ({reason(error)}); name a config.json of a causal language model"
            ) from error
    assert table.pretrained is not None
    where = _folder_or_hub_id(table.pretrained, base)
    try:
        config = AutoConfig.from_pretrained(where)
        config.get_text_config()
        return config
    except Exception as error:
        raise _not_loaded(table.pretrained, error) from error


def _not_loaded(name: str, error: Exception) -> ModelError:
    return ModelError(
        f"model.pretrained {name} cannot be loaded ({reason(error)}); name a folder that from_pretrained loads, or a hub id and be online"
    )


def _folder_or_hub_id(name: str, base: Path) -> str:
    """The folder a name stands for when there is one, else the name itself (a hub id). Raises ModelError for a path to nowhere."""
    path = _path(name, base)
    if path is not None:
        return str(path)
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name:
        raise ModelError(
            f"model.pretrained {name} does not exist in {base}; name a folder that from_pretrained loads, or a hub id and be online"
        )
    return name


def _path(name: str, base: Path) -> Path | None:
    """The file or folder of that name, None where there is none: nor for a name that no disk can hold, nor an unknown person's home."""
    try:
        path = base / Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _from_pretrained(name: str, config: Any, base: Path) -> Any:
    """The model with its weights. A tensor that the folder lacks would start from random bits: an error, not a warning."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            _folder_or_hub_id(name, base),
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they come in the report, by name
        )
    except Exception as error:  # missing files, no network, damaged weights: each has its own class
        raise _not_loaded(name, error) from error
    unusable = sorted({*report["missing_keys"], *(str(key) for key, *_ in report["mismatched_keys"])})
    if unusable:
        raise ModelError(
            f"model.pretrained {name} has no weights, or of another shape, for {unusable[0]} ({len(unusable)} such tensors); "
            "name a complete causal language model"
        )
    return model


def _from_config(config: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)


def _on_meta(config: Any, table: ModelTable) -> tuple[Any, str]:
    """The model without memory, and the attention it has: sdpa where transformers offers it for this architecture, else eager."""
    attention = "sdpa"
    with torch.device("meta"):
        try:
            try:
                return _from_config(config, attention), attention
            except ValueError as error:
                if "scaled_dot_product_attention" not in str(error):
                    raise
            attention = "eager"
            return _from_config(config, attention), attention
        except Exception as error:  # a config that reads well may still be one that no code can build: any kind of error
            raise ModelError(
                f"transformers cannot build a causal language model from {_named(table)} ({reason(error)}); mend or choose another config"
            ) from error


def _parts(config: Any) -> Iterator[Any]:
    """A config and the configs inside it, such as the text model's."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _prepare_config(config: Any) -> Any:
    """No dropout (each sample is seen once), no KV cache, token ids that lie in the vocabulary, and attention to the past only."""
    for part in _parts(config):
        for key, value in list(vars(part).items()):
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    text = config.get_text_config()
    for part in (config, text):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(part, key, _known_tokens(getattr(part, key, None), text.vocab_size))
        if (
            getattr(part, "is_decoder", None) is False
        ):  # BERT and its kin look into the future unless told that they are decoders
            part.is_decoder = True
        part.use_cache = False
    return config


def _known_tokens(tokens: Any, vocab_size: int) -> Any:
    """A token id, or a list of them, without those outside the vocabulary (a config may name a larger tokenizer's)."""
    if isinstance(tokens, list):
        return [t for t in tokens if t < vocab_size] or None
    return None if isinstance(tokens, int) and tokens >= vocab_size else tokens


def _drop_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _check_fits(config: Any, vocab_size: int, sequence_length: int, named: str) -> None:
    text = config.get_text_config()
    known = _attribute(text, "vocab_size")
    if known is None:
        raise ModelError(f"{named} has no vocabulary; name a causal language model")
    if known < vocab_size:
        raise ModelError(
            f"{named} has a vocabulary of {known:,}, the data's tokenizer needs {vocab_size:,}; prepare the data with the model's own tokenizer"
        )
    longest = longest_context(config)
    if longest is not None and longest < sequence_length:
        raise ModelError(
            f"{named} takes sequences of up to {longest} tokens, data.sequence_length is {sequence_length}; use shorter sequences"
        )
    heads, kv_heads = _attribute(text, "num_attention_heads"), _attribute(text, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
        raise ModelError(f"{named} has {heads} attention heads, which {kv_heads} key-value heads cannot share; mend the config")


def longest_context(config: Any) -> int | None:
    """Tokens that a model of this config can look at; None where nothing limits them."""
    text = config.get_text_config()
    # transformers' own name, which most families answer to; MPT has another
    found = [_attribute(text, key) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    return min((n for n in found if isinstance(n, int) and n > 0), default=None)


def _attribute(config: Any, key: str) -> Any:
    """A config's value, None where it has none or has another for each layer (transformers refuses to read that as one)."""
    try:
        return getattr(config, key, None)
    except Exception:  # its class is newer than the oldest transformers we take
        return None


def reason(error: Exception) -> str:
    """What another library says went wrong, as part of a sentence: its first line, and the next where the first only announces it."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else ""
    if not said or isinstance(error, KeyError):  # a KeyError's text is the bare key
        said = f"{type(error).__name__} {said}".rstrip()
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON].rstrip()}..."


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The CPU's random numbers follow from the seed while the block runs, and go on as before after it.

    torch.manual_seed would reseed every accelerator as well, and leave it so."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No advice or progress bars from transformers while the block runs; errors stay."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    from transformers.utils import logging as hf

    bars = hf.is_progress_bar_enabled()
    hf.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(before)
        if bars:
            hf.enable_progress_bar()
