"""The command line: parse, call, print. Every command has `--json`; exit codes are those of `isles.errors`."""

from __future__ import annotations

import os
import sys

import typer

from isles.cli import compare, data, init, model, simulate
from isles.cli.common import err
from isles.errors import EXIT_INTERRUPTED, IslesError

app = typer.Typer(
    name="isles",
    help="Train large language models on clusters joined only by the ordinary internet.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
init.register(app)
data.register(app)
simulate.register(app)
compare.register(app)
model.register(app)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from isles import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of `isles`."""
    try:
        app()
    except IslesError as error:
        err.print(f"[bold red]error:[/] {_plain(error)}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `isles ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _plain(error: IslesError) -> str:
    from rich.markup import escape

    return escape(" ".join(str(error).split()))
