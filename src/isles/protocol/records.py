"""The records of a run's store: what clusters tell each other, as typed values.

    members.<cluster>                 MemberRecord   written by that cluster only, refreshed while it lives
    rounds.<fragment>                 RoundRecord    written by whoever is first, by compare-and-set
    ready.<fragment>.<cluster>        ReadyRecord    written by that cluster only
    done.<fragment>.<cluster>         DoneRecord     written by that cluster only
    figures.<cluster>                 FiguresRecord  written by that cluster only, for people; nothing is decided by it

A record comes from another machine, so nothing of it is believed: `parse` bounds every length and every number before a value
exists. Records are frozen and compare by value; they hold no clock, because no clock is compared between machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from isles.errors import RecordError

MAX_RECORD_BYTES = 1 << 20  # 256 participants with their ranges take about 100 KB; the store refuses more than 1 MB anyway
MAX_CLUSTERS = 1024
MAX_RANGES = 64  # of trained samples in one contribution; a round rarely claims more than two

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
Incarnation = Annotated[str, Field(pattern=r"^[0-9a-f]{8,32}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 62, strict=True)]
Range = tuple[Count, Count]
Seconds = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]


class Phase(StrEnum):
    """Where a round stands."""

    TRAIN = "train"  # the clusters train; at the run's start, or after every participant of an exchange was lost
    EXCHANGE = "exchange"  # participants and parts are fixed for this attempt
    COMMITTED = "committed"  # the average is decided; the next round is being trained


class State(StrEnum):
    """Where a cluster stands in the run."""

    JOINING = "joining"  # holds no round's state yet, or fell behind; nobody waits for it
    ACTIVE = "active"
    LEAVING = "leaving"  # finishes an exchange it takes part in, and begins none


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A cluster of the run. address: host:port of its agent, None when it cannot be reached from outside. up, down: line speeds in
    bytes/s, as far as they are known, else 0; up is what the host allows. beat: counts refreshes. rounds: the last round applied, one a fragment."""

    cluster: Name
    incarnation: Incarnation  # a new one each time the agent starts
    state: State
    address: Annotated[str, Field(max_length=255)] | None = None
    up: Count = 0
    down: Count = 0
    beat: Count = 0
    step: Count = 0
    rounds: Annotated[tuple[Count, ...], Field(max_length=MAX_CLUSTERS)] = ()


@dataclass(frozen=True, slots=True)
class ReadyRecord:
    """A cluster's contribution to `round` is frozen and can be exchanged.

    base: digest of the global parameters that it is measured from. tokens: trained since the cluster's last sync of the fragment.
    seconds: that training for it took. ranges: stream positions of the samples in it, [start, stop)."""

    round: Count
    incarnation: Incarnation
    base: Digest
    tokens: Count
    step: Count
    seconds: Annotated[float, Field(ge=0, lt=1e9, allow_inf_nan=False)] = 0.0
    ranges: Annotated[tuple[Range, ...], Field(max_length=MAX_RANGES)] = ()


@dataclass(frozen=True, slots=True)
class DoneRecord:
    """How a participant's exchange stands: the digest of the whole encoded average once it holds all of it, and before that the
    participants it cannot get on with."""

    round: Count
    attempt: Count
    incarnation: Incarnation
    digest: Digest | None = None
    blamed: Annotated[tuple[Name, ...], Field(max_length=MAX_CLUSTERS)] = ()


@dataclass(frozen=True, slots=True)
class Participant:
    """A cluster whose contribution is in a round."""

    cluster: Name
    incarnation: Incarnation
    tokens: Count
    ranges: Annotated[tuple[Range, ...], Field(max_length=MAX_RANGES)] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Chunks [first, stop) of the fragment, reduced by `owner`."""

    owner: Name
    first: Count
    stop: Count


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One fragment's round. participants: by name. parts: by position, together all chunks of the fragment. chunk: values in a
    chunk. base: digest of the global parameters the contributions are measured from. digest: of the encoded average, once
    committed. previous, before: digest and participants of the round before, for who comes late. step: the run's step, that of the
    participant furthest on."""

    fragment: Count
    number: Count  # from 1
    phase: Phase
    attempt: Count = 0
    participants: Annotated[tuple[Participant, ...], Field(max_length=MAX_CLUSTERS)] = ()
    parts: Annotated[tuple[Part, ...], Field(max_length=MAX_CLUSTERS)] = ()
    chunk: Count = 0
    base: Digest | None = None
    digest: Digest | None = None
    previous: Digest | None = None
    before: Annotated[tuple[Participant, ...], Field(max_length=MAX_CLUSTERS)] = ()
    step: Count = 0

    @property
    def open(self) -> int:
        """The round that clusters train for, or exchange, now."""
        return self.number + 1 if self.phase is Phase.COMMITTED else self.number

    def takes(self, cluster: str, incarnation: str) -> bool:
        """Whether that process takes part."""
        return any(p.cluster == cluster and p.incarnation == incarnation for p in self.participants)


@dataclass(frozen=True, slots=True)
class FiguresRecord:
    """How a cluster does. loss: of its last local step, nats per token. tokens: trained since its agent started. seconds: spent in local steps,
    waiting included; stalled: of these, waiting for a round. exchange_seconds: of the last exchange, one a fragment. bytes_up, bytes_down:
    since its agent started. trouble: a sentence for people, empty when all is well."""

    cluster: Name
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    tokens: Count = 0
    seconds: Seconds = 0.0
    stalled: Seconds = 0.0
    exchange_seconds: Annotated[tuple[Seconds, ...], Field(max_length=MAX_CLUSTERS)] = ()
    bytes_up: Count = 0
    bytes_down: Count = 0
    trouble: Annotated[str, Field(max_length=500)] = ""


Record = TypeVar("Record", MemberRecord, ReadyRecord, DoneRecord, RoundRecord, FiguresRecord)


_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (MemberRecord, ReadyRecord, DoneRecord, RoundRecord, FiguresRecord)
}


def pack(record: MemberRecord | ReadyRecord | DoneRecord | RoundRecord | FiguresRecord) -> bytes:
    """A record as JSON."""
    return _ADAPTERS[type(record)].dump_json(record)


def parse(kind: type[Record], data: bytes) -> Record:
    """A record from JSON that another machine wrote. Raises RecordError, which says what is wrong with it."""
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"a {kind.__name__} of {len(data):,} bytes is larger than {MAX_RECORD_BYTES:,}: refuse its writer")
    try:
        record: Record = _ADAPTERS[kind].validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the record"
        raise RecordError(f"a {kind.__name__} is damaged: {where}: {first['msg']}; run the same isles everywhere") from error
    return record
