"""Codecs: pseudo-gradients to chunks, and chunks back into sums.

`encode` reads the global and the local values and writes the chunk; `decode_accumulate` adds a chunk, times a weight, to a sum:

    accumulator += float32(weight) * value        one product, one sum, each rounded once

so that the same contributions in the same order give the same bits on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isles.codec import kernels, sparse
from isles.codec.format import HEADER, MAX_VALUES, TOPK_BLOCK, Chunk, ChunkHeader, NonFiniteError, blocks, payload_size, read_header, topk_entries
from isles.errors import CodecError
from isles.spec import CodecTable

Floats = NDArray[np.float32]
_BLOCK = {"int8": 128, "int4": 64}
_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True)
class Codec:
    """One way of encoding, without state. `gathers`: contributions are relayed to everyone instead of being averaged by an owner."""

    name: str
    parameter: int = 0  # block size of int8 and int4, k of topk
    stochastic: bool = False
    residual_decay: float = 0.95

    @property
    def gathers(self) -> bool:
        return self.name == "topk"

    @property
    def needs_residual(self) -> bool:
        return self.name == "topk"

    def encoded_size(self, count: int) -> int:
        """Bytes of a chunk of `count` values, header included."""
        return HEADER.size + payload_size(self.name, self.parameter, count)

    def encode(
        self,
        base: Floats,
        local: Floats | None = None,
        *,
        offset: int = 0,
        seed: int = 0,
        residual: Floats | None = None,
        out: bytearray | memoryview | None = None,
    ) -> memoryview:
        """Encode base - local, or base itself without a local.

        base, local, residual: fp32, contiguous, of the same one-dimensional shape; offset: position of the first value in the flat layout (it
        names values in errors and counts for stochastic rounding); seed: of stochastic rounding; residual: error feedback of topk, updated in
        place; out: where to write, of `encoded_size` bytes. Returns the chunk. Raises NonFiniteError with the position of the first NaN, infinity
        or value too large for the codec; nothing is silently clipped, and the residual is then unchanged."""
        count = _vector(base, "base").size
        for array, what in ((local, "local"), (residual, "residual")):
            if array is not None and _vector(array, what).size != count:
                raise ValueError(f"{what} has {array.size} values, base has {count}")
        if count > MAX_VALUES:
            raise ValueError(f"a chunk holds at most {MAX_VALUES} values, not {count}")
        if (residual is None) == self.needs_residual:
            raise ValueError(f"codec {self.name} {'needs' if self.needs_residual else 'takes no'} residual")
        view = memoryview(bytearray(self.encoded_size(count)) if out is None else out).cast("B")
        if len(view) != self.encoded_size(count):
            raise ValueError(f"out has {len(view)} bytes, {count} values of {self.name} need {self.encoded_size(count)}")
        header = ChunkHeader(self.name, self.parameter, count, offset, payload_size(self.name, self.parameter, count))
        header.pack_into(view)
        body = np.frombuffer(view, np.uint8, offset=HEADER.size)
        x = _NOTHING if local is None else local
        if residual is not None:
            self._encode_sparse(base, x, local is not None, residual, body, offset)
        elif count:
            bad = self._encode_dense(base, x, local is not None, body, offset, seed)
            if bad >= 0:
                raise _not_finite(base, local, bad, offset)
        return view

    def _encode_dense(self, base: Floats, x: Floats, subtract: bool, body: NDArray[np.uint8], offset: int, seed: int) -> int:
        if self.name == "fp32":
            return int(kernels.encode_fp32(base, x, subtract, body.view(np.float32)))
        if self.name == "bf16":
            return int(kernels.encode_bf16(base, x, subtract, body.view(np.uint16)))
        scales, codes = _split_scales(body, blocks(base.size, self.parameter))
        encode, width = (kernels.encode_int8, self.parameter) if self.name == "int8" else (kernels.encode_int4, self.parameter // 2)
        return int(encode(base, x, subtract, scales, codes, self.parameter, width, self.stochastic, stochastic_key(seed), offset))

    def _encode_sparse(self, base: Floats, x: Floats, subtract: bool, residual: Floats, body: NDArray[np.uint8], offset: int) -> None:
        body[:] = 0  # positions and values are packed by or-ing
        e = np.empty_like(base)
        bad = int(sparse.accumulate_residual(base, x, subtract, residual, np.float32(self.residual_decay), e))
        if bad < 0:
            bad = int(sparse.encode_topk(e, self.parameter, *_split_topk(body, base.size, self.parameter)))
        if bad >= 0:
            raise NonFiniteError(offset + bad, "not finite, or with its error feedback too large")
        np.copyto(residual, e)


def get_codec(table: CodecTable) -> Codec:
    """The codec a spec asks for."""
    parameter = table.k if table.name == "topk" else (table.block_size or _BLOCK[table.name]) if table.name in _BLOCK else 0
    return Codec(table.name, parameter, table.rounding == "stochastic", table.residual_decay)


def decode(chunk: Chunk | NDArray[np.uint8], out: Floats | None = None) -> Floats:
    """The values of a chunk, fp32. out: where to put them, of exactly the chunk's count.

    Raises CodecError when the chunk is cut, altered, or holds a value that is not finite."""
    header, body = _open(chunk)
    if out is None:
        out = np.empty(header.count, np.float32)
    _fits(out, header)
    if header.codec == "topk":
        out[:] = 0
    _decode(header, body, np.float32(1), header.codec == "topk", out)
    return out


def decode_accumulate(chunk: Chunk | NDArray[np.uint8], weight: float, accumulator: Floats) -> None:
    """accumulator += float32(weight) * value, in place; accumulator: fp32, of exactly the chunk's count. Raises CodecError as `decode`."""
    header, body = _open(chunk)
    _fits(accumulator, header)
    _decode(header, body, np.float32(weight), True, accumulator)


