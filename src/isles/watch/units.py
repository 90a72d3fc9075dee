"""Figures as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def human_count(count: float) -> str:
    """1_234_000 -> '1.23M'."""
    for unit in ("", "K", "M", "B", "T"):
        if abs(count) < 1000 or unit == "T":
            return f"{count:.0f}" if unit == "" else f"{count:.3g}{unit}"
        count /= 1000
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """3725 -> '1:02:05'."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
