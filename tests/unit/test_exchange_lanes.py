"""What goes over lanes: nothing is lost or doubled whatever is lost on the way, the order is the one that is wanted, and the pace finds the line."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.exchange.frames import TAKEN, Head, Kind, Piece, Receipts, Verdict, parse
from isles.exchange.outbox import Outbox, Way
from isles.exchange.pace import Pace

HEAD = Head(Kind.CONTRIBUTION, 0, 1, 0, 0, 0, 0, bytes(32), "0" * 8)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def posted(outbox: Outbox, chunk: int, body: bytes, kind: Kind = Kind.CONTRIBUTION) -> None:
    outbox.post(Head(kind, 0, 1, 0, chunk, len(body), len(body), bytes(32)), body)


@given(st.binary(min_size=1, max_size=100), st.integers(0, 50), st.integers(0, 2**62), st.sampled_from(["", "0a" * 16]))
def test_a_frame_is_read_as_it_was_written(data: bytes, offset: int, ident: int, who: str) -> None:
    size = offset + len(data)
    head = Head(Kind.AVERAGE, 3, 2**40, 2, 7, size, size + 9, bytes(range(32)), who, ident)
    piece = Piece(head, offset, data, 12345)
    again = parse(piece.frame(12345))
    assert isinstance(again, Piece) and (again.head, again.offset, bytes(again.data), again.stamp) == (
        piece.head,
        offset,
        data,
        12345,
    )
    assert parse(Receipts([(ident, offset, -5)]).frame()) == Receipts([(ident, offset, -5)])
    assert parse(Verdict(ident, 413, "zu lang").frame()) == Verdict(ident, 413, "zu lang")


@given(st.binary(max_size=200))
def test_what_is_no_frame_is_a_value_error_and_nothing_else(data: bytes) -> None:
    try:
        parse(data)
    except ValueError:
        return


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 130), st.integers(0, 2**32))
def test_everything_comes_whatever_lanes_are_lost_and_chunks_refused(sizes: list[int], most: int, seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    outbox, came, taken = Outbox(clock), {}, set()
    bodies, refusals = [rng.randbytes(size) for size in sizes], 20
    for chunk, body in enumerate(bodies):
        posted(outbox, chunk, body, rng.choice(list(Kind)))
    for _ in range(20_000):
        if not outbox.waits:
            break
        clock.now += 0.01
        lane = rng.randrange(3)
        if rng.random() < 0.1:
            outbox.lost(lane)
        piece = outbox.take(lane, most)
        if piece is None or rng.random() < 0.2:  # lost on the way, with or without its lane
            outbox.lost(lane)
            continue
        head = piece.head
        if refusals and rng.random() < 0.1:
            refusals -= 1
            came.pop(head.ident, None)
            outbox.verdict(Verdict(head.ident, 400))
            continue
        body = came.setdefault(head.ident, bytearray(head.size))
        body[piece.offset : piece.offset + len(piece.data)] = piece.data
        outbox.receipt(head.ident, piece.offset, 0)
        if bytes(body) == bodies[head.chunk]:
            taken.add(head.chunk)
            outbox.verdict(Verdict(head.ident, TAKEN))
    assert taken == set(range(len(bodies))) and not outbox.waits and outbox.unsent == 0


def test_contributions_go_before_averages_and_chunks_in_order() -> None:
    outbox = Outbox(Clock())
    posted(outbox, 5, b"abcd", Kind.AVERAGE)
    posted(outbox, 1, b"efgh")
    posted(outbox, 2, b"ij")
    pieces = [outbox.take(lane, 3) for lane in (1, 2, 1, 2, 1)]
    assert [(p.head.chunk, bytes(p.data)) for p in pieces if p] == [(1, b"efg"), (1, b"h"), (2, b"ij"), (5, b"abc"), (5, b"d")]
    assert outbox.take(1, 3) is None and outbox.waits and outbox.unsent == 0


def test_a_chunk_that_was_not_taken_asks_with_one_piece_and_not_at_once() -> None:
    clock = Clock()
    outbox = Outbox(clock)
    posted(outbox, 1, b"abcdef")
    first = outbox.take(1, 2)
    assert first is not None
    ended = outbox.verdict(Verdict(first.head.ident, 425))
    assert ended is not None and outbox.take(1, 2) is None
    clock.now += 1.0
    second = outbox.take(1, 2)
    assert second is not None and second.offset == 0 and second.head.ident != first.head.ident
    assert outbox.take(2, 2) is None  # until the piece has come
    outbox.receipt(second.head.ident, 0, 0)
    third = outbox.take(2, 2)
    assert third is not None and third.offset == 2
    assert outbox.verdict(Verdict(first.head.ident, TAKEN)) is None  # of the sending before


def test_a_piece_whose_receipt_is_overdue_goes_over_another_lane_and_only_when_nothing_else_waits() -> None:
    clock = Clock()
    outbox = Outbox(clock)
    posted(outbox, 1, b"abcd")
    one, two = outbox.take(1, 2), outbox.take(2, 2)
    assert one is not None and two is not None
    clock.now += 0.1
    outbox.receipt(two.head.ident, 2, 0)
    assert outbox.take(2, 2) is None
    clock.now += 1.0
    posted(outbox, 2, b"xy")
    new = outbox.take(2, 2)
    assert new is not None and new.head.chunk == 2
    assert outbox.take(1, 2) is None  # its own lane is what it waits for
    again = outbox.take(2, 2)
    assert again is not None and (again.head.chunk, again.offset) == (1, 0)


def test_waiting_is_what_a_way_takes_beyond_its_shortest_by_clocks_that_differ() -> None:
    way = Way()
    assert way.waiting(0.0) is None
    for step in range(100):
        way.passed(-5000.0 + 0.01, step / 100)
    assert way.waiting(1.0) == pytest.approx(0.0, abs=1e-6)
    for step in range(100):
        way.passed(-5000.0 + 0.05, 1 + step / 100)
    assert way.waiting(2.0) == pytest.approx(0.04, rel=0.01)
    assert way.waiting(3.0) is None


def driven(pace: Pace, line: float, rounds: int, offered: float = 1e9) -> float:
    """A line of so many bytes/s with a buffer of 100 ms, rounds of 1.5 s with pauses; the most that waited in the last round, in seconds."""
    waited = 0.0
    for _ in range(rounds):
        queue = waited = 0.0
        for _ in range(30):
            sent = min(offered, pace.rate or 1e9) * 0.05
            carried = min(line * 0.05, queue + sent)
            queue = min(queue + sent - carried, 0.1 * line)
            waited = max(waited, queue / line)
            pace.moved(round(carried), 0.05, queue / line, 0.02, pace.rate is not None and offered > pace.rate)
        for _ in range(4):
            pace.moved(0, 0.25, None, 0.0, False)
    return waited


@pytest.mark.parametrize("line", [2.5e6, 12.5e6, 125e6])
def test_the_pace_finds_the_line_keeps_it_full_and_its_buffer_low(line: float) -> None:
    pace = Pace()
    waited = driven(pace, line, 4)
    assert pace.rate is not None and 0.94 * line < pace.rate < 1.05 * line and waited < 0.06


def test_the_pace_follows_a_line_that_changes() -> None:
    pace = Pace()
    driven(pace, 12.5e6, 4)
    driven(pace, 2.5e6, 8)
    assert pace.rate is not None and pace.rate < 3e6
    driven(pace, 12.5e6, 12)
    assert pace.rate > 11e6


def test_traffic_that_the_line_does_not_notice_teaches_nothing() -> None:
    pace = Pace()
    driven(pace, 12.5e6, 4)
    before = pace.rate
    driven(pace, 12.5e6, 10, offered=1e6)
    assert pace.rate == before


def test_short_lines_are_not_paced() -> None:
    pace = Pace()
    for _ in range(100):
        pace.moved(5_000_000, 0.05, 0.1, 0.0002, False)
    assert pace.rate is None
