"""The long campaign, and the replay of a seed.

python -m tests.simulation --seeds 100000        play so many seeds on all cores; every failing one is named
python -m tests.simulation --replay 4711         play one seed and print what happened, line by line
python -m tests.simulation --mutations           the first seed that finds each planted bug
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from rich.progress import track
from tests.simulation.mutations import MUTATIONS, planted
from tests.simulation.run import Violation, play

BATCH = 100


def batch(start: int) -> tuple[list[str], int, int, int]:
    """Play seeds start..start + BATCH: violations, rounds, events, attempts beyond the first."""
    failed, rounds, events, attempts = [], 0, 0, 0
    for seed in range(start, start + BATCH):
        try:
            outcome = play(seed)
        except Violation as error:
            failed.append(str(error))
        else:
            rounds, events, attempts = rounds + outcome.rounds, events + outcome.events, attempts + outcome.attempts
    return failed, rounds, events, attempts


def campaign(seeds: int, start: int, jobs: int) -> int:
    began, failed, rounds, events, attempts = time.monotonic(), [], 0, 0, 0
    with ProcessPoolExecutor(jobs) as pool:
        starts = range(start, start + seeds, BATCH)
        for bad, r, e, a in track(pool.map(batch, starts), total=len(starts), description="seeds"):
            failed += bad
            rounds, events, attempts = rounds + r, events + e, attempts + a
    print("\n".join(failed))
    print(
        f"{len(starts) * BATCH:,} seeds from {start}: {len(failed)} failed; {rounds:,} rounds, {attempts:,} attempts after a "
        f"first one failed, {events:,} events, {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


def find_mutations(names: list[str], seeds: int) -> int:
    missed = 0
    for name in names or MUTATIONS:
        with planted(name):
            found = next((s for s in range(seeds) if fails(s)), None)
        missed += found is None
        print(f"{name}: {'not found' if found is None else f'seed {found}'}")
    return 1 if missed else 0


def fails(seed: int) -> bool:
    """Whether a seed finds something wrong. A mutation may also make the simulated cluster itself stumble."""
    try:
        play(seed)
    except Exception:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int)
    parser.add_argument(
        "--mutations", nargs="*", metavar="NAME", choices=[*MUTATIONS, []], help="all of them when none is named"
    )
    given = parser.parse_args()
    if given.replay is not None:
        print(play(given.replay, trace=True))
        return 0
    return (
        find_mutations(given.mutations, given.seeds)
        if given.mutations is not None
        else campaign(given.seeds, given.start, given.jobs)
    )


if __name__ == "__main__":
    sys.exit(main())
