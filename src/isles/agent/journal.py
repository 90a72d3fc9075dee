"""What a cluster's agent keeps on disk, so that killing it costs nothing: checkpoints, and what was applied since.

    checkpoints/step-.../   global parameters and momentum, with the rounds that are in them
    journal.json            every round applied since the oldest of them: number, digest, whether this cluster's contribution was in it; and
                            the contribution that was last shown to others (round and process)

Applying a round changes the parameters in memory; the journal names it, and its encoded average lies in the exchange's folder. After a crash
the newest checkpoint is loaded and the rounds since are applied again, to the same bits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles.errors import CheckpointError, DiskError
from isles.files import write_whole


@dataclass(frozen=True)
class Applied:
    """A round that was applied. landed: with this cluster's contribution."""

    number: int
    digest: str
    landed: bool


@dataclass
class FragmentJournal:
    """applied: rising, without gaps. exposed: last round in whose exchange this cluster took part, and as which process. moving: last round
    with which a contribution that is not in it was moved along."""

    applied: list[Applied] = field(default_factory=list)
    exposed: int = 0
    incarnation: str = ""
    moving: int = 0


class Journal:
    """The journal of one cluster."""

    def __init__(self, path: Path, fragments: int) -> None:
        self.path = path
        self.fragments = [FragmentJournal() for _ in range(fragments)]
        self.taken = 0  # claims of samples that workers were given
        try:
            self._load(json.loads(path.read_bytes()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); remove the cluster's folder, it fetches all from the others"
            ) from error

    def _load(self, record: Any) -> None:
        if len(record["fragments"]) != len(self.fragments):
            raise ValueError("it is of a run with another number of fragments")
        self.taken = int(record["taken"])
        for fragment, row in zip(self.fragments, record["fragments"], strict=True):
            fragment.applied = [Applied(int(n), str(d), bool(landed)) for n, d, landed in row["applied"]]
            fragment.exposed, fragment.incarnation = int(row["exposed"]), str(row["incarnation"])
            fragment.moving = int(row.get("moving", 0))

    def save(self) -> None:
        """Raises DiskError."""
        rows = []
        for f in self.fragments:
            applied = [[a.number, a.digest, a.landed] for a in f.applied]
            rows.append({"applied": applied, "exposed": f.exposed, "incarnation": f.incarnation, "moving": f.moving})
        try:
            write_whole(self.path, json.dumps({"taken": self.taken, "fragments": rows}).encode(), mode=0o600)
        except OSError as error:
            raise DiskError(
                f"{self.path} cannot be written ({error.strerror}); free some space, the run goes on then"
            ) from error

    def applied(self, fragment: int, number: int, digest: str, *, landed: bool) -> None:
        """A round was applied. Raises DiskError."""
        rows, row = self.fragments[fragment].applied, Applied(number, digest, landed)
        if rows[-1:] != [row]:  # said again after the disk had refused
            rows.append(row)
        self.save()

    def exposed(self, fragment: int, number: int, incarnation: str) -> None:
        """The contribution to a round is about to be shown to others. Raises DiskError."""
        row = self.fragments[fragment]
        if (row.exposed, row.incarnation) != (number, incarnation):
            row.exposed, row.incarnation = number, incarnation
            self.save()

    def moves(self, fragment: int, number: int) -> None:
        """What the workers handed off is about to be moved along with a round, which a kill may leave half done. Raises DiskError."""
        self.fragments[fragment].moving = number
        self.save()

    def claimed(self, number: int) -> None:
        """Claim `number` goes to the workers. Raises DiskError."""
        self.taken = number
        self.save()

    def since(self, fragment: int, number: int) -> list[Applied]:
        """The rounds after `number`, in order. Raises CheckpointError when some are missing."""
        later = [a for a in self.fragments[fragment].applied if a.number > number]
        if [a.number for a in later] != list(range(number + 1, number + 1 + len(later))):
            raise CheckpointError(
                f"{self.path} lacks rounds after {number} of fragment {fragment}; they are fetched from the others"
            )
        return later

    def last(self, fragment: int) -> Applied | None:
        rows = self.fragments[fragment].applied
        return rows[-1] if rows else None

    def trim(self, before: list[int]) -> None:
        """Drop what lies before these rounds, one a fragment; the last stays. Raises DiskError."""
        for fragment, number in zip(self.fragments, before, strict=True):
            fragment.applied = [a for a in fragment.applied if a.number > number] or fragment.applied[-1:]
        self.save()