def _open(chunk: Chunk | NDArray[np.uint8]) -> tuple[ChunkHeader, NDArray[np.uint8]]:
    view = memoryview(chunk).cast("B")
    header = read_header(view)
    body = np.frombuffer(view, np.uint8, offset=HEADER.size)
    if header.count and not _finite(header, body):
        raise CodecError(f"the chunk at position {header.offset} holds a value or scale that is not finite; it was altered")
    return header, body


def _finite(header: ChunkHeader, body: NDArray[np.uint8]) -> bool:
    if header.codec == "fp32":
        return bool(kernels.all_finite_fp32(body.view(np.uint32)))
    if header.codec == "bf16":
        return bool(kernels.all_finite_bf16(body.view(np.uint16)))
    if header.codec == "topk":
        return bool(kernels.all_finite_bf16(_split_topk(body, header.count, header.parameter)[0]))
    return bool(kernels.all_finite_bf16(_split_scales(body, blocks(header.count, header.parameter))[0]))


def _decode(header: ChunkHeader, body: NDArray[np.uint8], weight: np.float32, accumulate: bool, out: Floats) -> None:
    if header.count == 0:
        return
    if header.codec == "fp32":
        values = body.view(np.float32)
        if accumulate:
            kernels.accumulate_fp32(values, weight, out)
        else:
            np.copyto(out, values)
    elif header.codec == "bf16":
        kernels.decode_bf16(body.view(np.uint16), weight, accumulate, out)
    elif header.codec == "topk":
        sections = _split_topk(body, header.count, header.parameter)
        if not sparse.decode_topk(*sections, header.parameter, weight, out, True):
            raise CodecError(f"the chunk at position {header.offset} names positions out of order; it was altered")
        sparse.decode_topk(*sections, header.parameter, weight, out, False)
    else:
        scales, codes = _split_scales(body, blocks(header.count, header.parameter))
        if header.codec == "int8":
            kernels.decode_int8(scales, codes.view(np.int8), header.parameter, weight, accumulate, out)
        else:
            kernels.decode_int4(scales, codes, header.parameter, weight, accumulate, out)


def _split_scales(body: NDArray[np.uint8], count: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    return body[: 2 * count].view(np.uint16), body[2 * count :]


def _split_topk(body: NDArray[np.uint8], count: int, k: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8], NDArray[np.uint8]]:
    """Levels, positions and values of a topk payload."""
    levels = 4 * blocks(count, TOPK_BLOCK)
    positions = levels + (topk_entries(count, k) * 12 + 7) // 8
    return body[:levels].view(np.uint16), body[levels:positions], body[positions:]


def stochastic_key(seed: int) -> np.uint32:
    """32 bits of a seed, all of its bits mixed in."""
    z = (seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    return np.uint32((z ^ (z >> 32)) & 0xFFFFFFFF)


def _vector(array: Any, what: str) -> Floats:
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{what} must be a contiguous one-dimensional fp32 array")
    return array


def _fits(out: Floats, header: ChunkHeader) -> None:
    if _vector(out, "the destination").size != header.count:
        raise ValueError(f"the destination has {out.size} values, the chunk {header.count}")


def _not_finite(base: Floats, local: Floats | None, index: int, offset: int) -> NonFiniteError:
    with np.errstate(all="ignore"):
        value = base[index] if local is None else base[index] - local[index]
    return NonFiniteError(offset + index, "NaN" if np.isnan(value) else "infinite" if np.isinf(value) else f"too large ({value:g})")
