"""What the scripts of this folder have in common: the values of a site, rounds that begin together, and a report as a line of JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--index", type=int, required=True, help="of this site")
    made.add_argument("--addresses", required=True, help="of all sites, with commas")
    made.add_argument("--folder", type=Path, required=True, help="empty, and the same for all sites")
    made.add_argument("--values", type=int, default=25_000_000)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--warm", type=int, default=1, help="rounds that are not counted")
    made.add_argument("--pause", type=float, default=2.0, help="seconds of idleness before a round")
    return made


def values(given: argparse.Namespace, index: int) -> torch.Tensor:
    """fp32, normally distributed, the same as those of benchmarks/agents.py."""
    return torch.from_numpy(np.random.default_rng(index).standard_normal(given.values, dtype=np.float32))


def together(given: argparse.Namespace, name: str) -> None:
    """Wait until all sites are here; over the disk, so that the lines stay idle."""
    count = len(given.addresses.split(","))
    (given.folder / f"{name}-{given.index}").touch()
    while not all((given.folder / f"{name}-{i}").exists() for i in range(count)):
        time.sleep(0.002)


def measure(
    given: argparse.Namespace, once: Callable[[int], torch.Tensor], ready: Callable[[int], None] = lambda _: None
) -> None:
    """once: does round i, and returns the average. ready: is done before, and not counted."""
    rows = []
    average = torch.zeros(0)
    for i in range(given.warm + given.repeats):
        ready(i)
        time.sleep(given.pause)
        together(given, f"round{i}")
        began, used = time.monotonic(), time.process_time()
        average = once(i)
        rows.append({"began": began, "ended": time.monotonic(), "cpu": time.process_time() - used})
        together(given, f"ended{i}")
    print(json.dumps({"index": given.index, "rows": rows[given.warm :], "rms_error": _error(given, average)}), flush=True)
    together(given, "done")


def _error(given: argparse.Namespace, average: torch.Tensor) -> float:
    """Root mean square, in standard deviations of a contribution."""
    count = len(given.addresses.split(","))
    exact = sum(values(given, i).double() for i in range(count)) / count
    return float((average.double() - exact).square().mean().sqrt())
