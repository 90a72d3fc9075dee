"""`isles init`: a commented run.toml that works as it is."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.common import Json, as_argument, command_line, path_given, print_json, say
from isles.errors import UsageError
from isles.spec import render_spec, spec_from

HEAD = """A run of isles: four clusters train one small language model with DiLoCo.

    isles simulate run.toml                        the run in one process; Ctrl-C saves it, --resume goes on
    isles simulate run.toml --compare              the same beside one cluster alone and data-parallel training
    isles simulate run.toml --set train.local_steps=25 --out runs/h25
    isles up run.toml                              the run with real clusters, over TLS on this machine

Keys that start with a # stand at their default. The text comes from the Python standard library of this machine, so nothing
is downloaded; for your own, run `isles data prepare` and point data.path at what it wrote."""

# The recipe that docs/results.md found to work in a run of minutes: a short round, four bits, a long warm-up, little momentum.
STARTER = {
    "run": {"name": "demo", "steps": 1000},
    "model": {"family": "llama", "parameters": "0.13M"},
    "data": {"path": "data", "inputs": ["python:stdlib"], "sequence_length": 64},
    "train": {"local_steps": 10, "batch_size": 8, "threads": 1},  # at this size a second thread costs more than it gives
    "optimizer": {"lr": 8e-3, "warmup_steps": 200},
    "outer": {"lr": 0.9, "momentum": 0.3},
    "codec": {"name": "int4"},
    "clusters": {"count": 4},
    "eval": {"every": 50},
    "checkpoint": {"every": 250},
}


def register(app: typer.Typer) -> None:
    @app.command()
    def init(
        folder: Annotated[
            Path, typer.Argument(metavar="DIR", parser=path_given, help="Folder for the new run; made when it does not exist.")
        ],
        force: Annotated[bool, typer.Option("--force", help="Overwrite a run.toml that is already there.")] = False,
        as_json: Json = False,
    ) -> None:
        """Write a commented run.toml that works as it is."""
        path, temporary = folder / "run.toml", folder / ".run.toml.writing"
        if path.exists() and not force:
            raise UsageError(f"{path} already exists; edit it, choose another folder, or overwrite it with --force")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(render_spec(spec_from(STARTER), head=HEAD), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise UsageError(f"{path} cannot be written ({error.strerror}); choose another folder") from error
        if as_json:
            print_json({"path": str(path)})
        else:
            say(f"wrote {path}; start it with: {command_line(['isles', 'simulate', as_argument(path)])}")
