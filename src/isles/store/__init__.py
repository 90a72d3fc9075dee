"""The run's record: a small replicated key-value store on NATS JetStream."""

from isles.store.client import Entry, Store
from isles.store.server import StorePapers, StoreServer

__all__ = ["Entry", "Store", "StorePapers", "StoreServer"]
