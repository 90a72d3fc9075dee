"""Seeds of stochastic rounding: a function of where an encoding happens, so that a run can be repeated bit for bit."""

from __future__ import annotations

from blake3 import blake3


def rounding_seed(seed: int, fragment: int, number: int, who: str) -> int:
    """The seed for round `number` (from 1) of a fragment: its own for every sender, and one for the 'average'. seed: the run's."""
    raw = blake3(f"{seed}/{fragment}/{number - 1}/{who}".encode()).digest()
    return int.from_bytes(raw[:8], "little") >> 1
