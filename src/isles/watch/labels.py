"""What a run is called when it stands beside others: as short as tells them apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from isles.metrics import Summary

METHODS = {"diloco": "DiLoCo", "ddp": "data-parallel", "single": "one cluster alone"}


def method_name(method: str) -> str:
    return METHODS.get(method, method)


def settings(summary: Summary) -> str:
    """'4 clusters, H = 50, int4'."""
    clusters = f"{summary.clusters:,} cluster{'' if summary.clusters == 1 else 's'}"
    codec = f", {summary.codec}" if summary.codec else ""
    return f"{clusters}, H = {summary.local_steps:,}{codec}" if summary.method == "diloco" else clusters


def run_names(summaries: Sequence[Summary], *, with_settings: bool = True) -> list[str]:
    """A short name for each run.

    The method, as 'DiLoCo', where all are runs of one name; otherwise the run's own name, and the method where it differs. Runs that are
    still called alike get their settings (unless those stand elsewhere: with_settings=False) and then their seeds added."""
    own, mixed = len({s.name for s in summaries}) > 1, len({s.method for s in summaries}) > 1
    names = []
    for s in summaries:
        method = method_name(s.method)
        names.append(f"{s.name} ({method})" if own and mixed else s.name if own else method)
    if with_settings:
        names = _told_apart(names, [settings(s) for s in summaries])
    return _told_apart(names, [f"seed {s.seed}" for s in summaries])


def _told_apart(names: list[str], by: list[str]) -> list[str]:
    """The names, with `by` added to those that several runs share and that it tells apart."""
    count = Counter(names)
    kinds = {name: len({b for n, b in zip(names, by, strict=True) if n == name}) for name in count}
    return [f"{name}, {b}" if kinds[name] > 1 else name for name, b in zip(names, by, strict=True)]
