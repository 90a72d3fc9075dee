"""What works in the simulator only is refused by real clusters, in a sentence, before anything is made."""

from __future__ import annotations

import pytest

from isles.agent.restore import check_spec
from isles.errors import SpecError
from isles.spec import spec_from


@pytest.mark.parametrize(
    "overrides",
    [
        "streaming.merge=eager streaming.overlap=8",
        "outer.merge=radial",
        "streaming.overlap=8",
        "clusters.speeds=[1.0,0.5]",
        "clusters.join_state=peer",
        "clusters.pace=scale",
    ],
)
def test_what_only_the_simulator_does_is_refused(overrides: str) -> None:
    tables = {
        "run": {"steps": 40},
        "model": {"family": "llama", "parameters": "0.1M"},
        "train": {"local_steps": 8},
        "clusters": {"count": 2},
    }
    check_spec(spec_from(tables))
    with pytest.raises(SpecError, match=r"between real clusters|by themselves"):
        check_spec(spec_from(tables, overrides.split()))
