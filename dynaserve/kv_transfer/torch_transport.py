"""torch.distributed as a transport: Gloo for caches on CPU, NCCL for caches on CUDA (the latter written for, not run yet).

Every *directed* pair of workers has a process group of two ranks (0 sends, 1 receives), made on first use, never the
engine's default group: two workers that push into each other cannot wait for each other, and losing a peer ends its
groups only.  Groups meet in the receiver's TCP store, under a generation that counts how often the sender had to start
again.  A push is one header with the receiver's block ids, which the receiver compares with what it expects, and then
pieces of at most `PIECE_BYTES`, gathered from all layers: one message per layer and block would be hundreds per chunk.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynaserve.kv_transfer.transport import KvLayers, TransportError, WorkerEndpoint

PIECE_BYTES = 8 << 20
"""Bounds the staging memory of a channel."""
DEFAULT_TIMEOUT_S = 20.0
"""A push or receive that makes no progress for this long has lost its peer."""


@dataclass
class _Channel:
    """One directed pair; `group` is a torch ProcessGroup, `staging` holds one piece."""

    group: Any
    generation: int
    staging: torch.Tensor


class TorchTransport:
    """See the module; `Transport` has the contract."""

    name = "torch"
    one_sided = False

    def __init__(self, worker_id: str, host: str, kv: KvLayers, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._worker_id = worker_id
        self._host = host
        self._kv = kv
        self._timeout = timedelta(seconds=timeout_s)
        self._device = kv.layers[0].device
        self._blocks_per_piece = max(1, PIECE_BYTES // kv.block_bytes)
        # A bound socket of our own: by itself the store listens on all interfaces.
        listener = socket.create_server((host, 0))
        self._address = f"{host}:{listener.getsockname()[1]}"
        self._store = dist.TCPStore(
            host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._lock = threading.Lock()
        self._outgoing: dict[str, _Channel] = {}
        self._incoming: dict[str, _Channel] = {}
        self._generations: dict[tuple[str, str], int] = {}

    def address(self) -> str:
        return self._address

    def push(self, peer: WorkerEndpoint, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> None:
        with _as_transport_error("push to", peer):
            channel = self._outgoing.get(peer.worker_id) or self._open_outgoing(peer)
            header = torch.tensor(remote_blocks, dtype=torch.int64, device=self._device)
            channel.group.send([header], 1, 0).wait()
            for blocks in self._pieces(local_blocks):
                piece = self._gather(channel.staging, blocks)
                channel.group.send([piece], 1, 0).wait()
            self._synchronize()

    def receive(self, peer: WorkerEndpoint, local_blocks: Sequence[int]) -> None:
        with _as_transport_error("receive from", peer):
            channel = self._incoming.get(peer.worker_id) or self._open_incoming(peer)
            header = torch.empty(len(local_blocks), dtype=torch.int64, device=self._device)
            channel.group.recv([header], 0, 0).wait()
            if header.tolist() != list(local_blocks):
                raise TransportError(f"{peer.worker_id} sends blocks {header.tolist()}, {list(local_blocks)} are expected")
            for blocks in self._pieces(local_blocks):
                piece = channel.staging[: len(blocks) * self._kv.block_bytes]
                channel.group.recv([piece], 0, 0).wait()
                self._scatter(piece, blocks)
            self._synchronize()

    def discard(self, peer: WorkerEndpoint, num_blocks: int) -> None:
        with _as_transport_error("discard from", peer):
            channel = self._incoming.get(peer.worker_id) or self._open_incoming(peer)
            channel.group.recv([torch.empty(num_blocks, dtype=torch.int64, device=self._device)], 0, 0).wait()
            for blocks in self._pieces(range(num_blocks)):
                channel.group.recv([channel.staging[: len(blocks) * self._kv.block_bytes]], 0, 0).wait()

    def drop(self, peer: WorkerEndpoint) -> None:
        with self._lock:
            channels = [channels.pop(peer.worker_id, None) for channels in (self._outgoing, self._incoming)]
        for channel in channels:
            if channel is not None:
                channel.group.abort()

    def close(self) -> None:
        with self._lock:
            channels = [*self._outgoing.values(), *self._incoming.values()]
            self._outgoing.clear()
            self._incoming.clear()
        for channel in channels:
            channel.group.abort()

    # -- channels ------------------------------------------------------------------------------------------------------

    def _open_outgoing(self, peer: WorkerEndpoint) -> _Channel:
        host, _, port = peer.transports[self.name].rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
        pair = (self._worker_id, peer.worker_id)
        generation = self._generations[pair] = self._generations.get(pair, 0) + 1
        store.set(_generation_key(*pair, generation), "open")
        return self._open(self._outgoing, peer, store, pair, generation, rank=0)

    def _open_incoming(self, peer: WorkerEndpoint) -> _Channel:
        pair = (peer.worker_id, self._worker_id)
        generation = self._generations.get(pair, 0) + 1
        self._store.wait([_generation_key(*pair, generation)], self._timeout)
        self._generations[pair] = generation
        return self._open(self._incoming, peer, self._store, pair, generation, rank=1)

    def _open(
        self, channels: dict[str, _Channel], peer: WorkerEndpoint, store: dist.TCPStore, pair: tuple[str, str], generation: int, rank: int
    ) -> _Channel:
        group = self._make_group(dist.PrefixStore(f"{pair[0]}->{pair[1]}/{generation}", store), rank)
        staging = torch.empty(self._blocks_per_piece * self._kv.block_bytes, dtype=torch.uint8, device=self._device)
        channel = _Channel(group, generation, staging)
        with self._lock:
            channels[peer.worker_id] = channel
        return channel

    def _make_group(self, store: dist.PrefixStore, rank: int) -> Any:
        if self._device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, 2, nccl)
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        gloo._timeout = self._timeout
        return dist.ProcessGroupGloo(store, rank, 2, gloo)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _pieces(self, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Both sides cut a push into the same pieces."""
        for start in range(0, len(blocks), self._blocks_per_piece):
            yield blocks[start : start + self._blocks_per_piece]

    def _gather(self, staging: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(blocks, device=self._device)
        for layer, part in self._parts(staging, len(blocks)):
            torch.index_select(layer, 0, index, out=part)
        return staging[: len(blocks) * self._kv.block_bytes]

    def _scatter(self, piece: torch.Tensor, blocks: Sequence[int]) -> None:
        index = torch.tensor(blocks, device=self._device)
        for layer, part in self._parts(piece, len(blocks)):
            layer.index_copy_(0, index, part)

    def _parts(self, staging: torch.Tensor, num_blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer with its place in a piece, shape [num_blocks, block_bytes of the layer]."""
        start = 0
        for layer in self._kv.layers:
            end = start + num_blocks * layer.shape[1]
            yield layer, staging[start:end].view(num_blocks, layer.shape[1])
            start = end

    def _synchronize(self) -> None:
        """NCCL's `wait` only orders streams."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _generation_key(sender_id: str, receiver_id: str, generation: int) -> str:
    return f"{sender_id}->{receiver_id}/{generation}/open"


@contextmanager
def _as_transport_error(what: str, peer: WorkerEndpoint) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError, KeyError) as error:  # torch.distributed raises RuntimeErrors of many kinds
        raise TransportError(f"{what} worker {peer.worker_id} at {peer.control} failed: {error}") from error
