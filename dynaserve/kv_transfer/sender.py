"""The sending half of a KV transfer: which block may leave when.

    (unknown) --Ready or Grant--> OPEN --Stop--> STOPPED --Done or Revoke--> (forgotten)

A block leaves once it is both *ready* (A has computed it) and *granted* (B has a place for it); one push per
transfer is in flight at a time.  Pure: events in, instructions out; `agent.Agent` carries them out.
The state and failure tables are in docs/kv_transfer.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dynaserve.kv_transfer.transport import PushNumber, WorkerEndpoint
from dynaserve.kv_transfer.wire import Blocks, Broken, Closed, Done, Grant, Message, Revoke

MAX_BLOCKS_PER_PUSH = 32
"""Bounds how long one transfer keeps the channel to a peer, and so how long another one waits for it."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A has computed blocks `first_index ...`, which lie in `block_ids`; `final`: they end at the hand-off point.

    fence: waits until the device has written them (None where the forward pass is already complete).
    """

    transfer_id: str
    first_index: int
    block_ids: tuple[int, ...]
    final: bool
    fence: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PushDone:
    transfer_id: str
    took_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PushFailed:
    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PushWithdrawn:
    """The push in flight, of a one-sided transport, was only waiting for its turn, and does not begin: its blocks are not sent."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Retract:
    """A's blocks are about to be overwritten (preemption): forget those that have not left."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """A's request is over: nothing more leaves; say when its blocks are not being read any more."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class ReceiverLost:
    """The receiver is dead, and the channel to it is being dropped: nobody waits for these blocks."""

    transfer_id: str


Event = Ready | PushDone | PushFailed | PushWithdrawn | Retract | Stop | ReceiverLost | Grant | Done | Revoke


@dataclass(frozen=True, slots=True)
class Push:
    transfer_id: str
    receiver: WorkerEndpoint
    transport: str
    indexes: tuple[int, ...]
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    number: PushNumber | None
    fence: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Tell:
    peer: WorkerEndpoint
    message: Message


@dataclass(frozen=True, slots=True)
class Sent:
    """For the record: these blocks have left; `before_end`: while A was still computing."""

    transfer_id: str
    num_blocks: int
    before_end: bool
    took_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SendingStopped:
    """A's blocks of this transfer are not being read any more."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """B has every block that it needs: A's copy is not needed for the hand-off any more."""

    transfer_id: str


Instruction = Push | Tell | Sent | SendingStopped | Delivered


@dataclass(slots=True)
class Outgoing:
    """One transfer.

    ready: only blocks that have not left. places: B's block per granted index. aimed_at: who hears of it if the push in flight fails.
    """

    ready: dict[int, int] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    fence: Callable[[], None] | None = None
    receiver: WorkerEndpoint | None = None
    transport: str = ""
    places: dict[int, int] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()
    aimed_at: WorkerEndpoint | None = None
    final: bool = False
    stopped: bool = False
    stop_told: bool = False
    broken: bool = False
    revoked_by: WorkerEndpoint | None = None

    def withdraw(self) -> None:
        """Nothing is granted any more; a push in flight may still land."""
        self.receiver = None
        self.places.clear()


