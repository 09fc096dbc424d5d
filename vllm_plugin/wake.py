"""Wakes an engine core that waits for work when a worker has news of a transfer, or when time is up.

vLLM's worker reports only through steps, and its core loop steps once a millisecond while it has requests; a reserved beta
or a parked alpha would keep a core busy.  Instead the core sleeps until something can run: the transfer thread of each
worker signals over a socket, and a thread here puts a wake-up into the core's input queue.  Blocks that have landed are counted
by the signal itself: a step without tokens, only to hear of them, would take its time from the resuming beta, and from others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import zmq

from dynaserve.fleet_secret import FleetSecret, secure_client, secure_server

logger = logging.getLogger("vllm.dynaserve.wake")

_Count = Annotated[int, msgspec.Meta(ge=0)]
_LANDED = msgspec.msgpack.Decoder(tuple[str, _Count, _Count])
_LONGEST_SLEEP_MS = 250
"""How late a deadline may be noticed."""
LONGEST_SIGN_BYTES = 4096
"""Of a ring, or a pulse; ZeroMQ's own greetings must fit as well."""


class Bell:
    """The worker's end; both `ring`s are called by one thread at a time and never wait. rank: of the worker, in its instance."""

    def __init__(self, host: str, rank: int, secret: FleetSecret | None = None) -> None:
        self._rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.linger = 0
        secure_server(self._socket, secret)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"

    def ring(self) -> None:
        """The worker has results, which a step takes."""
        self._send(b"")

    def ring_landed(self, transfer_id: str, blocks: int) -> None:
        """So many more blocks are here. Should it get lost, the engine hears it with the result of the whole transfer."""
        self._send(msgspec.msgpack.encode((transfer_id, self._rank, blocks)))

    def _send(self, sign: bytes) -> None:
        try:
            self._socket.send(sign, zmq.NOBLOCK)
        except zmq.Again:
            return  # nobody listens yet, or a thousand signals are under way

    def close(self) -> None:
        self._context.destroy(linger=0)


class Alarm:
    """The engine core's end: a thread of its own notes what comes, and then calls `wake`.

    bells: addresses, one of each worker. rings: a step is needed. landed: (transfer id, rank of the worker, blocks) that have arrived
    since it was emptied. dropped: signals that could not be read. deadline_s: on the monotonic clock, when to wake the core without
    a signal; None: never.
    """

    def __init__(self, bells: Sequence[str], wake: Callable[[], None], secret: FleetSecret | None = None) -> None:
        self.rings = threading.Event()
        self.landed: deque[tuple[str, int, int]] = deque()
        self.dropped = 0
        self.deadline_s: float | None = None
        self._num_workers = len(bells)
        self._wake = wake
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.linger = 0
        self._socket.maxmsgsize = LONGEST_SIGN_BYTES
        secure_client(self._socket, secret)
        for address in bells:
            self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="dynaserve-alarm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._context.destroy(linger=0)  # ends the thread's wait
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                if self._wait():
                    self._wake()
        except zmq.ContextTerminated:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.ENOTSOCK:  # closed while it waited
                raise

    def _wait(self) -> bool:
        """Whether there is news. Signals may come all the time: the deadline is looked at beside them."""
        has_signals = bool(self._socket.poll(_LONGEST_SLEEP_MS))
        deadline_s = self.deadline_s
        is_due = deadline_s is not None and time.monotonic() >= deadline_s
        if is_due:
            self.deadline_s = None
            self.rings.set()
        if not has_signals:
            return is_due
        while True:
            try:
                sign = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if sign:
                self._note_landed(sign)
            else:
                self.rings.set()

    def _note_landed(self, sign: bytes) -> None:
        try:
            transfer_id, rank, blocks = _LANDED.decode(sign)
            if rank >= self._num_workers:
                raise msgspec.ValidationError(f"it is of rank {rank}, and there are {self._num_workers} workers")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.dropped += 1
            logger.warning("dropped a malformed signal of %d bytes of a worker: %s", len(sign), error)
        else:
            self.landed.append((transfer_id, rank, blocks))
