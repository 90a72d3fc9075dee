"""The watch room: what people look at. It reads the records of `isles.metrics` and nothing else."""

from isles.watch.picture import RunSeries, draw, load_series
from isles.watch.table import comparison_markdown, comparison_rows, comparison_table
from isles.watch.tensorboard import TensorBoard
from isles.watch.terminal import PrepareDisplay, RunDisplay, sparkline

__all__ = [
    "PrepareDisplay",
    "RunDisplay",
    "RunSeries",
    "TensorBoard",
    "comparison_markdown",
    "comparison_rows",
    "comparison_table",
    "draw",
    "load_series",
    "sparkline",
]
