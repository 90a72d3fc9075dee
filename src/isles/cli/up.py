"""`isles up`: a whole run on one machine, with real processes, sockets and a store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.common import Json, Stop, as_argument, command_line, err, out, path_given, print_json, say, stop_on_signals
from isles.errors import IslesError, UsageError
from isles.spec import Spec, load_spec

if TYPE_CHECKING:
    from isles.agent.local import LocalRun
    from isles.metrics import Summary

RESTARTS = 5  # of a cluster's agent that is killed
LOOK = 0.25  # seconds between looks at the clusters


class ClusterFailed(IslesError):
    """A cluster's agent ended with an error."""


def register(app: typer.Typer) -> None:
    @app.command()
    def up(
        spec_path: Annotated[
            Path, typer.Argument(metavar="RUN.toml", parser=path_given, help="The run's spec; `isles init` writes one.")
        ],
        clusters: Annotated[
            int | None, typer.Option("--clusters", min=1, max=64, help="Number of clusters, instead of the spec's.")
        ] = None,
        nproc: Annotated[int, typer.Option("--nproc", min=1, max=64, help="Workers of each cluster.")] = 1,
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec, as train.local_steps=50; repeatable."),
        ] = None,
        to: Annotated[
            Path | None,
            typer.Option("--out", metavar="DIR", parser=path_given, help="The run's folder; runs/NAME-up when left out."),
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
        check: Annotated[
            bool,
            typer.Option("--check", help="Then simulate the same run, and hold the global parameters against it, bit for bit."),
        ] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="No live table.")] = False,
        as_json: Json = False,
    ) -> None:
        """Train with real clusters on this machine: a store, and an agent and a worker for each, over TLS on loopback."""
        counted = [f"clusters.count={clusters}"] if clusters else []
        changes = [*(overrides or []), *counted]
        spec = load_spec(spec_path, changes)
        folder = to or Path("runs") / f"{spec.run.name}-up"
        words = [
            "isles",
            "up",
            as_argument(spec_path),
            *(("--nproc", str(nproc)) if nproc > 1 else ()),
            *(w for c in changes for w in ("--set", c)),
            "--out",
            as_argument(folder),
        ]
        _check(spec, folder, resume=resume)
        summary, stopped = _run(spec, spec_path, folder, nproc, quiet=quiet or as_json)
        again = command_line([*words, "--resume"])
        if stopped:
            err.print(f"stopped and saved at step {summary.steps if summary else 0}; go on with: {again}", soft_wrap=True)
        if as_json and summary is not None:
            from dataclasses import asdict

            print_json(asdict(summary) | ({"resume": again} if stopped else {}))
        elif summary is not None and not stopped:
            from isles.watch import comparison_table

            out.print(comparison_table([summary]))
            say(f"run: {folder}")
        if check and not stopped:
            _hold_against_simulation(spec, spec_path, folder, quiet=quiet or as_json)
        if stopped:
            raise typer.Exit(stopped)


def _hold_against_simulation(spec: Spec, spec_path: Path, folder: Path, *, quiet: bool) -> None:
    """Raises ClusterFailed when the real run came to other parameters than the simulated one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from isles.agent.local import LocalRun
    from isles.agent.result import differs_from_simulation

    columns = (TextColumn("simulating the same run"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=quiet, transient=True) as progress:
        task = progress.add_task("", total=spec.run.steps)
        different = differs_from_simulation(
            LocalRun(folder, spec, spec_path.parent), lambda step: progress.update(task, completed=step)
        )
    if different:
        raise ClusterFailed(
            f"{different}; that is sound if a cluster was late or lost in a round, see {folder}/clusters/*/agent.log"
        )
    err.print("the simulation of the same run ends with the same global parameters, bit for bit", soft_wrap=True)


def _check(spec: Spec, folder: Path, *, resume: bool) -> None:
    """Raises UsageError, SpecError."""
    from isles.agent.restore import check_spec
    from isles.model import check_built_here

    begun = (folder / "authority.json").exists()
    if resume and not begun:
        raise UsageError(f"{folder} holds no run to resume; start it without --resume")
    if begun and not resume:
        raise UsageError(f"{folder} already holds a run; go on with it with --resume, or choose another --out")
    if not begun and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty and holds no run; choose another --out")
    check_spec(spec)
    check_built_here(spec.model)


def _run(spec: Spec, spec_path: Path, folder: Path, nproc: int, *, quiet: bool) -> tuple[Summary | None, int]:
    """The summary, and the exit code of the signal that stopped the run before its end (0: none did)."""
    from isles.agent.local import LocalRun
    from isles.agent.result import collect
    from isles.data import open_or_prepare
    from isles.simulator import RunFolder

    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with stop_on_signals() as stop, RunFolder(folder).held():
        open_or_prepare(spec.data, spec_path.parent)  # once, and not by every cluster at the same time
        run = LocalRun(folder, spec, spec_path.parent, ranks=[nproc] * spec.clusters.count)
        codes = asyncio.run(_watch(run, stop, quiet=quiet))
        failed = [n for n, code in codes.items() if code]
        if failed and not stop():
            raise ClusterFailed(
                f"cluster {failed[0]} ended with exit code {codes[failed[0]]}; see the end of {run.cluster(failed[0]).log}"
            )
        summary = None
        with contextlib.suppress(IslesError) if stop() else contextlib.nullcontext():
            summary = collect(run, seconds=time.monotonic() - began, complete=not stop())
    return summary, stop.exit_code if stop() else 0


async def _watch(run: LocalRun, stop: Stop, *, quiet: bool) -> dict[int, int]:
    """Start everything, show it, and wait until it is over or somebody says to stop: the agents' exit codes."""
    from isles.cli.live import LiveTable
    from isles.watch.clusters import clusters_table

    try:
        await run.start()
        revived: Counter[int] = Counter()
        waiting = asyncio.create_task(run.wait())
        with LiveTable(shown=not quiet) as live:
            while not waiting.done() and not stop():
                await asyncio.wait({waiting}, timeout=LOOK)
                rows = [{"cluster": run.cluster(n).path.name} | run.cluster(n).read_status() for n in range(run.count)]
                step, steps = max(int(row.get("step", 0)) for row in rows), run.spec.run.steps
                live.update(clusters_table(rows, f"{run.spec.run.name}: step {step:,} of {steps:,}"))
                failed = [n for n, agent in run.agents.items() if agent.poll()]
                for number in [n for n in failed if int(run.agents[n].returncode) < 0 and revived[n] < RESTARTS]:
                    revived[number] += 1  # killed: it goes on from where it was
                    run.start_agent(number)
                    failed.remove(number)
                if len(failed) == run.count:
                    break
        if stop():
            err.print("stopping: the clusters save and leave ...")
    finally:
        await run.stop()
    return {number: int(agent.returncode or 0) for number, agent in run.agents.items()}
