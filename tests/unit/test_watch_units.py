"""Figures as people read them: the right unit, three digits or so, never a unit's worth too many."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.watch.units import human_bytes, human_count, human_ratio, human_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1024**2 - 1, "1.0 MiB"),
        (281_088_000, "268.1 MiB"), (5 * 1024**4, "5.0 TiB"), (933.6, "934 B"), (3 * 1024**6, "3072 PiB"),
    ],
)  # fmt: skip
def test_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"), (7, "7"), (999, "999"), (1000, "1K"), (1_234_000, "1.23M"), (51_200, "51.2K"), (999_999, "1M"),
        (999_500_000, "1B"), (2.5, "2.5"), (0.125, "0.125"), (999.7, "1K"), (3e12, "3T"), (4.5e15, "4500T"),
    ],
)  # fmt: skip
def test_counts(count: float, text: str) -> None:
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3725, "1:02:05"), (360_000, "100:00:00"), (math.inf, "?"), (math.nan, "?"), (-3, "0:00")],
)  # fmt: skip
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0, "1x"), (1.52, "1.5x"), (9.96, "10x"), (74.6, "75x"), (1484.2, "1,484x"), (0.5, "0.5x")]
)
def test_ratios(ratio: float, text: str) -> None:
    assert human_ratio(ratio) == text


SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@given(st.integers(0, 2**59))
def test_bytes_are_within_a_twentieth_of_what_they_say_and_below_a_thousand_of_the_unit(count: int) -> None:
    number, unit = human_bytes(count).split()
    assert float(number) < 1024
    assert abs(float(number) * SIZES[unit] - count) <= 0.05 * count


@given(st.integers(0, 10**14))
def test_counts_are_within_a_hundredth_of_what_they_say_and_never_in_scientific_notation(count: int) -> None:
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,2})?)([KMBT]?)", human_count(count))
    assert match
    assert abs(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]] - count) <= 0.01 * count
