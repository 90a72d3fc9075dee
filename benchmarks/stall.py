"""For how long workers stand still for an exchange, and what the whole machinery costs them in tokens per second; over the test internet, needs root.

    python benchmarks/stall.py                                    0.8M and 25M parameters at 20 and 100 Mbit/s
    python benchmarks/stall.py --only 25M@20 --rounds 12          one of them
    python benchmarks/stall.py --json docs/results/stall.json

Two clusters at 100 ms, as training scripts of their own (`isles.Cluster`), int4. One trains a transformer on a core that nothing else uses; the other has the same parameters and keeps
the same pace (a little faster, so that nobody waits for it) but computes nothing; it, both agents, the store and the test internet share the other core. A first run finds out how
long an exchange takes, and rounds are then made twice as long. Three runs follow: without overlap; with overlap of 0.65 of a round; and
with four fragments and that overlap. `stalled` is the share of the wall time in which the training cluster stood still; the ratio is its tokens per second, of each round, over those of
the same loop without isles, before and after.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.netlab import Lab, Line, Pair, Spec

MBIT = 125e3  # bytes/s
RTT = 0.1
SIZES = {"0.8M": (4, 128, 4, 64), "25M": (8, 512, 1, 64)}  # layers, width, sequences in a batch, tokens in one
LINES = (20, 100)  # Mbit/s
BARE = 12.0  # seconds of training without isles, before and after
FASTER = 0.97  # of the time of a step, for the cluster that keeps the pace
ISLES = (sys.executable, "-m", "isles")
STORE = "10.77.0.3:7500"
RUN = """
[run]
name = "stall"
steps = {steps}
[model]
module = "stall"
[train]
local_steps = {local_steps}
[codec]
name = "int4"
[streaming]
fragments = {fragments}
overlap = {overlap}
[clusters]
count = 2
"""


# --- what runs in a site


def train(where: str, size: str, folder: Path, paces: bool) -> None:
    """One cluster; writes what it saw to the folder."""
    import torch
    import torch.nn.functional as F

    import isles
    from isles.model import build_model
    from isles.spec import ModelTable

    torch.set_num_threads(1)
    layers, width, batch, length = SIZES[size]
    table = ModelTable(family="llama", layers=layers, hidden_size=width, heads=4)
    model = build_model(table, vocab_size=256, sequence_length=length, seed=0, base=Path())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, (batch, length + 1), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        loss = F.cross_entropy(model(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def bare() -> float:
        """Seconds of a step without isles."""
        began, count = time.monotonic(), 0
        while time.monotonic() - began < BARE:
            step()
            count += 1
        return (time.monotonic() - began) / count

    pace = folder / "pace"
    if paces:
        while not pace.exists():
            time.sleep(0.05)
        seconds = FASTER * float(pace.read_text())
    else:
        alone([0])
        before = bare()
        pace.with_suffix(".new").write_text(str(before))
        pace.with_suffix(".new").rename(pace)
        alone([1])  # for the agent, which inherits it
    ends = []
    with isles.Cluster(model, where, out=folder / ("pacer" if paces else "trainer")) as cluster:
        if not paces:
            alone([0])
        next_at = time.monotonic()
        while cluster.running:
            if paces:
                next_at = max(next_at + seconds, time.monotonic())
                time.sleep(max(0.0, next_at - time.monotonic()))
                loss = 1.0
            else:
                loss = step()
            cluster.step(loss=loss, tokens=batch * length)
            ends.append(time.monotonic())
    if not paces:
        after = bare()
        count = sum(p.numel() for p in model.parameters())
        (folder / "seen.json").write_text(json.dumps({"bare": [before, after], "ends": ends, "parameters": count}))


def alone(cores: list[int]) -> None:
    """Move all threads of this process to these cores."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


# --- the runs


