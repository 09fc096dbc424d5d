"""The two ends of a directed pair of workers: which channel carries the next push, whatever either side has dropped.

The sender numbers its pushes; the control message that announces one carries its `PushNumber`, and so both ends know which push
is meant, whatever became of those before it.  Channels of a pair come in *generations*, which meet in the receiver's TCP store:

    <sender>-><receiver>/<session>/<generation>/first   set by the sender: the generation exists, and starts with this push
    <sender>-><receiver>/<session>/<generation>/group/  set by both: that they have come, and then what Gloo needs to connect them
    <sender>-><receiver>/<session>/next                 set by the receiver: earlier pushes will not be taken

So after either side has dropped its end, or the network has cut it, the sender knows whether the push in hand is still wanted,
and the receiver whether it is still to come; what was under way is lost, what follows is not.  The sender's connection to the
store may be cut as well, and loses in silence what was just set: over the next one it sets every generation again that the
receiver may not have heard of.

A store's client has no timeout for a stopped process, and keeps its lock while it waits: so every end has a client of its own,
and whatever waits for another process does so in a thread of its own, is given up after a time, and ends with `drop` (`Waits`).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dynaserve.kv_transfer.torch_channel import RECEIVER, SENDER, Channel
from dynaserve.kv_transfer.transport import TransportError

_GRACE_S = 5.0
"""How long a sender whose channel has ended may need to go on in another; of one that died others know sooner, and `drop` it."""
_HEADER_FIELDS = 4
_STORE_TIMEOUT_S = 5.0
"""Of one question to the store of another process, and of one connection to it."""
_CONNECT_SHARE = 5
"""Gloo waits for a peer that comes to a group and goes several times in a row: its timeout for that is so much shorter."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Between two looks into a store."""
_DROPPED = "the channel was dropped while it was being opened"
T = TypeVar("T")


class Overtaken(Exception):
    """The sender waits in a newer generation."""


class Waits:
    """What an end waits for, each in a thread of its own, until it comes, its time is over, or another thread calls `end`.

    ends: how often that was.
    """

    def __init__(self) -> None:
        self.ends = 0
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()

    def within(
        self,
        limit_s: float,
        call: Callable[[], T],
        undo: Callable[[T], None] | None = None,
        is_overtaken: Callable[[], bool] | None = None,
        since: int | None = None,
    ) -> T:
        """What `call` returns or raises; raises RuntimeError where nothing comes in time. undo: gets what comes later.

        is_overtaken: looked at again and again; raises Overtaken once it holds. since: `ends` when what this is part of began: an end that
        has come since then is one of this, too.
        """
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                value = call()
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                _fail(answer, error)
                return
            try:
                answer.set_result(value)
            except InvalidStateError:
                if undo is not None:
                    undo(value)

        with self._lock:
            if since is not None and since != self.ends:
                raise RuntimeError(_DROPPED)
            self._pending.add(answer)
        until_s = time.monotonic() + limit_s
        try:
            # Not a thread of a pool: one that waits for a stopped process ends with that, and must not hold up the end of this one.
            threading.Thread(target=ask, name="dynaserve-wait", daemon=True).start()
            while not answer.done():
                rest_s = until_s - time.monotonic()
                wait([answer], rest_s if is_overtaken is None else min(rest_s, _LONGEST_PAUSE_S))
                if time.monotonic() >= until_s:
                    _fail(answer, RuntimeError(f"nothing has come from the peer for {limit_s:g} s"))
                elif is_overtaken is not None and is_overtaken():
                    _fail(answer, Overtaken())
            return answer.result()
        except BaseException as error:
            _fail(answer, error)
            raise
        finally:
            with self._lock:
                self._pending.discard(answer)

    def end(self) -> bool:
        """Whatever is waited for fails now. Whether anything was."""
        with self._lock:
            self.ends += 1
            pending = list(self._pending)
        return sum(_fail(answer, RuntimeError(_DROPPED)) for answer in pending) > 0


