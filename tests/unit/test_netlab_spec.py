"""What a test internet may be asked for, and what is said of what it may not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from benchmarks.netlab.spec import Event, Line, Pair, Spec, SpecError, load, parse

WHOLE = """
seed = 3
[line]
up = "100Mbit"
buffer = "256kB"
[way]
rtt = "20ms"
[sites.a]
[sites.b]
up = "20Mbit"
buffer = "50ms"
[sites.c]
[ways."c a"]
rtt = "0.1s"
loss = 0.01
[[events]]
at = "5s"
cut = "b"
for = "500ms"
"""


def test_sites_take_what_is_said_for_all_and_change_it(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(WHOLE)
    spec = load(path)
    assert spec.sites["a"] == Line(12.5e6, 12.5e6, -256e3) and spec.sites["b"] == Line(2.5e6, 12.5e6, 0.05)
    assert spec.between("a", "c") == spec.between("c", "a") == Pair(0.1, 0.01) and spec.between("a", "b") == Pair(0.02)
    assert spec.events == (Event(5.0, "b", 0.5),) and spec.seed == 3
    assert spec.sites["a"].room(1e6) == 256e3 and spec.sites["b"].room(12.5e6) == 625e3
    assert spec.sites["b"].room(1e3) == 64e3  # some packets fit into any buffer


def test_the_examples_are_sound() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks" / "netlab" / "examples").glob("*.toml"):
        assert len(load(path).sites) >= 2


def test_equal_sites() -> None:
    spec = Spec.equal(3, Line(), Pair(), c1=Line(up=1e6))
    assert list(spec.sites) == ["c0", "c1", "c2"] and spec.sites["c1"].up == 1e6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('rtt = "20ms"', 'rtt = "20"'), 'must be like "20ms"'),
        (('rtt = "20ms"', "rtt = 20"), 'must be like "20ms"'),
        (('"100Mbit"', '"100MB"'), 'must be like "100Mbit"'),
        (('"100Mbit"', '"0Mbit"'), 'must be like "100Mbit"'),
        (("loss = 0.01", "loss = 1"), "chance from 0 to below 1"),
        (("loss = 0.01", "loss = true"), "chance from 0 to below 1"),
        (("seed = 3", "seed = -1"), "whole number"),
        (("seed = 3", "sead = 3"), "has no 'sead'"),
        (("[sites.c]", "[sites.c]\nspeed = 1"), "has no 'speed'"),
        (('"c a"', '"c"'), "must name two sites"),
        (('"c a"', '"c d"'), "no site 'd'"),
        (('cut = "b"', 'cut = "d"'), "no site 'd'"),
        (('cut = "b"\n', ""), "needs at, cut and for"),
        (("[sites.c]", "[sites.C]"), "no name for a site"),
    ],
)
def test_mistakes_are_sentences(change: tuple[str, str], said: str) -> None:
    assert change[0] in WHOLE
    with pytest.raises(SpecError, match=said):
        parse(tomllib.loads(WHOLE.replace(*change)))


def test_too_few_sites_and_no_file_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="2 to 64"):
        parse({"sites": {"a": {}}})
    with pytest.raises(SpecError, match="cannot be read"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[")
    with pytest.raises(SpecError, match="no TOML"):
        load(tmp_path / "bad.toml")
