"""From the campaign's result files to the tables and the picture of docs/results.md.

    python benchmarks/report.py [--results docs/results] [--page docs/results.md]

Every figure in the page stands between two marks and is written here from the files, so that no figure is ever typed by hand.
Without --check the page is rewritten in place; with it, the exit status says whether it is current.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """All seeds of one configuration."""

    name: str
    baseline: str
    chosen: dict[str, Any]
    losses: dict[int, float]  # by seed; a run that diverged is missing
    bytes: float  # sent by all clusters together
    tokens: int
    clusters: int
    diverged: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.losses.values()) if self.losses else float("nan")

    @property
    def spread(self) -> str:
        values = sorted(self.losses.values())
        return f"{values[0]:.3f} to {values[-1]:.3f}" if len(values) > 1 else "one seed"


def load(path: Path) -> list[Row]:
    """The rows of a results file, in its recipe's order."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines() if path.exists() else []:
        run = json.loads(line)
        groups[json.dumps([run["name"], run["baseline"], run["set"]], sort_keys=True)].append(run)
    return [_row(runs) for runs in groups.values()]


def _row(runs: list[dict[str, Any]]) -> Row:
    whole = [r for r in runs if "summary" in r]
    summary = whole[0]["summary"] if whole else {"bytes": 0, "tokens": 0, "clusters": 0}
    losses = {r["seed"]: r["summary"]["held_out_loss"] for r in whole}
    first = runs[0]
    return Row(
        first["name"],
        first["baseline"],
        first["set"],
        losses,
        summary["bytes"],
        summary["tokens"],
        summary["clusters"],
        len(runs) - len(whole),
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find(rows: Sequence[Row], name: str, **chosen: Any) -> Row | None:
    """The row of a name, and of the given settings when there are several."""
    for row in rows:
        if row.name.split("/")[0] == name and all(row.chosen.get(k) == v for k, v in chosen.items()):
            return row
    return None


def _codec(row: Row) -> str:
    """The codec as it was set, with k where there is one."""
    name = str(row.chosen.get("codec.name", "fp32"))
    return f"{name}, k = {row.chosen.get('codec.k', 64)}" if name == "topk" else name


def _ints(row: Row) -> tuple[str, str, str]:
    """H, codec and outer settings as they were set."""
    outer = f"{row.chosen.get('outer.lr', '-')} / {row.chosen.get('outer.momentum', '-')}" if row.baseline == "none" else "-"
    return (
        str(row.chosen.get("train.local_steps", "-")) if row.baseline == "none" else "-",
        _codec(row),
        outer,
    )


def _curve_lines(rows: Sequence[Row], single: Row, ddp: Row) -> list[list[str]]:
    lines = []
    for row in rows:
        h, codec, outer = _ints(row)
        closed = f"{100 * (single.mean - row.mean) / (single.mean - ddp.mean):.0f}%"
        fewer = (
            f"{ddp.bytes / row.bytes:.2g}x"
            if 0 < ddp.bytes < row.bytes
            else f"{ddp.bytes / row.bytes:.0f}x"
            if row.bytes
            else "sends nothing"
        )
        excess = f"{100 * (row.mean / ddp.mean - 1):+.1f}%"
        name = {"ddp": "data-parallel", "single": "one cluster alone"}.get(
            row.baseline, row.name.split("/")[0].removeprefix("long-")
        )
        lines.append(
            [
                name,
                str(row.clusters),
                h,
                codec,
                outer,
                f"{row.tokens / 1e6:.2f}M",
                f"{row.mean:.4f}",
                row.spread,
                closed,
                excess,
                fewer,
            ]
        )
    return lines


CURVE_HEAD = [
    "run",
    "M",
    "H",
    "codec",
    "outer lr / momentum",
    "tokens",
    "held-out loss",
    "over seeds",
    "gap closed",
    "over data-parallel",
    "fewer bytes",
]


def curve(results: Path, *, long: bool) -> str:
    """One cluster alone, data-parallel and DiLoCo: loss, the share of the gap closed, and bytes against data-parallel with M = 4."""
    rows = [r for r in load(results / "curve.jsonl") if r.name.startswith("long-") == long]
    prefix = "long-" if long else ""
    single, ddp = find(rows, f"{prefix}single"), next((r for r in rows if r.baseline == "ddp" and r.clusters == 4), None)
    if single is None or ddp is None:
        return "not measured yet"
    rows.sort(key=lambda r: (r.baseline == "none", r.clusters, r.name.split("/")[0], r.chosen.get("train.local_steps", 0)))
    return table(CURVE_HEAD, _curve_lines(rows, single, ddp))


def sizes(results: Path) -> str:
    rows = load(results / "sizes.jsonl")
    single, ddp = find(rows, "single"), find(rows, "ddp")
    return table(CURVE_HEAD, _curve_lines(rows, single, ddp)) if single and ddp else "not measured yet"


def unequal(results: Path) -> str:
    """Every row beside plain DiLoCo at the same steps."""
    rows = load(results / "unequal.jsonl")
    plain = find(rows, "plain")
    if plain is None:
        return "not measured yet"
    lines = []
    for row in rows:
        settings = ", ".join(
            f"{k.split('.')[-1]} {v}" for k, v in row.chosen.items() if k not in ("clusters.events", "clusters.speeds")
        )
        outer = row.name.split("-")[0]  # mild, small: with an outer step, and a plain row, of its own
        beside = find(rows, f"{outer}-plain") or plain
        common = sorted(set(row.losses) & set(beside.losses))
        difference = f"{statistics.fmean(row.losses[s] - beside.losses[s] for s in common):+.4f}" if common else "diverged"
        lines.append(
            [row.name.split("/")[0], settings or "-", f"{row.tokens / 1e6:.2f}M", f"{row.mean:.4f}", row.spread, difference]
        )
    return table(["run", "settings", "tokens", "held-out loss", "over seeds", "against plain, mean over seeds"], lines)


def tuning(results: Path) -> str:
    """Every trial of tuning, the best of each method marked."""
    rows = load(results / "tune.jsonl")
    best: dict[str, float] = {}
    for row in rows:
        method = row.name.split("/")[0]
        best[method] = min(best.get(method, float("inf")), row.mean)
    lines = []
    for row in sorted(rows, key=lambda r: (r.name.split("/")[0], r.mean)):
        method, c = row.name.split("/")[0], row.chosen
        outer = f"{c['outer.lr']} / {c['outer.momentum']}" if "outer.lr" in c else "-"
        mark = "**" if row.mean == best[method] else ""
        lines.append(
            [method, f"{c['optimizer.lr']}", f"{c.get('optimizer.warmup_steps', 300)}", outer, f"{mark}{row.mean:.4f}{mark}"]
        )
    return table(["method", "lr", "warm-up", "outer lr / momentum", "held-out loss"], lines) if lines else "not measured yet"


def codec_speed(results: Path) -> str:
    path = results / "codec.json"
    if not path.exists():
        return "not measured yet"
    measured = json.loads(path.read_text())
    lines = []
    for s in measured["speeds"]:
        bar = "" if s["bar"] is None else f"{s['bar']} ({'met' if s['ratio']['median'] >= s['bar'] else 'missed'})"
        rate, torch_rate = s["values_per_second"], s["torch_values_per_second"]
        lines.append(
            [s["codec"], s["operation"], f"{rate / 1e9:.2f}", *_ratio(s["ratio"], 2), bar, f"{rate / torch_rate:.1f}x"]
        )
    copy = f"memcpy: {measured['copy_values_per_second'] / 1e9:.2f} billion values a second."
    head = ["codec", "operation", "billion values/s", "of memcpy: min", "median", "max", "bar", "against torch"]
    return f"{copy}\n\n{table(head, lines)}"


def codec_cost(results: Path) -> str:
    path = results / "codec.json"
    if not path.exists():
        return "not measured yet"
    lines = []
    for c in json.loads(path.read_text())["costs"]:
        largest = max(abs(e) for e in c["mean_errors"].values())
        dense = c["codec"] != "topk"
        errors = [f"{c['rms_error']:.2e}", f"{largest:.1e}"] if dense else ["kept in the error feedback", "-"]
        lines.append([c["codec"], f"{c['compression']:.2f}", *errors])
    return table(
        ["codec", "fp32 bytes over encoded", "rms error of a contribution", "largest mean error of the average of 2 to 8"],
        lines,
    )


def worker_speed(results: Path) -> str:
    path = results / "worker.json"
    if not path.exists():
        return "not measured yet"
    lines = [
        [
            f"{r['parameters']:,}",
            f"{r['worker_tokens_per_second']:,.0f}",
            f"{r['bare_tokens_per_second']:,.0f}",
            *_ratio(r["ratio"], 3),
            "yes" if r["same_parameters"] else "NO",
        ]
        for r in json.loads(path.read_text())
    ]
    return table(["parameters", "worker tokens/s", "bare tokens/s", "ratio: min", "median", "max", "same bits"], lines)


def _ratio(ratio: dict[str, float], digits: int) -> list[str]:
    return [f"{ratio[k]:.{digits}f}" for k in ("min", "median", "max")]


def draw_curve(results: Path, out: Path) -> None:
    """Held-out loss over H for each M, and over the bytes sent."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in load(results / "curve.jsonl") if not r.name.startswith("long-")]
    single, ddp = find(rows, "single"), next((r for r in rows if r.baseline == "ddp" and r.clusters == 4), None)
    if single is None or ddp is None:
        return
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
        _loss_over_h(left, rows, single, ddp)
        _loss_over_bytes(right, [r for r in rows if r.bytes and r.clusters == 4])
        figure.savefig(out, dpi=150, metadata={"Software": None})
        plt.close(figure)


def _loss_over_h(axes: Any, rows: Sequence[Row], single: Row, ddp: Row) -> None:
    for m, colour in {1: "#E69F00", 2: "#009E73", 4: "#0072B2", 8: "#CC79A7"}.items():
        points = sorted((r.chosen["train.local_steps"], r) for r in rows if r.name.startswith("diloco") and r.clusters == m)
        if points:
            lows = [r.mean - min(r.losses.values()) for _, r in points]
            highs = [max(r.losses.values()) - r.mean for _, r in points]
            hs, means = [h for h, _ in points], [r.mean for _, r in points]
            axes.errorbar(hs, means, yerr=[lows, highs], color=colour, marker="o", capsize=3, label=f"DiLoCo, M = {m}")
    for row, label, line in ((single, "one cluster alone", ":"), (ddp, "data-parallel, M = 4", "--")):
        axes.axhline(row.mean, color="#444444", linestyle=line, label=label)
    axes.set(xscale="log", xlabel="local steps in a round (H)", ylabel="held-out loss (nats per token)")
    axes.set_xticks([10, 50, 100], ["10", "50", "100"])
    _legend_beside(axes)


def _loss_over_bytes(axes: Any, rows: Sequence[Row]) -> None:
    colours = {"recipe": "#D55E00", "ddp": "#444444", "sparseloco": "#009E73", "averaging": "#E69F00"}
    for i, row in enumerate(sorted(rows, key=lambda r: r.bytes)):
        kind = row.name.split("/")[0]
        shown = {"codec": "DiLoCo", "diloco": "DiLoCo", "sparseloco": "SparseLoCo"}.get(kind, kind)
        label = f"{shown} {_codec(row)}, H = {row.chosen['train.local_steps']}" if row.baseline == "none" else "data-parallel"
        colour = colours.get(kind, "#0072B2")
        axes.scatter(row.bytes / 2**20, row.mean, s=55, color=colour, marker="osD^vP*XphH<>"[i % 13], label=label)
    axes.set(xscale="log", xlabel="bytes sent, all clusters (MiB)", title="M = 4")
    _legend_beside(axes)


def _legend_beside(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description="write the tables of docs/results.md")
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"))
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the page is not current")
    args = parser.parse_args()
    tables = {
        "tuning": tuning(args.results),
        "curve": curve(args.results, long=False),
        "long": curve(args.results, long=True),
        "sizes": sizes(args.results),
        "unequal": unequal(args.results),
        "codec": codec_speed(args.results),
        "cost": codec_cost(args.results),
        "worker": worker_speed(args.results),
    }
    text = args.page.read_text()
    new = MARK.sub(lambda m: m[1] + tables[m[2]] + "\n" + m[3], text)
    if args.check:
        sys.exit(0 if new == text else f"{args.page} is not what the result files say; run: python benchmarks/report.py")
    args.page.write_text(new)
    draw_curve(args.results, args.page.parent / "curve.png")


if __name__ == "__main__":
    main()
