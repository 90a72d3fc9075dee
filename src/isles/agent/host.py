"""Joining a run from a host: an invite becomes a cluster's folder, once the store shows the run that it was made for."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from isles.agent.access import shown_by_store
from isles.agent.folder import ClusterFolder, ClusterSettings
from isles.agent.organiser import RunRecord
from isles.errors import DataError, NetworkError, UsageError
from isles.identity import Invite
from isles.spec import Spec

ADDRESS = re.compile(r"^(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})$")
RATE = re.compile(r"^(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[kKmMgG]?)(?P<kind>bit|B)(/s|ps)?$")


@dataclass(frozen=True)
class Terms:
    """How a host takes part. advertise: host:port under which others reach it; listen: address to listen on, with a port or without; data: folder
    of prepared data, instead of the spec's; ranks: workers, 0 when a script trains; max_upload: bytes/s."""

    ranks: int = 1
    advertise: str | None = None
    outbound_only: bool = False
    listen: str | None = None
    max_upload: float | None = None
    data: Path | None = None


def split_address(text: str) -> tuple[str, int]:
    """'203.0.113.9:7700' -> host and port. Raises UsageError."""
    found = ADDRESS.match(text)
    port = int(found["port"]) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise UsageError(f"{text!r} is no address; write it as HOST:PORT, 203.0.113.9:7700 or cluster.example.org:7700")
    return found["host"].strip("[]"), port


def parse_rate(text: str) -> float:
    """'50Mbit' or '6MB' (per second) in bytes/s. Raises UsageError."""
    found = RATE.match(text.strip())
    rate = 0.0
    if found is not None:
        scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[found["unit"].lower()]
        rate = float(found["number"]) * scale / (8 if found["kind"] == "bit" else 1)
    if rate < 1000:
        raise UsageError(
            f"{text!r} is no rate; write 50Mbit for 50 megabits a second, or 6MB for 6 megabytes; 8kbit is the least"
        )
    return rate


def settle(invite: Invite, record: RunRecord, path: Path, terms: Terms) -> ClusterFolder:
    """Write the cluster's folder, or bring that of an earlier join up to date. Raises UsageError, DataError, SpecError."""
    from isles.data import open_or_prepare  # torch: not before it is needed

    spec = record.spec
    if spec.model.module is not None:
        raise UsageError(
            f"run {spec.run.name} is trained by the hosts' own scripts (model.module {spec.model.module!r}) and `isles join` has no model "
            "for it; start the script, which joins by isles.Cluster"
        )
    _check_folder(invite, path)
    if terms.data is not None:
        table = spec.data.model_copy(update={"path": str(terms.data.resolve())})
        spec = spec.model_copy(update={"data": table})
    dataset = open_or_prepare(spec.data, Path())
    if dataset.digest != record.data:
        raise DataError(
            f"{spec.data.path} holds other data than the run trains; get the organiser's, or prepare the same input again, and name it with --data"
        )
    return write_folder(invite, spec, path, terms)


def write_folder(invite: Invite, spec: Spec, path: Path, terms: Terms) -> ClusterFolder:
    """What `settle` does once model and data are known to be the run's. Raises UsageError, SpecError, NetworkError."""
    from isles.agent.restore import check_spec

    _check_folder(invite, path)
    check_spec(spec)
    folder = ClusterFolder(path)
    host, port, advertise, outbound_only = _where(invite, terms)
    settings = ClusterSettings(
        run=invite.run, cluster=invite.cluster, spec=spec, base=str(Path().resolve()), host=host, port=port, advertise=advertise,
        outbound_only=outbound_only, max_upload=terms.max_upload, ranks=terms.ranks, start=spec.clusters.count,
    )  # fmt: skip
    folder.write_settings(settings)
    invite.save(folder.invite)
    return folder


def _check_folder(invite: Invite, path: Path) -> None:
    """Raises UsageError when the folder is another run's."""
    kept = ClusterFolder(path).invite
    if kept.exists() and Invite.load(kept).run != invite.run:
        raise UsageError(f"{path} belongs to another run; choose another --out")


def _where(invite: Invite, terms: Terms) -> tuple[str, int, str | None, bool]:
    """Address and port to listen on, the address to tell others, and whether nobody can reach this cluster."""
    if terms.outbound_only:
        if terms.advertise:
            raise UsageError(
                "--outbound-only says that nobody can reach this cluster; leave --advertise out, or --outbound-only"
            )
        return "127.0.0.1", 0, None, True
    if terms.advertise:
        name, port = split_address(terms.advertise)
        _check_name(name)
        host, port = _listen(terms.listen, "127.0.0.1" if _loopback(name) else "0.0.0.0", port)
        return host, port, terms.advertise, False
    own = own_address(invite)
    private = bool(ipaddress.ip_address(own).is_private) and not _loopback(own)
    if terms.listen is None and private and _public(invite):
        return "127.0.0.1", 0, None, True  # behind NAT: nobody outside could use that address
    host, port = _listen(terms.listen, own, 0)
    return host, port, None, False


def _listen(text: str | None, host: str, port: int) -> tuple[str, int]:
    if text is None:
        return host, port
    if ":" in text:
        return split_address(text)
    return text, port


def _check_name(name: str) -> None:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise UsageError(
            f"the address {name} to advertise is not known ({error.strerror}); check it, or use --outbound-only"
        ) from error


def own_address(invite: Invite) -> str:
    """The address of this machine on the way to the store. Raises NetworkError."""
    host, port = split_address(invite.store[0].rpartition("/")[2])
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise NetworkError(
            f"the store's address {host} cannot be reached from here ({error.strerror}); check the network"
        ) from error


def _loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.") or address == "::1"


def _public(invite: Invite) -> bool:
    """Whether the store is out on the internet."""
    host = split_address(invite.store[0].rpartition("/")[2])[0]
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_global
    except OSError:
        return False


def join(invite: Invite, path: Path, terms: Terms) -> ClusterFolder:
    """Everything that comes before the agent: the store is asked, data and address are checked, the folder is written. Raises IslesError."""
    invite.check_dates()
    record = asyncio.run(shown_by_store(invite))
    fresh = not path.exists()
    try:
        return settle(invite, record, path, terms)
    except BaseException:
        if fresh:
            shutil.rmtree(path, ignore_errors=True)
        raise
