"""What the kernel says of real connections: their room, before and after idleness, and what they carried."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from isles.exchange.kernel import INITIAL, UNKNOWN, room, seen


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


def mss(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)


def pass_on(near: socket.socket, far: socket.socket, count: int) -> None:
    near.sendall(bytes(count))
    while count:
        count -= len(far.recv(min(count, 1 << 16)))


def test_a_new_connection_has_room_for_the_initial_window(pair: tuple[socket.socket, socket.socket]) -> None:
    assert room(pair[0]) == INITIAL * mss(pair[0])


def test_there_is_no_room_where_nobody_reads(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    near.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    assert room(near) < 0
    near.setblocking(True)
    far.setblocking(False)
    deadline = time.monotonic() + 20
    while room(near) <= 0 and time.monotonic() < deadline:
        with suppress(BlockingIOError):
            far.recv(1 << 20)
    assert room(near) > 0


def test_after_idleness_the_window_begins_anew(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    for _ in range(40):
        pass_on(near, far, INITIAL * mss(near))
    assert room(near) > INITIAL * mss(near)  # it has grown
    time.sleep(0.5)  # the retransmission time-out is 0.2 s here
    assert room(near) == INITIAL * mss(near)


def test_what_a_connection_carried(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    pass_on(near, far, 500_000)
    there, here = seen(far), seen(near)
    assert there is not None and here is not None
    assert there.received == 500_000 and here.received == 0
    assert 0 < here.shortest <= here.trip < 10


def test_nothing_is_known_of_what_is_no_connection_of_tcp() -> None:
    class Gone:
        def get_extra_info(self, name: str, default: object = None) -> object:
            return {}.get(name, default)

    class Broken:
        def get_extra_info(self, name: str, default: object = None) -> object:
            raise AttributeError(name, default)  # as a WebSocket of aiohttp does whose transport is gone

    near, far = socket.socketpair()
    with near, far:
        for connection in (near, Gone(), Broken()):
            assert room(connection) == UNKNOWN
            assert seen(connection) is None
