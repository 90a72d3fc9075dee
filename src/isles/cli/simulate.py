"""`isles simulate`: M clusters in one process, and the same run beside its baselines."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.common import Json, Stop, err, out, print_json, stop_on_signals
from isles.errors import UsageError
from isles.spec import Spec, load_spec

if TYPE_CHECKING:
    from isles.metrics import Summary
    from isles.simulate.methods import Baseline
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
        spec_path: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run's spec; `isles init` writes one.")],
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
            Path | None, typer.Option("--out", metavar="DIR", help="The run's folder; runs/NAME when left out.")
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
        spec = load_spec(spec_path, [*(overrides or []), *counted])
        name = spec.run.name if baseline is BaselineName.none else f"{spec.run.name}-{baseline}"
        folder = to or Path("runs") / name
        chosen = COMPARED if compare else ((name, str(baseline)),)
        session = Session(spec, spec_path, folder, quiet=quiet or as_json, many=compare)
        summaries = session.run([(n, b) for n, b in chosen], resume=resume, checkpoint=checkpoint)  # type: ignore[misc]
        _report(summaries, folder, many=compare, as_json=as_json)


class Session:
    """One or several runs of one spec, one after another, with one display and one way to stop them."""

    def __init__(self, spec: Spec, spec_path: Path, folder: Path, *, quiet: bool, many: bool) -> None:
        self.spec, self.spec_path, self.folder, self.quiet, self.many = spec, spec_path, folder, quiet, many

    def run(self, chosen: list[tuple[str, Baseline]], *, resume: bool, checkpoint: int | None) -> list[Summary]:
        """Run what is not complete yet. Leaves with the signal's exit code when it was interrupted."""
        from isles.metrics import read_summary
        from isles.simulate import RunFolder
        from isles.watch import RunDisplay

        summaries = []
        display = RunDisplay(quiet=self.quiet)
        with stop_on_signals() as stop, display:
            for number, (name, baseline) in enumerate(chosen, 1):
                path = self.folder / name if self.many else self.folder
                run = RunFolder(path)
                if self.many and resume and run.summary.exists() and read_summary(run.summary).complete:
                    summaries.append(read_summary(run.summary))
                    continue
                begun = (path / "run.json").exists()
                display.begin(name, self.spec, baseline=baseline, number=number, of=len(chosen))
                summaries.append(self._one(baseline, path, resume and (begun or not self.many), checkpoint, display, stop))
                if stop():
                    break
        if stop():
            self._say_how_to_resume(summaries[-1])
            raise typer.Exit(stop.exit_code)
        return summaries

    def _one(
        self, baseline: Baseline, path: Path, resume: bool, checkpoint: int | None, display: RunDisplay, stop: Stop
    ) -> Summary:
        from isles.simulate import simulate
        from isles.watch import TensorBoard

        with TensorBoard(path / "tensorboard") as board:

            def observe(record: object) -> None:
                board.add(record)  # type: ignore[arg-type]
                display.update(record)  # type: ignore[arg-type]

            return simulate(
                self.spec, base=self.spec_path.parent, out=path, baseline=baseline, resume=resume, checkpoint=checkpoint,
                observer=observe, on_prepare=display.prepare, stop=stop,
            )  # fmt: skip

    def _say_how_to_resume(self, last: Summary) -> None:
        compare = " --compare" if self.many else ""
        baseline = "" if self.many or last.method == "diloco" else f" --baseline {last.method}"
        err.print(
            f"stopped and saved at step {last.steps}; go on with: isles simulate {self.spec_path}{baseline}{compare} --out {self.folder} --resume",
            soft_wrap=True,
            markup=False,
        )


def _report(summaries: list[Summary], folder: Path, *, many: bool, as_json: bool) -> None:
    from isles.watch import comparison_table, draw, load_series

    paths = [folder / name for name, _ in COMPARED] if many else [folder]
    picture = folder / "picture.png"
    draw([load_series(p) for p in paths], picture)
    if as_json:
        from dataclasses import asdict

        rows = [asdict(s) for s in summaries]
        print_json({"runs": rows, "picture": str(picture)} if many else rows[0] | {"picture": str(picture)})
        return
    out.print(comparison_table(summaries))
    out.print(f"picture: {picture}", soft_wrap=True)
    if many:
        _sample(paths[0])


def _sample(folder: Path) -> None:
    from isles.cli.model import load_for_sampling
    from isles.model import generate

    model, tokenizer = load_for_sampling(folder, None)
    text = generate(model, tokenizer, "def ", max_new_tokens=240, temperature=0.7, top_k=20, seed=0)
    out.rule("what the DiLoCo model writes after 'def '", align="left")
    out.print(text, markup=False, soft_wrap=True)
    out.rule()
