"""Speed of the codecs on one thread, as a fraction of a memory copy of the same fp32 values, and what they cost in size and error.

    python benchmarks/codec.py [--values 25M] [--repeats 15] [--json FILE]

Each repeat measures, one after the other in one process, the memory copy (numpy.copyto to a destination that exists and has been
touched) and the codec; every third also what one would write in torch without a kernel of one's own (TorchCodec below: vectorised,
eager, without the packing of top-k's positions; not isles.codec.reference, which is written to be read). All go through the same
vectors in chunks of 2**20 values, far more than the caches hold, so a machine whose speed drifts drifts for all; ratios are taken
within a repeat. Encoding reads two vectors where the copy reads one. What is decoded are the chunks that encoding wrote: with
--values 25M those of the block codecs still fit a last-level cache of 32 MiB, as they would fresh from the network.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from isles.codec import CHUNK_VALUES, Codec, decode, decode_accumulate, get_codec
from isles.codec.format import SPARSE_BLOCK, TOP_CODE
from isles.spec import CodecTable, parse_size

Floats = NDArray[np.float32]
BARS = {
    ("int8", "encode"): 0.45,
    ("int4", "encode"): 0.35,
    ("int8", "decode_accumulate"): 0.35,
    ("int4", "decode_accumulate"): 0.35,
}
TABLES = {
    "fp32": CodecTable(name="fp32"),
    "bf16": CodecTable(name="bf16"),
    "int8": CodecTable(name="int8"),
    "int8 stochastic": CodecTable(name="int8", rounding="stochastic"),
    "int4": CodecTable(name="int4"),
    "int4 stochastic": CodecTable(name="int4", rounding="stochastic"),
    "topk": CodecTable(name="topk"),
}
MEAN_ERROR_BAR = 1e-4  # of sigma, for an average of clusters


@dataclass(frozen=True)
class Ratio:
    """Speed as a fraction of the memory copy's, over the repeats."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Speed:
    """One operation of one codec. Speeds in values per second, medians over the repeats."""

    codec: str
    operation: str
    values_per_second: float
    torch_values_per_second: float
    ratio: Ratio
    bar: float | None


@dataclass(frozen=True)
class Cost:
    """What a codec costs in bytes and exactness, on gaussian values; errors in units of sigma."""

    codec: str
    compression: float  # fp32 bytes / bytes of the chunks
    rms_error: float
    mean_errors: dict[int, float]  # by the number of clusters averaged


Packed = tuple[Tensor, ...]


class TorchCodec:
    """Each codec as one would write it in torch: a few vectorised operations, each a pass over the chunk."""

    def __init__(self, table: CodecTable) -> None:
        self.table, self.block = table, get_codec(table).block_size

    def encode(self, base: Tensor, local: Tensor, residual: Tensor) -> Packed:
        if self.table.name == "topk":
            return self._encode_sparse(residual.mul_(self.table.residual_decay).add_(base).sub_(local))
        d = base - local
        if not bool(torch.isfinite(d).all()):
            raise ValueError("not finite")
        if self.table.name == "fp32":
            return (d,)
        if self.table.name == "bf16":
            return (d.to(torch.bfloat16),)
        rows, top = d.view(-1, self.block), TOP_CODE[self.table.name]
        scale = rows.abs().amax(1, keepdim=True).div_(top).clamp_(min=2.0**-126).to(torch.bfloat16)
        scaled = rows / scale.float()
        if self.table.rounding == "stochastic":
            scaled += torch.rand_like(scaled) - 0.5
        codes = scaled.round_().clamp_(-top, top).to(torch.int8)
        if top == TOP_CODE["int4"]:
            low, high = codes.chunk(2, dim=1)
            codes = (low & 15) | (high << 4)
        return scale, codes

    def _encode_sparse(self, e: Tensor) -> Packed:
        rows = e.view(-1, SPARSE_BLOCK)
        magnitudes, positions = rows.abs().topk(self.table.k, dim=1)
        over = magnitudes >= magnitudes.mean(1, keepdim=True)
        levels = torch.stack([(magnitudes * m).sum(1) / m.sum(1).clamp(min=1) for m in (~over, over)], 1).to(torch.bfloat16)
        codes = (rows.gather(1, positions) < 0).to(torch.uint8) + 2 * over.to(torch.uint8)
        packed = levels, positions.to(torch.int16), codes
        rows.scatter_add_(1, positions, -self._levels(packed))
        return packed

    @staticmethod
    def _levels(packed: Packed) -> Tensor:
        levels, _, codes = packed
        values = levels.float().gather(1, (codes >> 1).long())
        return torch.where(codes & 1 == 1, -values, values)

    def _values(self, packed: Packed) -> Tensor:
        if len(packed) == 1:
            return packed[0].float()
        scale, codes = packed
        if self.table.name == "int4":
            codes = torch.cat([codes << 4 >> 4, codes >> 4], 1)
        return (codes.float() * scale.float()).view(-1)

    def decode(self, packed: Packed, out: Tensor) -> None:
        if self.table.name == "topk":
            out.zero_().view(-1, SPARSE_BLOCK).scatter_(1, packed[1].long(), self._levels(packed))
        else:
            out.copy_(self._values(packed))

    def decode_accumulate(self, packed: Packed, weight: float, total: Tensor) -> None:
        if self.table.name == "topk":
            total.view(-1, SPARSE_BLOCK).scatter_add_(1, packed[1].long(), self._levels(packed) * weight)
        else:
            total.add_(self._values(packed), alpha=weight)


