"""`import isles`: quick, small, and the same on every access."""

from __future__ import annotations

import subprocess
import sys

import pytest

import isles


@pytest.mark.parametrize("name", isles.__all__)
def test_every_public_name_is_the_same_on_every_access(name: str) -> None:
    """A submodule of a public name's own name would take its place after the first import."""
    code = (
        f"import isles; a = isles.{name}; import isles.cli; from isles import {name} as b; c = isles.{name}; "
        "assert a is b is c and callable(a), (a, b, c)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_isles_loads_nothing_heavy() -> None:
    code = "import isles, sys; assert not {'torch', 'numba', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = isles.nothing