def _fail(answer: Future[Any], error: BaseException) -> bool:
    try:
        answer.set_exception(error)
    except InvalidStateError:
        return False
    return True


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
    staging_bytes: int
    pinned: bool
    timeout_s: float

    def connect(self, address: str) -> Any:
        """A client of the store at `address`. Raises OSError where nobody listens; waits for ever where nobody answers."""
        host, _, port = address.rpartition(":")
        # The store's own client tries a refused connection again until its timeout.
        socket.create_connection((host, int(port)), min(self.timeout_s, _STORE_TIMEOUT_S)).close()
        return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=self.timeout_s))

    def open(
        self,
        waits: Waits,
        store: Any,
        generation: str,
        rank: int,
        since: int,
        is_overtaken: Callable[[], bool] | None = None,
        is_given_up: Callable[[], bool] | None = None,
    ) -> Channel:
        """Raises RuntimeError where the other end does not come, TransportError once it has given up, and Overtaken.

        since: of `Waits.within`. is_given_up: asked by the thread that waits for the other end, as it may use that thread's store.
        """
        group = dist.PrefixStore(f"{generation}/group", store)

        def meet() -> Channel:
            # Gloo's timeout is for ends that are both there: by itself it waits for one that is late no longer than that.
            group.set(f"here{rank}", "")
            until_s = time.monotonic() + self.timeout_s
            for pause_s in _pauses_s():
                if group.check([f"here{1 - rank}"]):
                    break
                if is_given_up is not None and is_given_up():
                    raise TransportError("the receiver has given it up")
                if time.monotonic() >= until_s:
                    raise RuntimeError(f"nothing has come from the peer for {self.timeout_s:g} s")
                time.sleep(pause_s)
            meet_timeout_s = self.timeout_s / _CONNECT_SHARE
            return Channel(group, rank, self.host, self.staging_bytes, self.pinned, self.timeout_s, meet_timeout_s)

        return waits.within(self.timeout_s, meet, Channel.end, is_overtaken, since)


def _pauses_s() -> Iterator[float]:
    """Between two looks into a store."""
    for attempt in itertools.count():
        yield min(_SHORTEST_PAUSE_S * 2 ** min(attempt, 10), _LONGEST_PAUSE_S)


