"""The receiving half of a KV transfer: what has been granted, what has arrived, when blocks may be reused.

    Expect --> OPEN --all blocks landed--> (forgotten, RECEIVED)
               OPEN --Cancel or a failure--> CLOSING --Closed, nothing being written--> (forgotten, RECEIVED or LOST)

A granted block is never handed back while the sender might still write to it: cancelling asks the sender to stop,
and only its `Closed` (or the end of a two-sided channel) ends the transfer.  Pure, like `sender`.
The state and failure tables are in docs/kv_transfer.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaserve.kv_transfer.sender import Tell
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.kv_transfer.wire import Blocks, Broken, Closed, Done, Grant, Revoke


@dataclass(frozen=True, slots=True)
class Expect:
    """B has reserved `block_ids` for the blocks from `first_index` on, to be written by `sender`."""

    transfer_id: str
    sender: WorkerEndpoint
    transport: str
    first_index: int
    block_ids: tuple[int, ...]


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
class Cancel:
    """B does not want the blocks any more (the request ended, or the reservation is taken back)."""

    transfer_id: str


Event = Expect | Blocks | Landed | ReceiveFailed | Cancel | Broken | Closed


@dataclass(frozen=True, slots=True)
class Receive:
    transfer_id: str
    sender: WorkerEndpoint
    transport: str
    indexes: tuple[int, ...]
    local_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Take the push off the two-sided channel and throw it away."""

    sender_id: str
    transport: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """For the record."""

    transfer_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Received:
    """The transfer is over; `lost_blocks`: ids of granted blocks that did not arrive (empty: all did, or it was cancelled)."""

    transfer_id: str
    lost_blocks: tuple[int, ...] = ()


Instruction = Tell | Receive | Discard | Arrived | Received


@dataclass(slots=True)
class Incoming:
    expect: Expect
    landed: set[int] = field(default_factory=set)
    receiving: int = 0
    cancelled: bool = False
    failed: bool = False
    closed: bool = False

    @property
    def closing(self) -> bool:
        return self.cancelled or self.failed

    def block_of(self, index: int) -> int | None:
        offset = index - self.expect.first_index
        return self.expect.block_ids[offset] if 0 <= offset < len(self.expect.block_ids) else None


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
        transfer = self.transfers.get(event.transfer_id)
        if transfer is None:
            return self._on_unknown(event)
        match event:
            case Blocks():
                return self._on_blocks(transfer, event)
            case Landed(indexes=indexes):
                transfer.receiving -= 1
                return self._on_landed(transfer, indexes)
            case ReceiveFailed():
                transfer.receiving -= 1
                transfer.failed = transfer.closed = True
                return self._settle(transfer)
            case Broken():
                transfer.failed = transfer.closed = True
                return self._settle(transfer)
            case Cancel():
                transfer.cancelled = True
                if transfer.closed:
                    return self._settle(transfer)
                return [Tell(transfer.expect.sender, Revoke(event.transfer_id, self.endpoint))]
            case Closed():
                transfer.closed = True
                return self._settle(transfer)

    def check_invariants(self) -> None:
        """Raises AssertionError where a finished transfer is still open or a block is granted twice."""
        granted: set[int] = set()
        for transfer in self.transfers.values():
            blocks = set(transfer.expect.block_ids)
            assert not blocks & granted, "a block is granted to two transfers"
            granted |= blocks
            assert transfer.closing or len(transfer.landed) < len(transfer.expect.block_ids), "a complete transfer is still open"

    def _on_expect(self, expect: Expect) -> list[Instruction]:
        if expect.transfer_id in self.transfers:
            raise ValueError(f"transfer {expect.transfer_id} is already open")
        if not expect.block_ids:
            return [Received(expect.transfer_id)]
        self.transfers[expect.transfer_id] = Incoming(expect)
        return [
            Tell(
                expect.sender,
                Grant(expect.transfer_id, self.endpoint, expect.transport, expect.first_index, list(expect.block_ids)),
            )
        ]

    def _on_unknown(self, event: Event) -> list[Instruction]:
        """Late events of a transfer that is over are normal; a two-sided push still has to be taken off the channel."""
        if isinstance(event, Blocks):
            return self._refuse(event)
        return []

    def _refuse(self, blocks: Blocks) -> list[Instruction]:
        self.refused_blocks += len(blocks.indexes)
        return [] if blocks.transport in self.one_sided else [Discard(blocks.sender_id, blocks.transport, len(blocks.indexes))]

    def _on_blocks(self, transfer: Incoming, event: Blocks) -> list[Instruction]:
        expect = transfer.expect
        blocks = tuple(block for index in event.indexes if (block := transfer.block_of(index)) is not None)
        if (event.sender_id, event.transport) != (expect.sender.worker_id, expect.transport) or len(blocks) != len(event.indexes):
            return self._refuse(event)
        indexes = tuple(event.indexes)
        if expect.transport in self.one_sided:
            return self._on_landed(transfer, indexes)
        transfer.receiving += 1
        return [Receive(event.transfer_id, expect.sender, expect.transport, indexes, blocks)]

    def _on_landed(self, transfer: Incoming, indexes: tuple[int, ...]) -> list[Instruction]:
        transfer.landed.update(indexes)
        arrived: list[Instruction] = [Arrived(transfer.expect.transfer_id, len(indexes))]
        return arrived + self._settle(transfer)

    def _settle(self, transfer: Incoming) -> list[Instruction]:
        expect = transfer.expect
        complete = len(transfer.landed) == len(expect.block_ids)
        if transfer.receiving or not (complete or (transfer.closing and transfer.closed)):
            return []
        del self.transfers[expect.transfer_id]
        if complete:
            return [Tell(expect.sender, Done(expect.transfer_id)), Received(expect.transfer_id)]
        lost = (
            ()
            if transfer.cancelled
            else tuple(block for index, block in enumerate(expect.block_ids, start=expect.first_index) if index not in transfer.landed)
        )
        return [Tell(expect.sender, Done(expect.transfer_id)), Received(expect.transfer_id, lost)]
