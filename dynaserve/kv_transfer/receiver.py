"""The receiving half of a KV transfer: what has been granted, what has arrived, when blocks may be reused.

    Expect --> OPEN --Complete, all blocks landed-------> (forgotten, RECEIVED)
               OPEN --Complete, the rest is lost--------> (forgotten, RECEIVED with the lost blocks)
               OPEN --Cancel--> CLOSING --Closed, nothing being written--> (forgotten, RECEIVED)
               any --Broken, SenderGone--> FAILED --one-sided: Quiet--> as above, the rest is lost

B grants a transfer piece by piece (`Expect`, then `Extend`) and learns only at the end how long it is (`Complete`).
A granted block is never handed back while the sender might still write to it: cancelling asks the sender to stop,
and only its `Closed` (or the end of a two-sided channel) ends the transfer.  A one-sided push that failed may still
land, so its transfer is quarantined first.  Pure, like `sender`.
The state and failure tables are in docs/kv_transfer.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaserve.kv_transfer.sender import Tell
from dynaserve.kv_transfer.transport import PushNumber, WorkerEndpoint
from dynaserve.kv_transfer.wire import Blocks, Broken, Closed, Done, Grant, Message, Revoke


@dataclass(frozen=True, slots=True)
class Expect:
    """B has reserved `block_ids` for the blocks from `first_index` on, to be written by `sender`."""

    transfer_id: str
    sender: WorkerEndpoint
    transport: str
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extend:
    """B has reserved more: `block_ids` follow on those that it has granted."""

    transfer_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """A has stopped: the transfer ends before block `end_index`, all of it granted. Blocks granted beyond stay unwritten."""

    transfer_id: str
    end_index: int


@dataclass(frozen=True, slots=True)
class Landed:
    transfer_id: str
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """A two-sided receive ended in an error; the channel to the sender has been dropped, so it cannot write any more."""

    transfer_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SenderLost:
    """The sender is dead, as far as anybody hears; a two-sided channel to it is being dropped.

    On a one-sided transport that proves nothing (a process that was stopped goes on where it stood): the transfer is over only
    when the sender has confirmed that it does not write, as after `Cancel`, or is known to have ended (`SenderGone`).
    """

    transfer_id: str


@dataclass(frozen=True, slots=True)
class SenderGone:
    """The sender's process has ended, its machine says: a one-sided transport brings only what is on its way already."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """B does not want the blocks any more (the request ended, or the reservation is taken back)."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """The quarantine is over: what the failed push left behind on this machine has been written or thrown away."""

    transfer_id: str


Event = Expect | Extend | Complete | Blocks | Landed | ReceiveFailed | SenderLost | SenderGone | Cancel | Broken | Closed | Quiet


@dataclass(frozen=True, slots=True)
class Receive:
    transfer_id: str
    sender: WorkerEndpoint
    transport: str
    indexes: tuple[int, ...]
    local_blocks: tuple[int, ...]
    number: PushNumber


@dataclass(frozen=True, slots=True)
class Discard:
    """Take the push off the two-sided channel and throw it away."""

    sender_id: str
    transport: str
    num_blocks: int
    number: PushNumber


@dataclass(frozen=True, slots=True)
class Arrived:
    """num_unbroken: how many more blocks are here of those without a gap before them."""

    transfer_id: str
    num_blocks: int
    num_unbroken: int


@dataclass(frozen=True, slots=True)
class Failed:
    """What has not arrived will not come; B may cancel, or complete and compute the rest itself."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Answer with `Quiet` once this transport cannot write any more to what a failed push was aimed at."""

    transfer_id: str
    transport: str


@dataclass(frozen=True, slots=True)
class Received:
    """The transfer is over, nobody writes its blocks any more; said once for each `Expect`, and for a late `Cancel`.

    lost_blocks: ids of the blocks before the end that did not arrive (empty: all did, or it was cancelled).
    """

    transfer_id: str
    lost_blocks: tuple[int, ...] = ()