class Outgoing:
    """The end that sends. `announce` and `give_up` by one thread at a time, `drop` by any. session: of `PushNumber`."""

    def __init__(self, local: Local, receiver_id: str, address: str, session: int) -> None:
        self.session = session
        self._local = local
        self._pair = f"{local.worker_id}->{receiver_id}/{session}"
        self._address = address
        self._lock = threading.Lock()
        self._waits = Waits()
        self._next = 0
        """After the newest push that was begun."""
        self._generation = 0
        self._met = 0
        """The newest generation in which the receiver has come."""
        self._store: Any = None
        self._channel: Channel | None = None

    def announce(self, number: int, push: Description) -> Channel:
        """Sends the header of push `number`; returns, once the receiver has taken it, the channel for the bytes.

        Raises TransportError if the receiver has given it up; else OSError or RuntimeError.
        """
        with self._lock:
            self._next = number + 1
            channel, drops = self._channel, self._waits.ends
        if channel is None:
            channel = self._open(number, drops)
        fields = [number, push.num_blocks, push.block_bytes, push.blocks_digest]
        header = torch.tensor(fields, dtype=torch.int64)
        started_s = time.monotonic()
        try:
            channel.send(header)
        except RuntimeError:
            silent = time.monotonic() - started_s >= self._local.timeout_s
            if silent or not self._leave(channel, number, drops):
                raise
            channel = self._open(number, drops)
            channel.send(header)
        return channel

    def give_up(self, number: int) -> None:
        """Push `number` will never be made."""
        with self._lock:
            self._next = number + 1
        self._end(tell=True)

    def drop(self) -> None:
        """Ends an open channel, and what waits for one."""
        with self._lock:
            waited = self._waits.end()
            if waited:
                self._store = None  # its client may still be waiting
        self._end(tell=waited)

    def _end(self, *, tell: bool) -> None:
        """tell: also where no channel is open, that the next push comes in another generation."""
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None or tell:
                self._begin_generation(first=self._next)
        if channel is not None:
            channel.end()

    def _leave(self, channel: Channel, number: int, drops: int) -> bool:
        """Goes on in a new generation, unless this side has ended the old one, or the receiver waits for a later push."""
        if channel.ended or self._is_given_up(number, drops):
            return False
        with self._lock:
            if self._channel is not channel:
                return False
            self._channel = None
            self._begin_generation(first=number)
        return True

    def _is_given_up(self, number: int, drops: int) -> bool:
        """By the receiver. Raises OSError or RuntimeError where it cannot be asked any more."""
        store = self._store
        if store is not None:
            try:
                return self._waits.within(_STORE_TIMEOUT_S, lambda: self._ask_given_up(store, number), since=drops)
            except RuntimeError:
                if self._waits.ends != drops:
                    raise
                self._store = None  # its connection was cut as well
        fresh = self._connected(drops)
        return self._waits.within(_STORE_TIMEOUT_S, lambda: self._ask_given_up(fresh, number), since=drops)

    def _ask_given_up(self, store: Any, number: int) -> bool:
        key = f"{self._pair}/next"
        return bool(store.check([key])) and int(store.get(key)) > number

    def _begin_generation(self, first: int) -> None:
        """Call it with the lock. Where the receiver cannot be told, the next connection tells it."""
        self._generation += 1
        store, generation = self._store, self._generation
        if store is None:
            return
        try:
            Waits().within(_STORE_TIMEOUT_S, lambda: self._set_first(store, generation, first))
        except RuntimeError:
            self._store = None

    def _set_first(self, store: Any, generation: int, first: int) -> None:
        store.set(f"{self._pair}/{generation}/first", str(first))

    def _open(self, number: int, drops: int) -> Channel:
        try:
            return self._open_newest(number, drops)
        except (OSError, RuntimeError, TransportError):
            with self._lock:
                if self._store is not None:  # nobody shall wait in the one that is left here; and who connects begins one
                    self._begin_generation(first=number + 1)
            raise

    def _open_newest(self, number: int, drops: int) -> Channel:
        reused = self._store is not None
        if not reused:
            self._connect(number, drops)
        if self._is_given_up(number, drops):
            raise TransportError(f"the receiver has given up push {number}")
        began_s = time.monotonic()
        with self._lock:
            store, generation = self._store, self._generation
        try:
            if store is None:
                raise RuntimeError("the connection to the store of the peer has ended")
            name = f"{self._pair}/{generation}"
            channel = self._local.open(self._waits, store, name, SENDER, drops, is_given_up=lambda: self._ask_given_up(store, number))
        except RuntimeError:
            if reused and self._waits.ends == drops and time.monotonic() - began_s < self._local.timeout_s / _CONNECT_SHARE:
                self._store = None  # it was the connection to the store that had ended
                return self._open_newest(number, drops)
            raise
        with self._lock:
            if self._waits.ends == drops:
                self._channel, self._met = channel, generation
                return channel
        channel.end()
        raise RuntimeError(_DROPPED)

    def _connect(self, number: int, drops: int) -> None:
        store = self._connected(drops)
        with self._lock:
            self._generation += 1
            # The newest first: a receiver that waits for the oldest looks for newer ones as soon as it is there.
            untold = range(self._generation, self._met, -1)

        def tell() -> None:
            for generation in untold:
                self._set_first(store, generation, number)

        self._waits.within(_STORE_TIMEOUT_S, tell, since=drops)
        self._store = store

    def _connected(self, drops: int) -> Any:
        return self._waits.within(2 * _STORE_TIMEOUT_S, lambda: self._local.connect(self._address), since=drops)


