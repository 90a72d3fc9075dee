"""What a run reports of itself: typed records, one JSON object a line.

Every command, picture and table reads these records and nothing else, so what is printed live and what is read back a
year later are the same figures. The file is plain JSON lines because it can be cut, tailed and read by anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from isles.errors import DataError


@dataclass(frozen=True)
class StepRecord:
    """One local step of the run, over all clusters. Losses in nats per token; every count is since the run's start."""

    step: int  # local steps done by a cluster of full speed
    round: int  # rounds committed (all fragments together)
    tokens: int  # tokens trained, all clusters together
    loss: float  # training loss, mean over the clusters that trained
    held_out_loss: float | None  # of the global parameters, where it was measured
    bytes: int  # bytes that all clusters together would have sent over the internet
    lr: float  # inner learning rate
    grad_norm: float  # before clipping, mean over the clusters
    clusters: int  # clusters that trained in this step
    seconds: float  # wall time spent training, resumed parts included


@dataclass(frozen=True)
class Summary:
    """What is left of a run when it ended. `summary.json` holds exactly these fields."""

    name: str
    method: str  # diloco, ddp, single
    clusters: int
    parameters: int  # trainable parameters of the model
    steps: int
    rounds: int
    tokens: int
    bytes: int  # sent by all clusters together
    loss: float  # training loss, mean of the last 20 records
    held_out_loss: float  # of the global parameters at the end, nats per token
    seconds: float
    tokens_per_second: float
    seed: int
    spec_digest: str  # blake3 of the spec
    complete: bool  # False when the run was interrupted


def to_json_line(record: StepRecord) -> str:
    return json.dumps(asdict(record), allow_nan=False)


def read_records(path: Path) -> Iterator[StepRecord]:
    """Read metrics.jsonl. A last line cut by a crash is left out; any other bad line raises DataError with its number."""
    names = {f.name for f in fields(StepRecord)}
    lines = path.read_text().split("\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is empty, or was cut
        try:
            yield StepRecord(**{k: v for k, v in json.loads(line).items() if k in names})
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, line {number}, is no record of a run ({error}); remove the line or the run's folder") from error
