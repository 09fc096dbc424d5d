"""How KV blocks get from one worker's paged cache into another's.

One `Transport` object lives in each worker process.  It moves *whole blocks as bytes*: on CPUs the
inside of a block depends on the instruction set, so a slice of tokens means nothing to a peer.

Two kinds of transport exist:

* one-sided (`one_sided = True`; Mooncake, same-host): `push` writes straight into the peer's cache; the peer does
  nothing and learns from a control message, sent after the write, that the blocks are there.
* two-sided (torch.distributed): `push` only completes while the peer is in `receive`; the control
  message that names the blocks, and the push, therefore travels *before* the data.

Threads: for one peer, `push` is called by one thread at a time, and `receive` by one thread at a time;
these two threads differ, and threads of different peers run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    import torch


Name = Annotated[str, Meta(max_length=4096)]
"""Of whatever another process names: an address, a model, a path."""
WorkerId = Annotated[str, Meta(min_length=1, max_length=128)]
TransportAddress = Annotated[str, Meta(max_length=1 << 16)]
"""Mooncake's has a number per layer."""


class PushNumber(msgspec.Struct, frozen=True, array_like=True):
    """Which push of a two-sided transport: its sender counts those to each receiver, without a gap.

    session: larger once the sender has forgotten the receiver and begins anew.
    """

    session: Annotated[int, Meta(ge=0, lt=1 << 62)]
    number: Annotated[int, Meta(ge=0, lt=1 << 62)]


class TransportError(Exception):
    """A push or a receive that did not complete; the sentence names the peer and the cause."""


class TransportUnavailable(Exception):
    """The transport cannot run on this machine; the sentence says what is missing and how to get it."""


class WorkerEndpoint(msgspec.Struct, frozen=True):
    """Everything that a peer needs to reach one worker process.

    worker_id: unique for every start of the process, so a restarted worker is never taken for its predecessor.
    control: ZeroMQ address (`tcp://host:port`) of the worker's transfer agent.
    transports: address per transport name, as `Transport.address()` returned it.
    """

    worker_id: WorkerId
    control: Name
    transports: Annotated[dict[Name, TransportAddress], Meta(max_length=256)]


@dataclass(frozen=True)
class KvLayers:
    """The paged KV cache of one worker, as bytes.

    layers: one uint8 tensor per layer, shape [num_blocks, block_bytes of that layer], a view (never a
        copy) of the engine's cache: writing to it changes the cache.
    """

    layers: Sequence[torch.Tensor]

    @property
    def num_blocks(self) -> int:
        return int(self.layers[0].shape[0])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(int(layer.shape[1]) for layer in self.layers)


_ONE_SIDED = "the peer has no part in the pushes of a one-sided transport"


class Transport(Protocol):
    """One way to move blocks. Constructed as `Class(worker_id: str, host: str, kv: KvLayers)`.

    host: the address of this machine that peers use (loopback by default).
    Raises TransportUnavailable from the constructor where it cannot run.
    """

    name: str
    one_sided: bool
    late_write_s: float
    """After a push has failed at the sender, for how long a running receiver may still see bytes of it written: 0 if two-sided."""

    def address(self) -> str:
        """What a peer must know to push into this worker's cache; an opaque string."""
        ...

    def push(self, peer: WorkerEndpoint, local_blocks: Sequence[int], remote_blocks: Sequence[int], number: PushNumber | None) -> None:
        """Copies local block `local_blocks[i]` into the peer's block `remote_blocks[i]`; blocks until the source may change.

        number: None on one-sided transports. Raises TransportError. After that the channel to this peer is unusable until
        `drop(peer)`.
        """
        ...

    def receive(self, peer: WorkerEndpoint, local_blocks: Sequence[int], number: PushNumber) -> None:
        """Two-sided transports: takes this push of the peer into `local_blocks`; returns when the bytes are in place.

        A one-sided transport raises NotImplementedError. Raises TransportError like `push`.
        """
        ...

    def discard(self, peer: WorkerEndpoint, num_blocks: int, number: PushNumber) -> None:
        """Two-sided transports: takes this push of `num_blocks` blocks and throws it away: the sender waits for that."""
        ...

    def give_up_push(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        """Two-sided transports, instead of `push`: it will never come. The peer hears of it if that is possible."""
        ...

    def give_up_receive(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        """Two-sided transports, instead of `receive`: it is not waited for."""
        ...

    def drop(self, peer: WorkerEndpoint) -> None:
        """Ends the channels from and to this peer, and only those, and at once what waits for them. A later push opens a new one."""
        ...

    def forget(self, peer: WorkerEndpoint) -> None:
        """As `drop`, of a peer whose process has ended: nothing of it is kept."""
        ...

    def close(self) -> None:
        """Ends all channels and unregisters the memory. Idempotent."""
        ...


class OneSided:
    """What all one-sided transports have of `Transport`."""

    one_sided = True

    def receive(self, peer: WorkerEndpoint, local_blocks: Sequence[int], number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def discard(self, peer: WorkerEndpoint, num_blocks: int, number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def give_up_push(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def give_up_receive(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        raise NotImplementedError(_ONE_SIDED)

    def drop(self, peer: WorkerEndpoint) -> None:
        """There is no channel to it."""

    def forget(self, peer: WorkerEndpoint) -> None:
        self.drop(peer)
