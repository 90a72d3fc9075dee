"""A training script of one's own as a cluster of a run.

    with isles.Cluster(model, "alice.invite", lr_scheduler=scheduler) as cluster:
        while cluster.running:
            loss = ...
            loss.backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()
            cluster.step(loss=loss.item(), tokens=...)

The script brings model, data and optimizer. The object starts the cluster's agent, or takes over one that a killed script has left, and
reads and writes the model's parameters in place; the optimizer's state stays as it is. Under torchrun every process makes one and calls
`step`; the first speaks for all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from isles.agent.folder import ClusterFolder
from isles.agent.host import Terms, parse_rate, write_folder
from isles.agent.launch import AgentFailed, AgentProcess, running_agent
from isles.agent.scripted import agree, check_scripted, read_layout, shown_to_script, write_layout
from isles.errors import IslesError, ModelError, UsageError
from isles.files import held
from isles.identity import Invite
from isles.model import Layout
from isles.spec import Spec
from isles.worker.link import OVER
from isles.worker.memory import SharedParameters
from isles.worker.rank import Crew, CrewParameters, follow
from isles.worker.script import ScriptRank
from isles.worker.session import Session

log = logging.getLogger("isles")

LOOK = 1.0  # seconds between looks at the agent's process
LAST = 60.0  # seconds that an agent whose run is over stays for others that are still fetching, and some


@dataclass(frozen=True)
class State:
    """What all processes of a script know of the run. step: of the run. error: why the cluster cannot go on."""

    running: bool = False
    step: int = 0
    reason: str = ""
    error: str = ""


class Cluster:
    """This script as one cluster of a run between machines; a context manager.

    Args:
        model: what is trained; its trainable parameters are fp32. Move it to its device, and wrap it in DDP or split it by FSDP2, before.
        where: the invite's file, or the folder of a cluster that joined before.
        optimizer: whose learning rate is reported. lr_scheduler: of a schedule over the run's steps; it is stepped forward to where the run
            stands when the cluster joins, and over steps that the others have done.
        out: the cluster's folder; runs/RUN-NAME when left out. outbound_only, advertise, listen, max_upload: as of `isles join`.

    Raises:
        ModelError: the model is not fp32, or not the run's. UsageError: the invite cannot be used, no script trains this run, or another
            process works in the folder. NetworkError: the store cannot be reached. AgentFailed: the agent ended with an error.
    """

    def __init__(
        self, model: nn.Module, where: Path | str, *, optimizer: torch.optim.Optimizer | None = None, lr_scheduler: Any = None,
        out: Path | str | None = None, outbound_only: bool = False, advertise: str | None = None, listen: str | None = None,
        max_upload: str | None = None,
    ) -> None:  # fmt: skip
        self._model, self._where, self._out = model, Path(where), None if out is None else Path(out)
        self._optimizer, self._scheduler = optimizer, lr_scheduler
        self._terms = Terms(0, advertise, outbound_only, listen, parse_rate(max_upload) if max_upload else None)
        self._state = State()
        self._rank: ScriptRank | None = None
        self._leader: Leader | None = None

    @property
    def running(self) -> bool:
        """Whether there is a next step. The same in every process."""
        return self._state.running

    @property
    def steps_done(self) -> int:
        """Local steps of the run that are done: where a schedule has to stand."""
        return self._state.step

    @property
    def reason(self) -> str:
        """Why the cluster was told to stop; empty when it did the run's last step, or was not told."""
        return self._state.reason

    @property
    def folder(self) -> Path | None:
        """The cluster's folder; None before it is known, and in processes that do not lead."""
        folder: ClusterFolder | None = getattr(self._leader, "folder", None)
        return None if folder is None else folder.path

    def __enter__(self) -> Self:
        rank = self._rank = ScriptRank(self._model)
        try:
            if rank.leads:
                leader = self._leader = Leader(rank, self._where, self._out, self._terms)
                self._lead(leader, leader.begin)
            else:
                self._follow(rank)
            self._forward(self.steps_done - int(getattr(self._scheduler, "last_epoch", 0)))
        except BaseException:
            self._end(orderly=False)
            raise
        return self

    def step(self, *, loss: float, tokens: int, grad_norm: float = 0.0, lr: float | None = None) -> None:
        """A local step is done. Returns when the next may begin, or there is none.

        loss, tokens: of this process in this step, mean nats per token and trained tokens, by which contributions are weighed; grad_norm and
        lr: for the record. Parameters may change. Raises AgentFailed, DiskError, NetworkError."""
        rank, leader = self._rank, self._leader
        if rank is None:
            raise UsageError(
                "Cluster.step comes within `with isles.Cluster(...) as cluster:`; the cluster has not begun, or has ended"
            )
        if not self.running:
            raise UsageError(
                f"the cluster was told to stop ({self.reason or 'the run is over'}); ask cluster.running before a step"
            )
        before, rate = self.steps_done, self._rate() if lr is None else lr
        mean, together, norm = rank.sum_up(loss, tokens, grad_norm)
        if leader is not None:
            session = leader.session
            self._lead(leader, lambda: session.stepped(loss=mean, tokens=together, grad_norm=norm, lr=rate))
        else:
            self._follow(rank)
        self._forward(self.steps_done - before - 1)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end(orderly=kind is None)

    def _lead(self, leader: Leader, work: Callable[[], object]) -> None:
        """Do something with the session; the other processes learn how the run stands then."""
        try:
            work()
        except BaseException as error:
            with contextlib.suppress(IslesError, RuntimeError):
                leader.crew.end(asdict(State(error=str(error) or type(error).__name__)))
            raise
        self._state = leader.state()
        leader.crew.end(asdict(self._state))

    def _follow(self, rank: ScriptRank) -> None:
        (words,) = follow(rank)
        self._state = State(**words)
        if self._state.error:
            raise IslesError(f"the script's first process cannot go on: {self._state.error}")

    def _forward(self, steps: int) -> None:
        """Step the schedule over steps that were done elsewhere."""
        if self._scheduler is not None and steps > 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, that the optimizer was to step first
                for _ in range(steps):
                    self._scheduler.step()

    def _rate(self) -> float:
        optimizer = self._optimizer or getattr(self._scheduler, "optimizer", None)
        return float(optimizer.param_groups[0]["lr"]) if optimizer is not None else 0.0

    def _end(self, *, orderly: bool) -> None:
        """Leave the run, or stay until it is over. Processes that follow wait for the first, unless something went wrong."""
        leader, rank = self._leader, self._rank
        self._leader = self._rank = None
        try:
            if leader is not None and orderly:
                self._lead(leader, lambda: leader.end(orderly=True))
            elif leader is not None:
                leader.end(orderly=False)
            elif rank is not None and orderly:
                self._follow(rank)
        finally:
            if rank is not None and rank.ranks is not None:
                rank.ranks.leave()
            self._state = State(False, self._state.step, self._state.reason, self._state.error)


