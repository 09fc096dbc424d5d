"""Control messages between the transfer agents of two workers (msgpack over ZeroMQ).

Block *indexes* count the blocks of the request (block `i` holds tokens `[i * block_size, (i + 1) * block_size)`);
block *ids* name places in one worker's cache.
"""

from __future__ import annotations

import msgspec

from dynaserve.kv_transfer.transport import WorkerEndpoint


class Grant(msgspec.Struct, frozen=True, tag=True):
    """B to A: you may write block `first_index + i` of this transfer into my block `block_ids[i]`.

    A transfer may be granted piece by piece; every piece comes from the same receiver and goes over the same transport.
    """

    transfer_id: str
    receiver: WorkerEndpoint
    transport: str
    first_index: int
    block_ids: list[int]


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """A to B: these blocks follow on the two-sided channel, or lie already in your cache (one-sided)."""

    transfer_id: str
    sender_id: str
    transport: str
    indexes: list[int]


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A to B: a push failed; what has not arrived will not come."""

    transfer_id: str
    reason: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """B to A: the transfer is over; `complete`: every block that B needs is there."""

    transfer_id: str
    complete: bool


class Revoke(msgspec.Struct, frozen=True, tag=True):
    """B to A: stop writing, then answer `Closed`. B's blocks return to its pool only after that answer."""

    transfer_id: str
    receiver: WorkerEndpoint


class Closed(msgspec.Struct, frozen=True, tag=True):
    """A to B: nothing of this transfer is being written, nor will be."""

    transfer_id: str


Message = Grant | Blocks | Broken | Done | Revoke | Closed
