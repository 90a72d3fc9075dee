"""`isles compare`: several finished runs in one table and one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isles.cli.common import Json, out, path_given, print_json, say


def register(app: typer.Typer) -> None:
    @app.command()
    def compare(
        folders: Annotated[
            list[Path],
            typer.Argument(metavar="DIR...", parser=path_given, help="Folders of runs (the --out of `isles simulate`)."),
        ],
        picture: Annotated[
            Path | None,
            typer.Option(
                "--picture",
                metavar="FILE",
                parser=path_given,
                help="Also draw loss against tokens and bytes into this .png or .svg.",
            ),
        ] = None,
        as_json: Json = False,
    ) -> None:
        """Compare runs: loss, tokens, bytes and speed side by side."""
        from isles.metrics import read_summary
        from isles.simulator import RunFolder
        from isles.watch import comparison_rows, comparison_table, draw, load_series

        summaries = [read_summary(RunFolder(folder).summary) for folder in folders]
        if picture:
            draw([load_series(folder) for folder in folders], picture)
        if as_json:
            print_json({"runs": comparison_rows(summaries), "picture": str(picture) if picture else None})
        else:
            out.print(comparison_table(summaries))
            if picture:
                say(f"picture: {picture}")
