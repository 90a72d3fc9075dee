"""A cluster's training seen from the workers: one call per local step, and all of DiLoCo behind it.

    session = Session(folder, parameters, spec, layout.digest())
    session.begin()
    while session.running:
        loss = train_one_step(session.step)
        session.stepped(loss=loss, tokens=...)

`stepped` hands fragments off, waits for rounds where it must, merges what came back, and hears when to stop. Parameters stay where
they are; what the agent needs of them goes through a mapped file. If the agent is gone, training goes on until a round is needed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from isles.spec import Spec
from isles.worker.link import (
    AgentLink,
    Claim,
    FromAgent,
    HandedOff,
    Hello,
    Merge,
    Merged,
    Need,
    Range,
    Release,
    Released,
    Start,
    Stepped,
    Stop,
    Stopped,
)  # fmt: skip
from isles.worker.memory import SharedParameters
from isles.worker.schedule import Schedule

log = logging.getLogger("isles.worker")

Floats = NDArray[np.float32]
PATIENCE = 0.5  # seconds between two looks at an agent that is away


class Parameters(Protocol):
    """The local parameters of this process, by positions of the canonical flat layout. Vectors are fp32 of the whole layout's size."""

    def write_out(self, vector: Floats, start: int, stop: int) -> None:
        """vector = x on [start, stop)."""

    def read_in(self, vector: Floats, start: int, stop: int) -> None:
        """x = vector on [start, stop)."""

    def subtract(self, vector: Floats, start: int, stop: int) -> None:
        """x -= vector on [start, stop), in place."""

    def add(self, vector: Floats, start: int, stop: int) -> None:
        """x += vector on [start, stop), in place."""

    def mix(self, vector: Floats, start: int, stop: int, alpha: float) -> None:
        """x = alpha x + (1 - alpha) vector on [start, stop), in place."""


