"""The table of transitions, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.protocol import BASE, DIGEST, OTHER, RULES, Table, incarnation, names

from isles.protocol import LEASE, Phase, RoundRecord, Rules, State, pack
from isles.protocol.board import SUSPICION


def opened(*clusters: str, number: int = 1) -> Table:
    table = Table(*clusters)
    table.round(RoundRecord(0, number, Phase.TRAIN, base=BASE))
    return table


def test_no_record_has_no_successor() -> None:
    assert Table("a").next() is None


def test_a_round_closes_when_every_active_cluster_is_ready() -> None:
    table = opened("a", "b")
    table.ready("b")
    assert table.next() is None
    table.ready("a", tokens=7)
    record = table.next()
    assert record is not None and (record.phase, record.number, record.attempt) == (Phase.EXCHANGE, 1, 0)
    assert [(p.cluster, p.tokens) for p in record.participants] == [("a", 7), ("b", 5)]
    assert sum(p.stop - p.first for p in record.parts) * record.chunk >= 100_000
    assert record.base == BASE


def test_the_first_round_waits_for_the_clusters_that_the_run_starts_with() -> None:
    table = opened("a", "b")
    table.ready("a"), table.ready("b")
    rules = replace(RULES, start=3)
    assert table.next(rules) is None
    table.member("c")
    table.ready("c")
    assert names(table.next(rules)) == ["a", "b", "c"]


def test_joiners_are_neither_waited_for_nor_averaged_in() -> None:
    table = opened("a")
    table.member("b", State.JOINING)
    table.ready("a"), table.ready("b")
    assert names(table.next()) == ["a"]


def test_a_cluster_that_leaves_is_not_waited_for_but_may_still_contribute() -> None:
    table = opened("a")
    table.member("b", State.LEAVING)
    table.ready("a")
    assert names(table.next()) == ["a"]
    table.ready("b")
    assert names(table.next()) == ["a", "b"]


def test_ready_for_another_round_is_not_ready() -> None:
    table = opened("a", "b", number=4)
    table.ready("a", 4), table.ready("b", 3)
    assert table.next() is None


def test_ready_of_a_process_that_is_gone_is_not_ready() -> None:
    table = opened("a", "b")
    table.ready("a"), table.ready("b")
    table.member("b", boot=2)
    assert table.next() is None


def test_a_cluster_with_other_parameters_is_left_out() -> None:
    table = Table("a", "b", "c")
    table.round(RoundRecord(0, 3, Phase.COMMITTED, base=BASE, digest=DIGEST))
    for cluster in "abc":
        table.ready(cluster, 4, base=OTHER if cluster == "a" else BASE)
    table.now += 10 * LEASE
    table.refresh("a", "b", "c")
    assert names(table.next()) == ["b", "c"]


def test_a_silent_cluster_is_not_waited_for_once_its_lease_has_run_out() -> None:
    table = opened("a", "b")
    table.ready("a")
    table.now += LEASE
    table.refresh("a")
    assert table.next() is None
    table.now += 0.1
    assert names(table.next()) == ["a"]


def test_a_quorum_closes_the_round_after_the_grace() -> None:
    table = opened("a", "b", "c")
    rules = replace(RULES, quorum=2, grace=0.5)
    table.ready("a"), table.ready("b")
    table.now += 4.9
    table.refresh("a", "b", "c")
    assert table.next(rules) is None
    table.now += 0.1
    assert names(table.next(rules)) == ["a", "b"]


def test_a_cluster_that_hangs_is_waited_for_twice_the_training_of_the_others() -> None:
    table = opened("a", "b")
    table.ready("a", seconds=30)
    table.now += 60 + LEASE - 0.1
    table.refresh("a", "b")
    assert table.next() is None
    table.now += 0.2
    assert names(table.next()) == ["a"]


def test_clusters_that_nobody_can_reach_cannot_exchange() -> None:
    table = opened()
    table.member("a", address=None), table.member("b", address=None)
    table.ready("a"), table.ready("b")
    assert table.next() is None
    table.member("b")
    record = table.next()
    assert {p.owner for p in record.parts} == {"b"} if record else False


def test_who_cannot_be_reached_does_not_go_on_alone() -> None:
    table = opened("b")
    table.member("a", address=None)
    table.ready("a")
    table.now += LEASE + 0.1
    table.refresh("a")
    assert table.next() is None
    table.member("b", State.LEAVING)
    assert table.next() is None
    table.member("a")
    assert names(table.next()) == ["a"]


def test_a_run_that_has_begun_does_not_wait_for_its_number_of_clusters_again() -> None:
    rules = replace(RULES, start=2)
    table = opened("a")
    table.ready("a")
    assert table.next(rules) is None
    table.member("a", rounds=(0, 3))  # another fragment is on its way
    assert names(table.next(rules)) == ["a"]
    table.member("a")
    assert table.next(rules) is None
    table.round(RoundRecord(0, 1, Phase.TRAIN, 1, base=BASE))  # they were there, and lost each other in the first exchange
    assert names(table.next(rules)) == ["a"]


def test_of_two_sets_of_parameters_the_one_that_somebody_can_be_asked_for_counts() -> None:
    for base in ("0" * 64, "f" * 64):
        table = opened("a")
        table.member("b", address=None)
        table.ready("a"), table.ready("b", base=base)
        assert names(table.next()) == ["a"]


def test_an_average_that_only_hidden_clusters_take_is_made_again_with_others() -> None:
    table = Table("a")
    table.member("b", address=None)
    table.exchange("a", "b")
    table.member("c")
    table.done("b")
    table.now += LEASE - 0.1
    table.refresh("a", "b", "c")
    table.ready("c")
    assert table.next() is None
    table.now += LEASE
    table.refresh("a", "b", "c")
    record = table.next()
    assert record is not None and (record.phase, record.participants) == (Phase.TRAIN, ())


def test_an_average_that_nobody_could_get_is_not_committed() -> None:
    table = Table("a")
    table.member("b", address=None), table.member("c", address=None)
    table.exchange("a", "b", "c")
    table.done("b"), table.done("c")
    assert table.next() is None
    table.done("a")
    committed = table.next()
    assert committed is not None and committed.phase is Phase.COMMITTED


def test_who_makes_no_progress_is_waited_for_as_long_as_the_first_needed_and_a_lease() -> None:
    table = Table("a", "b")
    table.exchange("a", "b")
    table.now += 20
    table.refresh("a", "b")
    table.done("a")
    table.now += 19.9
    table.refresh("a", "b")
    assert table.next() is None
    table.now += 0.2
    committed = table.next()
    assert committed is not None and committed.phase is Phase.COMMITTED and names(committed) == ["a", "b"]


def test_a_participant_that_hangs_alone_does_not_hold_up_others() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    table.round(replace(record, attempt=1, participants=record.participants[:1]))
    table.now += 10 + LEASE - 0.1
    table.refresh("a", "b")
    assert table.next() is None
    table.now += 0.2
    back = table.next()
    assert back is not None and (back.phase, back.attempt, back.base) == (Phase.TRAIN, 2, BASE)


def test_whom_most_contradict_is_not_in_the_next_attempt() -> None:
    table = Table("a", "b", "c")
    table.exchange("a", "b", "c")
    table.done("a"), table.done("b", digest="e" * 64), table.done("c")
    assert names(table.next()) == ["a", "c"]


def test_a_cluster_with_other_parameters_is_not_waited_for() -> None:
    table = Table("a", "b", "c")
    table.round(RoundRecord(0, 3, Phase.COMMITTED, base=BASE, digest=DIGEST))
    for cluster in "abc":
        table.ready(cluster, 4, base=OTHER if cluster == "a" else BASE)
    assert names(table.next()) == ["b", "c"]


def test_after_the_store_was_away_what_it_says_holds() -> None:
    table = Table("a")
    record = table.exchange("a")
    table.board.disconnected(table.now)
    table.board.connected(table.now + 5)
    table.board.put("rounds.0", pack(replace(record, phase=Phase.TRAIN)), 1, table.now + 5)
    assert table.board.rounds[0].revision == 1 and table.board.rounds[0].record.phase is Phase.TRAIN


def test_a_round_is_committed_when_most_hold_the_same_average() -> None:
    table = Table("a", "b", "c")
    record = table.exchange("a", "b", "c")
    table.done("a")
    assert table.next() is None
    table.done("c")
    committed = table.next()
    assert committed == replace(record, phase=Phase.COMMITTED, digest=DIGEST)


def test_done_of_another_attempt_round_or_process_counts_for_nothing() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    table.round(replace(record, attempt=1))
    table.done("a", attempt=0), table.done("b", attempt=0)
    assert table.next() is None
    table.done("a", number=2, attempt=1), table.done("b", number=2, attempt=1)
    assert table.next() is None


def test_two_results_of_one_attempt_are_never_committed() -> None:
    table = Table("a", "b")
    table.exchange("a", "b")
    table.done("a"), table.done("b", digest="e" * 64)
    again = table.next()
    assert again is not None and (again.phase, again.attempt) == (Phase.EXCHANGE, 1)


def test_a_lost_participant_leads_to_the_next_attempt_and_survivors_keep_their_parts() -> None:
    table = Table("a", "b", "c")
    record = table.exchange("a", "b", "c")
    table.member("b", boot=2)
    again = table.next()
    assert again is not None and again.attempt == 1 and names(again) == ["a", "c"]
    kept = {part for part in record.parts if part.owner != "b"}
    assert kept <= set(again.parts) and {p.owner for p in again.parts} == {"a", "c"}
    assert again.chunk == record.chunk and again.base == record.base


def test_a_participant_lost_after_most_were_done_does_not_cost_the_round() -> None:
    table = Table("a", "b", "c")
    table.exchange("a", "b", "c")
    table.done("a"), table.done("c")
    table.member("b", boot=2)
    committed = table.next()
    assert committed is not None and committed.phase is Phase.COMMITTED and names(committed) == ["a", "b", "c"]


def test_when_all_are_lost_the_round_is_trained_for_again_and_the_attempt_number_is_not_used_twice() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    table.member("a", boot=2), table.member("b", boot=2)
    back = table.next()
    assert back is not None and (back.phase, back.number, back.base) == (Phase.TRAIN, 1, BASE)
    table.round(back)
    table.ready("a", boot=2), table.ready("b", boot=2)
    again = table.next()
    assert again is not None and again.attempt > record.attempt + 1


def test_survivors_of_whom_none_can_be_reached_go_back_to_training() -> None:
    table = Table("a")
    table.member("b", address=None), table.member("c", address=None)
    table.exchange("a", "b", "c")
    table.member("a", boot=2)
    back = table.next()
    assert back is not None and back.phase is Phase.TRAIN


@pytest.mark.parametrize(("voters", "gone"), [("a", False), ("ab", True)])
def test_a_majority_of_the_others_votes_a_participant_out(voters: str, gone: bool) -> None:
    table = Table("a", "b", "c", "d")
    table.exchange("a", "b", "c", "d")
    for voter in voters:
        table.done(voter, digest=None, blamed=("c",))
    assert (names(table.next()) == ["a", "b", "d"]) is gone


def test_one_word_is_enough_against_a_member_that_misses_refreshes() -> None:
    table = Table("a", "b", "c", "d")
    table.exchange("a", "b", "c", "d")
    table.done("a", digest=None, blamed=("c",))
    table.now += SUSPICION + 0.1
    table.refresh("a", "b", "d")
    assert names(table.next()) == ["a", "b", "d"]


def test_of_two_that_blame_each_other_one_goes() -> None:
    table = Table("a", "b")
    table.exchange("a", "b")
    table.done("a", digest=None, blamed=("b",)), table.done("b", digest=None, blamed=("a",))
    assert names(table.next()) == ["a"]


def test_nobody_votes_against_itself_twice_or_from_outside() -> None:
    table = Table("a", "b", "c", "x")
    table.exchange("a", "b", "c", "x")
    table.done("a", digest=None, blamed=("b", "b", "a"))
    assert table.next() is None


def test_the_next_round_remembers_the_one_before() -> None:
    table = Table("a")
    table.exchange("a")
    table.done("a")
    committed = table.next()
    assert committed is not None
    table.round(committed)
    table.ready("a", 2, base=OTHER)
    following = table.next()
    assert following is not None and (following.number, following.previous) == (2, DIGEST)
    assert following.before == committed.participants and following.digest is None
    assert following.takes("a", incarnation("a")) and not following.takes("a", incarnation("a", 2))


def test_a_round_can_be_computed_by_anyone_and_comes_out_the_same() -> None:
    first, second = Table("a", "b"), Table("b", "a")
    for table, order in ((first, "ab"), (second, "ba")):
        table.round(RoundRecord(0, 1, Phase.TRAIN, base=BASE))
        for cluster in order:
            table.ready(cluster)
    assert first.next() == second.next() is not None


def test_small_fragments_have_a_chunk_at_least() -> None:
    table = Table("a", "b")
    table.exchange("a", "b", rules=Rules((3,)))
