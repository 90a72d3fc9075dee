"""The codecs: pseudo-gradients to chunks, and chunks back to values or into a sum.

A codec is a small frozen object without state: any number of threads may use one. What travels is described in `format`; the loops are
in `kernels` and `sparse`, and `reference` says the same in plain torch. Decoding needs no codec, a chunk says what it is.

Everything here either works completely or raises `CodecError` and leaves its arguments (an accumulator, a residual) as they were; only
`out` may hold anything after an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from isles.codec import kernels, sparse
from isles.codec.errors import first_refused
from isles.codec.format import (
    HEADER_BYTES,
    LARGEST_BITS,
    LARGEST_SCALE,
    SPARSE_BLOCK,
    Chunk,
    ChunkHeader,
    CodecName,
    as_bytes,
    pack_header,
    payload_bytes,
    read_header,
)
from isles.errors import CodecError
from isles.spec import CodecTable

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_NO_LOCAL = np.zeros(SPARSE_BLOCK, np.float32)  # what is subtracted, block after block, when there is no local
_NO_LOCAL.flags.writeable = False


@dataclass(frozen=True)
class Source:
    """What is encoded: base - local, where `step` is 1, or base alone, where `local` is a block of zeros and `step` is 0."""

    base: Floats
    local: Floats
    step: int
    residual: Floats | None
    offset: int
    seed: int

    def values(self, start: int, length: int, decay: float) -> Floats:
        """The values themselves, from `start` on: to say which of them is refused."""
        part = slice(start, start + length)
        with np.errstate(all="ignore"):
            d = self.base[part] - self.local[part] if self.step else self.base[part].copy()
            return d if self.residual is None else np.float32(decay) * self.residual[part] + d


@dataclass(frozen=True)
class Codec(ABC):
    """One way of encoding.

    name: as in run.toml. gathers: contributions are relayed to everyone and averaged by each, because an average of them is no longer
    small. needs_residual: `encode` takes the cluster's residual (error feedback) and updates it. block_size, k: as in the header."""

    name: CodecName
    block_size: int = 0
    k: int = 0
    stochastic: bool = False
    residual_decay: float = 0.0

    gathers: ClassVar[bool] = False
    needs_residual: ClassVar[bool] = False

    def encoded_size(self, count: int) -> int:
        """Bytes of a chunk of `count` values, header included."""
        return HEADER_BYTES + payload_bytes(self.name, count, self.block_size, self.k)

    def encode(
        self,
        base: Floats,
        local: Floats | None = None,
        *,
        offset: int = 0,
        seed: int = 0,
        residual: Floats | None = None,
        out: bytearray | memoryview | Bytes | None = None,
    ) -> memoryview:
        """Encode d = base - local (or d = base) into one chunk, in one pass.

        base, local: fp32, contiguous, shape [n], n at most CHUNK_VALUES. offset: position of the first value in the canonical flat
        layout; it goes into the header, into errors, and with `seed` into stochastic rounding. residual: fp32, shape [n], of codecs that
        need it, updated in place: e = beta e + d, less what is sent. out: a buffer of at least encoded_size(n) bytes to write to.

        Returns a view of exactly the chunk's bytes. Raises NonFiniteError when a value of d (or of e) is NaN, infinite or larger than the
        codec carries, with its position as `.index`; the residual is then untouched. Raises CodecError when an argument does not fit."""
        count = _vector("base", base).size
        header = pack_header(self.name, count, offset, self.block_size, self.k)
        source = self._source(base, local, residual, offset, seed)
        size = self.encoded_size(count)
        target = np.empty(size, np.uint8) if out is None else _buffer(out, size)
        aligned = target.ctypes.data % 4 == 0  # the loops write whole fp32 and bf16 values
        chunk = target if aligned else np.empty(size, np.uint8)
        chunk[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        bad = self._pack(source, chunk[HEADER_BYTES:])
        if bad >= 0:
            values = source.values(bad, max(kernels.STRIP, self.block_size), self.residual_decay)
            raise first_refused(values, offset + bad, self.name)
        if not aligned:
            target[:] = chunk
        return target.data

    def _source(self, base: Floats, local: Floats | None, residual: Floats | None, offset: int, seed: int) -> Source:
        if (residual is not None) != self.needs_residual:
            need = "needs the cluster's residual (zeros at first)" if self.needs_residual else "takes no residual"
            raise CodecError(f"{self.name} {need}: see Codec.needs_residual")
        values = _vector("base", base)
        rest = None if residual is None else _vector("residual", residual, values.size, writable=True)
        if local is None:
            return Source(values, _NO_LOCAL, 0, rest, offset, seed)
        return Source(values, _vector("local", local, values.size), 1, rest, offset, seed)

    @abstractmethod
    def _pack(self, source: Source, payload: Bytes) -> int:
        """Fill the payload. Returns -1, or the start of the first block with a value that the codec refuses."""

    @abstractmethod
    def _fits(self, payload: Bytes, count: int) -> bool:
        """Whether all values that the payload decodes to are finite, and all its positions valid."""

    @abstractmethod
    def _unpack(self, payload: Bytes, out: Floats) -> None:
        """out = the values."""

    @abstractmethod
    def _add(self, payload: Bytes, weight: np.float32, total: Floats) -> None:
        """total += weight * the values."""


class PlainCodec(Codec):
    """fp32 and bf16: a number for a number."""

    def _numbers(self, payload: Bytes) -> NDArray[Any]:
        return payload.view(np.float32 if self.name == "fp32" else np.uint16)

    def _received(self, payload: Bytes) -> NDArray[Any]:
        return _readonly(np.require(self._numbers(payload), requirements="A"))  # a copy of what arrived at an odd address

    def _pack(self, source: Source, payload: Bytes) -> int:
        pack = kernels.encode_fp32 if self.name == "fp32" else kernels.encode_bf16
        return int(pack(source.base, source.local, source.step, _largest(self.name), self._numbers(payload)))

    def _fits(self, payload: Bytes, count: int) -> bool:  # noqa: ARG002
        if self.name == "fp32":
            return bool(kernels.finite_fp32(self._received(payload).view(np.int32)))
        return bool(kernels.finite_bf16(self._received(payload)))

    def _unpack(self, payload: Bytes, out: Floats) -> None:
        if self.name == "fp32":
            np.copyto(out, self._numbers(payload))
        else:
            kernels.decode_bf16(self._received(payload), out)

    def _add(self, payload: Bytes, weight: np.float32, total: Floats) -> None:
        (kernels.add_fp32 if self.name == "fp32" else kernels.add_bf16)(self._received(payload), weight, total)


class BlockCodec(Codec):
    """int8 and int4: symmetric codes in blocks with a scale each."""

    def _pack(self, source: Source, payload: Bytes) -> int:
        pack = kernels.encode_int8 if self.name == "int8" else kernels.encode_int4
        first, high = np.uint32(source.offset & 0xFFFFFFFF), source.offset >> 32
        noise = self.stochastic, first, noise_key(source.seed, high), noise_key(source.seed, high + 1)
        return int(pack(source.base, source.local, source.step, _largest(self.name), self.block_size, payload, *noise))

    def _fits(self, payload: Bytes, count: int) -> bool:
        return bool(kernels.scales_fit(payload, -(-count // self.block_size), LARGEST_SCALE[self.name]))

    def _unpack(self, payload: Bytes, out: Floats) -> None:
        (kernels.decode_int8 if self.name == "int8" else kernels.decode_int4)(payload, self.block_size, out)

    def _add(self, payload: Bytes, weight: np.float32, total: Floats) -> None:
        (kernels.add_int8 if self.name == "int8" else kernels.add_int4)(payload, self.block_size, weight, total)


class SparseCodec(Codec):
    """topk: the largest of every 4,096, the rest later (SparseLoCo)."""

    gathers = True
    needs_residual = True

    def _pack(self, source: Source, payload: Bytes) -> int:
        taken = source.base, source.local, source.step, cast(Floats, source.residual), np.float32(self.residual_decay)
        bad = int(sparse.check_feedback(*taken, _largest(self.name)))
        if bad < 0:
            sparse.encode_topk(*taken, self.k, payload)
        return bad

    def _fits(self, payload: Bytes, count: int) -> bool:
        return bool(sparse.topk_fits(payload, count, self.k))

    def _unpack(self, payload: Bytes, out: Floats) -> None:
        out.fill(0)
        sparse.add_topk(payload, self.k, np.float32(1), out)

    def _add(self, payload: Bytes, weight: np.float32, total: Floats) -> None:
        sparse.add_topk(payload, self.k, weight, total)


_KINDS: dict[str, Callable[..., Codec]] = {
    "fp32": PlainCodec,
    "bf16": PlainCodec,
    "int8": BlockCodec,
    "int4": BlockCodec,
    "topk": SparseCodec,
}
_DEFAULT_BLOCK = {"int8": 128, "int4": 64}


def get_codec(table: CodecTable) -> Codec:
    """The codec that a spec asks for."""
    if table.name == "topk":
        return SparseCodec("topk", SPARSE_BLOCK, table.k, residual_decay=table.residual_decay)
    if table.name in _DEFAULT_BLOCK:
        block = table.block_size or _DEFAULT_BLOCK[table.name]
        return BlockCodec(table.name, block, stochastic=table.rounding == "stochastic")
    return PlainCodec(table.name)


def decode(chunk: Chunk, out: Floats | None = None) -> Floats:
    """The values of a chunk, fp32, shape [count]; written to `out` (fp32, contiguous, shape [count]) when it is given.

    Raises CodecError: the chunk is damaged, cut short, of another version, or holds values that are not finite; or `out` does not fit."""
    codec, header, payload = _open(chunk)
    values = np.empty(header.count, np.float32) if out is None else _vector("out", out, header.count, writable=True)
    codec._unpack(payload, values)
    return values


def decode_accumulate(chunk: Chunk, weight: float, accumulator: Floats) -> None:
    """accumulator += float32(weight) * value for every value of the chunk.

    accumulator: fp32, contiguous, shape [count], updated in place. A product and a sum, each rounded once (no fused multiply-add), so the
    same chunks in the same order give the same bits on every machine. Values that a top-k chunk does not name are left alone. Raises
    CodecError as `decode` does, or when the weight is not a finite fp32; the accumulator is then unchanged."""
    codec, header, payload = _open(chunk)
    total = _vector("accumulator", accumulator, header.count, writable=True)
    with np.errstate(over="ignore"):
        factor = np.float32(weight)
    if not np.isfinite(factor):
        raise CodecError(f"the weight of a contribution is {weight}, and must be a finite fp32 number")
    codec._add(payload, factor, total)


def check(chunk: Chunk) -> ChunkHeader:
    """What a chunk says about itself, once it is known that it can be decoded to finite values. Raises CodecError as `decode` does."""
    return _open(chunk)[1]


def _open(chunk: Chunk) -> tuple[Codec, ChunkHeader, Bytes]:
    """A checked chunk: its codec, its header, and its payload as a read-only array without a copy."""
    header = read_header(chunk)
    codec = _KINDS[header.codec](header.codec, header.block_size, header.k)
    payload = _readonly(np.frombuffer(as_bytes(chunk), np.uint8)[HEADER_BYTES:])
    if not codec._fits(payload, header.count):
        raise CodecError(
            f"the {header.codec} chunk for positions {header.offset} to {header.stop} holds values that are not finite or not "
            "in their place: refuse it and fetch it again"
        )
    return codec, header, payload


def noise_key(seed: int, high: int) -> np.uint32:
    """The key of stochastic rounding for positions whose upper 32 bits are `high` (splitmix64 of both, upper half)."""
    z = (seed + 0x9E3779B97F4A7C15 * (high + 1)) & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return np.uint32((z ^ z >> 31) >> 32)


def _largest(name: CodecName) -> np.int32:
    return np.int32(LARGEST_BITS[name])


def _vector(what: str, array: object, count: int | None = None, writable: bool = False) -> Floats:
    """The array, read-only unless it is to be written (the kernels are compiled for just these two), or CodecError."""
    fits = isinstance(array, np.ndarray) and array.dtype == np.float32 and array.ndim == 1
    if not fits or not (array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative):  # type: ignore[attr-defined]
        kind = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise CodecError(f"{what} must be a contiguous one-dimensional float32 numpy array, not {kind}: convert it first")
    vector = cast(Floats, array)
    if count is not None and vector.size != count:
        raise CodecError(f"{what} has {vector.size:,} values where {count:,} belong: pass the matching slice")
    if writable and not vector.flags.writeable:
        raise CodecError(f"{what} is read-only, and must be written to: pass a copy")
    return vector if writable else _readonly(vector)


def _readonly(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _buffer(out: bytearray | memoryview | Bytes, size: int) -> Bytes:
    view = as_bytes(out)
    if view.readonly or view.nbytes < size:
        state = "read-only" if view.readonly else f"{view.nbytes:,} bytes long"
        raise CodecError(f"the buffer to encode to is {state}, and must take {size:,} bytes")
    return np.frombuffer(view, np.uint8, count=size)
