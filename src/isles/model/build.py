"""Building a model: a preset, any config.json that transformers knows, or pretrained weights to go on from.

Weights are initialised from the seed alone, whatever random numbers were drawn before, so that every cluster of a run starts from the
same bits. Nothing is downloaded unless the spec names a hub id.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isles.errors import ModelError
from isles.model.presets import choose_shape, preset_config
from isles.spec import ModelTable


def build_model(table: ModelTable, *, vocab_size: int, sequence_length: int, seed: int, base: Path) -> Any:
    """A transformers causal language model: fp32, on the CPU, in train mode, no dropout, no KV cache.

    vocab_size: tokens of the data's tokenizer; sequence_length: tokens a sequence; base: folder that paths count from. Raises
    ModelError: the config or weights cannot be read, the vocabulary or the sequence length does not fit."""
    with quiet_transformers():
        if table.pretrained is not None:
            model = _from_pretrained(table.pretrained, base)
            _check_fits(model.config, vocab_size, sequence_length, table.pretrained)
            _prepare_config(model.config)
            _drop_dropout(model)
        else:
            config = _config(table, vocab_size, sequence_length, base)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = _from_config(config)
    return model.float().train()


def count_parameters(table: ModelTable, *, vocab_size: int, sequence_length: int, base: Path) -> int:
    """Trainable parameters, without allocating them: the model is built on the meta device."""
    with quiet_transformers(), torch.device("meta"):
        if table.pretrained is not None:
            config = _read_config(_local(table.pretrained, base), table.pretrained)
        else:
            config = _config(table, vocab_size, sequence_length, base)
        model = _from_config(config)
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
    if table.config is not None:
        config = _read_config(_local(table.config, base), table.config)
        _check_fits(config, vocab_size, sequence_length, table.config)
        if table.tie_embeddings is not None:
            config.tie_word_embeddings = table.tie_embeddings
    else:
        config = preset_config(choose_shape(table, vocab_size=vocab_size, sequence_length=sequence_length))
    return _prepare_config(config)


def _local(name: str, base: Path) -> str:
    """The path a name stands for when there is one, else the name itself (a hub id)."""
    path = base / name
    return str(path) if path.exists() else name


def _read_config(path: str, name: str) -> Any:
    from transformers import AutoConfig

    if path.endswith(".json") and not Path(path).exists():
        raise ModelError(f"model.config {name} does not exist; name a config.json of a causal language model")
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds for a file that is none of its configs
        raise ModelError(
            f"{name} is no config that transformers can read ({_first_line(error)}); name a config.json of a causal language model"
        ) from error


def _from_pretrained(name: str, base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(_local(name, base), dtype=torch.float32)
    except Exception as error:  # missing files, no network, damaged weights: each has its own class
        raise ModelError(
            f"model.pretrained {name} cannot be loaded ({_first_line(error)}); name a folder that from_pretrained loads, or a hub id and be online"
        ) from error


def _from_config(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise ModelError(
                f"transformers cannot build a causal language model from this config ({_first_line(error)}); choose another architecture"
            ) from error
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _prepare_config(config: Any) -> Any:
    """No dropout (each sample is seen once), no KV cache, and token ids that lie in the vocabulary."""
    for key, value in config.to_dict().items():
        if ("drop" in key or "pdrop" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(config, key, None)
        if isinstance(token, int) and token >= config.vocab_size:
            setattr(config, key, None)
    config.use_cache = False
    return config


def _drop_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _check_fits(config: Any, vocab_size: int, sequence_length: int, name: str) -> None:
    if config.vocab_size < vocab_size:
        raise ModelError(
            f"{name} has a vocabulary of {config.vocab_size:,}, the data's tokenizer needs {vocab_size:,}; prepare the data with the model's own tokenizer"
        )
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if longest is not None and longest < sequence_length:
        raise ModelError(
            f"{name} takes sequences of up to {longest} tokens, data.sequence_length is {sequence_length}; use shorter sequences"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
