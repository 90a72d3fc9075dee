"""Whatever clusters do, each stream position is trained at most once, and once exactly when every claim is used."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from isles.data import Claim, Ledger, Sampler
from isles.data.claims import MAX_DETAIL
from isles.errors import DataError

clusters = st.sampled_from(["a", "b", "c", "d"])


class LedgerMachine(RuleBasedStateMachine):
    """Random claims, uses, releases, deaths and reloads beside a model that keeps a fate for every single position."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(17)
        self.holder: dict[int, str] = {}  # position -> cluster that holds it
        self.times_trained: Counter[int] = Counter()
        self.by: Counter[str] = Counter()
        self.round = 0

    @rule(cluster=clusters, count=st.integers(1, 30))
    def claim(self, cluster: str, count: int) -> None:
        self.round += 1
        free = sorted(p for p in range(self.ledger.next) if p not in self.holder and not self.times_trained[p])
        claims = self.ledger.claim(cluster, self.round, count)
        got = [p for c in claims for p in range(c.start, c.stop)]
        assert len(got) == count
        assert got[: len(free)] == free[:count]  # what was given back goes first
        for position in got:
            assert position not in self.holder and not self.times_trained[position]
            self.holder[position] = cluster
        assert all(c.cluster == cluster and c.round == self.round for c in claims)

    def _part(self, cluster: str, data: st.DataObject) -> tuple[int, int] | None:
        held = self.ledger.held(cluster)
        if not held:
            return None
        chosen = data.draw(st.sampled_from(held))
        start = data.draw(st.integers(chosen.start, chosen.stop - 1))
        return start, data.draw(st.integers(start + 1, chosen.stop))

    @rule(cluster=clusters, data=st.data())
    def use(self, cluster: str, data: st.DataObject) -> None:
        if part := self._part(cluster, data):
            self.ledger.use(cluster, *part)
            for position in range(*part):
                assert self.holder.pop(position) == cluster
                self.times_trained[position] += 1
                self.by[cluster] += 1

    @rule(cluster=clusters, data=st.data())
    def release(self, cluster: str, data: st.DataObject) -> None:
        if part := self._part(cluster, data):
            self.ledger.release(cluster, *part)
            for position in range(*part):
                assert self.holder.pop(position) == cluster

    @rule(cluster=clusters)
    def leave(self, cluster: str) -> None:
        given_back = {p for c in self.ledger.leave(cluster) for p in range(c.start, c.stop)}
        assert given_back == {p for p, holder in self.holder.items() if holder == cluster}
        self.holder = {p: holder for p, holder in self.holder.items() if holder != cluster}

    @rule()
    def store_and_reload(self) -> None:
        record = json.loads(json.dumps(self.ledger.to_dict()))
        self.ledger = Ledger.from_dict(record)
        assert self.ledger.to_dict() == record

    @rule(cluster=clusters, start=st.integers(0, 60), length=st.integers(-1, 20))
    def what_is_not_held_cannot_be_used(self, cluster: str, start: int, length: int) -> None:
        wanted = range(start, start + length)
        if not wanted or any(self.holder.get(p) != cluster for p in wanted):
            before = self.ledger.to_dict()
            for action in (self.ledger.use, self.ledger.release):
                with pytest.raises(ValueError, match="does not hold"):
                    action(cluster, start, start + length)
            assert self.ledger.to_dict() == before

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert max(self.times_trained.values(), default=0) <= 1
        assert self.ledger.trained() == {c: n for c, n in self.by.items() if n}
        untrained = [p for p in range(self.ledger.next) if not self.times_trained[p]]
        assert self.ledger.complete == min(untrained, default=self.ledger.next)
        for start, stop, cluster in self.ledger.trained_ranges():
            assert cluster in self.by and all(self.times_trained[p] for p in range(start, stop))

    def teardown(self) -> None:
        """Everything claimed is used: every position below the frontier was trained exactly once."""
        while self.ledger.to_dict()["free"]:
            self.claim("a", 1)
        for cluster in "abcd":
            for claim in self.ledger.held(cluster):
                self.ledger.use(cluster, claim.start, claim.stop)
                self.times_trained.update(range(claim.start, claim.stop))
        assert self.times_trained == Counter(range(self.ledger.next))
        assert self.ledger.complete == self.ledger.next == sum(self.ledger.trained().values())
        assert not self.ledger.trained_ranges()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_the_record_stays_small_over_a_hundred_thousand_rounds() -> None:
    ledger, largest = Ledger(1000), 0
    rng = np.random.default_rng(0)
    for number in range(100_000 // 8):
        order = rng.permutation(8)
        for cluster in order:
            ledger.claim(int(cluster), number, 32)
        for cluster in order[::-1]:
            if rng.random() < 0.02:  # died: others take over
                ledger.leave(int(cluster))
                continue
            for claim in ledger.held(int(cluster)):
                ledger.use(int(cluster), claim.start, claim.stop)
        if number % 100 == 0:
            largest = max(largest, len(json.dumps(ledger.to_dict())))
    assert largest < 4000
    assert ledger.next > 3_000_000
    assert sum(ledger.trained().values()) == ledger.next - sum(stop - start for start, stop in ledger.to_dict()["free"])


def test_detail_is_bounded_even_while_one_cluster_hangs_on_to_an_old_range() -> None:
    ledger = Ledger(50)
    ledger.claim("slow", 0, 1)
    for number in range(2 * MAX_DETAIL):
        for name in ("a", "b"):
            (claim,) = ledger.claim(name, number, 5)
            ledger.use(name, claim.start, claim.stop)
    assert len(ledger.trained_ranges()) == MAX_DETAIL
    assert ledger.trained() == {"a": 10 * MAX_DETAIL, "b": 10 * MAX_DETAIL}
    assert Ledger.from_dict(ledger.to_dict()).to_dict() == ledger.to_dict()
    ledger.use("slow", 0, 1)
    assert ledger.complete == ledger.next and not ledger.trained_ranges()


def test_neighbours_of_one_cluster_are_merged() -> None:
    ledger = Ledger(100)
    ledger.claim("hold", 0, 1)
    ledger.claim("a", 0, 30)
    for start in (1, 21, 11):
        ledger.use("a", start, start + 10)
    assert ledger.trained_ranges() == ((1, 31, "a"),)


@given(n=st.integers(1, 40), seed=st.integers(0, 99), sizes=st.lists(st.integers(1, 13), min_size=1, max_size=30))
def test_a_pass_claimed_by_many_holds_every_sample_once(n: int, seed: int, sizes: list[int]) -> None:
    ledger, sampler = Ledger(n), Sampler(n, seed)
    claims = [ledger.claim(i % 3, i, size) for i, size in enumerate(sizes)]
    ids = np.concatenate([sampler.ids(c) for c in claims])
    assert ids.size == sum(sizes)
    for number in range(ids.size // n):
        assert np.array_equal(np.sort(ids[number * n : (number + 1) * n]), np.arange(n))


def test_a_single_claim_and_none_can_be_sampled() -> None:
    sampler = Sampler(10, 0)
    assert sampler.ids(Claim(3, 6, "a", 0)).tolist() == sampler.ids([Claim(3, 5, "a", 0), Claim(5, 6, "a", 1)]).tolist()
    assert sampler.ids([]).shape == (0,)


def test_equal_records_give_equal_claims() -> None:
    """Any cluster may compute the next record, so it must not depend on who does."""
    ledger = Ledger(9)
    for number in range(5):
        ledger.claim("abc"[number % 3], number, 4 + number)
    ledger.leave("b")
    twins = [Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) for _ in range(2)]
    assert twins[0].claim("d", 9, 20) == twins[1].claim("d", 9, 20)
    assert twins[0].to_dict() == twins[1].to_dict()


def _record() -> dict[str, Any]:
    ledger = Ledger(10)
    ledger.claim("a", 0, 10)
    ledger.claim("b", 0, 10)
    ledger.use("a", 0, 5)
    ledger.use("b", 12, 14)
    ledger.release("b", 18, 20)
    return ledger.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        {"next": 21},
        {"next": 3},
        {"free": [[17, 20]]},
        {"free": []},
        {"held": {"a": [[5, 10, 0]]}},
        {"held": 3},
        {"trained": [[12, 15, "b"]]},
        {"counts": {"a": 6}},
        {"size": 0},
        {"next": None},
        {"free": [[1]]},
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    assert Ledger.from_dict(_record()).to_dict() == _record()
    with pytest.raises(DataError, match="damaged"):
        Ledger.from_dict(_record() | change)
    with pytest.raises(DataError, match="damaged"):
        Ledger.from_dict({key: value for key, value in _record().items() if key not in change})


def test_a_record_of_another_dataset_is_refused() -> None:
    ledger = Ledger(11)
    with pytest.raises(DataError, match="10 sequences, this one has 11"):
        ledger.load_dict(_record())
    ledger = Ledger(10)
    ledger.load_dict(_record())
    assert ledger.to_dict() == _record()


def test_empty_claims_and_datasets_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one position"):
        Ledger(3).claim("a", 0, 0)
    with pytest.raises(ValueError, match="at least one sequence"):
        Ledger(0)
