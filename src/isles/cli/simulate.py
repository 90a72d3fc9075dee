"""`isles simulate`: M clusters in one process, and the same run beside its baselines."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.cli.common import (
    Json,
    Stop,
    Stopped,
    as_argument,
    command_line,
    err,
    out,
    path_given,
    print_json,
    say,
    stop_on_signals,
)
from isles.errors import EXIT_INTERRUPTED, IslesError, UsageError
from isles.spec import Spec, load_spec

if TYPE_CHECKING:
    from isles.metrics import StepRecord, Summary
    from isles.simulator.methods import Baseline
    from isles.watch import RunDisplay


class BaselineName(StrEnum):
    """What to train instead of DiLoCo."""

    none = "none"
    ddp = "ddp"
    single = "single"


COMPARED: tuple[tuple[str, Baseline], ...] = (("diloco", "none"), ("ddp", "ddp"), ("single", "single"))


def register(app: typer.Typer) -> None:
    @app.command()
    def simulate(
        spec_path: Annotated[
            Path, typer.Argument(metavar="RUN.toml", parser=path_given, help="The run's spec; `isles init` writes one.")
        ],
        clusters: Annotated[
            int | None, typer.Option("--clusters", min=1, help="Number of clusters, instead of the spec's.")
        ] = None,
        baseline: Annotated[
            BaselineName, typer.Option("--baseline", help="Train this instead of DiLoCo: data-parallel, or one cluster alone.")
        ] = BaselineName.none,
        compare: Annotated[bool, typer.Option("--compare", help="Train DiLoCo and both baselines, and compare them.")] = False,
        overrides: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec, as train.local_steps=50; repeatable."),
        ] = None,
        to: Annotated[
            Path | None,
            typer.Option("--out", metavar="DIR", parser=path_given, help="The run's folder; runs/NAME when left out."),
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
        checkpoint: Annotated[
            int | None, typer.Option("--checkpoint", help="With --resume: from the checkpoint of this step.")
        ] = None,
        quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
        as_json: Json = False,
    ) -> None:
        """Train M clusters in one process with DiLoCo, or one of its baselines."""
        if compare and baseline is not BaselineName.none:
            raise UsageError("--compare already trains the baselines; leave --baseline out")
        if checkpoint is not None and (compare or not resume):
            raise UsageError("--checkpoint goes with --resume of one run")
        counted = [f"clusters.count={clusters}"] if clusters else []
        changes = [*(overrides or []), *counted]
        spec = load_spec(spec_path, changes)
        name = spec.run.name if baseline is BaselineName.none else f"{spec.run.name}-{baseline}"
        folder = to or Path("runs") / name
        chosen = COMPARED if compare else ((name, str(baseline)),)
        words = ["isles", "simulate", as_argument(spec_path), *(w for c in changes for w in ("--set", c))]
        words += ["--compare"] if compare else ["--baseline", str(baseline)] if baseline is not BaselineName.none else []
        words += ["--out", as_argument(folder)] + ["--quiet"] * quiet + ["--json"] * as_json
        session = Session(spec, spec_path, folder, quiet=quiet or as_json, many=compare, words=words)
        summaries = session.run([(n, b) for n, b in chosen], resume=resume, checkpoint=checkpoint)  # type: ignore[misc]
        if session.stopped_with:
            if as_json:
                print_json(_plain(summaries, many=compare) | {"picture": None, "resume": session.command})
            raise typer.Exit(session.stopped_with)
        _report(summaries, folder, many=compare, as_json=as_json)


class Session:
    """One or several runs of one spec, one after another, with one display and one way to stop them.

    words: the command that was given, without --resume and --checkpoint."""

    def __init__(
        self, spec: Spec, spec_path: Path, folder: Path, *, quiet: bool, many: bool, words: Sequence[str] = ()
    ) -> None:
        self.spec, self.spec_path, self.folder, self.quiet, self.many = spec, spec_path, folder, quiet, many
        self._words = words
        self.stopped_with = 0  # exit code of the signal that ended the session before its runs were complete

    def run(self, chosen: list[tuple[str, Baseline]], *, resume: bool, checkpoint: int | None) -> list[Summary]:
        """Run what is not complete yet, until a signal stops it: see `stopped_with`. Raises Stopped where nothing could be saved."""
        from isles.watch import RunDisplay

        if self.many and not resume:
            self._check_new()
        summaries: list[Summary] = []
        with stop_on_signals() as stop, RunDisplay(quiet=self.quiet, console=err) as display:
            try:
                for number, (name, baseline) in enumerate(chosen, 1):
                    path = self.folder / name if self.many else self.folder
                    done = self._done(path) if self.many and resume else None
                    if done is None:
                        display.begin(name, self.spec, baseline=baseline, number=number, of=len(chosen))
                        go_on = resume and (_begun(path) or not self.many)
                        done = self._one(baseline, path, go_on, checkpoint, display, stop)
                    summaries.append(done)
                    if stop() and not (done.complete and number == len(chosen)):
                        self.stopped_with = stop.exit_code
                        break
            except KeyboardInterrupt:
                text = f"interrupted before the run was saved; from what was saved earlier, go on with: {self.command}"
                raise Stopped(text, EXIT_INTERRUPTED) from None
        if self.stopped_with:
            err.print(f"stopped and saved at step {summaries[-1].steps}; go on with: {self.command}", soft_wrap=True)
        return summaries

    def _one(
        self, baseline: Baseline, path: Path, resume: bool, checkpoint: int | None, display: RunDisplay, stop: Stop
    ) -> Summary:
        from isles.simulator import simulate
        from isles.watch import TensorBoard

        with TensorBoard(path / "tensorboard") as board:

            def observe(record: StepRecord) -> None:
                board.add(record)
                display.update(record)

            def prepare(progress: object) -> None:
                stop.check(f"stopped before the first step, while text was being prepared; go on with: {self.command}")
                display.prepare(progress)

            return simulate(
                self.spec, base=self.spec_path.parent, out=path, baseline=baseline, resume=resume, checkpoint=checkpoint,
                observer=observe, on_prepare=prepare, stop=stop,
            )  # fmt: skip

    def _check_new(self) -> None:
        """A comparison makes folders of its own; it does not mix them with what others left. Raises UsageError."""
        if any((self.folder / name).is_dir() for name, _ in COMPARED):
            raise UsageError(f"{self.folder} already holds a comparison; go on with it with --resume, or choose another --out")
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UsageError(f"{self.folder} is not empty and holds no comparison; choose another --out")

    def _done(self, path: Path) -> Summary | None:
        """The summary of a run that needs no more steps; None when it does, or when it is of another spec and has to say so."""
        from isles.metrics import read_summary
        from isles.simulator import RunFolder
        from isles.spec.digest import spec_digest

        file = RunFolder(path).summary
        summary = read_summary(file) if file.exists() else None
        return summary if summary and summary.complete and summary.spec_digest == spec_digest(self.spec) else None

    @property
    def command(self) -> str:
        """What goes on with the session, for a shell in the same folder."""
        return command_line([*self._words, *(["--resume"] if self.many or _begun(self.folder) else [])])


def _begun(path: Path) -> bool:
    return (path / "run.json").exists()


def _plain(summaries: list[Summary], *, many: bool) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [asdict(s) for s in summaries]
    return {"runs": rows} if many else rows[0]


def _report(summaries: list[Summary], folder: Path, *, many: bool, as_json: bool) -> None:
    """The result, whatever becomes of its picture."""
    from isles.watch import comparison_table, draw, load_series

    paths = [folder / name for name, _ in COMPARED] if many else [folder]
    picture = folder / "picture.png"
    failure = None
    try:
        draw([load_series(p) for p in paths], picture)
    except IslesError as error:
        failure = error
    if as_json:
        print_json(_plain(summaries, many=many) | {"picture": None if failure else str(picture)})
    else:
        out.print(comparison_table(summaries))
        if not failure:
            say(f"picture: {picture}")
        if many:
            _sample(paths[0])
    if failure:
        raise failure


def _sample(folder: Path) -> None:
    from isles.cli.model import load_for_sampling
    from isles.model import generate

    model, tokenizer = load_for_sampling(folder, None)
    text = generate(model, tokenizer, "def ", max_new_tokens=240, temperature=0.7, top_k=20, seed=0)
    out.rule("what the DiLoCo model writes after 'def '", align="left")
    say(text)
    out.rule()