class Workload:
    """The vectors, and every operation as a function of a chunk's number."""

    def __init__(self, values: int) -> None:
        rng = np.random.default_rng(0)
        self.base = rng.standard_normal(values, dtype=np.float32)
        self.local = self.base + np.float32(1e-2) * rng.standard_normal(values, dtype=np.float32)
        self.target = np.ones(values, np.float32)  # touched: no page is new while the clock runs
        self.residual = np.zeros(values, np.float32)
        self.parts = [slice(i, min(i + CHUNK_VALUES, values)) for i in range(0, values, CHUNK_VALUES)]

    def copy(self, i: int) -> None:
        np.copyto(self.target[self.parts[i]], self.base[self.parts[i]])

    def operations(self, codec: Codec) -> dict[str, Callable[[int], object]]:
        buffers = [np.ones(codec.encoded_size(p.stop - p.start), np.uint8) for p in self.parts]

        def encode(i: int) -> object:
            part = self.parts[i]
            rest = self.residual[part] if codec.needs_residual else None
            return codec.encode(self.base[part], self.local[part], offset=part.start, residual=rest, out=buffers[i])

        return {
            "encode": encode,
            "decode": lambda i: decode(buffers[i], self.target[self.parts[i]]),
            "decode_accumulate": lambda i: decode_accumulate(buffers[i], 0.25, self.target[self.parts[i]]),
        }

    def torch_operations(self, table: CodecTable) -> tuple[int, dict[str, Callable[[int], object]]]:
        """The same operations in torch, and over how many values they go: the whole top-k blocks of each chunk."""
        codec, parts = TorchCodec(table), [slice(p.start, p.stop - (p.stop - p.start) % SPARSE_BLOCK) for p in self.parts]
        base, local, target, residual = (torch.from_numpy(v) for v in (self.base, self.local, self.target, self.residual))

        def encode(i: int) -> Packed:
            return codec.encode(base[parts[i]], local[parts[i]], residual[parts[i]])

        chunks = [encode(i) for i in range(len(parts))]
        return sum(p.stop - p.start for p in parts), {
            "encode": encode,
            "decode": lambda i: codec.decode(chunks[i], target[parts[i]]),
            "decode_accumulate": lambda i: codec.decode_accumulate(chunks[i], 0.25, target[parts[i]]),
        }