def play(size: str, rate: float, *, local_steps: int, rounds: int, fragments: int, overlap: int) -> dict[str, Any]:
    """One run of so many rounds of so many steps. Raises RuntimeError."""
    sites = Spec.equal(3, Line(rate * MBIT, rate * MBIT), Pair(RTT, 0.0), c2=Line(1e3 * MBIT, 1e3 * MBIT))
    with tempfile.TemporaryDirectory() as temporary, Lab(sites) as lab:
        folder, steps = Path(temporary), local_steps * rounds
        (folder / "run.toml").write_text(RUN.format(steps=steps, local_steps=local_steps, fragments=fragments, overlap=overlap))
        subprocess.run([*ISLES, "create", "run.toml", "--store", STORE], cwd=folder, check=True, capture_output=True)
        with (folder / "out").open("w") as out:
            more: dict[str, Any] = {"cwd": folder, "stdout": out, "stderr": out, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
            store = lab.popen("c2", ["taskset", "-c", "1", *ISLES, "store"], **more)
            scripts = []
            for site, words in (("c0", []), ("c1", ["--paces"])):
                subprocess.run([*ISLES, "invite", site], cwd=folder, check=True, capture_output=True)
                words = [sys.executable, __file__, "--train", f"{site}.invite", "--size", size, "--folder", str(folder), *words]
                scripts.append(lab.popen(site, ["taskset", "-c", "1", *words], **more))
            codes = [script.wait() for script in scripts]
            store.send_signal(signal.SIGTERM)
            store.wait()
        if any(codes):
            raise RuntimeError((folder / "out").read_text()[-3000:])
        rows = [json.loads(line) for line in (folder / "trainer" / "metrics.jsonl").read_text().splitlines()]
        seen = json.loads((folder / "seen.json").read_text())
        exchange = json.loads((folder / "trainer" / "status.json").read_text())["exchange_seconds"]
    return summary(seen, rows, local_steps, exchange)


def summary(seen: dict[str, Any], rows: list[dict[str, Any]], local_steps: int, exchange: list[float]) -> dict[str, Any]:
    """The first round is left out, as the line is learned in it; and of the last the part that nobody waits for any more."""
    bare, ends, stalled = statistics.mean(seen["bare"]), seen["ends"], [row["stalled"] for row in rows]
    edges = range(local_steps, len(ends) - 1, local_steps)
    spans = [(a, b) for a, b in ((e, e + local_steps) for e in edges) if b < len(ends)]
    ratios = [bare * local_steps / (ends[b] - ends[a]) for a, b in spans]
    stalls = [sum(stalled[a + 1 : b + 1]) / (ends[b] - ends[a]) for a, b in spans]
    return {
        "parameters": seen["parameters"], "step_seconds": bare, "bare": seen["bare"], "exchange_seconds": exchange, "stalled_seconds": [sum(stalled[a + 1 : b + 1]) for a, b in spans],
        "ratio": {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)},
        "stalled": {"min": min(stalls), "mean": statistics.mean(stalls), "max": max(stalls)},
    }  # fmt: skip


def condition(size: str, rate: float, rounds: int) -> dict[str, Any]:
    first = play(size, rate, local_steps=20, rounds=4, fragments=1, overlap=0)
    seconds = statistics.median(first["stalled_seconds"])
    local_steps = max(8, math.ceil(2 * seconds / first["step_seconds"] / 4) * 4)
    tau = math.ceil(0.65 * local_steps)
    row: dict[str, Any] = {"size": size, "rate": rate, "exchange": seconds, "local_steps": local_steps, "overlap": tau}
    for name, fragments, overlap in (("no overlap", 1, 0), ("overlap", 1, tau), ("four fragments", 4, tau)):
        row[name] = play(size, rate, local_steps=local_steps, rounds=rounds, fragments=fragments, overlap=overlap)
        stalled, ratio = row[name]["stalled"], row[name]["ratio"]
        print(
            f"{size:5} {rate:3} Mbit/s, {local_steps} steps of {1e3 * first['step_seconds']:.0f} ms, exchange {seconds:.2f} s, {name:14}: "
            f"stalled {stalled['min']:.4f} / {stalled['mean']:.4f} / {stalled['max']:.4f}, "
            f"tokens/s {ratio['min']:.3f} / {ratio['median']:.3f} / {ratio['max']:.3f} of bare", flush=True,
        )  # fmt: skip
    return row


def main() -> None:
    names = [f"{size}@{rate}" for size in SIZES for rate in LINES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="SIZE@RATE", default=names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    for word in ("--train", "--size", "--folder"):
        parser.add_argument(word, help=argparse.SUPPRESS)
    parser.add_argument("--paces", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train, given.size, Path(given.folder), given.paces)
        return
    rows = [condition(size, rate, given.rounds) for size in SIZES for rate in LINES if f"{size}@{rate}" in given.only]
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
