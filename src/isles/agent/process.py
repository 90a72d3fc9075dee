"""`python -m isles.agent FOLDER`: the agent process of one cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
from pathlib import Path

from isles.agent.agent import Agent
from isles.agent.folder import ClusterFolder
from isles.agent.restore import restore
from isles.errors import IslesError
from isles.identity import Invite

log = logging.getLogger("isles.agent")


def allow_many_files() -> None:
    """A run of many clusters takes more connections than a process may have at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(most, 1 << 16)), hard))


async def serve(path: Path) -> None:
    """Run the agent of a cluster's folder until the run is over for it, or SIGTERM or SIGINT tells it to leave. Raises IslesError."""
    folder = ClusterFolder(path)
    with folder.held():
        await _serve(folder)


async def _serve(folder: ClusterFolder) -> None:
    settings, invite = folder.read_settings(), Invite.load(folder.invite)
    invite.check_dates()
    restored = await asyncio.to_thread(restore, folder, settings)
    agent = Agent(folder, settings, invite, restored)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.leave)
    await agent.run()


def main(arguments: list[str]) -> int:
    """Exit code 0: the run is over, or the cluster left in order; otherwise that of the mistake."""
    logging.basicConfig(level=os.environ.get("ISLES_LOG", "INFO"), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every TLS connection that the other side closes
    if len(arguments) != 1:
        print("usage: python -m isles.agent FOLDER", file=sys.stderr)
        return 2
    allow_many_files()
    try:
        asyncio.run(serve(Path(arguments[0])))
    except IslesError as error:
        log.error("%s", error)
        return error.exit_code
    return 0
