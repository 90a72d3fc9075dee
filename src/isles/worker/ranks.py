"""The processes of one cluster's workers: who they are, which device each has, and how rank 0 speaks with the others.

What they say to each other is JSON over a gloo group of their own, beside the collectives of training. It has no time limit, because rank 0
may wait for a round for hours; a process that ends closes its connections, which the others notice at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from isles.errors import NetworkError, SpecError
from isles.worker.loop import choose_device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_FOR_EVER = timedelta(days=3650)
_MEETING = timedelta(minutes=5)  # for all ranks to come together when they start


def world_size() -> int:
    """Processes of this cluster's workers, as the environment has it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_device(name: str, local_rank: int, ranks: int) -> torch.device:
    """The device of one of several ranks on this machine. Raises SpecError when there is none for each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = choose_device(name)
    if device.type == "cpu":
        return device
    if name != "cuda":
        raise SpecError(f"train.device {name!r} is one device and this cluster has {ranks} ranks; use cuda, cpu or auto")
    if torch.cuda.device_count() < ranks:
        raise SpecError(
            f"{ranks} ranks need as many GPUs and this machine has {torch.cuda.device_count()}; start the cluster with fewer ranks"
        )
    return torch.device("cuda", local_rank)


class Ranks:
    """This process as one of `size`. Values that are told must be JSON-able. All methods but `leave` raise NetworkError when a rank is gone.

    device: this rank's, `rank_device`. store: where the ranks meet; None when they have met (torch.distributed is initialised)."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store | None) -> None:
        self.rank, self.size, self.device, self._own = rank, size, device, store is not None
        with lost():
            if store is None:
                pass
            elif device.type == "cuda":
                torch.cuda.set_device(device)
                dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
            else:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            self._group = dist.new_group(backend="gloo", timeout=_FOR_EVER)

    @classmethod
    def join(cls, device_name: str) -> Ranks:
        """Meet the others where the environment says (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Raises SpecError."""
        rank, size = int(os.environ["RANK"]), world_size()
        device = rank_device(device_name, int(os.environ["LOCAL_RANK"]), size)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if host == "127.0.0.1":  # else gloo asks for the machine's name, which need not lead anywhere
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        with lost():
            return cls(rank, size, device, _store(host, port, size, leads=rank == 0))

    @classmethod
    def beside(cls) -> Ranks:
        """The processes of a torch.distributed that a script has initialised, in a group of their own."""
        return cls(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), None)

    def tell(self, value: Any) -> None:
        """Rank 0 tells all others."""
        self._broadcast(json.dumps(value).encode())

    def hear(self) -> Any:
        """What rank 0 tells."""
        return json.loads(self._broadcast(b""))

    def gather(self, value: Any) -> list[Any]:
        """What each rank has to say, by rank, on every rank."""
        with lost():
            content = json.dumps(value).encode()
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(content)]), group=self._group)
            padded = torch.zeros(max(int(s) for s in sizes), dtype=torch.uint8)
            padded[: len(content)] = _bytes(content)
            rows = [torch.zeros_like(padded) for _ in range(self.size)]
            dist.all_gather(rows, padded, group=self._group)
        return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def together(self) -> None:
        """Return when all ranks have come here."""
        with lost():
            dist.all_reduce(torch.zeros(1), group=self._group)

    def leave(self) -> None:
        """The group beside those of a script goes alone."""
        if dist.is_initialized():
            dist.destroy_process_group(None if self._own else self._group)

    def _broadcast(self, content: bytes) -> bytes:
        with lost():
            size = torch.tensor([len(content)])
            dist.broadcast(size, 0, group=self._group)
            row = _bytes(content) if self.rank == 0 else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(row, 0, group=self._group)
        return row.numpy().tobytes()


@contextlib.contextmanager
def lost() -> Iterator[None]:
    """A collective that fails because a process is gone is a sentence and no traceback. Raises NetworkError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in ("onnect", "socket", "peer")):
            raise
        said = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).partition(". ")[0]  # without the place in gloo's source
        raise NetworkError(
            f"a rank of this cluster's workers is gone ({said[:200]}); all of them have to be started again"
        ) from error


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _store(host: str, port: int, size: int, *, leads: bool) -> Store:
    """Where the ranks meet. Rank 0 listens at that address only: torch by itself would listen to the whole network."""
    if not leads:
        return dist.TCPStore(host, port, size, is_master=False, timeout=_MEETING)  # type: ignore[attr-defined]
    listening = socket.create_server((host, port))
    return dist.TCPStore(host, port, size, is_master=True, timeout=_MEETING, master_listen_fd=listening.detach())  # type: ignore[attr-defined]
