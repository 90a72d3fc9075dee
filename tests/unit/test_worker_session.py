"""A session with an agent that is played by the test: what comes in one batch, late, or never."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isles.spec import Spec, spec_from
from isles.worker.link import Claim, FromAgent, HandedOff, Hello, Merge, Merged, Message, Need, Release, Released, Start, Stop
from isles.worker.memory import SharedParameters
from isles.worker.parameters import FlatView
from isles.worker.schedule import Schedule
from isles.worker.session import Session

SIZE = 8


class PlayedLink:
    """What the agent says, batch by batch; what the workers say is kept."""

    def __init__(self) -> None:
        self.connected = False
        self.batches: list[list[FromAgent]] = []
        self.said: list[Message] = []
        self.answer: Callable[[Message], list[FromAgent]] = lambda _: []

    def connect(self, hello: Hello) -> None:
        self.connected = True
        self.said.append(hello)

    def send(self, message: Message) -> None:
        if self.connected:
            self.said.append(message)
            if answer := self.answer(message):
                self.batches.append(answer)

    def receive(self, seconds: float) -> Sequence[FromAgent]:  # noqa: ARG002
        return self.batches.pop(0) if self.batches else []

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


def spec_of(**more: Any) -> Spec:
    tables = {"run": {"steps": 1000}, "model": {"family": "llama", "parameters": "0.1M"}, "train": {"local_steps": 4}}
    return spec_from({**tables, **more})


class Played:
    """A session of SIZE parameters in one fragment; the test changes the global parameters as the agent would."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        self.shared = SharedParameters(folder / "parameters.f32", SIZE, create=True)
        self.shared.globals[:] = 100.0
        self.x = torch.zeros(SIZE)
        self.session = Session(
            folder, FlatView(self.x), spec, fragments=[(0, SIZE)], layout="l", shared=self.shared, kept=[(3, 9)], saved=(0,)
        )
        self.link = PlayedLink()
        self.session._link = self.link  # type: ignore[assignment]
        self.link.batches = [[Start(0, False, 0, (0,))]]
        self.session.begin()

    def step(self) -> None:
        self.x += 1.0
        self.session.stepped(loss=1.0, tokens=1)

    def apply(self, change: float) -> None:
        """The outer step of a round."""
        self.shared.globals += np.float32(change)


@pytest.mark.parametrize(("overlap", "heard"), [(0, 4), (3, 4), (3, 5), (3, 6)])
def test_a_result_and_the_next_round_heard_at_once_lose_and_double_nothing(tmp_path: Path, overlap: int, heard: int) -> None:
    """The cluster's contribution has landed, and the next round was committed without it before the result was merged: the worker was
    frozen, or the result waited for its time."""
    played = Played(tmp_path, spec_of(streaming={"overlap": overlap}))
    for _ in range(3):
        played.step()

    def answer(message: Message) -> list[FromAgent]:
        if isinstance(message, HandedOff):
            played.apply(10.0)
        if not isinstance(message, Released):
            return []
        played.apply(5.0)
        return [Merge(0, 2, True, False, 0)]

    played.link.answer = answer
    played.link.batches = [[]] * (heard - 3) + [[Merge(0, 1, False, True, 0), Release(0)]]
    while played.session.step < 7:
        played.step()
        if played.link.of(Released):
            assert (
                played.x[0] == 115.0 + played.session.step - 4
            )  # what was trained since the hand-off, on the global parameters
    assert len(played.link.of(Released)) == 1 and played.session.whole


def test_a_result_that_waits_for_its_time_when_the_workers_are_told_to_stop_is_merged(tmp_path: Path) -> None:
    """Else what they save is not whole, and their moments are lost."""
    played = Played(tmp_path, spec_of(streaming={"overlap": 3}))
    for _ in range(4):
        played.step()
    played.apply(10.0)
    played.link.batches = [[Merge(0, 1, False, True, 0), Stop("the cluster leaves the run")]]
    played.step()
    assert not played.session.running and not played.session.whole
    played.session.settle()
    assert played.session.whole and played.x[0] == 110.0 + 1 and played.link.of(Merged) == [Merged(0, 1)]


def test_a_claim_that_was_asked_for_is_asked_again_when_the_line_is_back_and_only_then(tmp_path: Path) -> None:
    played = Played(tmp_path, spec_of())
    answers: list[list[FromAgent]] = [[], [], [Claim(1, ((0, 8),))]]

    def receive(seconds: float) -> Sequence[FromAgent]:  # noqa: ARG001
        if len(answers) == 2:
            played.link.connected = False  # the agent is killed, and forgets
        return answers.pop(0)

    played.link.receive = receive  # type: ignore[method-assign]
    assert played.session.claim(4, each=8) == [(0, 4)]
    assert played.link.of(Need) == [Need(1, 8), Need(1, 8)]
    assert [hello.kept for hello in played.link.of(Hello)] == [((3, 9),)] * 2


@pytest.mark.parametrize("h", [[], [[20, 6], [50, 15]]])
@pytest.mark.parametrize("start", [0, 1, 7, 8, 15, 26, 33, 55, 80])
def test_whoever_begins_late_hands_off_at_the_steps_of_the_others(start: int, h: list[list[int]]) -> None:
    train = {"local_steps": 8, **({"local_steps_schedule": h} if h else {})}
    spec = spec_of(train=train)

    def dues(schedule: Schedule, upto: int) -> set[tuple[int, int]]:
        found = set()
        while schedule.step < upto:
            schedule.stepped(1)
            for index in range(4):
                if schedule.due(index):
                    found.add((schedule.step, index))
                    schedule.handed_off(index)
                    schedule.merged(index, 1, landed=True)
        return found

    assert dues(Schedule(spec, 4, start), 120) == {(s, i) for s, i in dues(Schedule(spec, 4), 120) if s > start}
