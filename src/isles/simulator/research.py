"""`simulate`: a whole run of M clusters in one process, with the rooms that a real run uses and no network.

One loop over the run's steps: every method is advanced by a tick, its record written, its global parameters evaluated and
saved when due. On the CPU a run is reproducible bit for bit, interrupted and resumed or not.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isles.data import Dataset, Progress, open_or_prepare
from isles.data.index import TOKENIZER_FOLDER
from isles.errors import CheckpointError, DivergedError
from isles.metrics import MetricsFile, StepRecord, Summary, read_records, write_summary
from isles.model import FlatParameters, Layout, build_model, check_built_here
from isles.simulator.folder import RunFolder, run_digest
from isles.simulator.methods import Baseline, Diloco, Method, OneModel, Tick
from isles.spec import Spec
from isles.spec.digest import spec_digest
from isles.worker import Trainer, choose_device, held_out_loss
from isles.worker.checkpoint import CheckpointStore

LOSS_WINDOW = 20  # records that the summary's training loss is the mean of


class Simulation:
    """A run that is set up and can be advanced. `simulate` is the plain way to use it."""

    def __init__(
        self, spec: Spec, *, base: Path, baseline: Baseline = "none", on_prepare: Callable[[Progress], None] | None = None
    ) -> None:
        if spec.train.threads:
            torch.set_num_threads(spec.train.threads)
        check_built_here(spec.model)
        length = spec.data.sequence_length
        train = open_or_prepare(spec.data, base, on_prepare)
        held_out = Dataset.open(train.folder, length, "held_out")
        model = build_model(spec.model, vocab_size=train.vocab_size, sequence_length=length, seed=spec.run.seed, base=base)
        self.spec, self.base, self.baseline, self.dataset = spec, base, baseline, train
        self.device = choose_device(spec.train.device)
        self.layout = Layout.of(model, spec.streaming.fragments, spec.streaming.order)
        self._batches = fixed_batches(held_out, spec.eval.sequences, spec.train.micro_batch_size or spec.train.batch_size)
        self._judge = copy.deepcopy(model).to(self.device)  # the global parameters are evaluated in a copy of their own
        self._judged = FlatParameters(self._judge, self.layout)

        def make_trainer() -> Trainer:
            return Trainer(copy.deepcopy(model), self.layout, spec, self.device)

        if baseline == "none":
            self.method: Method = Diloco(spec, make_trainer, self.layout, train)
        else:
            self.method = OneModel(spec, make_trainer, self.layout, train, baseline)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.saved: int | None = None  # step that is safe in a checkpoint
        self.recent: list[float] = []
        self.held_out_loss = float("nan")

    @property
    def digest(self) -> str:
        return run_digest(self.spec, self.baseline, self.dataset.digest, self.layout)

    @property
    def done(self) -> bool:
        return self.step >= self.spec.run.steps

    def advance(self) -> StepRecord | None:
        """One step of the run. Returns its record, or None when every cluster stood still. Raises DivergedError."""
        began = time.perf_counter()
        tick = self.method.tick(self.step)
        self.step += 1
        if self.done:
            self.method.finish()
        self.seconds += time.perf_counter() - began  # training only; evaluation and files do not count
        measured = self.evaluate() if self._evaluation_due() else None
        if tick is None:
            return None
        self._check(tick)
        self.tokens += tick.tokens
        self.recent = [*self.recent, tick.loss][-LOSS_WINDOW:]
        return StepRecord(
            step=self.step,
            round=self.method.rounds,
            tokens=self.tokens,
            loss=tick.loss,
            held_out_loss=measured,
            bytes=self.method.bytes,
            lr=tick.lr,
            grad_norm=tick.grad_norm,
            clusters=tick.clusters,
            seconds=round(self.seconds, 3),
        )

    def _evaluation_due(self) -> bool:
        every = self.spec.eval.every or self.spec.train.local_steps
        return self.done or self.step % every == 0

    def evaluate(self) -> float:
        """Held-out loss of the global parameters, nats per token. Raises DivergedError when it is not finite."""
        self._judged.copy_from(torch.from_numpy(self.method.values), 0, self.layout.total)
        self.held_out_loss = held_out_loss(self._judge, self._batches, self.device)
        if not np.isfinite(self.held_out_loss):
            raise DivergedError(
                f"the held-out loss is {self.held_out_loss} at step {self.step}; lower optimizer.lr or outer.lr"
            )
        return self.held_out_loss

    def _check(self, tick: Tick) -> None:
        if not np.isfinite([tick.loss, tick.grad_norm]).all():
            what = "gradient norm" if np.isfinite(tick.loss) else "training loss"
            value = tick.grad_norm if np.isfinite(tick.loss) else tick.loss
            raise DivergedError(
                f"the {what} is {value} at step {self.step}; lower optimizer.lr, or outer.lr if it happened just after a round"
            )

    def save(self, store: CheckpointStore) -> Path:
        """Write a checkpoint. Those of later steps go: the run went back to before them, they may be damaged or differ."""
        counters, tensors = self.method.state()
        state = {
            "method": counters,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "recent": self.recent,
            "held_out_loss": self.held_out_loss if np.isfinite(self.held_out_loss) else None,
        }
        for later in store.steps():
            if later > self.step:
                shutil.rmtree(store.path(later), ignore_errors=True)
        path = store.save(self.step, state, tensors)
        self.saved = self.step
        return path

    def load(self, store: CheckpointStore, step: int | None = None) -> None:
        checkpoint = store.load(step)
        state: dict[str, Any] = checkpoint.state
        self.method.load(state["method"], checkpoint.tensors)
        self.step, self.saved, self.tokens, self.seconds = state["step"], state["step"], state["tokens"], state["seconds"]
        self.recent = state["recent"]
        self.held_out_loss = float("nan") if state["held_out_loss"] is None else state["held_out_loss"]

    def summary(self) -> Summary:
        if not np.isfinite(self.held_out_loss):
            self.evaluate()
        return Summary(
            name=self.spec.run.name,
            method=self.method.name,
            clusters=1 if self.baseline == "single" else self.spec.clusters.count,
            local_steps=self.spec.train.local_steps_at(self.step),
            parameters=self.layout.total,
            steps=self.step,
            rounds=self.method.rounds,
            tokens=self.tokens,
            bytes=self.method.bytes,
            loss=float(np.mean(self.recent)) if self.recent else self.held_out_loss,
            held_out_loss=self.held_out_loss,
            seconds=round(self.seconds, 3),
            tokens_per_second=round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            seed=self.spec.run.seed,
            spec_digest=spec_digest(self.spec),
            complete=self.done,
            codec=self.spec.codec.name if self.baseline == "none" else "",
        )


def simulate(
    spec: Spec,
    *,
    base: Path | str = ".",
    out: Path | str | None = None,
    baseline: Baseline = "none",
    resume: bool = False,
    checkpoint: int | None = None,
    observer: Callable[[StepRecord], None] | None = None,
    on_prepare: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Run a spec to its end, or until `stop` says so.

    Args:
        spec: what to train.
        base: folder that relative paths of the spec count from (where run.toml lies).
        out: the run's folder; nothing is written when it is left out.
        baseline: "none" is DiLoCo; "ddp" data-parallel over the same number of clusters; "single" one cluster alone.
        resume: go on with the run in `out`, bit for bit on the CPU; checkpoint: from this step instead of the newest.
        observer: called with every record. on_prepare: called while the data is being prepared.
        stop: asked after every step; when it says True, the run is saved and `Summary.complete` is False.

    Raises:
        SpecError, DataError, ModelError: the spec cannot be run. UsageError: `out` holds something else.
        CheckpointError: a checkpoint is missing, damaged or of another run. DivergedError: the loss is no number any more.
    """
    base, folder = Path(base), RunFolder(Path(out)) if out else None
    with ExitStack() as stack:
        if folder:
            folder.begin(resume=resume)
            stack.enter_context(folder.held())
        run = Simulation(spec, base=base, baseline=baseline, on_prepare=on_prepare)
        store = metrics = None
        if folder:
            store = folder.checkpoints(run.digest, spec.checkpoint.keep)
            if resume and (store.steps() or checkpoint is not None):
                run.load(store, checkpoint)
            elif resume and _other_run(folder, run.digest):  # it was killed before its first checkpoint, so it starts at step 0
                raise CheckpointError(
                    f"{folder.path} belongs to another run: its spec, data or model differ from the one given; resume with the run.toml it was started with, or choose another --out"
                )
            folder.write_run(
                spec=spec, base=base, baseline=baseline, vocab_size=run.dataset.vocab_size, layout=run.layout,
                data_digest=run.dataset.digest, tokenizer=run.dataset.folder / TOKENIZER_FOLDER,
            )  # fmt: skip
            metrics = stack.enter_context(MetricsFile(folder.metrics))
            metrics.truncate_after(run.step)
        _loop(run, store, metrics, observer, stop)
        if store and run.saved != run.step:
            run.save(store)
    summary = run.summary()
    if folder:
        write_summary(folder.summary, summary)
    return summary


