"""`isles create`, `isles invite`, `isles store`: what an organiser does for a run between machines."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.common import Json, as_argument, command_line, err, out, path_given, print_json, say, stop_on_signals
from isles.errors import NetworkError, UsageError
from isles.spec import Spec, load_spec

if TYPE_CHECKING:
    from isles.agent.organiser import Organiser, RunRecord
    from isles.store import StoreServer

HERE = "127.0.0.1:7500"
AGAIN = 2.0  # seconds between two tries to write the run into a store whose members are still coming up

Run = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", parser=path_given, help="The folder that `isles create` made; the only run in runs/ when left out."),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command()(create)
    app.command()(invite)
    app.command()(store)


def create(
    spec_path: Annotated[
        Path, typer.Argument(metavar="RUN.toml", parser=path_given, help="The run's spec; `isles init` writes one.")
    ],
    members: Annotated[
        list[str] | None,
        typer.Option("--store", metavar="HOST:PORT", help=f"Where hosts reach a member of the store; once, or for each of three or five. {HERE} when left out."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec; repeatable.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", parser=path_given, help="The run's folder; runs/NAME when left out.")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a run between machines: its id, its authority, the spec frozen and hashed. It begins with clusters.count clusters."""
    from isles.agent.host import split_address
    from isles.agent.organiser import Organiser
    from isles.agent.restore import check_spec

    spec = load_spec(spec_path, overrides or [])
    addresses = tuple(members or [HERE])
    if len(addresses) not in (1, 3, 5) or len(set(addresses)) < len(addresses):
        raise UsageError(f"a store has one, three or five members at different addresses, and --store names {len(addresses)}")
    for address in addresses:
        split_address(address)
    check_spec(spec)
    folder, base = to or Path("runs") / spec.run.name, spec_path.parent
    if (folder / "authority.json").exists():
        raise UsageError(f"{folder} already holds a run; choose another --out")
    record = _record_of(spec, base)
    made = Organiser.create(folder, record, addresses)
    where = as_argument(folder)
    if as_json:
        print_json(
            {
                "run": made.authority.run,
                "spec": record.digest,
                "parameters": record.parameters,
                "store": addresses,
                "folder": str(folder),
            }
        )
        return
    say(f"run {made.authority.run}: {_size_of(record)}, spec {record.digest[:16]}, begins with {spec.clusters.count} clusters")
    say(f"keep {folder}/authority.json safe: who has it can invite, and nobody else")
    say(f"start the store here:  {command_line(['isles', 'store', where])}")
    for number in range(2, len(addresses) + 1):
        say(f"and at {addresses[number - 1]}: carry {made.papers(number)} there, and  isles store {made.papers(number).name}")
    say(f"invite a host:         {command_line(['isles', 'invite', 'NAME', '--run', where])}")


def _record_of(spec: Spec, base: Path) -> RunRecord:
    """What the run trains; of a model that a script builds, nothing is known yet. Raises DataError, ModelError, SpecError."""
    from isles.agent.organiser import RunRecord
    from isles.data import open_or_prepare
    from isles.model import Layout, build_model

    if spec.model.module is not None:
        return RunRecord(spec, data="", layout="", parameters=0)
    dataset = open_or_prepare(spec.data, base)
    length, vocab = spec.data.sequence_length, dataset.vocab_size
    model = build_model(spec.model, vocab_size=vocab, sequence_length=length, seed=spec.run.seed, base=base)
    layout = Layout.of(model, spec.streaming.fragments, spec.streaming.order)
    return RunRecord(spec, dataset.digest, layout.digest(), layout.total)


def _size_of(record: RunRecord) -> str:
    if record.spec.model.module is not None:
        return f"model {record.spec.model.module} of the hosts' own scripts"
    return f"{record.parameters:,} parameters"


def invite(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The cluster's name: a-z, 0-9 and -.")],
    run: Run = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", parser=path_given, help="The invite's file; NAME.invite when left out."),
    ] = None,
    line: Annotated[bool, typer.Option("--line", help="Print the invite as one line to paste, and write no file.")] = False,
    as_json: Json = False,
) -> None:
    """Make an invite for a host: one file, or one line. It holds a key, so send it as you would send a password."""
    from isles.agent.organiser import Organiser, organised_here

    made = Organiser.load(organised_here(run)).invite(name)
    if line:
        sys.stdout.write(made.to_line() + "\n")
        return
    path = to or Path(f"{name}.invite")
    if path.exists():
        raise UsageError(
            f"{path} exists; a host that has lost its invite can use it again, for another one choose another --out"
        )
    made.save(path)
    if as_json:
        print_json({"run": made.run, "cluster": name, "path": str(path)})
        return
    say(f"wrote {path}; the host joins with:  {command_line(['isles', 'join', as_argument(path)])}")


def store(
    where: Annotated[
        Path | None,
        typer.Argument(metavar="DIR | PAPERS", parser=path_given, help="The organiser's folder, or a member's papers; the only run in runs/ when left out."),
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="ADDRESS", help="Address to listen on; all of this machine's when left out.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", parser=path_given, help="Folder for the records; beside the papers when left out.")
    ] = None,
) -> None:  # fmt: skip
    """Run a member of the run's store, until Ctrl-C. What was written is on disk: start it again with the same command."""
    from isles.agent.organiser import Organiser, member_of, organised_here

    path = organised_here(None) if where is None else where
    organiser = Organiser.load(path) if path.is_dir() else None
    papers = organiser.papers(1) if organiser is not None else path
    folder = to or papers.with_name(papers.stem)
    server = member_of(papers, folder, listen or "0.0.0.0")
    if listen is None and organiser is not None and organiser.store[0].rpartition(":")[0] in ("127.0.0.1", "localhost"):
        server.host = "127.0.0.1"
    logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stderr)
    with stop_on_signals() as stop:
        asyncio.run(_serve(server, organiser, stop))


async def _serve(server: StoreServer, organiser: Organiser | None, stop: object) -> None:
    from isles.agent.access import Access, publish
    from isles.agent.organiser import RunRecord

    await server.start()
    try:
        out.print(f"the store listens on {server.host}:{server.port}, its records are in {server.folder}", soft_wrap=True)
        sys.stdout.flush()
        said, at = "", 0.0
        loop = asyncio.get_running_loop()
        while not stop():  # type: ignore[operator]
            if organiser is not None and loop.time() >= at:
                try:
                    standing = await publish(Access.of_organiser(organiser), organiser.record, len(organiser.store))
                except NetworkError as error:
                    if said != str(error):
                        said = str(error)
                        err.print(f"waiting for the store's other members ({error})", soft_wrap=True)
                    at = loop.time() + AGAIN
                else:
                    if standing is not None and RunRecord.parse(standing.value, "the store").digest != organiser.record.digest:
                        raise NetworkError("the store already holds another run; start it in a folder of its own")
                    out.print(f"run {organiser.authority.run} can be joined", soft_wrap=True)
                    sys.stdout.flush()
                    organiser = None
            await asyncio.sleep(0.1)
    finally:
        await server.stop()
    err.print("the store has stopped; clusters go on training until it is back")
