"""Records from other machines are believed in nothing, and the board keeps the newest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocol import BASE, Table, incarnation

from isles.errors import RecordError
from isles.protocol import LEASE, Board, MemberRecord, Phase, RoundRecord, State, pack, parse
from isles.protocol.records import MAX_RECORD_BYTES, DoneRecord, ReadyRecord

MEMBER = MemberRecord("a", incarnation("a"), State.ACTIVE, "h:1", rounds=(3,))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"nothing", b'{"fragment": -1}', b"\xff\xfe", b"null",
        pack(RoundRecord(0, 1, Phase.TRAIN)).replace(b'"train"', b'"run"'),
        pack(RoundRecord(0, 1, Phase.TRAIN)).replace(b'"number":1', b'"number":1.5'),
        pack(RoundRecord(0, 1, Phase.TRAIN)).replace(b'"number":1', b'"number":99999999999999999999'),
        pack(RoundRecord(0, 1, Phase.TRAIN, base=BASE)).replace(b"bbbb", b"../x"),
        b" " * (MAX_RECORD_BYTES + 1),
    ],
)  # fmt: skip
def test_a_damaged_record_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(RecordError) as caught:
        parse(RoundRecord, data)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_bytes_are_never_taken_for_a_record_by_accident(data: bytes) -> None:
    for kind in (MemberRecord, ReadyRecord, DoneRecord, RoundRecord):
        with pytest.raises(RecordError):
            parse(kind, data)


def test_records_survive_the_wire() -> None:
    table = Table("a", "b")
    record = table.exchange("a", "b")
    assert parse(RoundRecord, pack(record)) == record
    assert parse(MemberRecord, pack(MEMBER)) == MEMBER


def test_the_board_keeps_the_newest_whatever_order_records_come_in() -> None:
    board = Board()
    first, second = RoundRecord(0, 1, Phase.TRAIN), RoundRecord(0, 2, Phase.TRAIN)
    assert board.put("rounds.0", pack(second), 9, 0.0)
    assert not board.put("rounds.0", pack(first), 8, 1.0)
    assert not board.put("rounds.0", pack(second), 9, 2.0)
    assert board.rounds[0].record == second and board.rounds[0].since == 0.0


def test_nobody_speaks_for_another() -> None:
    with pytest.raises(RecordError, match="another cluster"):
        Board().put("members.b", pack(MEMBER), 1, 0.0)
    with pytest.raises(RecordError, match="another fragment"):
        Board().put("rounds.1", pack(RoundRecord(0, 1, Phase.TRAIN)), 1, 0.0)


@pytest.mark.parametrize("key", ["spec", "ledger", "members", "members.a.b", "rounds.x", "ready.0", "done.x.a", ""])
def test_other_keys_are_none_of_the_boards_business(key: str) -> None:
    assert not Board().put(key, b"anything", 1, 0.0)


def test_time_without_the_store_is_held_against_nobody() -> None:
    table = Table("a", "b")
    table.round(RoundRecord(0, 1, Phase.TRAIN))
    table.now = 2.0
    table.board.disconnected(table.now)
    table.now = 100.0
    assert table.view().alive("a") and table.view().stood(table.board.rounds[0]) == 2.0
    table.board.connected(table.now)
    assert table.view().alive("a") and table.view().stood(table.board.rounds[0]) == 2.0
    table.now += LEASE + 0.1
    assert not table.view().alive("a")


def test_a_process_is_not_the_one_before_it() -> None:
    table = Table("a")
    assert table.view().alive("a", incarnation("a")) and not table.view().alive("a", incarnation("a", 2))
    assert not table.view().alive("b")
