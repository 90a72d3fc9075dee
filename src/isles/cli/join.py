"""`isles join` and `isles leave`: what a host does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.common import Json, Stop, as_argument, command_line, err, path_given, print_json, say, stop_on_signals
from isles.errors import UsageError
from isles.files import held

if TYPE_CHECKING:
    from isles.agent.folder import ClusterFolder
    from isles.agent.launch import AgentProcess
    from isles.identity import Invite

LOOK = 0.25  # seconds between looks at the cluster


def register(app: typer.Typer) -> None:
    app.command()(join)
    app.command()(leave)


def join(
    given: Annotated[
        str, typer.Argument(metavar="INVITE", help="The invite's file, or - to paste its line; or the folder of a cluster that joined before.")
    ],
    nproc: Annotated[int, typer.Option("--nproc", min=1, max=1024, help="Workers, one for each accelerator.")] = 1,
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="HOST:PORT", help="Where other clusters reach this one; found out when left out.")
    ] = None,
    outbound_only: Annotated[
        bool, typer.Option("--outbound-only", help="Nobody can reach this cluster: it only makes outgoing connections.")
    ] = False,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="ADDRESS[:PORT]", help="Where to listen, when that is not the address to advertise.")
    ] = None,
    max_upload: Annotated[
        str | None, typer.Option("--max-upload", metavar="RATE", help="Never send faster, as 50Mbit or 6MB a second.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", parser=path_given, help="Folder of the prepared data, instead of the spec's.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", parser=path_given, help="The cluster's folder; runs/RUN-NAME when left out.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live table.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train in a run with this machine. The same command joins, and comes back after a pause or a crash; Ctrl-C saves and leaves."""
    from isles.agent.host import Terms, parse_rate
    from isles.agent.host import join as prepare
    from isles.agent.launch import AgentProcess

    invite = _invite(given)
    path = to or (Path(given) if (Path(given) / "cluster.json").exists() else Path("runs") / f"{invite.run}-{invite.cluster}")
    rate = parse_rate(max_upload) if max_upload else None
    with contextlib.ExitStack() as stack:
        fresh = not path.is_dir()
        if not fresh:
            stack.enter_context(held(path))
        folder = prepare(invite, path, Terms(nproc, advertise, outbound_only, listen, rate, data))
        if fresh:
            stack.enter_context(held(path))
        err.print(f"{invite.cluster} joins run {invite.run}; its folder is {path}, its log {folder.log}", soft_wrap=True)
        stop = stack.enter_context(stop_on_signals())
        agent = AgentProcess(folder)
        _attend(agent, folder, invite, stop, quiet=quiet or as_json)
    status = folder.read_status()
    again = command_line(["isles", "join", as_argument(path)])
    if as_json:
        print_json(status | ({"resume": again} if stop() else {}))
    elif stop():
        err.print(f"left and saved at step {status.get('step', 0)}; come back with: {again}", soft_wrap=True)
    elif status.get("state") != "finished":
        say(f"{invite.cluster} was told to leave, and has at step {status.get('step', 0)}; come back with: {again}")
    else:
        say(f"the run is over at step {status.get('step', 0)}; its parameters are in {folder.checkpoints}")
    if stop():
        raise typer.Exit(stop.exit_code)


def leave(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", parser=path_given, help="The folder of a cluster that `isles join` made.")
    ],
    as_json: Json = False,
) -> None:
    """Have a cluster of this machine save and leave its run. Returns once it has."""
    from isles.agent.folder import ClusterFolder
    from isles.agent.launch import GRACE, running_agent

    folder = ClusterFolder(path)
    folder.read_settings()
    pid = running_agent(folder)
    if pid is None:
        raise UsageError(f"no agent is running for {path}; there is nothing to leave")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while running_agent(folder) == pid:
        if time.monotonic() > deadline:
            raise UsageError(f"the agent of {path} has not left within {GRACE:.0f} s; see {folder.log}")
        time.sleep(LOOK)
    status = folder.read_status()
    if as_json:
        print_json(status)
    else:
        say(f"{status.get('cluster', path)} has left at step {status.get('step', 0)}")


def _invite(given: str) -> Invite:
    from isles.identity import Invite

    if given.startswith("isles1-"):
        raise UsageError(
            "an invite on the command line can be read by everybody on this machine; paste it after `isles join -`"
        )
    if given == "-":
        if sys.stdin.isatty():
            err.print("paste the invite's line and press Enter:")
        return Invite.from_text(sys.stdin.readline())
    path = Path(given)
    return Invite.load(path / "invite" if path.is_dir() else path)


def _attend(agent: AgentProcess, folder: ClusterFolder, invite: Invite, stop: Stop, *, quiet: bool) -> None:
    """Show the run and keep the agent going until the run is over, or somebody says to stop. Raises AgentFailed."""
    from isles.agent.access import Access
    from isles.cli.status import RunView

    try:
        with RunView(Access.of_invite(invite), folder, live=not quiet) as view:
            while not stop():
                if agent.keep() is not None:
                    break
                view.show()
                time.sleep(LOOK)
        if stop():
            err.print("saving and leaving ...")
    finally:
        agent.end()
