"""What one cluster does next, case by case."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.protocol import BASE, DIGEST, OTHER, RULES, Table, incarnation

from isles.protocol import (
    Apply,
    Attempt,
    Begin,
    CatchUp,
    Cease,
    Create,
    Fetch,
    Local,
    Phase,
    Propose,
    ReadyRecord,
    Renew,
    RoundRecord,
    WriteDone,
    WriteReady,
    after_applying,
    decide,
    given_up,
)  # fmt: skip

READY = ReadyRecord(1, incarnation("a"), BASE, tokens=5, step=10, seconds=10.0)


def local(applied: int = 0, **more: object) -> Local:
    return replace(Local("a", incarnation("a"), applied, BASE), **more)


def test_the_first_cluster_writes_the_first_record() -> None:
    (action,) = decide(Table("a").view(), local(), RULES)
    assert action == Create(RoundRecord(0, 1, Phase.TRAIN, base=BASE))


def test_what_is_prepared_is_reported_once() -> None:
    table = Table("a", "b")
    table.round(RoundRecord(0, 1, Phase.TRAIN, base=BASE))
    assert decide(table.view(), local(prepared=READY), RULES) == [WriteReady(READY)]
    table.put("ready.0.a", READY)
    assert decide(table.view(), local(prepared=READY), RULES) == []


def test_an_exchange_is_begun_once_an_attempt() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    mine = local(prepared=READY)
    assert decide(table.view(), mine, RULES) == [Begin(record)]
    assert decide(table.view(), replace(mine, attempt=Attempt(1, 0)), RULES) == []
    again = table.round(replace(record, attempt=1))
    assert decide(table.view(), replace(mine, attempt=Attempt(1, 0, DIGEST)), RULES) == [Begin(again)]


def test_a_whole_average_and_blame_are_reported() -> None:
    table = Table("a", "b", "c")
    table.exchange("a", "b", "c")
    (done,) = decide(table.view(), local(prepared=READY, attempt=Attempt(1, 0, DIGEST)), RULES)
    assert isinstance(done, WriteDone) and done.record.digest == DIGEST
    (done,) = decide(table.view(), local(prepared=READY, attempt=Attempt(1, 0, None, ("b",))), RULES)
    assert isinstance(done, WriteDone) and done.record.blamed == ("b",)


def test_nothing_is_applied_before_the_record_says_committed() -> None:
    table = Table("a", "b", "c")
    record = table.exchange("a", "b", "c")
    mine = local(prepared=READY, attempt=Attempt(1, 0, DIGEST), held=frozenset({(1, DIGEST)}))
    assert not any(isinstance(a, Apply) for a in decide(table.view(), mine, RULES))
    table.round(replace(record, phase=Phase.COMMITTED, digest=DIGEST))
    assert decide(table.view(), mine, RULES) == [Apply(1, DIGEST, contributed=True)]


def test_another_digest_than_the_committed_one_is_not_applied() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    table.round(replace(record, phase=Phase.COMMITTED, digest=OTHER))
    mine = local(prepared=READY, attempt=Attempt(1, 0, DIGEST), held=frozenset({(1, DIGEST)}))
    assert decide(table.view(), mine, RULES) == [Fetch(1, OTHER)]


def test_an_exchange_that_is_about_to_end_is_let_end() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    table.round(replace(record, phase=Phase.COMMITTED, digest=DIGEST))
    mine = local(prepared=READY, attempt=Attempt(1, 0))
    assert decide(table.view(), mine, RULES) == []
    blamed = replace(mine, attempt=Attempt(1, 0, None, ("b",)))
    assert decide(table.view(), blamed, RULES) == [Cease(), Fetch(1, DIGEST)]
    table.member("b", boot=2)  # an owner that began anew knows nothing of it
    assert decide(table.view(), mine, RULES) == [Cease(), Fetch(1, DIGEST)]


def test_a_cluster_left_out_of_the_attempt_stops_and_keeps_its_contribution() -> None:
    table = Table("a", "b", "c")
    record = table.exchange("a", "b", "c")
    table.round(replace(record, attempt=1, participants=record.participants[1:]))
    actions = decide(table.view(), local(prepared=READY, attempt=Attempt(1, 0)), RULES)
    assert actions[0] == Cease()


def test_a_late_cluster_takes_the_average_that_it_had_no_part_in() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    others = replace(record, participants=record.participants[1:], phase=Phase.COMMITTED, digest=DIGEST)
    table.round(others)
    mine = local(prepared=READY, held=frozenset({(1, DIGEST)}))
    assert decide(table.view(), mine, RULES) == [Apply(1, DIGEST, contributed=False)]


def test_one_round_behind_takes_the_round_before_the_one_that_stands() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    table.round(replace(record, number=2, previous=DIGEST, before=record.participants))
    assert decide(table.view(), local(), RULES) == [Fetch(1, DIGEST)]
    held = local(held=frozenset({(1, DIGEST)}))
    assert decide(table.view(), held, RULES) == [Apply(1, DIGEST, contributed=True)]


def test_further_behind_catches_up() -> None:
    table = Table("a", "b")
    table.round(RoundRecord(0, 7, Phase.COMMITTED, digest=DIGEST))
    assert decide(table.view(), local(applied=3), RULES) == [CatchUp(7)]


def test_a_store_that_lost_its_last_writes_is_told_what_was_applied() -> None:
    table = Table("a")
    table.round(RoundRecord(0, 3, Phase.COMMITTED, digest=DIGEST))
    (action,) = decide(table.view(), local(applied=5), RULES)
    assert isinstance(action, Propose) and action.revision == table.board.rounds[0].revision
    assert (action.record.number, action.record.phase, action.record.base) == (6, Phase.TRAIN, BASE)
    assert action.record.attempt > 1000  # what stands of the attempts before counts for none of these
    assert decide(table.view(), local(applied=5), RULES, may_propose=False) == []


def test_an_empty_store_begins_after_the_last_round_that_was_applied() -> None:
    (action,) = decide(Table("a").view(), local(applied=5), RULES)
    assert isinstance(action, Create) and (action.record.number, action.record.phase) == (6, Phase.TRAIN)


def test_who_cannot_be_reached_does_not_say_where_a_run_stands_whose_store_forgot() -> None:
    """Nobody could come there."""
    table = Table()
    table.member("a", address=None)
    assert decide(table.view(), local(applied=5), RULES) == []
    assert decide(table.view(), local(), RULES) != []  # where every cluster begins
    table.round(RoundRecord(0, 3, Phase.COMMITTED, digest=DIGEST))
    assert decide(table.view(), local(applied=5), RULES) == []


def test_a_run_that_begins_again_from_a_disk_goes_on_at_its_step() -> None:
    """The learning rate of who joins then is that of the run."""
    (action,) = decide(Table("a").view(), local(40, step=4000), RULES)
    assert isinstance(action, Create) and (action.record.open, action.record.step) == (41, 4000)
    table = Table("a", "b")
    table.round(RoundRecord(0, 38, Phase.TRAIN, base=BASE, step=3700))
    (action,) = decide(table.view(), local(40, step=4000), RULES)
    assert isinstance(action, Propose) and (action.record.open, action.record.step) == (41, 4000)


def test_a_cluster_with_other_parameters_than_the_round_gets_them_anew() -> None:
    table = Table("b", "c")
    record = table.exchange("b", "c")
    table.round(replace(record, number=4, base=OTHER))
    actions = decide(table.view(), local(applied=3), RULES)
    assert Renew(3, OTHER) in actions and not any(isinstance(a, Begin) for a in actions)


def test_what_the_process_before_had_shown_is_in_the_round() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    table.round(replace(record, phase=Phase.COMMITTED, digest=DIGEST))
    again = local(incarnation=incarnation("a", 2), held=frozenset({(1, DIGEST)}))
    assert decide(table.view(), again, RULES) == [Apply(1, DIGEST, contributed=False)]
    kept = replace(again, exposed=(1, incarnation("a")))
    assert decide(table.view(), kept, RULES) == [Apply(1, DIGEST, contributed=True)]


def test_who_may_not_propose_does_not() -> None:
    table = Table("a")
    table.round(RoundRecord(0, 1, Phase.TRAIN, base=BASE))
    table.put("ready.0.a", READY)
    (action,) = decide(table.view(), local(prepared=READY), RULES)
    assert isinstance(action, Propose) and action.revision == table.board.rounds[0].revision
    assert decide(table.view(), local(prepared=READY), RULES, may_propose=False) == []


def test_contributions_are_carried_over_once() -> None:
    assert after_applying(READY, 1, OTHER) == replace(READY, round=2, base=OTHER)
    assert after_applying(replace(READY, round=2), 1, OTHER) == replace(READY, round=2)
    assert after_applying(None, 1, OTHER) is None
    assert not given_up(READY, exposed=0) and not given_up(None, exposed=1)
    assert given_up(READY, exposed=1)