@dataclass
class Sender:
    """All outgoing transfers of one worker.

    worker_id: of this worker. one_sided: names of the transports whose pushes land without the receiver's help.
    """

    worker_id: str
    one_sided: frozenset[str]
    transfers: dict[str, Outgoing] = field(default_factory=dict)
    refused_grants: int = 0
    next_pushes: dict[str, PushNumber] = field(default_factory=dict)
    """By receiver; two-sided ones."""
    sessions: int = 0

    def handle(self, event: Event) -> list[Instruction]:
        transfer_id = event.transfer_id
        match event:
            case Ready():
                return self._on_ready(event)
            case Grant():
                return self._on_grant(event)
            case PushDone(took_ms=took_ms):
                return self._on_push_done(transfer_id, took_ms)
            case PushFailed(reason=reason):
                return self._on_push_failed(transfer_id, reason)
            case PushWithdrawn():
                return self._on_push_withdrawn(transfer_id)
            case Retract():
                if transfer := self.transfers.get(transfer_id):
                    transfer.ready.clear()
                    transfer.final = False
                return []
            case Stop():
                return self._on_stop(transfer_id)
            case ReceiverLost():
                return self._on_receiver_lost(transfer_id)
            case Done(complete=complete):
                return self._on_done(transfer_id, complete)
            case Revoke(receiver=receiver):
                return self._on_revoke(transfer_id, receiver)

    def transfers_to(self, worker_id: str) -> list[str]:
        """Those that this receiver has granted."""
        granted = ((name, transfer.receiver) for name, transfer in self.transfers.items())
        return [name for name, receiver in granted if receiver is not None and receiver.worker_id == worker_id]

    def forget_receiver(self, worker_id: str) -> None:
        """Its process has ended: pushes to whoever comes under this name are counted anew."""
        self.next_pushes.pop(worker_id, None)

    def is_in_flight(self, transfer_id: str) -> bool:
        transfer = self.transfers.get(transfer_id)
        return transfer is not None and bool(transfer.in_flight)

    def check_invariants(self) -> None:
        """Raises AssertionError where a block is both sent and waiting, or an ungranted one is in flight."""
        for transfer_id, transfer in self.transfers.items():
            assert not transfer.sent & transfer.ready.keys(), (transfer_id, "a sent block is ready again")
            assert not transfer.sent & set(transfer.in_flight), (transfer_id, "a sent block is in flight again")
            assert not (transfer.stopped and transfer.ready), (transfer_id, "a stopped transfer has blocks to send")

    def _on_grant(self, grant: Grant) -> list[Instruction]:
        transfer = self.transfers.setdefault(grant.transfer_id, Outgoing())
        if transfer.receiver is None:
            transfer.receiver, transfer.transport = grant.receiver, grant.transport
        elif (transfer.receiver.worker_id, transfer.transport) != (grant.receiver.worker_id, grant.transport):
            self.refused_grants += 1
            return []
        transfer.places.update(enumerate(grant.block_ids, start=grant.first_index))
        return self._advance(grant.transfer_id)

    def _on_done(self, transfer_id: str, complete: bool) -> list[Instruction]:
        transfer = self.transfers.get(transfer_id)
        if transfer is None:
            return []
        transfer.withdraw()
        transfer.aimed_at = None
        if not (transfer.ready or transfer.sent or transfer.in_flight):
            # A's Stop may have been before the grant. What A may still say of this transfer starts it afresh, up to its Stop.
            del self.transfers[transfer_id]
        else:
            self._forget_if_over(transfer_id)
        return [Delivered(transfer_id)] if complete else []

    def _on_ready(self, event: Ready) -> list[Instruction]:
        transfer = self.transfers.setdefault(event.transfer_id, Outgoing())
        if transfer.stopped or transfer.broken:
            return []
        for index, block in enumerate(event.block_ids, start=event.first_index):
            if index not in transfer.sent and index not in transfer.in_flight:
                transfer.ready[index] = block
        transfer.fence = event.fence
        transfer.final |= event.final
        return self._advance(event.transfer_id)

    def _advance(self, transfer_id: str) -> list[Instruction]:
        transfer = self.transfers[transfer_id]
        if transfer.in_flight or transfer.receiver is None or transfer.stopped or transfer.revoked_by is not None:
            return []
        indexes = sorted(transfer.ready.keys() & transfer.places.keys())[:MAX_BLOCKS_PER_PUSH]
        if not indexes:
            return []
        transfer.in_flight, transfer.aimed_at = tuple(indexes), transfer.receiver
        number = None if transfer.transport in self.one_sided else self._next_push_to(transfer.receiver.worker_id)
        push = Push(
            transfer_id,
            transfer.receiver,
            transfer.transport,
            indexes=tuple(indexes),
            local_blocks=tuple(transfer.ready.pop(index) for index in indexes),
            remote_blocks=tuple(transfer.places[index] for index in indexes),
            number=number,
            fence=transfer.fence,
        )
        if number is None:
            return [push]
        return [Tell(transfer.receiver, Blocks(transfer_id, self.worker_id, transfer.transport, indexes, number)), push]

    def _next_push_to(self, worker_id: str) -> PushNumber:
        number = self.next_pushes.get(worker_id)
        if number is None:
            self.sessions += 1
            number = PushNumber(self.sessions, 0)
        self.next_pushes[worker_id] = PushNumber(number.session, number.number + 1)
        return number

    def _on_stop(self, transfer_id: str) -> list[Instruction]:
        transfer = self.transfers.setdefault(transfer_id, Outgoing())
        transfer.stopped = True
        transfer.ready.clear()
        return [] if transfer.in_flight else self._settle(transfer_id)

    def _on_push_done(self, transfer_id: str, took_ms: float) -> list[Instruction]:
        transfer = self.transfers[transfer_id]
        indexes = transfer.in_flight
        transfer.in_flight, transfer.aimed_at = (), None
        transfer.sent.update(indexes)
        done: list[Instruction] = [Sent(transfer_id, len(indexes), not transfer.final, took_ms)]
        if transfer.receiver is not None and transfer.transport in self.one_sided:
            done.append(Tell(transfer.receiver, Blocks(transfer_id, self.worker_id, transfer.transport, list(indexes), None)))
        answers = self._settle(transfer_id)
        return done + answers + (self._advance(transfer_id) if transfer_id in self.transfers else [])

    def _on_push_failed(self, transfer_id: str, reason: str) -> list[Instruction]:
        transfer = self.transfers[transfer_id]
        aimed_at, transfer.aimed_at = transfer.aimed_at, None
        transfer.in_flight = ()
        transfer.ready.clear()
        transfer.broken = True
        tell: list[Instruction] = [] if aimed_at is None else [Tell(aimed_at, Broken(transfer_id, reason))]
        return tell + self._settle(transfer_id)

    def _on_push_withdrawn(self, transfer_id: str) -> list[Instruction]:
        transfer = self.transfers[transfer_id]
        transfer.in_flight, transfer.aimed_at = (), None
        return self._settle(transfer_id)

    def _on_revoke(self, transfer_id: str, receiver: WorkerEndpoint) -> list[Instruction]:
        transfer = self.transfers.get(transfer_id)
        if transfer is None:
            return [Tell(receiver, Closed(transfer_id))]
        transfer.revoked_by = receiver
        return [] if transfer.in_flight else self._settle(transfer_id)

    def _on_receiver_lost(self, transfer_id: str) -> list[Instruction]:
        transfer = self.transfers.get(transfer_id)
        if transfer is None:
            return []
        # It may only be stopped: when it goes on it still waits for the answer to its Revoke, and must know of a push that failed.
        transfer.withdraw()
        if not (transfer.ready or transfer.sent or transfer.in_flight or transfer.broken or transfer.revoked_by or transfer.stopped):
            # Its alpha may go on alone without ever having had a block to send, and then says no Stop.
            del self.transfers[transfer_id]
            return []
        return [] if transfer.in_flight else self._settle(transfer_id)

    def _settle(self, transfer_id: str) -> list[Instruction]:
        """Answers whoever waits for the transfer to come to rest; called only when nothing is in flight."""
        transfer = self.transfers[transfer_id]
        answers: list[Instruction] = []
        if transfer.revoked_by is not None:
            answers.append(Tell(transfer.revoked_by, Closed(transfer_id)))
            transfer.withdraw()
            transfer.revoked_by = None
            if not transfer.stopped:
                # Without a grant nothing leaves: what A may still say of this transfer starts it afresh, up to its Stop.
                del self.transfers[transfer_id]
        if transfer.stopped:
            if not transfer.stop_told:
                transfer.stop_told = True
                answers.append(SendingStopped(transfer_id))
            self._forget_if_over(transfer_id)
        return answers

    def _forget_if_over(self, transfer_id: str) -> None:
        transfer = self.transfers[transfer_id]
        if transfer.stopped and transfer.receiver is None and not transfer.in_flight:
            del self.transfers[transfer_id]
