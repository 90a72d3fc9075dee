"""The exchange room: contributions in, one average out."""

from isles.exchange.averaging import Average, Contribution, average, bytes_on_wire, decode_chunks, encode_contribution

__all__ = ["Average", "Contribution", "average", "bytes_on_wire", "decode_chunks", "encode_contribution"]
