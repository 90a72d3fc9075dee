"""A test internet by commands; it needs root.

    python -m benchmarks.netlab run SPEC [--only a,b] -- COMMAND...     run a command in every site
    python -m benchmarks.netlab check [--json FILE]                     measure that it does what it is asked

In COMMAND {site}, {address}, {sites} and {addresses} stand for a site's name and address and for those of all, with commas; NETLAB_SITE,
NETLAB_ADDRESS and NETLAB_ADDRESSES (JSON) say the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.netlab.check import measured
from benchmarks.netlab.lab import Counters, Lab, LabError
from benchmarks.netlab.spec import SpecError, load
from rich.console import Console
from rich.table import Table


def run(path: Path, only: list[str], words: list[str]) -> int:
    """The exit code: the first that is not 0."""
    with Lab(load(path)) as lab:
        sites = only or lab.names
        if unknown := sorted(set(sites) - set(lab.names)):
            raise SpecError(f"{path} has no site {unknown[0]!r}; it has {', '.join(lab.names)}")
        addresses = {name: lab.address(name) for name in lab.names}
        lab.begin()
        processes: list[subprocess.Popen[Any]] = []
        for name in sites:
            filled = [_filled(word, name, addresses) for word in words]
            more = {"NETLAB_SITE": name, "NETLAB_ADDRESS": addresses[name], "NETLAB_ADDRESSES": json.dumps(addresses)}
            processes.append(lab.popen(name, filled, env={**os.environ, **more}))
        codes = [process.wait() for process in processes]
        show(lab.counters())
    return next((code for code in codes if code), 0)


def _filled(word: str, name: str, addresses: dict[str, str]) -> str:
    values = {"site": name, "address": addresses[name], "sites": ",".join(addresses), "addresses": ",".join(addresses.values())}
    for key, value in values.items():
        word = word.replace(f"{{{key}}}", value)
    return word


def show(counters: dict[str, Counters]) -> None:
    table = Table("site", "MB sent", "packets", "MB received", "packets", "lost", "dropped")
    for name, c in counters.items():
        table.add_row(
            name, f"{c.sent / 1e6:.2f}", f"{c.sent_packets:,}", f"{c.received / 1e6:.2f}", f"{c.received_packets:,}", f"{c.lost:,}",
            f"{c.dropped:,}",
        )  # fmt: skip
    Console(stderr=True).print(table)


def check(json_path: Path | None) -> int:
    rows, console = [], Console(width=110)
    for row in measured():
        rows.append(row)
        mark = "ok" if row.good else "MISSED"
        console.print(f"{mark:6} {row.what}: {row.value:.3g} {row.unit} ({row.bar})", highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps([{**asdict(row), "good": row.good} for row in rows], indent=1) + "\n")
    return int(not all(row.good for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="netlab", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("spec", type=Path)
    running.add_argument("--only", type=lambda text: text.split(","), default=[])
    running.add_argument("words", nargs="+", metavar="COMMAND")
    checking = commands.add_parser("check")
    checking.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    try:
        return check(given.json) if given.command == "check" else run(given.spec, given.only, given.words)
    except (SpecError, LabError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
