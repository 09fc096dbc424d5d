"""Control messages between the transfer agents of two workers (msgpack over ZeroMQ).

Block *indexes* count the blocks of the request (block `i` holds tokens `[i * block_size, (i + 1) * block_size)`);
block *ids* name places in one worker's cache.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from dynaserve.kv_transfer.transport import WorkerEndpoint

LONGEST_MESSAGE_BYTES = 16 << 20
"""Of a control message; a grant of all blocks of a request of a million tokens has less than 1 MiB. A longer one ends the connection."""

TransferId = Annotated[str, Meta(min_length=1, max_length=128)]
"""Drawn by the front-end, with 128 bits of `secrets`: who does not know it has no part in the transfer."""
BlockNumber = Annotated[int, Meta(ge=0, lt=1 << 31)]
BlockNumbers = Annotated[list[BlockNumber], Meta(max_length=1 << 20)]


class Grant(msgspec.Struct, frozen=True, tag=True):
    """B to A: you may write block `first_index + i` of this transfer into my block `block_ids[i]`.

    A transfer may be granted piece by piece; every piece comes from the same receiver and goes over the same transport.
    """

    transfer_id: TransferId
    receiver: WorkerEndpoint
    transport: str
    first_index: BlockNumber
    block_ids: BlockNumbers


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """A to B: these blocks follow on the two-sided channel, or lie already in your cache (one-sided)."""

    transfer_id: TransferId
    sender_id: str
    transport: str
    indexes: BlockNumbers


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A to B: a push failed; what has not arrived will not come."""

    transfer_id: TransferId
    reason: str


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
