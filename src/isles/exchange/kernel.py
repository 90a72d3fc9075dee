"""What Linux says of a TCP connection (struct tcp_info): how fast it is, how long packets wait on it, and how much it has room for."""

from __future__ import annotations

import socket
import struct
from typing import Any, NamedTuple, Protocol

INITIAL = 10  # packets of the initial congestion window (RFC 6928)
UNKNOWN = 1 << 30  # bytes of room where nobody knows

# tcpi_snd_mss, tcpi_rtt, tcpi_bytes_received, tcpi_min_rtt, tcpi_delivered. What is delivered counts what arrived behind a hole, too, where what is
# acknowledged would come all at once when the hole is filled.
_SEEN = struct.Struct("=16xI48xI56xQ12xI40xI")
# tcpi_rto, tcpi_snd_mss, tcpi_unacked, tcpi_sacked, tcpi_lost, tcpi_retrans, tcpi_last_data_sent, tcpi_snd_cwnd, tcpi_notsent_bytes
_ROOM = struct.Struct("=8xI4xI4xIIII4xI32xI60xI")


class Wrapped(Protocol):
    """A transport, or a WebSocket."""

    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


Connection = socket.socket | Wrapped


class Seen(NamedTuple):
    """Seconds, and bytes since the connection was made."""

    trip: float
    delivered: int
    received: int
    shortest: float


def seen(connection: Connection) -> Seen | None:
    """Its round trip and what it carried; None where the kernel does not say."""
    fields = _info(connection, _SEEN)
    if fields is None:
        return None
    packet, trip, received, shortest, packets = fields
    return Seen(trip / 1e6, packets * packet, received, shortest / 1e6)


def room(connection: Connection) -> int:
    """Bytes that its congestion window lets go at once; below zero while some wait already, UNKNOWN where the kernel does not say.

    After idleness the window begins anew (RFC 5681, 4.1), which shows only with the next packet.
    """
    fields = _info(connection, _ROOM)
    if fields is None:
        return UNKNOWN
    timeout, packet, unacked, sacked, lost, again, idle, window, waiting = fields
    if not unacked and idle * 1000 > timeout:  # milliseconds, microseconds
        window = min(window, INITIAL)
    return int((window - (unacked - sacked - lost + again)) * packet - waiting)


def _info(connection: Connection, fields: struct.Struct) -> tuple[int, ...] | None:
    try:  # what is closed has no socket any more, or one that says nothing
        held = connection if isinstance(connection, socket.socket) else connection.get_extra_info("socket")
        return fields.unpack(held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, fields.size))
    except (OSError, AttributeError, struct.error):
        return None