class Incoming:
    """The end that receives. `meet` and `give_up` by one thread at a time, `drop` by any. session: of `PushNumber`.

    store: the server that `Local.address` names; no other thread may wait on it.
    """

    def __init__(self, local: Local, sender_id: str, store: Any, session: int) -> None:
        self.session = session
        self._local = local
        self._pair = f"{sender_id}->{local.worker_id}/{session}"
        self._server = store
        self._store: Any = None
        self._lock = threading.Lock()
        self._waits = Waits()
        self._next = 0
        """After the newest push that was waited for."""
        self._generation = 0
        self._channel: Channel | None = None

    def meet(self, number: int, expected: Description) -> Channel:
        """Waits for the header of push `number`; returns the channel on which its bytes follow.

        Raises TransportError if another push comes, or the sender has given up the one expected; else OSError or RuntimeError.
        """
        with self._lock:
            self._next = number + 1
            drops = self._waits.ends
        try:
            return self._take(number, expected, drops)
        except RuntimeError:
            self._store = None  # its connection may be what has ended
            raise

    def give_up(self, number: int) -> None:
        """Push `number` is not waited for any more."""
        with self._lock:
            self._next = number + 1
            self._tell_next(self._next)

    def drop(self) -> None:
        """Ends an open channel, and what waits for one."""
        with self._lock:
            self._waits.end()
            self._tell_next(self._next)  # before the end, which is what makes the sender look
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.end()

    def _take(self, number: int, expected: Description, drops: int) -> Channel:
        if self._store is None:
            self._store = self._connected(drops)
        header = torch.empty(_HEADER_FIELDS, dtype=torch.int64)
        while True:
            channel = self._join(number, drops)
            try:
                channel.receive(header)
            except RuntimeError:
                if channel.ended or not self._has_sender_moved_on(drops):
                    raise
                continue
            came, *fields = header.tolist()
            if came >= number:
                break
            self._leave(channel, number)
        push = Description(*fields)
        if came > number or not expected.fits(push):
            raise TransportError(f"push {came} came with {push}, push {number} is expected with {expected}")
        return channel

    def _leave(self, channel: Channel, number: int) -> None:
        """What came was given up on this side: its sender goes on, with what follows, in the next generation."""
        with self._lock:
            if self._channel is channel:
                self._tell_next(number)
                self._channel = None
        channel.end()

    def _tell_next(self, number: int) -> None:
        """Call it with the lock."""
        try:
            self._server.set(f"{self._pair}/next", str(number))
        except RuntimeError:  # our own connection to our own store was cut, for good
            with contextlib.suppress(OSError, RuntimeError):  # the sender's timeout tells it
                self._local.connect(self._local.address).set(f"{self._pair}/next", str(number))

    def _join(self, number: int, drops: int) -> Channel:
        """The channel of the newest generation. Raises TransportError if that starts after push `number`."""
        while True:
            with self._lock:
                newest, current = self._generation, self._channel
            if current is None:
                newest += 1
                if not self._comes(newest, self._local.timeout_s, drops):
                    raise RuntimeError(f"the sender has not come for {self._local.timeout_s:g} s")
            while self._has_begun(newest + 1):
                newest += 1
            if current is not None and newest == self._generation:
                return current
            first = int(self._store.get(self._first_key(newest)))
            if first > number:
                raise TransportError(f"the sender has given up push {number} and goes on with push {first}")
            with contextlib.suppress(Overtaken):  # its connection to the store was cut, and it has begun another one
                return self._open(newest, drops)

    def _open(self, generation: int, drops: int) -> Channel:
        with self._lock:
            self._channel, self._generation = None, generation
        # A client of its own: who waits on one keeps all others from it, also when it is not waited for any more.
        store = self._connected(drops)
        name = f"{self._pair}/{generation}"
        channel = self._local.open(self._waits, store, name, RECEIVER, drops, lambda: self._has_begun(generation + 1))
        with self._lock:
            if self._waits.ends == drops:
                self._channel = channel
                return channel
        channel.end()
        raise RuntimeError(_DROPPED)

    def _connected(self, drops: int) -> Any:
        return self._waits.within(2 * _STORE_TIMEOUT_S, lambda: self._local.connect(self._local.address), since=drops)

    def _has_sender_moved_on(self, drops: int) -> bool:
        return self._comes(self._generation + 1, _GRACE_S, drops)

    def _comes(self, generation: int, within_s: float, drops: int) -> bool:
        """Whether the sender begins this generation in time. Raises RuntimeError once `drop` was called."""
        until_s = time.monotonic() + within_s
        for pause_s in _pauses_s():
            if self._has_begun(generation):
                return True
            if self._waits.ends != drops:
                raise RuntimeError("the sender was dropped")
            if time.monotonic() >= until_s:
                return False
            time.sleep(pause_s)
        raise AssertionError

    def _has_begun(self, generation: int) -> bool:
        return bool(self._store.check([self._first_key(generation)]))

    def _first_key(self, generation: int) -> str:
        return f"{self._pair}/{generation}/first"
