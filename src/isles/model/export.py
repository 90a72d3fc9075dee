"""Export: a folder that transformers loads, from the global parameters of a run.

The folder is written beside its final name and renamed, so that an export that was killed leaves nothing that looks whole.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from isles.errors import ModelError, UsageError
from isles.model.build import quiet_transformers
from isles.model.layout import FlatParameters, Layout

# What an earlier export may have left, and may therefore be replaced.
_EXPORTED = re.compile(
    r"^((generation_)?config\.json|model.*\.safetensors|model\.safetensors\.index\.json|tokenizer.*"
    r"|(special_tokens_map|added_tokens|vocab)\.json|vocab\.txt|merges\.txt|chat_template.*)$"
)


def check_export_target(folder: Path) -> None:
    """An export replaces its folder as a whole, so it must hold nothing but an earlier export. Raises UsageError."""
    if folder.resolve() == Path.cwd():
        raise UsageError(f"{folder} is the folder you are in, which an export would replace; name a new folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; choose another --out")
    others = [p.name for p in folder.iterdir() if not _EXPORTED.match(p.name)] if folder.is_dir() else []
    if others:
        raise UsageError(f"{folder} holds {sorted(others)[0]}, which no export wrote; choose another --out")


def export_model(
    model: Any, values: torch.Tensor, save_tokenizer: Callable[[Path], None], out: Path, *, eos_id: int | None = None
) -> None:
    """Write `values` as a transformers model folder with safetensors weights.

    model: a built model of the run's spec; values: fp32, shape [total], in the layout of `Layout.of(model)`; save_tokenizer: writes the
    tokenizer's files into a folder; eos_id: the end-of-text token, for generation. Raises UsageError when `out` holds something else than an
    export, ModelError when the disk refuses."""
    check_export_target(out)
    FlatParameters(model, Layout.of(model)).copy_from(values, 0, values.numel())
    if eos_id is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id = eos_id
    model.config.use_cache = True  # whoever serves it wants the cache that training had no use for
    temporary = out.parent / f".{out.name}.writing-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        with quiet_transformers():
            model.save_pretrained(temporary)
        save_tokenizer(temporary)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{out} cannot be written: {getattr(error, 'strerror', None) or error}; check the folder and the room on its disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_exported(folder: Path) -> Any:
    """A model from a folder that `export_model` or save_pretrained wrote: fp32, on the CPU. Raises ModelError when it cannot be read."""
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except Exception as error:  # damaged or missing files: each has its own class
        raise ModelError(f"{folder} cannot be loaded ({str(error).strip().splitlines()[0]}); export the run again") from error
