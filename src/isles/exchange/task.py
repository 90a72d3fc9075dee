"""One attempt of one round of one fragment, as the exchange needs to know it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from isles.codec import Codec
from isles.errors import RecordError
from isles.outer import contribution_weights
from isles.protocol import Participant, RoundRecord
from isles.spec import OuterTable

Contribution = Callable[[int], memoryview]  # chunk index -> its encoding; called in worker threads


@dataclass(frozen=True)
class Task:
    """run: the run's id. record: in phase exchange. start, size: the fragment's values in the flat layout. peers: address (host:port) of each
    participant, None where it cannot be reached from outside. seed: of the average's stochastic rounding. Raises RecordError when the record's
    parts are not those of the fragment."""

    run: str
    record: RoundRecord
    start: int
    size: int
    peers: Mapping[str, str | None]
    seed: int = 0
    owners: Mapping[int, str] = field(init=False)  # chunk -> owner

    def __post_init__(self) -> None:
        if self.record.chunk < 1 or any(not 0 <= part.first <= part.stop <= self.chunks for part in self.record.parts):
            raise RecordError(f"round {self.record.number}: its parts are not of this fragment; the round is not taken part in")
        owners = {chunk: part.owner for part in self.record.parts for chunk in range(part.first, part.stop)}
        if sorted(owners) != list(range(self.chunks)):
            raise RecordError(
                f"round {self.record.number}: its parts do not cover the fragment; the round is not taken part in"
            )
        object.__setattr__(self, "owners", owners)

    @property
    def key(self) -> tuple[int, int]:
        return self.record.fragment, self.record.number

    @cached_property
    def chunks(self) -> int:
        return -(-self.size // self.record.chunk)

    @cached_property
    def participants(self) -> dict[str, Participant]:
        """By name, in order."""
        return {p.cluster: p for p in sorted(self.record.participants, key=lambda p: p.cluster)}

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Values [first, stop) of the flat layout in a chunk."""
        first = chunk * self.record.chunk
        return self.start + first, self.start + min(first + self.record.chunk, self.size)

    def count(self, chunk: int) -> int:
        first, stop = self.bounds(chunk)
        return stop - first

    def owned_by(self, cluster: str) -> list[int]:
        return [chunk for chunk, owner in self.owners.items() if owner == cluster]

    def weights(self, table: OuterTable) -> list[float]:
        """Share of each contribution, in the order of the names."""
        return contribution_weights(table, [p.tokens for p in self.participants.values()])

    def result_limit(self, codec: Codec) -> int:
        """Largest encoding of a chunk of the average, in bytes."""
        return largest_result(codec, self.record.chunk, len(self.participants))


def largest_result(codec: Codec, chunk: int, participants: int) -> int:
    """Bytes of the largest encoding of `chunk` values of an average: of the contributions of so many, where the codec gathers them."""
    size = codec.encoded_size(chunk)
    return participants * (4 + size) if codec.gathers else size
