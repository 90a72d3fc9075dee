"""Who reduces what: the parts of a round, sized so that the slowest line finishes with the others.

With m clusters, encoded size S, and cluster i owning the share p_i of the fragment, i sends (1 - p_i) S of its contribution to other
owners and its p_i S of averages to m - 1 others; it receives just as much. So its line, of r_i bytes/s in its slower direction, is busy

    t_i = S (1 + p_i (m - 2)) / r_i

and the best shares bring all t_i that can be brought there to one T: p_i = clamp((T r_i / S - 1) / (m - 2), 0, 1), sum p_i = 1. A line
slower than S / T owns nothing and is done when its own contribution and its averages have gone through. With m = 2 the time does not
depend on the shares. A cluster that cannot be reached from outside owns no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isles.protocol.records import Part

CHUNK_VALUES = 1 << 20  # of a full chunk, as in the codec's format: 4 MiB of fp32
CHUNK_UNIT = 4096  # chunks are multiples of this, so that codecs' blocks do not depend on where chunks are cut
CHUNKS_PER_CLUSTER = 4  # at least, where the fragment is large enough: both directions stay busy


def chunk_values(size: int, clusters: int) -> int:
    """Values in a chunk of a fragment of `size` values exchanged by so many clusters: a multiple of CHUNK_UNIT."""
    wanted = -(-size // max(1, clusters * CHUNKS_PER_CLUSTER))
    return min(CHUNK_VALUES, max(CHUNK_UNIT, -(-wanted // CHUNK_UNIT) * CHUNK_UNIT))


def plan_parts(chunks: int, owners: Mapping[str, float], clusters: int) -> tuple[Part, ...]:
    """Parts of `chunks` chunks. owners: clusters that can own a part, with their line's speed in bytes/s (0: unknown); clusters: that take
    part, owners included. Raises ValueError when nobody can own."""
    names = sorted(owners)
    if not names:
        raise ValueError("nobody can own a part: no participant can be reached from outside")
    shares = _shares([owners[name] for name in names], clusters)
    parts, first = [], 0
    for name, count in zip(names, _rounded(shares, chunks), strict=True):
        if count:
            parts.append(Part(name, first, first + count))
            first += count
    return tuple(parts)


def replan_parts(parts: Sequence[Part], owners: Mapping[str, float], clusters: int) -> tuple[Part, ...]:
    """The parts of the next attempt: who is still there keeps what it has, what lost owners had is spread over the others.
    Raises ValueError when nobody can own."""
    result = [part for part in parts if part.owner in owners]
    orphans = [part for part in parts if part.owner not in owners]
    for orphan in orphans:
        spread = plan_parts(orphan.stop - orphan.first, owners, clusters)
        result += [Part(part.owner, orphan.first + part.first, orphan.first + part.stop) for part in spread]
    return tuple(sorted(result, key=lambda part: part.first))


def _shares(speeds: Sequence[float], clusters: int) -> list[float]:
    """The share of each owner; speeds in bytes/s, 0 for unknown lines, which are taken for the mean of the others."""
    known = [speed for speed in speeds if speed > 0]
    typical = sum(known) / len(known) if known else 1.0
    rates = [speed if speed > 0 else typical for speed in speeds]
    if clusters <= 2 or len(rates) == 1:
        return [1 / len(rates)] * len(rates)

    def at(seconds: float) -> list[float]:
        return [min(1.0, max(0.0, (seconds * rate - 1) / (clusters - 2))) for rate in rates]

    low, high = 0.0, (clusters - 1) / min(rates)  # at `high` even the slowest would own everything
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(at(middle)) >= 1 else (middle, high)
    shares = at(high)
    return [share / sum(shares) for share in shares]


def _rounded(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers with the same sum, by largest remainders; ties go to who comes first."""
    exact = [share * total for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
