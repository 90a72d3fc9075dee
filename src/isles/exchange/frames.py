"""What travels on a lane: pieces of chunks one way, and what became of them the other way.

A lane is a WebSocket (RFC 6455) over mutual TLS; a frame is one binary message of it, all numbers little endian:

    piece      type 1: kind, ident, fragment, round, attempt, chunk, size of what travels of the chunk, offset of the piece, size of the
               chunk itself (another one when it is packed, see `packing`), BLAKE3 of the chunk itself, the sender's incarnation (ASCII, filled with zeros), its clock in microseconds; then the piece
    receipts   type 2: (ident, offset, microseconds between the sender's clock and the receiver's), of pieces that have come, any number of them
    verdict    type 3: ident, a status as in HTTP (200: taken in), and a sentence

An ident names one sending of one chunk; the sender makes it up. Nothing here is believed: lengths and numbers are checked by who takes the chunk in.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

_PIECE = struct.Struct("<BBQIQQIIII32s32sQ")
_RECEIPT = struct.Struct("<QIq")
_VERDICT = struct.Struct("<BHQ")
PIECE, RECEIPTS, VERDICT = 1, 2, 3
LARGEST_PIECE = 1 << 20  # bytes of a chunk's body in a frame
MAX_FRAME = LARGEST_PIECE + _PIECE.size
MAX_TEXT = 300  # bytes of a verdict's sentence
TAKEN = 200


class Kind(IntEnum):
    """What a chunk is of."""

    CONTRIBUTION = 1
    AVERAGE = 2


@dataclass(frozen=True, slots=True)
class Head:
    """Of a chunk that is sent. size: bytes of it that travel; whole: bytes of the chunk itself, and digest its BLAKE3. incarnation: of whose contribution it is, empty for an average."""

    kind: Kind
    fragment: int
    number: int
    attempt: int
    chunk: int
    size: int
    whole: int
    digest: bytes
    incarnation: str = ""
    ident: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """offset: of `data` in the chunk's body. stamp: the sender's clock, in microseconds, when it went."""

    head: Head
    offset: int
    data: bytes | memoryview
    stamp: int = 0

    def frame(self, stamp: int) -> bytes:
        h = self.head
        return (
            _PIECE.pack(
                PIECE, h.kind, h.ident, h.fragment, h.number, h.attempt, h.chunk, h.size, self.offset, h.whole, h.digest, h.incarnation.encode(), stamp
            )
            + self.data
        )  # fmt: skip


Receipt = tuple[
    int, int, int
]  # ident, offset, and how much later it is on the receiver's clock than it was on the sender's, in microseconds


@dataclass(frozen=True, slots=True)
class Receipts:
    """Pieces that have come, as (ident, offset, delay)."""

    pieces: Sequence[Receipt]

    def frame(self) -> bytes:
        return bytes([RECEIPTS]) + b"".join(_RECEIPT.pack(*piece) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a chunk. status: TAKEN, or as in HTTP why not."""

    ident: int
    status: int
    text: str = ""

    def frame(self) -> bytes:
        return _VERDICT.pack(VERDICT, self.status, self.ident) + self.text.encode()[:MAX_TEXT]


def parse(data: bytes) -> Piece | Receipts | Verdict:
    """Raises ValueError when it is no frame."""
    try:
        match data[0]:
            case 1:
                _, kind, ident, fragment, number, attempt, chunk, size, offset, whole, digest, incarnation, stamp = (
                    _PIECE.unpack_from(data)
                )
                name = incarnation.rstrip(b"\0").decode("ascii")
                head = Head(Kind(kind), fragment, number, attempt, chunk, size, whole, digest, name, ident)
                piece = memoryview(data)[_PIECE.size :]
                if size > whole:
                    raise ValueError(f"{size} bytes that pack a chunk of {whole}")
                if not 0 < len(piece) <= size - offset:
                    raise ValueError(f"a piece of {len(piece)} bytes at {offset} of {size}")
                return Piece(head, offset, piece, stamp)
            case 2:
                return Receipts(list(_RECEIPT.iter_unpack(memoryview(data)[1:])))
            case 3:
                _, status, ident = _VERDICT.unpack_from(data)
                return Verdict(ident, status, data[_VERDICT.size :][:MAX_TEXT].decode(errors="replace"))
    except (struct.error, IndexError) as error:
        raise ValueError(f"a frame that is cut short ({error})") from error
    raise ValueError(f"a frame of an unknown type {data[0]}")


def renamed(head: Head, ident: int) -> Head:
    """The head of another sending of the same chunk."""
    return replace(head, ident=ident)
