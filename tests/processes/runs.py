"""What the tests of whole runs share: text, a spec, a run that always ends, and looks at how it stands."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isles.agent.local import LocalRun
from isles.data import ByteTokenizer, prepare
from isles.spec import Spec, spec_from

SLOW = 150_000.0  # bytes/s: an exchange of the model below then takes more than a second


def write_text(out: Path) -> None:
    """Prepare a little data in the folder `out`."""
    rng = np.random.default_rng(3)
    words = ["island", "reef", "tide", "sail", "harbour", "wind", "shore", "lagoon", "palm", "current"]
    with tempfile.TemporaryDirectory() as folder:
        for i in range(40):
            (Path(folder) / f"{i}.txt").write_text(" ".join(rng.choice(words, 600)))
        prepare([folder], out, tokenizer=ByteTokenizer(), held_out=0.05)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "data"
    write_text(out)
    return out


def spec_of(data: Path, count: int, *overrides: str) -> Spec:
    tables: dict[str, Any] = {
        "run": {"steps": 300, "seed": 1},
        "model": {"family": "llama", "layers": 2, "hidden_size": 32, "heads": 2},
        "data": {"path": str(data), "sequence_length": 32},
        "train": {"local_steps": 20, "batch_size": 2, "threads": 1, "device": "cpu"},
        "optimizer": {"lr": 5e-3, "warmup_steps": 20},
        "outer": {"lr": 0.9, "momentum": 0.3},
        "codec": {"name": "fp32"},
        "clusters": {"count": count},
        "eval": {"sequences": 16},
    }
    return spec_from(tables, overrides)


@asynccontextmanager
async def local_run(folder: Path, spec: Spec, **more: Any) -> AsyncIterator[LocalRun]:
    run = LocalRun(folder / "run", spec, Path(), **more)
    try:
        yield run
    finally:
        await run.stop(5.0)


def play(scene: Callable[[], Awaitable[None]], seconds: float = 380) -> None:
    asyncio.run(asyncio.wait_for(scene(), seconds))  # type: ignore[arg-type]


async def until(run: LocalRun, condition: Callable[[], bool], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(run.cluster(n).log.read_text()[-1500:] for n in run.agents)
            raise AssertionError(f"{[run.cluster(n).read_status() for n in run.agents]}\n{logs}")
        await asyncio.sleep(0.05)


def rounds(run: LocalRun, number: int) -> int:
    return sum(run.cluster(number).read_status().get("rounds", [0]))


def steps_of(run: LocalRun, number: int) -> list[int]:
    """The local steps that a cluster's workers have done, one by one."""
    path = run.cluster(number).metrics
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def digests(run: LocalRun) -> set[tuple[str, ...]]:
    return {tuple(run.cluster(n).read_status()["digests"]) for n in run.agents}


async def ended_well(run: LocalRun) -> None:
    """All clusters have done the run's last step and hold the same bits."""
    codes = await run.wait()
    logs = "\n".join(run.cluster(n).log.read_text()[-2500:] for n in run.agents)
    assert set(codes.values()) == {0}, logs
    assert len(digests(run)) == 1, logs
    for number in run.agents:
        assert run.cluster(number).read_status()["step"] == run.spec.run.steps, logs