Instruction = Tell | Receive | Discard | Arrived | Failed | Quarantine | Received


@dataclass(slots=True)
class Incoming:
    """One transfer.

    block_ids: granted so far, from `first_index` on. end_index: None until `Complete`. failed: what has not landed will not
    come. unbroken: landed blocks without a gap before them. closed: nothing can write to the blocks any more. sender_gone: nobody is left
    to be told. told_failed: `Failed` was said.
    """

    sender: WorkerEndpoint
    transport: str
    first_index: int
    block_ids: list[int]
    end_index: int | None = None
    landed: set[int] = field(default_factory=set)
    unbroken: int = 0
    receiving: int = 0
    cancelled: bool = False
    failed: bool = False
    closed: bool = False
    sender_gone: bool = False
    told_failed: bool = False

    def block_of(self, index: int) -> int | None:
        offset = index - self.first_index
        return self.block_ids[offset] if 0 <= offset < len(self.block_ids) else None

    def lost_blocks(self) -> tuple[int, ...]:
        """Granted blocks before the end that are not here."""
        assert self.end_index is not None
        missing = (index for index in range(self.first_index, self.end_index) if index not in self.landed)
        return tuple(self.block_ids[index - self.first_index] for index in missing)


@dataclass
class Receiver:
    """All incoming transfers of one worker; `endpoint` is this worker's own."""

    endpoint: WorkerEndpoint
    one_sided: frozenset[str]
    transfers: dict[str, Incoming] = field(default_factory=dict)
    refused_blocks: int = 0
    """Blocks that a peer sent without a grant."""

    def handle(self, event: Event) -> list[Instruction]:
        if isinstance(event, Expect):
            return self._on_expect(event)
        transfer_id = event.transfer_id
        transfer = self.transfers.get(transfer_id)
        if transfer is None:
            return self._on_unknown(event)
        match event:
            case Extend(block_ids=block_ids):
                first = transfer.first_index + len(transfer.block_ids)
                transfer.block_ids += block_ids
                return self._tell(transfer, self._grant(transfer_id, transfer.transport, first, block_ids))
            case Complete(end_index=end_index):
                transfer.end_index = end_index
                return self._settle(transfer_id, transfer)
            case Blocks():
                return self._on_blocks(transfer, event)
            case Landed(indexes=indexes):
                transfer.receiving -= 1
                return self._on_landed(transfer_id, transfer, indexes)
            case ReceiveFailed():
                transfer.receiving -= 1
                return self._on_failed(transfer_id, transfer)
            case Broken():
                return self._on_failed(transfer_id, transfer)
            case SenderGone():
                transfer.sender_gone = True
                return self._on_failed(transfer_id, transfer)
            case SenderLost():
                one_sided = transfer.transport in self.one_sided
                return self._tell_failed(transfer_id, transfer) if one_sided else self._on_failed(transfer_id, transfer)
            case Cancel():
                transfer.cancelled = True
                if transfer.closed:
                    return self._settle(transfer_id, transfer)
                return self._tell(transfer, Revoke(transfer_id, self.endpoint))
            case Closed():  # from a sender that does not know what its failed push may still write
                transfer.closed |= not transfer.failed
                return self._settle(transfer_id, transfer)
            case Quiet():
                transfer.closed = True
                return self._settle(transfer_id, transfer)

    def transfers_from(self, worker_id: str) -> list[str]:
        """Without those that have heard that this sender is gone."""
        return [name for name, transfer in self.transfers.items() if transfer.sender.worker_id == worker_id and not transfer.sender_gone]

    def check_invariants(self) -> None:
        """Raises AssertionError where a finished transfer is still open or a block is granted twice."""
        granted: set[int] = set()
        for transfer in self.transfers.values():
            blocks = set(transfer.block_ids)
            assert not blocks & granted, "a block is granted to two transfers"
            granted |= blocks
            assert not self._is_over(transfer), "a transfer that is over is still open"

    def _on_expect(self, expect: Expect) -> list[Instruction]:
        if expect.transfer_id in self.transfers:
            raise ValueError(f"transfer {expect.transfer_id} is already open")
        if not expect.block_ids:
            raise ValueError(f"transfer {expect.transfer_id} has no blocks")
        transfer = Incoming(expect.sender, expect.transport, expect.first_index, list(expect.block_ids))
        self.transfers[expect.transfer_id] = transfer
        return self._tell(transfer, self._grant(expect.transfer_id, expect.transport, expect.first_index, expect.block_ids))

    def _grant(self, transfer_id: str, transport: str, first_index: int, block_ids: tuple[int, ...]) -> Grant:
        return Grant(transfer_id, self.endpoint, transport, first_index, list(block_ids))

    def _tell(self, transfer: Incoming, message: Message) -> list[Instruction]:
        return [] if transfer.sender_gone else [Tell(transfer.sender, message)]

    def _tell_failed(self, transfer_id: str, transfer: Incoming) -> list[Instruction]:
        """Once: beta gives the transfer up, or goes on without what is missing."""
        if transfer.told_failed:
            return []
        transfer.told_failed = True
        return [Failed(transfer_id)]

    def _on_unknown(self, event: Event) -> list[Instruction]:
        """Late events of a transfer that is over are normal; a two-sided push still has to be taken off the channel, and who
        cancels waits for an answer."""
        if isinstance(event, Blocks):
            return self._refuse(event)
        return [Received(event.transfer_id)] if isinstance(event, Cancel) else []

    def _refuse(self, blocks: Blocks) -> list[Instruction]:
        self.refused_blocks += len(blocks.indexes)
        if blocks.transport in self.one_sided or blocks.number is None:
            return []
        return [Discard(blocks.sender_id, blocks.transport, len(blocks.indexes), blocks.number)]

    def _on_blocks(self, transfer: Incoming, event: Blocks) -> list[Instruction]:
        blocks = tuple(block for index in event.indexes if (block := transfer.block_of(index)) is not None)
        expected = (transfer.sender.worker_id, transfer.transport)
        if (event.sender_id, event.transport) != expected or len(blocks) != len(event.indexes):
            return self._refuse(event)
        indexes = tuple(event.indexes)
        if transfer.transport in self.one_sided:
            return self._on_landed(event.transfer_id, transfer, indexes)
        if event.number is None:
            return self._refuse(event)
        transfer.receiving += 1
        return [Receive(event.transfer_id, transfer.sender, transfer.transport, indexes, blocks, event.number)]

    def _on_landed(self, transfer_id: str, transfer: Incoming, indexes: tuple[int, ...]) -> list[Instruction]:
        transfer.landed.update(indexes)
        before = transfer.unbroken
        while transfer.first_index + transfer.unbroken in transfer.landed:
            transfer.unbroken += 1
        return [Arrived(transfer_id, len(indexes), transfer.unbroken - before), *self._settle(transfer_id, transfer)]

    def _on_failed(self, transfer_id: str, transfer: Incoming) -> list[Instruction]:
        told = self._tell_failed(transfer_id, transfer)
        if transfer.transport not in self.one_sided:
            transfer.closed = True  # the channel has been dropped
        elif not transfer.failed:
            told.append(Quarantine(transfer_id, transfer.transport))
        transfer.failed = True
        return told + self._settle(transfer_id, transfer)

    def _is_over(self, transfer: Incoming) -> bool:
        if transfer.receiving:
            return False
        if transfer.cancelled:
            return transfer.closed
        if transfer.failed and not transfer.closed:
            return False
        return transfer.end_index is not None and (transfer.failed or not transfer.lost_blocks())

    def _settle(self, transfer_id: str, transfer: Incoming) -> list[Instruction]:
        if not self._is_over(transfer):
            return []
        del self.transfers[transfer_id]
        lost = () if transfer.cancelled else transfer.lost_blocks()
        complete = not transfer.cancelled and not lost
        return [*self._tell(transfer, Done(transfer_id, complete)), Received(transfer_id, lost)]
