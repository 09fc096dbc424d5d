"""The transfer agent of one worker process: carries out what `sender` and `receiver` decide.

One control thread owns the ZeroMQ sockets and both state machines; the `lanes` of each peer push and, on two-sided
transports, receive.  The engine's thread talks to the agent through `submit`, `retract` and `take_results` only.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import zmq

from dynaserve.fleet_secret import FleetSecret
from dynaserve.kv_transfer import receiver as rx
from dynaserve.kv_transfer import sender as tx
from dynaserve.kv_transfer.control_plane import ControlPlane
from dynaserve.kv_transfer.ended import nobody_listens
from dynaserve.kv_transfer.lanes import Lanes
from dynaserve.kv_transfer.results import ResultBox, Results
from dynaserve.kv_transfer.transport import Transport, WorkerEndpoint
from dynaserve.kv_transfer.wire import Done, Grant, Revoke

logger = logging.getLogger("vllm.dynaserve.kv_transfer")

PROBE_EVERY_S, PROBE_FOR_S = 1.0, 60.0
"""How often the machine of a lost peer is asked whether the process is still there, and for how long: as a process ends, its port goes
late. It goes on for longer while blocks wait for the answer."""
ACK_AFTER_S = 0.5
"""One answer acknowledges all messages of this time."""
TELL_AGAIN_S = 1.0
"""As long as nobody takes what an idle engine is to be woken for."""
RETRACT_WITHIN_S = 2.0
"""How long the engine's step waits for a push before that is given up: every request of the instance stands still. The largest push of a
model of 14B, 96 MiB, takes 0.1 s at 10 Gbit/s."""
AWAKE_LOOK_S = 0.25
"""How often time is counted that must be this process's own (`Transport.late_write_s`)."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A front-end takes this worker for dead: of these transfers nothing comes from it, nor goes to it.

    It is one opinion: where only the front-end's own connection is cut, the transfers of others go on.
    """

    worker_id: str
    transfer_ids: frozenset[str]


Command = PeerLost | tx.Ready | tx.Retract | tx.Stop | rx.Expect | rx.Extend | rx.Complete | rx.Cancel
"""What the engine's thread may submit."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """Sets `reached` once no block of these transfers is being read."""

    transfer_ids: tuple[str, ...]
    reached: threading.Event


