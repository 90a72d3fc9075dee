"""Many runs of the simulator from one recipe: the figures of docs/results.md.

    python benchmarks/campaign.py recipes/curve.toml [--jobs 2] [--only PATTERN] [--seeds 0 1]

A recipe is a run.toml with three more keys: `seeds`, and a list of `[[runs]]`, each with a `name`, an optional `baseline`, the keys it
`set`s, and a `grid` of keys with several values, every combination of which is a run. Results go to RESULTS/NAME.jsonl, one line a
run, with its held-out curve. A run that has a line there is not run again, so a campaign can be stopped and started at will.
Runs are spread over processes with one torch thread each, which is both the fastest way on a few cores and reproducible.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import json
import multiprocessing
import os
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@dataclass(frozen=True)
class Job:
    """One run of the campaign."""

    name: str
    baseline: str
    seed: int
    tables: dict[str, Any]  # of the whole spec
    chosen: dict[str, Any]  # what this run sets

    @property
    def key(self) -> str:
        """What makes it this run and no other, in a few characters."""
        text = json.dumps([self.baseline, self.tables], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def expand(recipe: dict[str, Any]) -> Iterator[Job]:
    """All runs of a recipe."""
    tables = {k: v for k, v in recipe.items() if k not in ("seeds", "runs")}
    for run in recipe["runs"]:
        grid = run.get("grid", {})
        for values in itertools.product(*grid.values()):
            chosen = run.get("set", {}) | dict(zip(grid, values, strict=True))
            name = "/".join([run["name"], *(f"{key}={value}" for key, value in zip(grid, values, strict=True))])
            for seed in run.get("seeds", recipe["seeds"]):
                yield Job(name, run.get("baseline", "none"), seed, _with(tables, chosen | {"run.seed": seed}), chosen)


def _with(tables: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """Nested tables with dotted keys set."""
    merged = {name: dict(table) for name, table in tables.items()}
    for key, value in chosen.items():
        table, _, name = key.partition(".")
        merged.setdefault(table, {})[name] = value
    return merged


def perform(job: Job, base: Path) -> dict[str, Any]:
    """Run one job in this process. Returns the line for the results file; a run that diverged says so instead of a summary."""
    import torch

    from isles.errors import DivergedError
    from isles.simulator import simulate
    from isles.spec import spec_from

    torch.set_num_threads(1)
    curve: list[list[float | int]] = []
    spec = spec_from(job.tables)
    row: dict[str, Any] = {
        "key": job.key,
        "name": job.name,
        "baseline": job.baseline,
        "seed": job.seed,
        "set": job.chosen,
    }

    def observe(record: Any) -> None:
        if record.held_out_loss is not None:
            curve.append([record.step, record.tokens, record.bytes, round(record.held_out_loss, 5)])

    try:
        summary = simulate(spec, base=base, baseline=job.baseline, observer=observe)  # type: ignore[arg-type]
    except DivergedError as error:
        return row | {"diverged": str(error), "curve": curve}
    return row | {"summary": asdict(summary), "curve": curve}


def _quiet() -> None:
    os.nice(10)  # a campaign yields to whoever works on the machine


def main() -> None:
    parser = argparse.ArgumentParser(description="run a recipe of simulations")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2)))
    parser.add_argument("--only", default="*", help="run only names that match this pattern")
    parser.add_argument("--seeds", type=int, nargs="+", help="run only these of the recipe's seeds")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    jobs = list(expand(tomllib.loads(args.recipe.read_text())))
    jobs = [j for j in jobs if fnmatch.fnmatch(j.name, args.only) and (args.seeds is None or j.seed in args.seeds)]
    path = args.results / f"{args.recipe.stem}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["key"] for line in path.read_text().splitlines()} if path.exists() else set()
    missing = [job for job in jobs if job.key not in done]  # in the recipe's order: what matters most stands first
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(args.jobs, mp_context=context, initializer=_quiet) as pool,
        path.open("a") as results,
    ):
        task = progress.add_task(args.recipe.stem, total=len(missing))
        futures = [pool.submit(perform, job, args.recipe.parent) for job in missing]
        for future in as_completed(futures):
            row = future.result()
            results.write(json.dumps(row) + "\n")
            results.flush()
            loss = f"{row['summary']['held_out_loss']:.4f}" if "summary" in row else "diverged"
            progress.console.print(f"{time.monotonic() - began:7.0f} s  {row['name']}  seed {row['seed']}  held-out {loss}")
            progress.advance(task)
    console.print(f"{len(jobs)} runs in {path}")


if __name__ == "__main__":
    main()
