"""How fast a line is told to be: from bursts that keep it busy, rounded, and known for what it is on a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from isles.exchange import speed as module
from isles.exchange.rate import RateCap
from isles.exchange.speed import BURSTS, IDLE, MOST, Direction, LineSpeed


def played(*bursts: Sequence[float]) -> Direction:
    """Bursts of bytes/s, window by window."""
    direction = Direction()
    for burst in bursts:
        for rate in burst:
            direction.window(round(rate * module.WINDOW), module.WINDOW)
        for _ in range(IDLE):
            direction.window(100, module.WINDOW)
    return direction


def test_nothing_is_known_of_a_line_that_was_never_busy_for_long() -> None:
    assert played().speed == 0
    assert played([1e6] * 4, [1e6] * 4).speed == 0


def test_the_best_window_of_a_burst_counts_but_not_its_edges() -> None:
    speed = played([9e9, 1e6, 12.5e6, 1e6, 9e9]).speed
    assert abs(speed / 12.5e6 - 1) < 0.1


def test_one_odd_burst_changes_nothing_and_a_line_that_changed_is_noticed() -> None:
    usual, slow = [12.5e6] * 6, [2.5e6] * 6
    assert played(usual, usual, slow, usual).speed == played(usual).speed
    assert played(usual, *[slow] * BURSTS).speed == played(slow).speed


@pytest.mark.parametrize("noise", [0.95, 1.0, 1.05])
def test_equal_lines_are_told_to_be_equal(noise: float) -> None:
    assert played([2.0**23 * noise] * 6).speed == 2**23


def test_traffic_that_never_ends_is_known_too() -> None:
    assert played([1e7] * MOST).speed > 0


def test_what_the_kernel_counts_on_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 0.02)

    async def play() -> None:
        lines = {"server": LineSpeed(), "client": LineSpeed()}
        body = bytes(200_000)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            lines["server"].watch(writer.transport)
            while await reader.read(len(body)):
                pass
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        measuring = [asyncio.create_task(line.run(RateCap(None), lambda: None)) for line in lines.values()]
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        lines["client"].watch(writer.transport)
        while not (lines["client"].up.speed and lines["server"].down.speed):  # a busy machine looks too rarely in some bursts
            for _ in range(12):
                writer.write(body)
                await writer.drain()
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02 * (IDLE + 3))
        assert lines["client"].down.speed == lines["server"].up.speed == 0
        writer.close()
        await reader.read()
        for task in measuring:
            task.cancel()
        server.close()

    asyncio.run(asyncio.wait_for(play(), 20))
