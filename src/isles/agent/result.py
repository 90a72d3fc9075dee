"""What came of a local run: its clusters' records as those of one run, the final parameters, and their held-out loss.

The run's folder then is like that of `isles simulate`: it can be compared, sampled and exported.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from isles.agent.local import LocalRun
from isles.data import Dataset, open_or_prepare
from isles.data.index import TOKENIZER_FOLDER
from isles.errors import CheckpointError
from isles.metrics import MetricsFile, StepRecord, Summary, write_summary
from isles.model import FlatParameters, Layout, build_model
from isles.simulator.folder import RunFolder, run_digest
from isles.simulator.research import LOSS_WINDOW, Simulation, fixed_batches
from isles.spec.digest import spec_digest
from isles.worker import choose_device, held_out_loss
from isles.worker.checkpoint import Checkpoint, CheckpointStore


def steps_of(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a cluster's metrics.jsonl; one that a crash cut is left out, and of a step done twice the later line counts."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def collect(run: LocalRun, *, seconds: float, complete: bool) -> Summary:
    """Gather the result of a local run in its folder. Raises CheckpointError when no cluster has saved anything."""
    spec, base = run.spec, run.base
    dataset = open_or_prepare(spec.data, base)
    model = build_model(
        spec.model, vocab_size=dataset.vocab_size, sequence_length=spec.data.sequence_length, seed=spec.run.seed, base=base
    )
    layout = Layout.of(model, spec.streaming.fragments, spec.streaming.order)
    digest = run_digest(spec, "none", dataset.digest, layout)
    newest = _newest(run, digest)
    folder = RunFolder(run.folder)
    folder.write_run(
        spec=spec, base=base, baseline="none", vocab_size=dataset.vocab_size, layout=layout, data_digest=dataset.digest,
        tokenizer=dataset.folder / TOKENIZER_FOLDER,
    )  # fmt: skip
    folder.checkpoints(digest, spec.checkpoint.keep).save(newest.step, newest.state, {"global": newest.tensors["global"]})
    FlatParameters(model, layout).copy_from(newest.tensors["global"]["values"], 0, layout.total)
    held_out = Dataset.open(dataset.folder, spec.data.sequence_length, "held_out")
    device = choose_device(spec.train.device)
    batches = fixed_batches(held_out, spec.eval.sequences, spec.train.micro_batch_size or spec.train.batch_size)
    loss = held_out_loss(model.to(device), batches, device)
    records = _merged(run, loss)
    (folder.metrics).unlink(missing_ok=True)
    with MetricsFile(folder.metrics) as metrics:
        for record in records:
            metrics.append(record)
    summary = _summary(run, records, layout, loss, newest, seconds=seconds, complete=complete)
    write_summary(folder.summary, summary)
    return summary


def differs_from_simulation(run: LocalRun, progress: Callable[[int], None]) -> str:
    """Simulate the same run and hold its global parameters against the real one's: empty when they have the same bits, else what differs.

    progress: is told the simulation's step. Raises what `Simulation` does, and CheckpointError."""
    simulation = Simulation(run.spec, base=run.base)
    while not simulation.done:
        simulation.advance()
        progress(simulation.step)
    theirs = _newest(run, simulation.digest).tensors["global"]["values"].numpy()
    differing = int(np.count_nonzero(simulation.method.values.view(np.uint32) != theirs.view(np.uint32)))
    return f"{differing:,} of {theirs.size:,} global parameters differ from the simulation's" if differing else ""


def _newest(run: LocalRun, digest: str) -> Checkpoint:
    """The checkpoint that is furthest on, of any cluster."""
    found: list[tuple[int, int, CheckpointStore]] = []
    for number in range(run.count):
        store = CheckpointStore(run.cluster(number).checkpoints, run_digest=digest)
        found += [(steps[-1], -number, store)] if (steps := store.steps()) else []
    if not found:
        raise CheckpointError(f"no cluster in {run.folder} has saved anything; the run was stopped before its first checkpoint")
    return max(found, key=lambda row: row[:2])[2].load()


def _merged(run: LocalRun, held_out: float) -> list[StepRecord]:
    """One record a step, over the clusters that did it."""
    by_step: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for number in range(run.count):
        for row in steps_of(run.cluster(number).metrics):
            by_step[row["step"]][number] = row
    sent = sum(run.cluster(n).read_status().get("bytes_up", 0) for n in range(run.count))
    records, tokens, seconds = [], 0, 0.0
    last = max(by_step, default=0)
    for step in sorted(by_step):
        rows = list(by_step[step].values())
        tokens += sum(row["tokens"] for row in rows)
        seconds += float(np.mean([row["seconds"] for row in rows]))
        rounds = sum(max(row["rounds"][i] for row in rows) for i in range(len(rows[0]["rounds"])))
        records.append(
            StepRecord(
                step=step, round=rounds, tokens=tokens, loss=float(np.mean([r["loss"] for r in rows])),
                held_out_loss=held_out if step == last else None, bytes=sent * step // last,
                lr=rows[0]["lr"], grad_norm=float(np.mean([r["grad_norm"] for r in rows])), clusters=len(rows), seconds=round(seconds, 3),
            )
        )  # fmt: skip
    return records


def _summary(
    run: LocalRun, records: list[StepRecord], layout: Layout, loss: float, newest: Checkpoint, *, seconds: float, complete: bool
) -> Summary:  # fmt: skip
    spec, tokens = run.spec, records[-1].tokens if records else 0
    recent = [record.loss for record in records[-LOSS_WINDOW:]]
    return Summary(
        name=spec.run.name, method="diloco", clusters=run.count, local_steps=spec.train.local_steps_at(newest.step),
        parameters=layout.total, steps=records[-1].step if records else 0, rounds=sum(newest.state["applied"]), tokens=tokens,
        bytes=records[-1].bytes if records else 0, loss=float(np.mean(recent)) if recent else loss, held_out_loss=loss,
        seconds=round(seconds, 3), tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0, seed=spec.run.seed,
        spec_digest=spec_digest(spec), complete=complete, codec=spec.codec.name,
    )  # fmt: skip
