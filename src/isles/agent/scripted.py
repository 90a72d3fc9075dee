"""A run that the hosts' own scripts train (`model.module`): what its cluster's folder holds instead of data and a model.

layout.json       the layout of the script's model
parameters.f32    its initial parameters, until the first checkpoint

The first script to come says in the store of what layout the run's model is; nobody joins with another one. The run begins with the
parameters of whoever makes its first round; who comes with others takes those over.
"""

from __future__ import annotations

import json

from isles.agent.access import Access, shown_by_store
from isles.agent.folder import ClusterFolder
from isles.agent.organiser import RunRecord
from isles.errors import MALFORMED, DiskError, ModelError, RecordError, UsageError
from isles.files import write_whole
from isles.identity import Invite
from isles.model import Layout
from isles.spec import Spec

KEY = "layout"  # of the store, under which the model's layout stands


def check_scripted(spec: Spec) -> None:
    """Raises UsageError when isles itself trains the run."""
    if spec.model.module is None:
        raise UsageError(
            f"run {spec.run.name} brings its own model and data and is trained by `isles join`; for a script of your own, the organiser "
            "creates a run whose spec gives model.module"
        )


async def shown_to_script(invite: Invite) -> RunRecord:
    """The run that an invite is for. Raises NetworkError, RecordError; UsageError when no script trains it."""
    record = await shown_by_store(invite)
    check_scripted(record.spec)
    return record


async def agree(invite: Invite, layout: Layout) -> None:
    """Have the store show the layout of the run's model. Raises NetworkError; ModelError when it shows another one."""
    record = json.dumps({"layout": layout.digest(), "parameters": layout.total}).encode()
    async with Access.of_invite(invite).store() as store:
        await store.create(KEY, record)
        entry = await store.get(KEY)
    try:
        shown = json.loads(entry.value) if entry is not None else {}
        digest, total = str(shown["layout"]), int(shown["parameters"])
    except MALFORMED as error:
        raise RecordError("the store's record of the model's layout cannot be read; use the isles of the others") from error
    if digest != layout.digest():
        raise ModelError(
            f"this model has {layout.total:,} trainable parameters and the run's has {total:,}, of other names or shapes; "
            "build the model that the others in the run build"
        )


def write_layout(folder: ClusterFolder, layout: Layout) -> None:
    """Raises DiskError."""
    try:
        write_whole(folder.layout, json.dumps(layout.to_dict()).encode())
    except OSError as error:
        raise DiskError(f"{folder.layout} cannot be written ({error.strerror}); free some space") from error


def read_layout(folder: ClusterFolder) -> Layout:
    """Raises UsageError when no script has joined with this folder, ModelError when the record is damaged."""
    try:
        return Layout.from_dict(json.loads(folder.layout.read_bytes()))
    except OSError as error:
        raise UsageError(f"{folder.path} holds no layout of a script's model; start the script, which makes it") from error
    except ValueError as error:
        raise ModelError(f"{folder.layout} is damaged; remove it and start the script again") from error
