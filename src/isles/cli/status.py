"""`isles status` and `isles watch`: the run as its store shows it, from any machine that may read it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.cli.common import Json, out, path_given, print_json, stop_on_signals
from isles.errors import IslesError

if TYPE_CHECKING:
    from isles.agent.access import Access
    from isles.agent.folder import ClusterFolder

LOOK = 0.25

Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="DIR | INVITE", parser=path_given,
        help="A cluster's folder or invite, the organiser's folder, or that of `isles up`; the only one in runs/ when left out.",
    ),
]  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(watch)


def status(where: Where = None, as_json: Json = False) -> None:
    """Show the run once: its clusters, and how far it has come."""
    from isles.agent.access import access_to
    from isles.agent.view import read_run

    state = asyncio.run(read_run(access_to(where)))
    if as_json:
        print_json(state.as_dict())
        return
    from isles.watch.clusters import run_table

    out.print(run_table(state.summary(), state.rows(time.monotonic())))


def watch(where: Where = None) -> None:
    """Show the run live, until Ctrl-C. It costs the run nothing."""
    from isles.agent.access import access_to

    access = access_to(where)
    with stop_on_signals() as stop, RunView(access, live=True) as view:
        while not stop():
            view.show()
            time.sleep(LOOK)


class RunView:
    """A live table of a run, kept up to date from the store by a thread."""

    def __init__(self, access: Access, folder: ClusterFolder | None = None, *, live: bool) -> None:
        from isles.agent.view import RunState
        from isles.cli.live import LiveTable

        self._access, self._folder, self._state = access, folder, RunState()
        self._live = LiveTable() if live else None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True, name="view")
        self._failure: IslesError | None = None

    def _follow(self) -> None:
        from isles.agent.view import follow_run

        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(follow_run(self._access, self._state))
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except IslesError as error:
            self._failure = error
        finally:
            self._loop.close()

    def __enter__(self) -> RunView:
        if self._live is not None:
            self._loop = asyncio.new_event_loop()
            self._thread.start()
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is None:
            return
        with contextlib.suppress(IslesError):
            self.show()
        self._live.__exit__(kind, error, trace)
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            assert self._loop is not None
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        self._thread.join(5.0)

    def show(self) -> None:
        """Draw the run as it is known now. Raises IslesError when the store cannot be read at all."""
        if self._live is None:
            return
        if self._failure is not None and self._folder is None:
            raise self._failure
        from isles.watch.clusters import run_table

        rows: list[dict[str, Any]] = self._state.rows(time.monotonic())
        if not rows and self._folder is not None:
            rows = [{"cluster": self._folder.path.name} | self._folder.read_status()]
        if rows:
            self._live.update(run_table(self._state.summary(), rows))
