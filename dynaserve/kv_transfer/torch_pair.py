"""The two ends of a directed pair of workers: which channel carries the next push, whatever either side has dropped.

Channels of a pair come in *generations*, which meet in the receiver's TCP store:

    <sender>-><receiver>/<generation>/first   set by the sender: the generation exists, and starts with this push number
    <sender>-><receiver>/<generation>/next    set by a receiver that ends the generation: earlier pushes will not be taken

Both sides number their pushes and receives.  So after either side has dropped its end, the sender knows whether the push
in hand is still wanted, and the receiver whether it is still to come; what was under way is lost, what follows is not.

A store has no timeout for a stopped process, and its client lets one thread wait at a time: the sender asks only a peer
that has just closed a connection, and every end has a client of its own.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynaserve.kv_transfer.torch_channel import RECEIVER, SENDER, Channel
from dynaserve.kv_transfer.transport import TransportError

_GRACE = timedelta(seconds=1)
"""How long a sender that dropped its end may need to say so; a sender that died says nothing."""
_HEADER_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Description:
    """What a header says of its push. blocks_digest: of the receiver's block ids; None: the receiver takes any."""

    num_blocks: int
    block_bytes: int
    blocks_digest: int | None

    def fits(self, came: Description) -> bool:
        digests_fit = self.blocks_digest is None or self.blocks_digest == came.blocks_digest
        return digests_fit and (self.num_blocks, self.block_bytes) == (came.num_blocks, came.block_bytes)


@dataclass(frozen=True, slots=True)
class Local:
    """What all ends of one worker share. address: `host:port` of the worker's own store."""

    worker_id: str
    host: str
    address: str
    device: torch.device
    staging_bytes: int
    timeout_s: float

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def connect(self, address: str) -> Any:
        """A client of the store at `address`. Raises OSError where nobody listens, RuntimeError where nobody answers."""
        host, _, port = address.rpartition(":")
        # The store's own client tries a refused connection again until its timeout.
        socket.create_connection((host, int(port)), self.timeout_s).close()
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self.timeout)

    def open(self, store: Any, generation: str, rank: int) -> Channel:
        group = dist.PrefixStore(f"{generation}/group", store)
        return Channel(group, rank, self.host, self.device, self.staging_bytes, self.timeout_s)


class Outgoing:
    """The end that sends. `announce` by one thread at a time, `drop` by any."""

    def __init__(self, local: Local, receiver_id: str, address: str) -> None:
        self._local = local
        self._pair = f"{local.worker_id}->{receiver_id}"
        self._address = address
        self._lock = threading.Lock()
        self._pushes = 0
        self._generation = 0
        self._store: Any = None
        self._channel: Channel | None = None

    def announce(self, push: Description) -> Channel:
        """Sends the header of the next push; returns, once the receiver has taken it, the channel for the bytes."""
        with self._lock:
            number, channel = self._pushes, self._channel
            self._pushes += 1
        if channel is None:
            channel = self._open(number)
        fields = [number, push.num_blocks, push.block_bytes, push.blocks_digest]
        header = torch.tensor(fields, dtype=torch.int64, device=self._local.device)
        started_s = time.monotonic()
        try:
            channel.send(header)
        except RuntimeError:
            silent = time.monotonic() - started_s >= self._local.timeout_s
            if silent or not self._leave(channel, number):
                raise
            channel = self._open(number)
            channel.send(header)
        return channel

    def drop(self) -> None:
        """Ends an open channel; one that is being opened ends by its timeout."""
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is None:
                return
            try:
                self._begin_generation(first=self._pushes)
            except RuntimeError:  # the receiver is gone, or the connection to its store: the next push finds out
                self._store = None
        channel.end()

    def _leave(self, channel: Channel, number: int) -> bool:
        """Goes on in a new generation, if it was the receiver that ended this one, and it still waits for push `number`."""
        store, key = self._store, f"{self._pair}/{self._generation}/next"
        if channel.ended or store is None or not store.check([key]) or int(store.get(key)) > number:
            return False
        with self._lock:
            if self._channel is not channel:
                return False
            self._channel = None
            self._begin_generation(first=number)
        return True

    def _begin_generation(self, first: int) -> None:
        self._generation += 1
        self._store.set(f"{self._pair}/{self._generation}/first", str(first))

    def _open(self, number: int) -> Channel:
        if self._store is None:
            self._store = self._local.connect(self._address)
            self._begin_generation(first=number)
        try:
            channel = self._local.open(self._store, f"{self._pair}/{self._generation}", SENDER)
        except RuntimeError:
            self._store = None  # the next push connects again and begins a generation
            raise
        with self._lock:
            self._channel = channel
        return channel


class Incoming:
    """The end that receives. `meet` by one thread at a time, `drop` by any.

    store: the server that `Local.address` names; no other thread may wait on it.
    """

    def __init__(self, local: Local, sender_id: str, store: Any) -> None:
        self._local = local
        self._pair = f"{sender_id}->{local.worker_id}"
        self._server = store
        self._store: Any = None
        self._lock = threading.Lock()
        self._calls = 0
        self._generation = 0
        self._channel: Channel | None = None

    def meet(self, expected: Description) -> Channel:
        """Waits for the header of the next push; returns the channel on which its bytes follow.

        Raises TransportError if another push comes, or the sender has given up the one expected; else RuntimeError.
        """
        with self._lock:
            number = self._calls
            self._calls += 1
        if self._store is None:
            self._store = self._local.connect(self._local.address)
        header = torch.empty(_HEADER_FIELDS, dtype=torch.int64, device=self._local.device)
        while True:
            channel = self._join(number)
            try:
                channel.receive(header)
            except RuntimeError:
                if channel.ended or not self._has_sender_moved_on():
                    raise
                continue
            came, *fields = header.tolist()
            push = Description(*fields)
            if expected.fits(push) or came >= number:
                break
            self.drop()  # an earlier push, which this side has given up: its sender goes on in the next generation
        if came > number or expected.blocks_digest is not None:
            self._calls = came + 1
        if not expected.fits(push):
            raise TransportError(f"push {came} came with {push}, push {number} is expected with {expected}")
        return channel

    def drop(self) -> None:
        """Ends an open channel; one that is being opened ends by its timeout."""
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is None:
                return
            # Before the end, which is what makes the sender look.
            self._server.set(f"{self._pair}/{self._generation}/next", str(self._calls))
        channel.end()

    def _join(self, number: int) -> Channel:
        """The channel of the newest generation. Raises TransportError if that starts after push `number`."""
        with self._lock:
            newest, current = self._generation, self._channel
        if current is None:
            newest += 1
            self._store.wait([self._first_key(newest)], self._local.timeout)
        while self._store.check([self._first_key(newest + 1)]):
            newest += 1
        if current is not None and newest == self._generation:
            return current
        first = int(self._store.get(self._first_key(newest)))
        if first > number:
            raise TransportError(f"the sender has given up push {number} and goes on with push {first}")
        with self._lock:
            self._channel, self._generation = None, newest
        channel = self._local.open(self._store, f"{self._pair}/{newest}", RECEIVER)
        with self._lock:
            self._channel = channel
        return channel

    def _has_sender_moved_on(self) -> bool:
        try:
            self._store.wait([self._first_key(self._generation + 1)], _GRACE)
        except dist.DistStoreError:
            return False
        return True

    def _first_key(self, generation: int) -> str:
        return f"{self._pair}/{generation}/first"
