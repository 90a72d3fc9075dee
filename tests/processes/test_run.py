"""Runs of real processes on loopback: store, agents, workers. Whatever is killed, frozen or late, all end with the same bits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.processes.runs import SLOW, ended_well, local_run, play, rounds, spec_of, steps_of, text, until

from isles.agent.access import access_to
from isles.agent.local import LocalRun
from isles.agent.result import collect
from isles.agent.view import read_run
from isles.simulator import Simulation
from isles.spec import Spec

__all__ = ["text"]  # a fixture


def simulated(spec: Spec) -> Simulation:
    simulation = Simulation(spec, base=Path())
    while not simulation.done:
        simulation.advance()
    return simulation


@pytest.mark.parametrize("overrides", [(), ("streaming.fragments=2", "streaming.overlap=3")], ids=["plain", "streaming"])
def test_a_real_run_ends_with_the_bits_of_the_simulated_one(text: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    spec = spec_of(text, 2, "run.steps=50", *overrides)

    async def scene() -> None:
        async with local_run(tmp_path, spec) as run:
            await run.start()
            await ended_well(run)
            simulation = simulated(spec)
            newest = sorted(run.cluster(0).checkpoints.glob("step-*"))[-1]
            assert np.array_equal(load_file(newest / "global.safetensors")["values"], simulation.method.values)
            summary = collect(run, seconds=1.0, complete=True)
            assert summary.held_out_loss == simulation.held_out_loss and summary.steps == 50

    play(scene)


def kill_cluster(run: LocalRun, number: int) -> None:
    """As a machine that loses its power: agent and workers at once."""
    workers = run.cluster(number).read_status().get("workers", [])
    for pid in [run.agents[number].pid, *workers]:
        os.kill(pid, signal.SIGKILL)
    run.agents[number].wait()


def test_a_cluster_killed_in_an_exchange_costs_the_others_nothing_and_comes_back(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with local_run(tmp_path, spec_of(text, 3), max_upload=SLOW) as run:
            await run.start()
            await until(run, lambda: rounds(run, 0) >= 2)
            log = run.cluster(2).log
            begun = log.read_text().count("begins")
            await until(run, lambda: log.read_text().count("begins") > begun)
            before = rounds(run, 0)
            kill_cluster(run, 2)
            await until(run, lambda: rounds(run, 0) >= before + 2, 20)
            run.start_agent(2)
            await ended_well(run)

    play(scene)


def test_killing_a_worker_the_store_and_an_agent_costs_no_step(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with local_run(tmp_path, spec_of(text, 2), max_upload=SLOW) as run:
            await run.start()
            await until(run, lambda: rounds(run, 0) >= 2)
            os.kill(run.cluster(0).read_status()["workers"][0], signal.SIGKILL)
            await until(run, lambda: "a worker ended with signal 9" in run.cluster(0).log.read_text())
            assert run.server is not None and run.server.pid is not None
            os.kill(run.server.pid, signal.SIGKILL)
            before = rounds(run, 1)
            await until(run, lambda: rounds(run, 1) >= before + 2)
            steps = steps_of(run, 1)
            assert steps == list(range(1, len(steps) + 1))  # neither the store nor the other's worker cost one
            run.agents[1].kill()
            run.agents[1].wait()
            run.start_agent(1)
            await until(run, lambda: "found the workers that were running" in run.cluster(1).log.read_text())
            await ended_well(run)
            steps = steps_of(run, 1)
            assert steps == sorted(set(steps))  # its worker went on where it was

    play(scene)


def test_a_frozen_cluster_is_dropped_and_catches_up_when_it_thaws(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with local_run(tmp_path, spec_of(text, 3), max_upload=SLOW) as run:
            await run.start()
            await until(run, lambda: rounds(run, 0) >= 2)
            pids = [run.agents[2].pid, *run.cluster(2).read_status()["workers"]]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            before, began = rounds(run, 0), time.monotonic()
            try:
                await until(run, lambda: rounds(run, 0) >= before + 2, 20)
                assert time.monotonic() - began < 12
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            await ended_well(run)

    play(scene)


def test_one_leaves_one_comes_late_and_one_cannot_be_reached(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        spec = spec_of(text, 4, "run.steps=600", "checkpoint.every=60")
        async with local_run(tmp_path, spec, max_upload=SLOW, outbound_only=[1], begin_with=3) as run:
            await run.start([0, 1, 2])
            await until(run, lambda: rounds(run, 0) >= 1)
            run.start_agent(3)
            await until(run, lambda: rounds(run, 0) >= 3 and bool(steps_of(run, 3)))
            run.agents[2].send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert (await run.wait([2])) == {2: 0}
            assert time.monotonic() - began < 25 and list(run.cluster(2).checkpoints.glob("step-*"))
            del run.agents[2]
            await ended_well(run)
            assert steps_of(run, 3)[0] > 20  # it began at the run's step

    play(scene)


def test_a_run_that_went_dark_goes_on_from_its_disks(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        spec = spec_of(text, 2)
        async with local_run(tmp_path, spec, max_upload=SLOW) as run:
            await run.start()
            await until(run, lambda: rounds(run, 0) >= 3)
            for number in (0, 1):
                kill_cluster(run, number)
            reached = rounds(run, 0)
        async with local_run(tmp_path, spec, max_upload=SLOW) as again:
            await again.start()
            await until(again, lambda: rounds(again, 0) > reached)
            await ended_well(again)

    play(scene)


def test_the_store_of_a_run_on_this_machine_shows_the_run(text: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with local_run(tmp_path, spec_of(text, 2)) as run:
            await run.start_store()
            state = await read_run(access_to(run.folder))
            assert state.summary()["steps"] == run.spec.run.steps

    play(scene)