class Leader:
    """The process of a script that has the agent and speaks with it. Raises what `Cluster` does."""

    def __init__(self, rank: ScriptRank, where: Path, out: Path | None, terms: Terms) -> None:
        self.rank, self.crew, self._terms = rank, Crew(rank), terms
        self._where, self._out = where, out
        self._invite: Invite
        self.folder: ClusterFolder
        self.session: Session
        self._agent: AgentProcess | None = None
        self._begun = False
        self._looked = 0.0
        self._held = contextlib.ExitStack()

    def begin(self) -> None:
        """Join, have an agent, and wait until it says where to begin."""
        where, joined = self._where, (self._where / "cluster.json").exists()
        self._invite = Invite.load(where / "invite" if where.is_dir() else where)
        self.folder = ClusterFolder(
            self._out or (where if joined else Path("runs") / f"{self._invite.run}-{self._invite.cluster}")
        )
        spec, layout = self._settle()
        self._steps, self._total = spec.run.steps, layout.total
        self._agent = AgentProcess(self.folder)
        parameters = CrewParameters(self.crew)
        self.session = parameters.session = Session(
            self.folder.path, parameters, spec, fragments=layout.fragments, layout=layout.digest(), ranks=self.rank.size
        )
        self.session.interrupted = self._agent_ended
        log.info("cluster %s of run %s: waiting for the others", self._invite.cluster, self._invite.run)
        self._begun = True
        self.session.begin()
        log.info("training from step %d", self.session.step)

    def state(self) -> State:
        step = max(self.session.step, self._steps) if self.session.reason == OVER else self.session.step
        return State(self.session.running, step, self.session.reason)

    def end(self, *, orderly: bool) -> None:
        """End the session; the agent then leaves, or ends by itself when the run is over: the model then holds the run's parameters.
        Raises AgentFailed."""
        with self._held:
            over = self._begun and (self.session.schedule.finished or self.session.reason == OVER)
            if self._begun:
                self.session.end()
            if self._agent is None:
                return
            if not orderly:
                with contextlib.suppress(AgentFailed):
                    self._agent.end()
                return
            deadline = time.monotonic() + LAST
            while over and self._agent.keep() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            self._agent.end()
            self._agent = None
            if over and self.folder.read_status().get("state") == "finished":
                self.crew.change("read_in", "globals", 0, self._total)

    def _settle(self) -> tuple[Spec, Layout]:
        """The run's spec and this model's layout; the folder is written, and no other script works in it."""
        found = self.folder.settings_file.exists() and running_agent(self.folder) is not None
        if found:  # left by a script that was killed; nothing has to be asked or written
            spec = self.folder.read_settings().spec
            check_scripted(spec)
        else:
            self._invite.check_dates()
            spec = _run(shown_to_script(self._invite)).spec
        layout = self.rank.layout_of(spec.streaming.fragments, spec.streaming.order)
        known = self.folder.layout.exists()
        if known and read_layout(self.folder).digest() != layout.digest():
            raise ModelError(
                f"this model is not the one that {self.folder.path} trains: names or shapes of its trainable parameters differ; "
                "build the same one, or join with another invite and folder"
            )
        if not found:
            _run(agree(self._invite, layout))
            write_folder(self._invite, spec, self.folder.path, self._terms)
        self._held.enter_context(held(self.folder.path))
        self.crew.call("open", str(self.folder.path.resolve()), spec.streaming.fragments, spec.streaming.order)
        if not found and not any(self.folder.checkpoints.glob("step-*")):
            write_layout(self.folder, layout)
            SharedParameters(self.folder.shared, layout.total, create=True)
            self.crew.change("write_out", "globals", 0, layout.total)
        return spec, layout

    def _agent_ended(self) -> bool:
        """Whether the agent has ended in order; one that was killed is started again. Raises AgentFailed."""
        now = time.monotonic()
        if self._agent is None or now - self._looked < LOOK:
            return False
        self._looked = now
        return self._agent.keep() is not None


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Also where an event loop runs already, as in a notebook."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
