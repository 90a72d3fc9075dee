"""When a cluster hands its fragments off: a function of local steps, the same on every cluster and in the simulator.

Fragments take even turns: fragment i of P is first due after i H / P steps (fragment 0 after H), and from then on every H steps. With an
overlap of tau its result is merged exactly tau steps after it was handed off, no earlier, so that a run can be repeated bit for bit
whatever the network does; when it is late, the workers stand still, and that is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isles.spec import Spec
from isles.worker.link import Flight, Range


@dataclass
class FragmentSchedule:
    """need: steps until the next hand-off is due. since: steps, tokens and samples since the last. flight: what is under way; foreign: of an
    earlier process, so that nothing here is in it."""

    need: int
    since: int = 0
    tokens: int = 0
    ranges: list[Range] = field(default_factory=list)
    flight: Flight | None = None
    foreign: bool = False
    merged: int = 0  # last round merged


class Schedule:
    """Counts local steps. `step` is the number of steps done."""

    def __init__(self, spec: Spec, fragments: int, step: int = 0) -> None:
        self._spec, self.step = spec, step
        self.fragments = [FragmentSchedule(self._next(index, fragments) - step) for index in range(fragments)]

    def _next(self, index: int, fragments: int) -> int:
        """The first step after the present one at which a fragment is due: whoever begins late keeps step with the others."""
        h = self._spec.train.local_steps_at(0)
        due = index * h // fragments or h
        while due <= self.step:
            due += self._spec.train.local_steps_at(due)
        return due

    @property
    def finished(self) -> bool:
        return self.step >= self._spec.run.steps

    def stepped(self, tokens: int, ranges: Sequence[Range] = ()) -> None:
        """A local step is done, over so many tokens and these samples."""
        self.step += 1
        for fragment in self.fragments:
            fragment.since += 1
            fragment.tokens += tokens
            fragment.ranges = joined([*fragment.ranges, *ranges])

    def due(self, index: int) -> bool:
        """Whether a fragment should be handed off now. At the run's end all are that hold unsent steps."""
        fragment = self.fragments[index]
        if fragment.flight is not None or not fragment.since:
            return False
        return self.finished or fragment.since >= fragment.need

    def must_wait(self, index: int) -> bool:
        """Whether the workers stand still until a fragment's result is merged."""
        fragment = self.fragments[index]
        if fragment.flight is None:
            return False
        if self.finished or fragment.since >= fragment.need:
            return True
        if fragment.foreign or self._spec.clusters.pace == "train":
            return False
        return self.step >= fragment.flight.step + self._spec.streaming.overlap

    def may_merge(self, index: int) -> bool:
        """Whether a result that is there may be merged now."""
        fragment = self.fragments[index]
        if fragment.flight is None or fragment.foreign:
            return True
        return self.finished or self.step >= fragment.flight.step + self._spec.streaming.overlap

    def handed_off(self, index: int) -> Flight:
        """A fragment is handed off now; what was done since the last time goes with it."""
        fragment = self.fragments[index]
        fragment.flight = Flight(self.step, fragment.tokens, tuple(fragment.ranges))
        fragment.since, fragment.tokens, fragment.ranges = 0, 0, []
        fragment.need = self._spec.train.local_steps_at(self.step)
        return fragment.flight

    def merged(self, index: int, number: int, *, landed: bool, step: int = 0) -> None:
        """A round is merged. landed: what was handed off is in it. step: of the run, as the round has it.

        A cluster that is behind goes on from there: its learning rate is that of the others, and it ends when they do."""
        fragment = self.fragments[index]
        fragment.merged = number
        self._skip(step - (self.step if fragment.flight is None else fragment.flight.step))
        if landed:
            fragment.flight, fragment.foreign = None, False

    def _skip(self, steps: int) -> None:
        """Count `steps` that others have done."""
        if steps > 0:
            self.step += steps
            for fragment in self.fragments:
                if fragment.flight is not None:
                    fragment.flight = replace(fragment.flight, step=fragment.flight.step + steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; only for a moment in which nothing is under way."""
        rows = [[f.need, f.since, f.tokens, [list(r) for r in f.ranges], f.merged] for f in self.fragments]
        return {"step": self.step, "fragments": rows}

    def load_dict(self, record: dict[str, Any]) -> None:
        self.step = int(record["step"])
        for fragment, (need, since, tokens, ranges, merged) in zip(self.fragments, record["fragments"], strict=True):
            fragment.need, fragment.since, fragment.tokens, fragment.merged = need, since, tokens, merged
            fragment.ranges = [(int(a), int(b)) for a, b in ranges]


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Ranges in order, with those that touch made one."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and result[-1][1] >= start:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
