"""Figures as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), lambda value: f"{value:.1f}", " ")


def human_count(count: float) -> str:
    """1_234_000 -> '1.23M'; 2.5 -> '2.5'."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T"), lambda value: f"{value:.3g}", "")


def human_seconds(seconds: float) -> str:
    """3725 -> '1:02:05'. What is no length of time yet (infinite, NaN) is '?'."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def human_ratio(ratio: float) -> str:
    """74.6 -> '75x'; 1.52 -> '1.5x'."""
    return f"{ratio:,.0f}x" if ratio >= 9.95 or round(ratio, 1) == round(ratio) else f"{ratio:.1f}x"


def _scaled(count: float, step: int, units: Sequence[str], digits: Callable[[float], str], space: str) -> str:
    """The figure in the largest unit that leaves it below `step` as it is written, so never '1024.0 KiB' or '1e+03K'."""
    value, last = float(count), len(units) - 1
    for i, unit in enumerate(units):
        whole = value == int(value) if i == 0 else abs(value) >= step
        text = f"{value:.0f}" if whole or (unit == "B" and i == 0) else digits(value)
        if abs(float(text)) < step or i == last:
            return f"{text}{space}{unit}"
        value /= step
    raise AssertionError