@dataclass(frozen=True, slots=True)
class _RestOverdue:
    """Blocks of these transfers are still being read, and the engine's step has waited for long enough."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _TellAgain:
    """Time to see whether anybody has taken the results."""


@dataclass(frozen=True, slots=True)
class _AcksDue:
    """Time to acknowledge what has come."""


@dataclass(frozen=True, slots=True)
class _ProbeDue:
    """Time to ask whether the process of a lost peer is still there."""

    peer: WorkerEndpoint


@dataclass(frozen=True, slots=True)
class _Probed:
    peer: WorkerEndpoint
    gone: bool


@dataclass(frozen=True, slots=True)
class _Awake:
    """So many more looks until the event: while this process is stopped no time passes."""

    event: rx.Quiet
    looks: int


_Event = tx.Event | rx.Event | PeerLost | _Rest | _RestOverdue | _AcksDue | _TellAgain | _ProbeDue | _Probed | _Awake


class Agent:
    """Moves blocks for one worker. `transports` by name; the agent closes them.

    worker_id: unique per start of the process. host: address to bind the control socket to.
    block_bytes: of one block over all layers. Both callbacks come from the control thread and return at once. on_results:
    `take_results` has news for which an idle engine should be woken. on_landed: so many more of the first blocks of this transfer are here;
    an engine that waits for the last of them need not ask for results. secret: of the fleet; None: peers are at loopback only.
    """

    def __init__(
        self,
        worker_id: str,
        host: str,
        block_bytes: int,
        transports: Mapping[str, Transport],
        on_results: Callable[[], None] = lambda: None,
        on_landed: Callable[[str, int], None] = lambda *_: None,
        secret: FleetSecret | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._control = ControlPlane(self._context, worker_id, host, secret)
        addresses = {name: transport.address() for name, transport in transports.items()}
        self.endpoint = WorkerEndpoint(worker_id, self._control.address, addresses)
        self._unknown_senders = 0
        self._transports = transports
        self._results = ResultBox(block_bytes)
        self._on_results = on_results
        self._on_landed = on_landed
        one_sided = frozenset(name for name, transport in transports.items() if transport.one_sided)
        self._sender = tx.Sender(worker_id, one_sided)
        self._receiver = rx.Receiver(self.endpoint, one_sided)
        self._peers: dict[str, WorkerEndpoint] = {}
        self._asked_about: dict[str, float] = {}
        """Lost peers whose machine is being asked, and since when, by the monotonic clock."""
        self._acks_due = False
        self._tells_again = False
        self._lanes = Lanes(transports, self._post)
        self._pushes: dict[str, tx.Push] = {}
        """Of each transfer the one that is under way, or queued; whatever has become of the grant since."""
        self._one_sided_pushes: dict[str, Future[None]] = {}
        """The last one of each transfer, until it is done."""
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._pipe_lock = threading.Lock()
        self._pipe_open = True
        self._resting: list[_Rest] = []
        self._timers: list[tuple[float, int, _Event]] = []
        """(due by the monotonic clock, running number, what to handle then), a heap."""
        self._timer_numbers = itertools.count()
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dynaserve-transfer", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Thread-safe; returns at once. Raises RuntimeError if the control thread has died."""
        self._post(command)

    def retract(self, transfer_ids: Sequence[str]) -> None:
        """Returns when no block of these transfers is being read, as after `close`: call it before their blocks are overwritten.

        A two-sided push that is not over after `RETRACT_WITHIN_S` fails, with whatever else is under way between the same two workers:
        its receiver may be stopped, and the caller is who would hear of that. A one-sided one is left to its own time limit.
        """
        rest = _Rest(tuple(transfer_ids), threading.Event())
        for transfer_id in transfer_ids:
            self._post(tx.Retract(transfer_id))
        self._post(rest)
        while not rest.reached.wait(timeout=RETRACT_WITHIN_S) and not self._closed:
            self._post(_RestOverdue(rest.transfer_ids))

    def take_results(self) -> Results:
        return self._results.take()

    @property
    def dropped_messages(self) -> int:
        """Those that could not be read, sent or followed."""
        return self._control.dropped + self._unknown_senders

    def open_transfers(self) -> Counter[str]:
        """How many transfers each half knows of; for the record and for tests. A snapshot, without a lock."""
        return Counter(sending=len(self._sender.transfers), receiving=len(self._receiver.transfers))

    def close(self) -> None:
        """Ends all threads and transports; what is under way is lost. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._events.put(None)
        self._wake()
        self._thread.join()
        for transport in self._transports.values():
            transport.close()  # ends what the lanes wait for
        self._lanes.close()
        self._context.destroy(linger=0)
        with self._pipe_lock:  # a lane of a peer that is gone may still be ending
            self._pipe_open = False
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the transfer agent of this worker has died") from self._failure

    def _post(self, event: _Event) -> None:
        self._check()
        self._events.put(event)
        self._wake()

    def _wake(self) -> None:
        with self._pipe_lock, contextlib.suppress(BlockingIOError):  # the pipe is full: the thread is about to wake up anyway
            if self._pipe_open:
                os.write(self._wake_write, b"x")

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("the transfer agent died")
            self._failure = error

    def _loop(self) -> None:
        self._control.poller.register(self._wake_read, zmq.POLLIN)
        while True:
            ready = dict(self._control.poller.poll(self._until_due_ms()))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if len(ready) > (self._wake_read in ready):
                self._read_control()
            if not self._handle_events():
                return
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._handle(heapq.heappop(self._timers)[2])
            if self._control.lacks_connections:  # nothing comes that would wake us
                for peer in self._control.take_cut():
                    self._ask_about(peer)

    def _until_due_ms(self) -> int | None:
        if not self._timers:
            return None
        return math.ceil(1e3 * max(0.0, self._timers[0][0] - time.monotonic()))

    def _handle_after(self, delay_s: float, event: _Event) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_numbers), event))

    def _read_control(self) -> None:
        for message in self._control.receive():
            self._handle(message)
        for peer in self._control.take_cut():
            self._ask_about(peer)
        if self._control.owes_acks and not self._acks_due:
            self._acks_due = True
            self._handle_after(ACK_AFTER_S, _AcksDue())

    def _handle_events(self) -> bool:
        while not self._events.empty():
            event = self._events.get()
            if event is None:
                return False
            self._handle(event)
        for rest in [rest for rest in self._resting if not any(map(self._sender.is_in_flight, rest.transfer_ids))]:
            self._resting.remove(rest)
            rest.reached.set()
        return True

    def _handle(self, event: _Event) -> None:
        match event:
            case _Rest():
                self._resting.append(event)
            case _RestOverdue(transfer_ids=transfer_ids):
                self._give_up_pushes(transfer_ids)
            case _AcksDue():
                self._acks_due = False
                self._control.send_acks()
            case _TellAgain():
                self._tells_again = False
                if self._results.wakes():
                    self._tell()
            case PeerLost(worker_id=worker_id, transfer_ids=transfer_ids):
                self._lose(worker_id, transfer_ids)
            case _ProbeDue(peer=peer):
                self._lanes.run("probe", peer, lambda: self._post(_Probed(peer, nobody_listens(peer.control))))
            case _Probed(peer=peer, gone=gone):
                self._on_probed(peer, gone)
            case tx.Retract(transfer_id=transfer_id):
                self._withdraw_push(transfer_id)
                self._to_sender(event)
            case _Awake(event=awaited, looks=0):
                self._handle(awaited)
            case _Awake(event=awaited, looks=looks):
                self._handle_after(AWAKE_LOOK_S, _Awake(awaited, looks - 1))
            case tx.PushDone(transfer_id=transfer_id) | tx.PushFailed(transfer_id=transfer_id) | tx.PushWithdrawn(transfer_id=transfer_id):
                self._pushes.pop(transfer_id, None)
                self._one_sided_pushes.pop(transfer_id, None)
                self._to_sender(event)
            case tx.Ready() | tx.Stop() | tx.ReceiverLost() | Grant() | Done() | Revoke():
                self._to_sender(event)
            case _:
                if isinstance(event, rx.Expect):
                    self._peers[event.sender.worker_id] = event.sender
                for received in self._receiver.handle(event):
                    self._receive_side(received)

    def _to_sender(self, event: tx.Event) -> None:
        for instruction in self._sender.handle(event):
            self._send_side(instruction)

    def _withdraw_push(self, transfer_id: str) -> None:
        """If it waits for its turn, behind pushes of other transfers or for a peer that does not answer: the engine's step waits for it."""
        push = self._one_sided_pushes.get(transfer_id)
        if push is not None and push.cancel():
            self._handle(tx.PushWithdrawn(transfer_id))

    def _give_up_pushes(self, transfer_ids: tuple[str, ...]) -> None:
        """Of two-sided transports: a push cannot be ended but with its channel, nor before those that are queued in front of it."""
        pushes = (self._pushes.get(transfer_id) for transfer_id in transfer_ids)
        receivers = {push.receiver.worker_id: push.receiver for push in pushes if push is not None and push.number is not None}
        for peer in receivers.values():
            logger.warning("the engine's step has waited for a push to worker %s, which is given up with its channel", peer.worker_id)
            self._lanes.end_two_sided(peer)

    def _lose(self, worker_id: str, transfer_ids: frozenset[str]) -> None:
        receiving, sending = self._receiver.transfers_from(worker_id), self._sender.transfers_to(worker_id)
        pushes = {name: push for name, push in self._pushes.items() if push.receiver.worker_id == worker_id}
        known = [self._control.peer(worker_id), self._peers.get(worker_id)]
        known += [self._receiver.transfers[name].sender for name in receiving]
        known += [self._sender.transfers[name].receiver for name in sending]
        known += [push.receiver for push in pushes.values()]
        peer = next((peer for peer in known if peer is not None), None)
        holding = {*pushes, *(name for name in receiving if self._receiver.transfers[name].receiving)}
        if peer is not None and (transfer_ids.issuperset([*receiving, *sending, *pushes]) or not transfer_ids.isdisjoint(holding)):
            self._lanes.end_two_sided(peer)
        for name in transfer_ids.intersection(receiving):
            self._handle(rx.SenderLost(name))
        for name in transfer_ids.intersection(sending):
            self._handle(tx.ReceiverLost(name))
        if peer is not None:
            self._ask_about(peer)

    def _ask_about(self, peer: WorkerEndpoint) -> None:
        """Asks its machine whether the process of this peer has ended, or the connection to it only."""
        if peer.worker_id not in self._asked_about:
            self._asked_about[peer.worker_id] = time.monotonic()
            self._handle(_ProbeDue(peer))

    def _on_probed(self, peer: WorkerEndpoint, gone: bool) -> None:
        if gone:
            del self._asked_about[peer.worker_id]
            self._forget(peer)
            return
        self._control.reconnect(peer.worker_id)
        recent = time.monotonic() - self._asked_about[peer.worker_id] < PROBE_FOR_S
        if recent or self._receiver.transfers_from(peer.worker_id):
            self._handle_after(PROBE_EVERY_S, _ProbeDue(peer))
        else:
            del self._asked_about[peer.worker_id]

    def _forget(self, peer: WorkerEndpoint) -> None:
        """The process of this worker has ended, and its next one will have another id."""
        worker_id = peer.worker_id
        self._sender.forget_receiver(worker_id)
        self._lanes.forget_channels(peer)
        for name in self._sender.transfers_to(worker_id):
            self._handle(tx.ReceiverLost(name))
        for name in self._receiver.transfers_from(worker_id):
            self._handle(rx.SenderGone(name))
        self._peers.pop(worker_id, None)
        self._lanes.end(worker_id)
        self._control.forget(worker_id)

    def _send_side(self, instruction: tx.Instruction) -> None:
        match instruction:
            case tx.Tell(peer=peer, message=message):
                self._control.send(peer, message)
            case tx.Push():
                self._pushes[instruction.transfer_id] = instruction
                queued = self._lanes.push(instruction)
                if instruction.number is None:  # of the others the receiver has been told, and waits for them
                    self._one_sided_pushes[instruction.transfer_id] = queued
            case tx.Sent(transfer_id=transfer_id, num_blocks=blocks, before_end=before_end, took_ms=took_ms):
                # for the record: nobody is woken
                self._results.add_report(transfer_id, "sent", blocks, before_end=before_end, took_ms=took_ms)
            case tx.Delivered(transfer_id=transfer_id):
                self._results.add_report(transfer_id, "delivered")
            case tx.SendingStopped(transfer_id=transfer_id):
                self._results.add_sending_stopped(transfer_id)
                self._tell()

    def _receive_side(self, instruction: rx.Instruction) -> None:
        match instruction:
            case tx.Tell(peer=peer, message=message):
                self._control.send(peer, message)
            case rx.Receive():
                self._lanes.receive(instruction)
            case rx.Discard():
                self._discard(instruction)
            case rx.Arrived(transfer_id=transfer_id, num_blocks=blocks, num_unbroken=unbroken):
                self._results.add_report(transfer_id, "received", blocks)
                if unbroken:
                    self._on_landed(transfer_id, unbroken)
            case rx.Failed(transfer_id=transfer_id):
                self._results.add_report(transfer_id, "failed")
                self._tell()
            case rx.Quarantine(transfer_id=transfer_id, transport=name):
                looks = math.ceil(self._transports[name].late_write_s / AWAKE_LOOK_S)
                self._handle_after(0.0, _Awake(rx.Quiet(transfer_id), looks))
            case rx.Received(transfer_id=transfer_id, lost_blocks=lost):
                self._results.add_received(transfer_id, lost)
                self._tell()

    def _tell(self) -> None:
        """Again and again until the results are taken: a signal may be lost, and nothing else would wake an engine that waits for these."""
        self._on_results()
        if not self._tells_again:
            self._tells_again = True
            self._handle_after(TELL_AGAIN_S, _TellAgain())

    def _discard(self, refused: rx.Discard) -> None:
        peer = self._peers.get(refused.sender_id)
        if peer is None or refused.transport not in self._transports:
            self._unknown_senders += 1
            return
        self._lanes.discard(peer, refused)
