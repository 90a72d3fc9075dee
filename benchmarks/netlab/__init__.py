"""A test internet on one Linux machine: sites in network namespaces, joined by a forwarder that delays, loses and drops packets as lines would.

`spec` says what lines there are, `lab` makes them, `forwarder.c` carries the packets, `check` measures that it does what was asked.
"""

from benchmarks.netlab.lab import Lab, LabError, enter
from benchmarks.netlab.spec import Line, Pair, Spec, SpecError

__all__ = ["Lab", "LabError", "Line", "Pair", "Spec", "SpecError", "enter"]