def _other_run(folder: RunFolder, digest: str) -> bool:
    """Whether a folder without checkpoints is of another run. A damaged record is of none: it is written again, and nothing is lost."""
    try:
        return folder.digest() != digest
    except CheckpointError:
        return False


def _loop(
    run: Simulation,
    store: CheckpointStore | None,
    metrics: MetricsFile | None,
    observer: Callable[[StepRecord], None] | None,
    stop: Callable[[], bool],
) -> None:
    every = run.spec.checkpoint.every
    while not run.done and not stop():
        record = run.advance()
        if record and metrics:
            metrics.append(record)
        if record and observer:
            observer(record)
        if store and every and run.step % every == 0 and not run.done:
            run.save(store)


def fixed_batches(held_out: Dataset, sequences: int, size: int) -> list[NDArray[np.int64]]:
    """Evenly spread held-out sequences, always the same ones, in batches of `size`."""
    count = min(sequences, len(held_out))
    chosen = np.unique(np.linspace(0, len(held_out) - 1, count).astype(np.int64))
    return [held_out.batch(chosen[i : i + size]) for i in range(0, chosen.size, size)]


def records(out: Path | str) -> list[StepRecord]:
    """All records of a run's folder."""
    return list(read_records(RunFolder(Path(out)).metrics))
