"""The command line: parse, call, print. Every command has `--json`; exit codes are those of `isles.errors`."""

from __future__ import annotations

import logging
import os
import sys

import typer

from isles.cli import compare, data, init, join, model, organise, simulate, status, up
from isles.cli.common import Stopped, complain, err, flush, forget, open_standard_files, print_any_character
from isles.errors import EXIT_INTERRUPTED, IslesError, UsageError

EXIT_PIPE = 141  # 128 + SIGPIPE: the reader of stdout went away

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
up.register(app)
organise.register(app)
join.register(app)
status.register(app)
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
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every TLS connection that the other side closes
    open_standard_files()
    print_any_character()
    try:
        code = app(prog_name="isles", standalone_mode=False)
        flush()
    except IslesError as error:
        complain(str(error))
        code = error.exit_code
    except Stopped as stopped:
        err.print(str(stopped), soft_wrap=True)
        code = stopped.exit_code
    except (typer.Abort, KeyboardInterrupt):
        err.print("interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # `isles ... | head`
        forget(sys.stdout)
        code = EXIT_PIPE
    except OSError as error:
        complain(_outside(error))
        forget(sys.stdout)
        code = IslesError.exit_code
    except Exception as error:
        if _is_out_of_memory(error):
            complain("there is not enough memory; choose a smaller model, batch or number of clusters")
            sys.exit(IslesError.exit_code)
        if not hasattr(error, "format_message"):  # click's own mistakes know how to say themselves; typer ships its own click
            raise
        if type(error).__name__ != "NoArgsIsHelpError":  # the help itself has been printed then
            complain(_usage(error))
        code = UsageError.exit_code
    sys.exit(code if isinstance(code, int) else 0)


def _usage(error: Exception) -> str:
    """click's sentence about a wrong option or argument, and where to read on."""
    text = str(error.format_message()).strip().rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    name = context.command_path if context else "isles"
    return f"{text[:1].lower()}{text[1:]}; see {name} --help"


def _is_out_of_memory(error: Exception) -> bool:
    """torch says it with a RuntimeError: on the CPU a plain one, on a GPU one of its own class."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "out of memory" in str(error))
    )


def _outside(error: OSError) -> str:
    """A failure of the disk or the system that no room has put into words."""
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
    why = (error.strerror or str(error) or type(error).__name__).lower()
    return f"{where}{why}; what was saved before is untouched, mend this and run the command again"
