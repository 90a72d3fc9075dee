"""Who is who in a run: the organiser's authority, the clusters' invites, and TLS between them."""

from isles.identity.authority import BUCKET, Authority, StoreTrust, StoreUser
from isles.identity.certificates import Certified
from isles.identity.invite import Invite
from isles.identity.nkeys import Nkey
from isles.identity.tls import client_context, peer_name, server_context

__all__ = [
    "BUCKET", "Authority", "Certified", "Invite", "Nkey", "StoreTrust", "StoreUser", "client_context", "peer_name", "server_context",
]  # fmt: skip
