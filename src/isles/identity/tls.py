"""TLS 1.3 between the clusters of a run: both sides show a certificate of the run's own authority, and no other is believed."""

from __future__ import annotations

import os
import ssl
import tempfile
from pathlib import Path

from isles.errors import NetworkError
from isles.identity.certificates import Certified


def server_context(authority: str, certified: Certified) -> ssl.SSLContext:
    """For listening; clients must show a certificate. authority: PEM."""
    return _context(ssl.PROTOCOL_TLS_SERVER, authority, certified)


def client_context(authority: str, certified: Certified) -> ssl.SSLContext:
    """For connecting; the server must be who `server_hostname` says, a cluster's name."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, authority, certified)


def _context(protocol: int, authority: str, certified: Certified) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority)
    with tempfile.TemporaryDirectory() as folder:  # 0700; the standard library takes keys from files only
        path = Path(folder) / "certified.pem"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(certified.key + certified.certificate)
        context.load_cert_chain(path)
    return context


def peer_name(secured: ssl.SSLObject) -> str:
    """The cluster that the other side's certificate is of. Raises NetworkError when it is of none."""
    certificate = secured.getpeercert() or {}
    for part in certificate.get("subject", ()):
        for entry in part:
            if entry[0] == "commonName":
                return str(entry[1])
    raise NetworkError("the other side's certificate names nobody; it is not of this run")
