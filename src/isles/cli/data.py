"""`isles data`: text to token shards, and what a folder of shards holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.common import Json, err, path_given, print_json, say, stop_on_signals
from isles.errors import UsageError

if TYPE_CHECKING:
    from isles.data import DatasetIndex

data = typer.Typer(help="Prepare and inspect token shards.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(data, name="data")


@data.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Files, folders or globs of text, JSONL or Parquet, also .gz or .zst; or python:stdlib."
        ),
    ],
    to: Annotated[Path, typer.Option("--out", metavar="DIR", parser=path_given, help="Folder to write.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="'bytes', a tokenizer.json file, or a transformers folder or hub id.")
    ] = "bytes",
    held_out: Annotated[
        float, typer.Option("--held-out", min=0.0, max=0.5, help="Share of the text kept out of training.")
    ] = 0.01,
    force: Annotated[bool, typer.Option("--force", help="Replace a data set that is already there.")] = False,
    as_json: Json = False,
) -> None:
    """Turn text into token shards with an index, hashes and a held-out part."""
    from isles.data import load_tokenizer
    from isles.data import prepare as run
    from isles.watch import PrepareDisplay

    here = Path.cwd()
    if not all(inputs):
        raise UsageError("an input is empty; name files, folders or globs, or . for the current folder")
    with stop_on_signals() as stop, PrepareDisplay(quiet=as_json, console=err) as display:

        def progress(at: object) -> None:
            stop.check(f"stopped; {to} is as it was, run the command again to start anew")
            display.update(at)

        index = run(
            inputs,
            to,
            tokenizer=load_tokenizer(tokenizer, here),
            held_out=held_out,
            base=here,
            progress=progress,
            force=force,
        )
    if as_json:
        print_json(index.model_dump(mode="json"))
    else:
        say(f"wrote {to}: {_describe(index)}")


@data.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=path_given, help="Folder that `isles data prepare` wrote.")],
    as_json: Json = False,
) -> None:
    """Check every shard against its hash and every token against the vocabulary."""
    from isles.data import Dataset

    splits = [Dataset.open(folder, 1, split) for split in ("train", "held_out")]
    for dataset in splits:
        dataset.verify()
    index = splits[0].index
    if as_json:
        print_json(index.model_dump(mode="json"))
    else:
        say(f"{folder} is whole: {_describe(index)}")


def _describe(index: DatasetIndex) -> str:
    train, held_out = index.tokens["train"], index.tokens["held_out"]
    return f"{train:,} tokens to train on and {held_out:,} held out, {index.sources.documents:,} documents, tokenizer {index.tokenizer.name}, {len(index.shards)} shards"
