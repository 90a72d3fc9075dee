"""Export: a folder that transformers loads, from the global parameters of a run.

The folder is written beside its final name and renamed, so that an export that was killed leaves nothing that looks whole. An earlier
export is moved aside first and deleted last: at every moment one of the two is on the disk. The model itself is only read, so that
a run can be exported while it trains.
"""

from __future__ import annotations

import copy
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from isles.errors import ModelError, UsageError
from isles.model.build import quiet_transformers, reason
from isles.model.layout import Layout, uncompiled

# What an earlier export may have left, and may therefore be replaced: an export deletes the folder it replaces.
_EXPORTED = re.compile(
    r"^((generation_)?config\.json|model.*\.safetensors|model\.safetensors\.index\.json|tokenizer.*"
    r"|(special_tokens_map|added_tokens|vocab)\.json|vocab\.txt|merges\.txt|chat_template.*)$"
)


def check_export_target(folder: Path) -> None:
    """An export replaces its folder as a whole, so it must be free, empty, or an export and nothing more. Raises UsageError."""
    try:
        if Path.cwd().is_relative_to(folder.resolve()):
            raise UsageError(f"{folder} holds the folder you are in, which an export would replace; name a new folder")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; choose another --out")
        there = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:  # a name too long, a folder that may not be read
        raise UsageError(f"{folder} cannot be used ({error.strerror}); choose another --out") from error
    # A folder is nothing that an export writes, whatever its name: tokenizer_research/ may be months of work.
    foreign = [p for p in there if p.is_dir() or not _EXPORTED.match(p.name)]
    if there and not (folder / "config.json").is_file():  # a tokenizer's own folder, say
        foreign = foreign or there
    if foreign:
        raise UsageError(f"{folder} holds {foreign[0].name}, which no export wrote; choose another --out")


def export_model(
    model: Any,
    values: torch.Tensor,
    save_tokenizer: Callable[[Path], None],
    out: Path,
    *,
    eos_id: int | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write `values` as a transformers model folder with safetensors weights, in files of at most `max_shard_size`.

    model: a built model of the run's spec, left as it is; values: fp32, shape [total], in the layout of `Layout.of(model)`; save_tokenizer:
    writes the tokenizer's files into a folder; eos_id: the end-of-text token, for generation. Raises UsageError when `out` holds anything
    else than an export, ModelError when the values do not fit the model or the disk refuses."""
    model = uncompiled(model)
    check_export_target(out)
    state = _state(model, values)
    out = Path(out).resolve()  # what a link stands for is replaced, not the link
    temporary = out.parent / f".{out.name}.writing-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        with quiet_transformers(), torch.no_grad():
            _save(model, state, temporary, eos_id, max_shard_size)
        save_tokenizer(temporary)
        _replace(out, temporary)
    except OSError as error:
        raise ModelError(
            f"{out} cannot be written: {error.strerror or error}; check the folder and the room on its disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_exported(folder: Path) -> Any:
    """A model from a folder that `export_model` or save_pretrained wrote: fp32, on the CPU. Raises ModelError when it cannot be read."""
    from transformers import AutoModelForCausalLM

    if not folder.is_dir():  # transformers would ask the hub for a model of that name
        raise ModelError(f"{folder} is no folder; name one that `isles export` wrote")
    try:
        with quiet_transformers():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # damaged or missing files: each has its own class
        raise ModelError(f"{folder} cannot be loaded ({reason(error)}); export the run again") from error
    if report["missing_keys"]:  # which transformers would fill with random numbers
        raise ModelError(f"{folder} has no weights for {min(report['missing_keys'])}; export the run again")
    return model


def _state(model: Any, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The model's state with `values` for its trainable parameters, under every name that a tied one has."""
    layout = Layout.of(model)
    if values.dtype != torch.float32 or tuple(values.shape) != (layout.total,):
        raise ModelError(
            f"an export needs {layout.total:,} fp32 values for this model, not {values.numel():,} of {values.dtype}; export the run that made them"
        )
    trained = dict(model.named_parameters())
    pieces = {id(trained[s.name]): values[s.offset : s.offset + s.numel].view(s.shape) for s in layout.slots}
    every_name = model.named_parameters(remove_duplicate=False)
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    state.update((name, pieces[id(p)].detach()) for name, p in every_name if id(p) in pieces)
    return state


def _save(model: Any, state: dict[str, torch.Tensor], folder: Path, eos_id: int | None, max_shard_size: str) -> None:
    """save_pretrained with configs for whoever serves the model; the model's own, which are for training, are put back."""
    before = model.config, model.generation_config
    model.config, model.generation_config = copy.deepcopy(before)
    try:
        for config in (model.config, model.generation_config):
            if config is not None:
                config.use_cache = True  # serving wants the cache that training has no use for
                if eos_id is not None:
                    config.eos_token_id = eos_id
        model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
    except SafetensorError as error:  # its writer reports a full disk in its own way
        raise OSError(str(error)) from error
    finally:
        model.config, model.generation_config = before


def _replace(out: Path, temporary: Path) -> None:
    if not out.exists():
        temporary.rename(out)
        return
    aside = temporary.with_name(f".{out.name}.replaced-{secrets.token_hex(4)}")
    out.rename(aside)
    try:
        temporary.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