def keep_freed_memory() -> None:
    """Tell glibc to keep what torch's temporaries free. Left to itself it gives them back or not as chance has it, and the page
    faults make the same torch operation up to four times slower; the compiled codecs have no temporaries. Elsewhere: no effect."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD


def seconds(run: Callable[[int], object], times: int) -> float:
    began = time.perf_counter()
    for i in range(times):
        run(i)
    return time.perf_counter() - began


def measure_speed(label: str, work: Workload, repeats: int) -> list[Speed]:
    """All three operations of a codec, each beside the copy, repeat by repeat."""
    table, chunks = TABLES[label], len(work.parts)
    ours = work.operations(get_codec(table))
    torch_values, theirs = work.torch_operations(table)
    speeds = []
    for name, operation in ours.items():
        seconds(operation, chunks)  # compiles, and warms up
        seconds(theirs[name], chunks)
        taken: dict[str, list[float]] = {"copy": [], "codec": [], "torch": []}
        for repeat in range(repeats):
            sides = [("copy", work.copy), ("codec", operation)]
            for side, run in sides if repeat % 2 else reversed(sides):
                taken[side].append(seconds(run, chunks))
            if repeat % 3 == 0:
                taken["torch"].append(seconds(theirs[name], chunks))
        ratios = [c / o for c, o in zip(taken["copy"], taken["codec"], strict=True)]
        ratio = Ratio(min(ratios), statistics.median(ratios), max(ratios))
        speed = work.base.size / statistics.median(taken["codec"])
        torch_speed = torch_values / statistics.median(taken["torch"])
        speeds.append(Speed(label, name, speed, torch_speed, ratio, BARS.get((label, name))))
    return speeds


def measure_cost(label: str, values: int = 4 * CHUNK_VALUES, clusters: int = 8) -> Cost:
    """Encode gaussian contributions and compare their running average with the exact one. topk: its first round, which leaves most
    of the value in the residual, so only its size says something."""
    codec, rng = get_codec(TABLES[label]), np.random.default_rng(1)
    error, square, sent, means = np.zeros(values), 0.0, 0, {}
    for cluster in range(1, clusters + 1):
        exact = rng.standard_normal(values, dtype=np.float32)
        for start in range(0, values, CHUNK_VALUES):
            part = exact[start : start + CHUNK_VALUES]
            rest = np.zeros_like(part) if codec.needs_residual else None
            chunk = codec.encode(part, offset=start, seed=cluster, residual=rest)
            sent += chunk.nbytes
            difference = decode(chunk).astype(np.float64) - part
            error[start : start + CHUNK_VALUES] += difference
            square += float(np.square(difference).sum())
        if cluster >= 2:
            means[cluster] = float(error.mean()) / cluster
    return Cost(label, 4 * values * clusters / sent, (square / (values * clusters)) ** 0.5, means)


def speed_table(speeds: list[Speed], copy_speed: float) -> Table:
    table = Table(
        "codec", "operation", "Mvalues/s", "of memcpy: min", "median", "max", "bar", "torch Mvalues/s", "times torch",
        title=f"one thread; memcpy {copy_speed / 1e6:,.0f} Mvalues/s ({copy_speed * 4 / 1e9:.1f} GB/s of fp32)",
    )  # fmt: skip
    for s in speeds:
        verdict = "" if s.bar is None else f"{s.bar} {'met' if s.ratio.median >= s.bar else 'missed'}"
        ratios = (f"{r:.2f}" for r in (s.ratio.min, s.ratio.median, s.ratio.max))
        times = s.values_per_second / s.torch_values_per_second
        torch_speed = f"{s.torch_values_per_second / 1e6:,.1f}"
        table.add_row(s.codec, s.operation, f"{s.values_per_second / 1e6:,.0f}", *ratios, verdict, torch_speed, f"{times:,.0f}")
    return table


def cost_table(costs: list[Cost]) -> Table:
    table = Table(
        "codec",
        "compression",
        "rms error",
        "largest |mean error| of 2..8 clusters",
        f"bar {MEAN_ERROR_BAR:g}",
        title="gaussian values, in sigma",
    )
    for c in costs:
        worst = max(abs(e) for e in c.mean_errors.values())
        sparse = c.codec == "topk"  # what it has not sent yet is no error
        verdict = "" if sparse else "met" if worst < MEAN_ERROR_BAR else "missed"
        table.add_row(
            c.codec,
            f"{c.compression:.2f}",
            "in the residual" if sparse else f"{c.rms_error:.2e}",
            "" if sparse else f"{worst:.1e}",
            verdict,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", default="25M", help="values of the vector, as 25M; far above the caches (default: 25M)")
    parser.add_argument("--repeats", type=int, default=15, help="alternations of copy and codec (default: 15)")
    parser.add_argument("--codecs", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if (values := parse_size(args.values)) < SPARSE_BLOCK or args.repeats < 1:
        parser.error(f"--values must be at least {SPARSE_BLOCK} and --repeats at least 1")
    work = Workload(values)
    seconds(work.copy, len(work.parts))
    copy_speed = work.base.size / statistics.median(seconds(work.copy, len(work.parts)) for _ in range(args.repeats))
    speeds = [speed for label in args.codecs for speed in measure_speed(label, work, args.repeats)]
    costs = [measure_cost(label) for label in args.codecs]
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(speed_table(speeds, copy_speed))
    console.print(cost_table(costs))
    if args.json:
        figures = {
            "copy_values_per_second": copy_speed,
            "speeds": [asdict(s) for s in speeds],
            "costs": [asdict(c) for c in costs],
        }
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
