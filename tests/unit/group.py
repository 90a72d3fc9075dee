"""A group of real processes over gloo, that does what tests ask of it and is gone when they end."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from isles.worker.ranks import Ranks

SECONDS = 60.0


class Group:
    """Processes 0 to size - 1, each a member of one `Ranks`."""

    def __init__(self, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": size,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            process = context.Process(target=_serve, args=(theirs, {k: str(v) for k, v in environment.items()}), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        self.pipes[rank].send((function, arguments))

    def answer(self, rank: int) -> Any:
        """What the function returned; raises what it raised."""
        assert self.pipes[rank].poll(SECONDS), f"rank {rank} does not answer"
        fine, value, trace = self.pipes[rank].recv()
        if not fine:
            print(trace)
            raise value
        return value

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(ranks, *arguments) on every rank at once: the results by rank."""
        for rank in range(len(self.pipes)):
            self.ask(rank, function, *arguments)
        return [self.answer(rank) for rank in range(len(self.pipes))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(5.0)


@contextmanager
def group_of(size: int) -> Iterator[Group]:
    group = Group(size)
    try:
        yield group
    finally:
        group.kill()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    ranks = Ranks.join("cpu")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(ranks, *arguments), ""))
        except Exception as error:
            pipe.send((False, error, traceback.format_exc()))
