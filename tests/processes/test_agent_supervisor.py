"""Workers are restarted when they fail, given up when that does not help, and adopted by the next agent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isles.agent import supervisor as module
from isles.agent.supervisor import Process, Supervisor, WorkersFailed

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def made() -> Iterator[list[Supervisor]]:
    """Supervisors whose processes are gone when the test ends, however it ends."""
    supervisors: list[Supervisor] = []
    yield supervisors
    for supervisor in supervisors:
        for process in supervisor._group:
            process.send(signal.SIGKILL)


def supervise(
    made: list[Supervisor], folder: Path, command: list[str], ranks: int = 1, over: Callable[[], bool] = lambda: False
) -> Supervisor:
    supervisor = Supervisor(command, ranks, record=folder / "workers.json", log_file=folder / "workers.log", over=over)
    made.append(supervisor)
    return supervisor


async def until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_ranks_are_told_who_they_are_and_end_well(made: list[Supervisor], tmp_path: Path) -> None:
    program = "import os; open(os.environ['RANK'], 'w').write(' '.join(os.environ[k] for k in ('LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))"
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {program}"]
    supervisor = supervise(made, tmp_path, command, 2, over=lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    asyncio.run(asyncio.wait_for(supervisor.run(), 20))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0 2 127.0.0.1", "1 2 127.0.0.1"]


def test_a_worker_that_is_killed_takes_its_group_with_it_and_all_start_again(made: list[Supervisor], tmp_path: Path) -> None:
    async def play() -> None:
        supervisor = supervise(made, tmp_path, SLEEPER, ranks=2)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: len(supervisor.pids) == 2)
        first = list(supervisor._group)
        os.kill(first[0].pid, signal.SIGKILL)
        await until(lambda: len(supervisor.pids) == 2 and supervisor.pids != [p.pid for p in first])
        assert not any(process.alive() for process in first)
        second = list(supervisor._group)
        await supervisor.stop(5.0)
        await asyncio.wait_for(running, 5)
        assert not any(process.alive() for process in second) and not (tmp_path / "workers.json").exists()

    asyncio.run(play())


def test_a_worker_that_ends_in_order_before_the_run_is_started_again(made: list[Supervisor], tmp_path: Path) -> None:
    async def play() -> None:
        polite = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(1, flush=True); time.sleep(60)"
        supervisor = supervise(made, tmp_path, [sys.executable, "-c", polite])
        running = asyncio.create_task(supervisor.run())
        log = tmp_path / "workers.log"
        await until(lambda: log.exists() and log.read_text().count("1") == 1)
        os.kill(supervisor.pids[0], signal.SIGTERM)
        await until(lambda: log.read_text().count("1") == 2)
        await supervisor.stop(5.0)
        await running

    asyncio.run(asyncio.wait_for(play(), 30))


def test_workers_that_fail_again_and_again_are_given_up(
    made: list[Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTARTS", 1)
    supervisor = supervise(made, tmp_path, [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(WorkersFailed, match=r"workers\.log"):
        asyncio.run(asyncio.wait_for(supervisor.run(), 30))


def test_the_next_agent_adopts_what_runs(made: list[Supervisor], tmp_path: Path) -> None:
    async def play() -> None:
        first = supervise(made, tmp_path, SLEEPER)
        running = asyncio.create_task(first.run())
        await until(lambda: first.pids)
        running.cancel()  # the agent is gone, its worker is not
        second = supervise(made, tmp_path, SLEEPER)
        watching = asyncio.create_task(second.run())
        await until(lambda: second.pids)
        assert second.pids == first.pids
        await second.stop(5.0)
        await asyncio.wait_for(watching, 5)

    asyncio.run(play())


def test_another_process_with_the_number_of_an_old_worker_is_left_alone(made: list[Supervisor], tmp_path: Path) -> None:
    (tmp_path / "workers.json").write_text(json.dumps([{"pid": os.getpid(), "born": "1"}]))
    done = tmp_path / "done"
    supervisor = supervise(made, tmp_path, [sys.executable, "-c", f"open({str(done)!r}, 'w')"], over=done.exists)
    asyncio.run(asyncio.wait_for(supervisor.run(), 20))
    assert not Process(os.getpid(), "1").alive() and Process.of(os.getpid()).alive()
