"""From contributions to one average: what a cluster encodes, and what the owner of a part makes of it.

A contribution is the fragment's pseudo-gradient as a list of chunks. The owner adds the decoded contributions up in the order
of the clusters' names (a fixed order, so that the sum has the same bits wherever it is made), encodes the average once, and
every cluster, the owner too, applies the *decoded* average. Codecs that gather (top-k) are not averaged by an owner: a mean of
sparse contributions is no longer sparse, so each cluster receives all contributions and adds them up itself, in the same order.

No network here: the same functions serve the simulator and, chunk by chunk, an owner that receives them over HTTPS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isles.codec import CHUNK_VALUES, Chunk, Codec, NonFiniteError, decode, decode_accumulate
from isles.outer import contribution_weights, radial_rescale, radial_weights, tensor_norms
from isles.spec import OuterTable

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Contribution:
    """One cluster's encoded pseudo-gradient of one fragment."""

    cluster: str
    tokens: int  # trained since the cluster's last contribution to this fragment
    chunks: tuple[Chunk, ...]  # consecutive, CHUNK_VALUES values each, the last one shorter

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(chunk) for chunk in self.chunks)


@dataclass(frozen=True)
class Average:
    """The merged pseudo-gradient of a fragment, as every cluster decodes it."""

    values: Floats  # shape [fragment]
    weights: tuple[float, ...]  # one a contribution, in the order of the clusters' names
    nbytes: int  # of the encoded average; 0 when contributions are gathered instead


def encode_contribution(
    codec: Codec,
    base: Floats,
    local: Floats,
    *,
    start: int,
    cluster: str,
    tokens: int,
    seed: int,
    residual: Floats | None = None,
) -> Contribution:
    """Encode base - local, chunk by chunk.

    base, local: fp32, shape [fragment]; start: the fragment's first position in the canonical flat layout; residual: error
    feedback of codecs that need it, fp32 of the same shape, updated in place. Raises NonFiniteError
    at NaN or infinity; the residual is then as it was."""
    chunks: list[Chunk] = []
    before = None if residual is None else residual.copy()
    try:
        for first in range(0, base.size, CHUNK_VALUES):
            part = slice(first, min(first + CHUNK_VALUES, base.size))
            rest = None if residual is None else residual[part]
            chunks.append(codec.encode(base[part], local[part], offset=start + first, seed=seed, residual=rest))
    except NonFiniteError:
        if residual is not None and before is not None:
            np.copyto(residual, before)  # earlier chunks have been taken out of it, and now nothing is sent
        raise
    return Contribution(cluster, tokens, tuple(chunks))


def decode_chunks(chunks: Sequence[Chunk], size: int) -> Floats:
    """Decode consecutive chunks into one fp32 vector of `size` values."""
    values = np.empty(size, np.float32)
    for i, chunk in enumerate(chunks):
        decode(chunk, values[i * CHUNK_VALUES : min((i + 1) * CHUNK_VALUES, size)])
    return values


def average(
    codec: Codec,
    contributions: Sequence[Contribution],
    table: OuterTable,
    tensors: Sequence[tuple[int, int]],
    *,
    start: int,
    size: int,
    seed: int,
) -> Average:
    """Merge contributions of one fragment into what every cluster applies.

    tensors: (start, stop) of each tensor within the fragment, for the radial rule; start, size: of the fragment in the flat
    layout; seed: of the average's stochastic rounding. Raises ValueError when there is no contribution."""
    ordered = sorted(contributions, key=lambda c: c.cluster)
    weights = contribution_weights(table, [c.tokens for c in ordered])
    if table.merge == "radial":
        mean = _radial_mean(ordered, weights, tensors, size)
    else:
        mean = np.zeros(size, np.float32)
        for contribution, weight in zip(ordered, weights, strict=True):
            for i, chunk in enumerate(contribution.chunks):
                decode_accumulate(chunk, weight, mean[i * CHUNK_VALUES : min((i + 1) * CHUNK_VALUES, size)])
    if codec.gathers:
        return Average(mean, tuple(weights), 0)
    encoded = [
        codec.encode(mean[first : min(first + CHUNK_VALUES, size)], offset=start + first, seed=seed)
        for first in range(0, size, CHUNK_VALUES)
    ]
    return Average(decode_chunks(encoded, size), tuple(weights), sum(_nbytes(chunk) for chunk in encoded))


def _radial_mean(
    ordered: Sequence[Contribution], weights: Sequence[float], tensors: Sequence[tuple[int, int]], size: int
) -> Floats:
    norms = [tensor_norms(decode_chunks(c.chunks, size), tensors) for c in ordered]
    factors = radial_weights(weights, norms)
    total = np.zeros(size, np.float32)
    for contribution, per_tensor in zip(ordered, factors, strict=True):
        values = decode_chunks(contribution.chunks, size)
        for (first, stop), factor in zip(tensors, per_tensor, strict=True):
            total[first:stop] += np.float32(factor) * values[first:stop]
    radial_rescale(total, tensors, weights, norms)
    return total


def bytes_on_wire(codec: Codec, contributions: Sequence[Contribution], averaged: Average, receivers: int) -> int:
    """Bytes that all clusters together send for one round.

    Dense codecs: every contribution travels to the owners, except each owner's own part; every average travels from its owner to
    the other receivers. Between m equal clusters that is 2 (m - 1) / m of the encoded size up, and as much down, for each.
    Gathering codecs: every contribution travels to every other receiver. receivers: clusters that take the result, contributors
    included."""
    sent = sum(c.nbytes for c in contributions)
    m = len(contributions)
    if codec.gathers:
        return sent * (receivers - 1)
    return sent * (m - 1) // m + averaged.nbytes * (receivers - 1)


def _nbytes(chunk: Chunk) -> int:
    return chunk.nbytes if isinstance(chunk, (memoryview, np.ndarray)) else len(chunk)
