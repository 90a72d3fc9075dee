"""Runs in which a cluster has two ranks: they end with the bits that a cluster of one rank ends with, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.processes.runs import SLOW, ended_well, local_run, play, rounds, spec_of, steps_of, text, until

__all__ = ["text"]  # a fixture


def test_clusters_of_one_and_of_two_ranks_end_with_the_same_bits(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        spec = spec_of(text, 2, "run.steps=60", "streaming.fragments=2", "streaming.overlap=3")
        async with local_run(tmp_path, spec, ranks=[1, 2]) as run:
            await run.start()
            await until(run, lambda: len(run.cluster(1).read_status().get("workers", [])) == 2)
            await ended_well(run)

    play(scene)


def test_killing_any_of_two_ranks_or_their_agent_costs_the_run_nothing(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with local_run(tmp_path, spec_of(text, 2, "run.steps=200"), ranks=[1, 2], max_upload=SLOW) as run:
            await run.start()
            log, killed = run.cluster(1).log, []
            for begun, victim in enumerate((1, 0)):
                await until(run, lambda n=begun: log.read_text().count("workers begin at step") == n + 1)  # type: ignore[misc]
                await until(run, lambda n=begun: rounds(run, 1) >= n + 2)  # type: ignore[misc]
                workers = run.cluster(1).read_status()["workers"]
                os.kill(workers[victim], signal.SIGKILL)
                killed += workers
            await until(run, lambda: log.read_text().count("workers begin at step") == 3)
            run.agents[1].kill()
            run.agents[1].wait()
            run.start_agent(1)
            await until(run, lambda: "found the workers that were running" in log.read_text())
            await ended_well(run)
            steps = steps_of(run, 0)
            assert steps == list(range(1, len(steps) + 1))  # the other cluster lost no step
            assert not any(Path(f"/proc/{pid}").exists() for pid in killed)

    play(scene)


def test_ranks_that_are_told_to_stop_save_and_go_on_from_there(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        spec = spec_of(text, 1, "run.steps=200")
        async with local_run(tmp_path, spec, ranks=[2]) as run:
            await run.start()
            await until(run, lambda: rounds(run, 0) >= 2)
            run.agents[0].send_signal(signal.SIGTERM)
            assert (await run.wait()) == {0: 0}
        async with local_run(tmp_path, spec, ranks=[2]) as again:
            await again.start()
            await ended_well(again)
            assert "where they had stopped" in again.cluster(0).log.read_text()

    play(scene)