class Session:
    """Args:
    folder: the cluster's folder, in which its agent listens.
    parameters: of the model that trains.
    spec: the run's.
    fragments: ranges of the flat layout; layout: its digest.
    saved: rounds that a saved local state goes with, which `Start.resume` may ask to go on from; kept: the samples that are trained in it and
    in no round yet.
    """

    def __init__(
        self, folder: Path, parameters: Parameters, spec: Spec, *, fragments: Sequence[tuple[int, int]], layout: str,
        ranks: int = 1, saved: tuple[int, ...] | None = None, kept: Sequence[Range] = (), shared: SharedParameters | None = None,
    ) -> None:  # fmt: skip
        self._parameters, self._spec, self._fragments = parameters, spec, list(fragments)
        self._layout, self._ranks, self._saved, self._kept = layout, ranks, saved, tuple(kept)
        self._link = AgentLink(folder)
        self._shared = shared
        self._path = folder / "parameters.f32"
        self.schedule = Schedule(spec, len(self._fragments))
        self._fresh = True
        self._released: set[int] = set()
        self._arrived: dict[int, Merge] = {}  # results that are there and not yet due
        self._stop: Stop | None = None
        self._positions: list[Range] = []  # claimed and not trained
        self._taken = 0  # claims received
        self._asked: Need | None = None  # for a claim that has not come
        self._started: Start | None = None
        self.stalled = 0.0  # seconds spent waiting since the last local step
        self._began = time.monotonic()
        self.interrupted: Callable[[], bool] = lambda: False

    @property
    def step(self) -> int:
        """Local steps done."""
        return self.schedule.step

    @property
    def shared(self) -> SharedParameters | None:
        """The mapped file; None until `begin`."""
        return self._shared

    @property
    def running(self) -> bool:
        return self._stop is None and not self.interrupted() and not self.schedule.finished

    @property
    def whole(self) -> bool:
        """Whether the parameters are all there: nothing is handed off, and no progress set apart."""
        return not self._released and not any(f.flight for f in self.schedule.fragments)

    @property
    def reason(self) -> str:
        """Why the agent said to stop; empty when it has not."""
        return "" if self._stop is None else self._stop.reason

    # --- beginning and ending

    def begin(self) -> Start | None:
        """Wait until the agent says where to begin, and begin there. None: it says to stop, or the process was interrupted."""
        while self._started is None and self._stop is None and not self.interrupted():
            self._hear(PATIENCE)
        start = self._started
        if start is None or self._stop is not None:
            return None
        if self._shared is None:
            self._shared = SharedParameters(self._path, self._fragments[-1][1])
        if not start.resume:
            self.schedule = Schedule(self._spec, len(self._fragments), start.step)
            for first, stop in self._fragments:
                self._parameters.read_in(self._shared.globals, first, stop)
        for index, fragment in enumerate(self.schedule.fragments):
            fragment.merged = start.rounds[index]
            if index in start.busy:
                fragment.flight, fragment.foreign = self.schedule.handed_off(index), True
        self._taken, self._fresh = start.taken, False
        self._began = time.monotonic()
        return start

    def settle(self) -> None:
        """Before the end: merge the results that are there and not yet due, so that what can be saved is whole."""
        for index in list(self._arrived):
            self._merge(self._arrived.pop(index))

    def end(self) -> None:
        """Say that the workers are done, or have saved and stop."""
        finished = self.schedule.finished and not any(f.flight or f.since for f in self.schedule.fragments)
        self._link.send(Stopped(self.step, finished))
        self._link.close()

    # --- data

    def claim(self, count: int, *, each: int) -> list[Range] | None:
        """The next `count` stream positions to train, as ranges; claims `each` at a time, the next before it is needed. None: stop."""
        while self._left() < count:
            if self._stop is not None or self.interrupted():
                return None
            self._ask(each)
            self._wait(lambda: self._left() >= count)
        taken: list[Range] = []
        missing = count
        while missing:
            first, stop = self._positions[0]
            size = min(missing, stop - first)
            taken.append((first, first + size))
            self._positions[0] = (first + size, stop)
            if first + size == stop:
                self._positions.pop(0)
            missing -= size
        if self._left() < max(count, each // 4):
            self._ask(each)
        return taken

    def _ask(self, count: int) -> None:
        """Ask for the next claim, once; what is not answered is asked again on the next connection."""
        if self._asked is None:
            self._asked = Need(self._taken + 1, count)
            self._link.send(self._asked)

    def _left(self) -> int:
        return sum(stop - start for start, stop in self._positions)

    # --- a local step

    def stepped(
        self, *, loss: float, tokens: int, grad_norm: float = 0.0, lr: float = 0.0, ranges: Sequence[Range] = ()
    ) -> None:  # fmt: skip
        """A local step is done. Returns when the next may begin, or the run is over."""
        self.schedule.stepped(tokens, ranges)
        before = time.monotonic()
        self._hear(0.0)
        self._advance()
        now = time.monotonic()
        self._link.send(
            Stepped(
                self.step, loss, grad_norm, lr, tokens, round(now - self._began, 4), round(min(self.stalled, now - before), 4)
            )
        )
        self._began, self.stalled = now, 0.0

    def _advance(self) -> None:
        """Hand off, wait and merge until nothing more is due at this step."""
        while True:
            for index in range(len(self._fragments)):
                if index in self._arrived and (index in self._released or self.schedule.may_merge(index)):
                    self._merge(self._arrived.pop(index))
                if self.schedule.due(index) and index not in self._released:
                    self._hand_off(index)
            waiting = [i for i in range(len(self._fragments)) if self.schedule.must_wait(i) or i in self._released]
            if not waiting or self._stop is not None or self.interrupted():
                return
            self._wait(lambda w=waiting: any(i in self._arrived for i in w))  # type: ignore[misc]

    def _hand_off(self, index: int) -> None:
        first, stop = self._fragments[index]
        assert self._shared is not None
        self._parameters.write_out(self._shared.sent, first, stop)
        self._link.send(HandedOff(index, self.schedule.handed_off(index)))

    def _release(self, index: int) -> None:
        """Set the progress apart: since the hand-off, or since the global parameters were taken. A result that waits for its time is merged
        before: the global parameters are still those of its round."""
        if index in self._arrived:
            self._merge(self._arrived.pop(index))
        if index not in self._released:
            fragment, (first, stop) = self.schedule.fragments[index], self._fragments[index]
            assert self._shared is not None
            own = fragment.flight is not None and not fragment.foreign
            self._parameters.subtract(self._shared.sent if own else self._shared.globals, first, stop)
            self._released.add(index)
        self._link.send(Released(index))

    def _merge(self, merge: Merge) -> None:
        index, fragment = merge.fragment, self.schedule.fragments[merge.fragment]
        first, stop = self._fragments[index]
        assert self._shared is not None
        g, sent = self._shared.globals, self._shared.sent
        if merge.round <= fragment.merged:
            pass  # said twice
        elif merge.late:
            own = fragment.flight is not None and not fragment.foreign
            self._parameters.add(sent if own else g, first, stop)
        elif index in self._released:  # what was handed off is in the round, and what was trained since lies apart
            self._parameters.add(g, first, stop)
        elif fragment.flight is not None and fragment.flight.step == self.step:
            self._parameters.read_in(g, first, stop)
        elif self._spec.streaming.merge == "mix":
            self._parameters.mix(g, first, stop, self._spec.streaming.alpha)
        else:
            self._parameters.subtract(sent, first, stop)
            self._parameters.add(g, first, stop)
        self._released.discard(index)
        self.schedule.merged(index, max(merge.round, fragment.merged), landed=merge.landed, step=merge.step)
        self._link.send(Merged(index, merge.round))

    # --- hearing

    def _wait(self, over: Callable[[], bool]) -> None:
        """Stand still until something has happened, or it is time to stop."""
        began = time.monotonic()
        while not over() and self._stop is None and not self.interrupted():
            self._hear(PATIENCE)
        self.stalled += time.monotonic() - began

    def _hear(self, seconds: float) -> None:
        if not self._link.connected:
            self._link.connect(self._hello())
            if self._asked is not None:
                self._link.send(self._asked)
        for message in self._link.receive(seconds):
            self._take(message)

    def _take(self, message: FromAgent) -> None:
        match message:
            case Start():
                self._started = message
            case Claim(number, ranges):
                if number == self._taken + 1:
                    self._taken, self._asked = number, None
                    self._positions += ranges
            case Release(fragment):
                self._release(fragment)
            case Merge(fragment):
                self._arrived[fragment] = message
            case Stop():
                log.info("the agent says to stop: %s", message.reason)
                self._stop = message

    def _hello(self) -> Hello:
        fragments = self.schedule.fragments
        own = {i: f.flight for i, f in enumerate(fragments) if f.flight is not None and not f.foreign}
        return Hello(
            pid=os.getpid(), ranks=self._ranks, layout=self._layout, fresh=self._fresh, step=self.step,
            merged=tuple(f.merged for f in fragments), flights={} if self._fresh else own, released=tuple(sorted(self._released)),
            saved=self._saved, kept=self._kept, taken=self._taken,
        )  # fmt: skip
