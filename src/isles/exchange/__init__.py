"""The exchange room: contributions in, one average out.

`averaging` is the arithmetic on whole fragments, as the simulator uses it; `exchange` is the same between machines, chunk by chunk.
"""

from isles.exchange.averaging import Average, Contribution, average, bytes_on_wire, decode_chunks, encode_contribution
from isles.exchange.exchange import Exchange
from isles.exchange.spool import StoredAverage
from isles.exchange.task import Task

__all__ = [
    "Average",
    "Contribution",
    "Exchange",
    "StoredAverage",
    "Task",
    "average",
    "bytes_on_wire",
    "decode_chunks",
    "encode_contribution",
]
