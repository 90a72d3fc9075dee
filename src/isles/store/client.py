"""The run's record, as a cluster reads and writes it: a key-value bucket of NATS JetStream with compare-and-set.

Three rules keep it honest. An operation has a deadline, and when that passes nobody says whether it took effect: that is an error and not
a refusal. Reads ask the stream's leader. And after every reconnection, and now and then besides, the watch reads everything anew,
so that a change which was missed is seen late but is seen.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.kv import KeyValue

from isles.errors import NetworkError
from isles.identity import BUCKET, Nkey, StoreUser

log = logging.getLogger("isles.store")

DEADLINE = 3.0  # seconds for an operation
REREAD = 15.0  # seconds between two readings of everything
MAX_VALUE = 1 << 20  # bytes of a record
HANG_UPS = 3  # a server that lets somebody not in may hang up before its reason was read; asked again it is
CONFLICTS = (10071, 10164)  # JetStream: another write of this key was first
EXISTS = 10058  # a stream of this name with other settings
_FAILURES = (nats.errors.Error, nats.js.errors.Error, OSError, asyncio.TimeoutError)


class _HungUp(Exception):
    """The server closed the connection before its reason was read."""


@dataclass(frozen=True)
class Entry:
    """What stands under a key. revision rises with every write to the bucket."""

    key: str
    value: bytes
    revision: int


class Store:
    """A connection to the store. `connect` makes one; it reconnects by itself for ever."""

    def __init__(self, client: Client, urls: Sequence[str]) -> None:
        self._client, self._urls = client, list(urls)
        self._js: JetStreamContext = client.jetstream(timeout=DEADLINE)
        self._changed = asyncio.Event()  # set when the connection came back: read everything anew
        self._said = ""  # the last that the server complained of
        self.on_state: Callable[[bool], None] = lambda _connected: None

    @classmethod
    async def connect(cls, urls: Sequence[str], user: StoreUser, context: ssl.SSLContext, *, patience: float = 10.0) -> Store:
        """Connect to any of the members. Raises NetworkError when none answers, or lets this user in, within `patience` seconds."""
        for _ in range(HANG_UPS):
            with contextlib.suppress(_HungUp):
                return await cls._connect(urls, user, context, patience)
        raise NetworkError(
            f"the store at {' or '.join(urls)} hangs up; the invite may be of another run, or the network cuts it off"
        )

    @classmethod
    async def _connect(cls, urls: Sequence[str], user: StoreUser, context: ssl.SSLContext, patience: float) -> Store:
        key, client = Nkey.from_seed(user.seed), Client()
        store = cls(client, urls)

        async def failed(error: Exception) -> None:
            said = str(error) or type(error).__name__
            if not (store._said and _hung_up(said)):  # a server says first why it hangs up
                store._said = said

        async def lost() -> None:
            store.on_state(False)

        async def back() -> None:
            store._changed.set()
            store.on_state(True)

        try:
            await asyncio.wait_for(
                client.connect(
                    servers=store._urls, tls=context, user_jwt_cb=lambda: bytearray(user.jwt.encode()),
                    signature_cb=lambda nonce: base64.b64encode(key.sign(nonce.encode())), error_cb=failed, disconnected_cb=lost,
                    reconnected_cb=back, max_reconnect_attempts=-1, reconnect_time_wait=0.25,  # type: ignore[arg-type]
                    connect_timeout=4, ping_interval=5,
                    max_outstanding_pings=2, name="isles",
                ),
                patience,
            )  # fmt: skip
        except (*_FAILURES, ssl.SSLError) as error:
            with contextlib.suppress(Exception):
                await client.close()
            if _hung_up(store._said or str(error)):
                raise _HungUp from error
            raise NetworkError(f"the store at {' or '.join(urls)} cannot be used: {_why(store._said or str(error))}") from error
        return store

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    async def close(self) -> None:
        with contextlib.suppress(*_FAILURES):
            await self._client.close()

    async def create_bucket(self, replicas: int = 1) -> None:
        """Make the bucket, or give one that is there these settings. Raises NetworkError."""
        config = StreamConfig(
            name=f"KV_{BUCKET}", subjects=[f"$KV.{BUCKET}.>"], max_msgs_per_subject=1, max_msg_size=MAX_VALUE + 1024,
            storage=StorageType.FILE, num_replicas=replicas, allow_rollup_hdrs=False, deny_delete=True, deny_purge=True, allow_direct=False,
            discard=DiscardPolicy.NEW, retention=RetentionPolicy.LIMITS, duplicate_window=0,
        )  # fmt: skip
        try:
            try:
                await self._js.add_stream(config)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != EXISTS:
                    raise
                await self._js.update_stream(config)
        except _FAILURES as error:
            raise self._failure("making the run's record", error) from error

    async def get(self, key: str) -> Entry | None:
        """What stands under a key. Raises NetworkError."""
        try:
            message = await self._js.get_last_msg(f"KV_{BUCKET}", f"$KV.{BUCKET}.{key}")
        except nats.js.errors.NotFoundError:
            return None
        except _FAILURES as error:
            raise self._failure(f"reading {key}", error) from error
        return Entry(key, message.data or b"", int(message.seq or 0))

    async def create(self, key: str, value: bytes) -> int | None:
        """Write a key that does not exist: its revision, or None when it does. Raises NetworkError."""
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, revision: int) -> int | None:
        """Write a key if it still stands at `revision`: the new revision, or None when somebody was first.

        Raises NetworkError; whether the write took effect is then not known."""
        return await self._publish(key, value, {"Nats-Expected-Last-Subject-Sequence": str(revision)})

    async def put(self, key: str, value: bytes) -> int:
        """Write a key whatever stands there: its revision. Raises NetworkError."""
        revision = await self._publish(key, value, None)
        if revision is None:
            raise NetworkError(f"writing {key}: the store answered as if it had been a compare-and-set; trying again")
        return revision

    async def _publish(self, key: str, value: bytes, headers: dict[str, str] | None) -> int | None:
        if len(value) > MAX_VALUE:
            raise NetworkError(f"{key} would have {len(value):,} bytes, and a record has at most {MAX_VALUE:,}")
        self._said = ""
        if not self.connected:  # the library would keep it for later, when it may have become wrong
            raise NetworkError(f"writing {key}: the store at {' or '.join(self._urls)} cannot be reached; trying again")
        try:
            acknowledged = await self._js.publish(f"$KV.{BUCKET}.{key}", value, timeout=DEADLINE, headers=headers)
        except nats.js.errors.APIError as error:
            if error.err_code in CONFLICTS:
                return None
            raise self._failure(f"writing {key}", error) from error
        except _FAILURES as error:
            raise self._failure(f"writing {key}", error) from error
        return int(acknowledged.seq)

    async def everything(self) -> list[Entry]:
        """Every record as it stands. Raises NetworkError."""
        try:
            watcher: Any = await (await self._bucket()).watchall()
            entries = []
            try:
                while (entry := await asyncio.wait_for(watcher._updates.get(), DEADLINE)) is not None:
                    if entry.operation is None:
                        entries.append(Entry(entry.key, entry.value or b"", int(entry.revision)))
            finally:
                with contextlib.suppress(Exception):
                    await watcher.stop()
        except _FAILURES as error:
            raise self._failure("reading the run's record", error) from error
        return entries

    async def watch(self) -> AsyncIterator[Entry]:
        """Every record that stands and every change, for ever. The same entry may come more than once, and older ones after newer ones:
        a reader goes by the revision."""
        while True:
            try:
                async for entry in self._watch_once():
                    yield entry
            except _FAILURES as error:
                log.debug("the watch on the store is made again: %s", error)
                await asyncio.sleep(0.2)

    async def _watch_once(self) -> AsyncIterator[Entry]:
        """Until the connection was lost, or it is time to read everything anew."""
        self._changed.clear()
        bucket = await self._bucket()
        watcher: Any = await bucket.watchall()
        end = asyncio.get_running_loop().time() + REREAD
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            while (left := end - asyncio.get_running_loop().time()) > 0:
                update = asyncio.ensure_future(watcher._updates.get())
                await asyncio.wait({update, changed}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not update.done():
                    update.cancel()
                    return
                entry = update.result()
                if entry is not None and entry.operation is None:
                    yield Entry(entry.key, entry.value or b"", int(entry.revision))
        finally:
            changed.cancel()
            with contextlib.suppress(Exception):
                await watcher.stop()

    async def _bucket(self) -> KeyValue:
        return await self._js.key_value(BUCKET)

    def _failure(self, what: str, error: BaseException) -> NetworkError:
        said = self._said if "ermissions" in self._said else str(error) or type(error).__name__
        return NetworkError(f"{what}: the store at {' or '.join(self._urls)} did not do it ({_why(said)})")


def _hung_up(said: str) -> bool:
    return any(words in said.lower() for words in ("broken pipe", "reset by peer"))


def _why(text: str) -> str:
    """What a failure means for a person."""
    low = text.lower()
    if "authorization" in low or "authentication" in low:
        return "it does not let this cluster in; the invite is of another run, ask the organiser for a new one"
    if "permissions violation" in low:
        return "it does not allow this to this cluster; use the invite of the cluster itself"
    if "certificate" in low:
        return f"its certificate is not of this run ({text}); check the store's address and the invite"
    if "no servers" in low or "refused" in low or "connect call failed" in low:
        return "nobody answers there; start the store, or check the address and the network"
    if "timeout" in low or not low:
        return "no answer in time; check the address and the network"
    return text
