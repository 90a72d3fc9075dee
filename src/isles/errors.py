"""The errors a person can cause, and the exit codes scripts can rely on.

Every error that a person can cause (a wrong key in run.toml, a damaged shard, an interrupted run) is an `IslesError`. Its text is
one sentence that names what is wrong, where, and what to do. The command line prints that sentence and exits with the
class's code; anything else that escapes is a bug in isles and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# what reading JSON of another machine may raise, be it nested too deep or of numbers that are none
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class IslesError(Exception):
    """A mistake or an outside failure that a sentence can explain. Exit code 1."""

    exit_code = 1


class UsageError(IslesError):
    """The command line was used wrongly (a bad option, a missing folder). Exit code 2, as shells and click use it."""

    exit_code = 2


class SpecError(IslesError):
    """run.toml, or an override of it, cannot be used. Exit code 3."""

    exit_code = 3


class DataError(IslesError):
    """Input text, a shard or an index is missing, damaged or of another version. Exit code 4."""

    exit_code = 4


class ModelError(IslesError):
    """A model cannot be built, loaded, laid out or exported. Exit code 5."""

    exit_code = 5


class CodecError(IslesError):
    """A tensor cannot be encoded (NaN, infinity) or a chunk cannot be decoded. Exit code 6."""

    exit_code = 6


class CheckpointError(IslesError):
    """A checkpoint is missing, damaged, or belongs to another run. Exit code 7."""

    exit_code = 7


class DivergedError(IslesError):
    """Training produced a loss or parameters that are not finite. Exit code 8."""

    exit_code = 8


class RecordError(IslesError):
    """A record of the run's store cannot be read, or the store refuses it. Exit code 9."""

    exit_code = 9


class NetworkError(IslesError):
    """A cluster, a store or an address cannot be reached, or does not prove who it is. Exit code 10."""

    exit_code = 10


class DiskError(IslesError):
    """A disk refuses what has to be written. Exit code 11."""

    exit_code = 11


@contextmanager
def first_failure() -> Iterator[None]:
    """Around a task group: what went wrong first is raised by itself, so that a sentence can be made of it."""
    try:
        yield
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report a command ended by Ctrl-C
