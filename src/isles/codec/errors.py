"""What a codec refuses to encode. Its own module, because the kernels' side and the reference raise the same error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from isles.codec.format import LARGEST_BITS, CodecName
from isles.errors import CodecError


class NonFiniteError(CodecError):
    """A value to encode is NaN, infinite, or larger than its codec carries. `index`: its position in the flat layout."""

    def __init__(self, index: int, value: float, codec: CodecName) -> None:
        largest = float(np.uint32(LARGEST_BITS[codec]).view(np.float32))
        super().__init__(
            f"the value to encode at position {index} of the flat layout is {value:g}, and {codec} carries finite values up to "
            f"{largest:.4g}: leave this contribution out, and lower the learning rate if it happens again"
        )
        self.index = index
        self.value = value


def check_encodable(g: NDArray[np.float32], x: NDArray[np.float32], offset: int, codec: CodecName) -> None:
    """Raises NonFiniteError when `codec` refuses a value of g - x (fp32, shape [n], from `offset` of the flat layout)."""
    d = g - x
    if (d.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(initial=0) > LARGEST_BITS[codec]:
        raise first_refused(d, offset, codec)


def first_refused(values: NDArray[np.float32], offset: int, codec: CodecName) -> NonFiniteError:
    """The error that names the first value of `values` (fp32, shape [n]; one of them is refused) which `codec` cannot carry."""
    bits = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    index = int(np.argmax(bits > LARGEST_BITS[codec]))
    return NonFiniteError(offset + index, float(values[index]), codec)
