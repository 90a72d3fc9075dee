"""The built-in worker process: the run's model on the run's data, under a session.

    python -m isles.worker FOLDER

FOLDER is the cluster's: `cluster.json` names the spec and where its paths count from. The process saves its inner state when it is told to
stop and every `checkpoint.every` steps, so that one that is started again goes on with its AdamW moments.

With WORLD_SIZE above 1 it is one of a cluster's ranks (RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT): rank 0 is the worker, the others follow.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

from isles.errors import IslesError
from isles.worker.rank import ClusterRecord, Crew, CrewParameters, Rank, follow
from isles.worker.ranks import Ranks, world_size
from isles.worker.session import Session

log = logging.getLogger("isles.worker")


class Worker:
    """The worker of a cluster, alone or as rank 0 of several."""

    def __init__(self, folder: Path, rank: Rank) -> None:
        self.spec, self.rank, self.crew = rank.spec, rank, Crew(rank)
        parameters = CrewParameters(self.crew)
        self.session = parameters.session = Session(
            folder, parameters if rank.ranks else rank.parameters, self.spec, fragments=rank.layout.fragments,
            layout=rank.layout.digest(), ranks=rank.size, saved=rank.saved.rounds(), kept=rank.saved.ranges(),
        )  # fmt: skip
        self.signal = 0
        self.session.interrupted = lambda: bool(self.signal)

    def run(self) -> None:
        """Train until the run is over or somebody says to stop."""
        start = self.session.begin()
        if start is None:
            return
        if start.resume:
            self.session.schedule.load_dict(self.crew.load())
        else:
            self.crew.load_inner()
            if self.rank.saved.rounds() is None:
                self.crew.rewarm(start.step, start.warmup)
        log.info("training from step %d", self.session.step)
        every = self.spec.checkpoint.every
        while self.session.running:
            if not self._step():
                break
            if every and self.session.step % every == 0:
                self._save()
        self.session.settle()
        self._save()
        self.session.end()

    def _step(self) -> bool:
        size, at = self.spec.train.batch_size, self.session.step
        ranges = self.session.claim(size, each=size * self.spec.train.local_steps_at(at))
        if ranges is None:
            return False
        result = self.crew.step(ranges, at)
        self.session.stepped(
            loss=float(result.loss), tokens=result.tokens, grad_norm=float(result.grad_norm), lr=result.lr, ranges=ranges
        )
        return True

    def _save(self) -> None:
        """Only between rounds: while a fragment is under way, a restart begins from the global parameters anyhow."""
        if self.session.whole:
            self.crew.save(self.session.schedule.to_dict())


def work(folder: Path) -> None:
    """Be what the environment says: a worker, or a rank that follows. Raises IslesError."""
    record = ClusterRecord(folder)
    if world_size() == 1:
        _lead(folder, Rank(folder, record))
        return
    from isles.worker.parallel import check_splits

    check_splits(record.spec, world_size())  # before anything takes time
    ranks = Ranks.join(record.spec.train.device)
    if ranks.rank == 0:
        _lead(folder, Rank(folder, record, ranks))
    else:  # these end when rank 0 says so, which saves with them first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow(Rank(folder, record, ranks))
    ranks.leave()


def _lead(folder: Path, rank: Rank) -> None:
    worker = Worker(folder, rank)

    def note(number: int, _frame: object) -> None:
        worker.signal = number

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    worker.run()
    worker.crew.end()


def main(arguments: list[str]) -> int:
    """Exit code 0: done or stopped in order; otherwise that of the mistake."""
    logging.basicConfig(level=os.environ.get("ISLES_LOG", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if len(arguments) != 1:
        print("usage: python -m isles.worker FOLDER", file=sys.stderr)
        return 2
    try:
        work(Path(arguments[0]))
    except IslesError as error:
        log.error("%s", error)
        return error.exit_code
    return 0
