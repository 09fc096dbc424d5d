"""Control messages between the transfer agents of two workers (msgpack over ZeroMQ).

Block *indexes* count the blocks of the request (block `i` holds tokens `[i * block_size, (i + 1) * block_size)`);
block *ids* name places in one worker's cache.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dynaserve.kv_transfer.transport import Name, PushNumber, WorkerEndpoint, WorkerId

LONGEST_MESSAGE_BYTES = 16 << 20
"""Of a control message; a grant of all blocks of a request of a million tokens has less than 1 MiB. A longer one ends the connection."""

TransferId = Annotated[str, Meta(min_length=1, max_length=128)]
"""Drawn by the front-end, with 128 bits of `secrets`: who does not know it has no part in the transfer."""
LONGEST_REASON = 4096
"""Characters."""
Reason = Annotated[str, Meta(max_length=LONGEST_REASON)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
BlockNumber = Annotated[int, Meta(ge=0, lt=1 << 31)]
BlockNumbers = Annotated[list[BlockNumber], Meta(max_length=1 << 20)]


def cut_reason(message: msgspec.Struct, field: str = "reason") -> None:
    """Called where a message is made: a reason with what a library has said may be of any length, and who refuses it loses the message."""
    reason: str | None = getattr(message, field)
    if reason is not None and len(reason) > LONGEST_REASON:
        msgspec.structs.force_setattr(message, field, f"{reason[: LONGEST_REASON - 3]}...")


class Grant(msgspec.Struct, frozen=True, tag=True):
    """B to A: you may write block `first_index + i` of this transfer into my block `block_ids[i]`.

    A transfer may be granted piece by piece; every piece comes from the same receiver and goes over the same transport.
    """

    transfer_id: TransferId
    receiver: WorkerEndpoint
    transport: Name
    first_index: BlockNumber
    block_ids: BlockNumbers


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """A to B: these blocks follow on the two-sided channel as push `number`, or lie already in your cache (one-sided: None)."""

    transfer_id: TransferId
    sender_id: WorkerId
    transport: Name
    indexes: BlockNumbers
    number: PushNumber | None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A to B: a push failed; what has not arrived will not come."""

    transfer_id: TransferId
    reason: Reason

    def __post_init__(self) -> None:
        cut_reason(self)


class Done(msgspec.Struct, frozen=True, tag=True):
    """B to A: the transfer is over; `complete`: every block that B needs is there."""

    transfer_id: TransferId
    complete: bool


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """B to A: stop writing, then answer `Closed`. B's blocks return to its pool only after that answer."""

    transfer_id: TransferId
    receiver: WorkerEndpoint


class Closed(msgspec.Struct, frozen=True, tag=True):
    """A to B: nothing of this transfer is being written, nor will be."""

    transfer_id: TransferId


Message = Grant | Blocks | Broken | Done | Revoke | Closed


class Envelope(msgspec.Struct, frozen=True):
    """One message of a worker, encoded. number: from 0 on, without a gap, to this receiver. session: larger once the sender begins anew."""

    sender_id: WorkerId
    session: Count
    number: Count
    message: msgspec.Raw


class Ack(msgspec.Struct, frozen=True):
    """The answer to envelopes, over the connection on which they came: so many of the session's have come."""

    count: Count
