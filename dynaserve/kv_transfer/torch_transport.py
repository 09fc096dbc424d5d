"""torch.distributed as a transport: Gloo, for caches on CUDA through pinned memory of the host (`docs/decisions/0012`).

Every *directed* pair of workers has a channel of its own (a process group of two ranks), made on first use, never the
engine's default group: two workers that push into each other cannot wait for each other, and losing a peer ends its
channels only.  `torch_pair` keeps both ends in step.

A push is a header of fixed size, then pieces of at most `PIECE_BYTES`, gathered from all layers: one message per layer
and block would be hundreds per chunk.  On CUDA each push and receive under way has as much memory of the device beside that of the host.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dynaserve.kv_transfer.torch_pair import Description, Incoming, Local, Outgoing
from dynaserve.kv_transfer.transport import KvLayers, PushNumber, TransportError, TransportUnavailable, WorkerEndpoint

PIECE_BYTES = {"cpu": 8 << 20, "cuda": 32 << 20}
"""By the kind of device: bounds the staging memory of a channel (a single block may be larger). On CUDA a copy is launched for each layer
of a piece, and a block of 16 tokens has 3 MiB in a model of 14B."""
DEFAULT_TIMEOUT_S = 20.0
"""A push or receive that makes no progress for this long has lost its peer."""


class TorchTransport:
    """See the module; `Transport` has the contract."""

    name = "torch"
    one_sided = False
    late_write_s = 0.0

    def __init__(self, worker_id: str, host: str, kv: KvLayers, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._kv = kv
        self._device = kv.layers[0].device
        if self._device.type not in PIECE_BYTES:
            raise TransportUnavailable(
                f"the torch transport moves caches on {' and '.join(PIECE_BYTES)}, and this one is on {self._device.type}"
            )
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._blocks_per_piece = max(1, PIECE_BYTES[self._device.type] // kv.block_bytes)
        # A bound socket of our own: by itself the store listens on all interfaces.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        staging_bytes = self._blocks_per_piece * kv.block_bytes
        self._local = Local(worker_id, host, f"{host}:{port}", staging_bytes, self._stream is not None, timeout_s)
        self._lock = threading.Lock()
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}
        self._closed = False

    def address(self) -> str:
        return self._local.address

    def push(self, peer: WorkerEndpoint, local_blocks: Sequence[int], remote_blocks: Sequence[int], number: PushNumber | None) -> None:
        assert number is not None
        with _as_transport_error("push to", peer), self._on_stream():
            channel = self._outgoing_to(peer, number.session).announce(number.number, self._describe(remote_blocks))
            for blocks in self._pieces(local_blocks):
                channel.send(self._gather(channel.staging, blocks))

    def receive(self, peer: WorkerEndpoint, local_blocks: Sequence[int], number: PushNumber) -> None:
        with _as_transport_error("receive from", peer), self._on_stream():
            channel = self._incoming_from(peer, number.session).meet(number.number, self._describe(local_blocks))
            for blocks in self._pieces(local_blocks):
                piece = channel.staging[: len(blocks) * self._kv.block_bytes]
                channel.receive(piece)
                self._scatter(piece, blocks)

    def discard(self, peer: WorkerEndpoint, num_blocks: int, number: PushNumber) -> None:
        with _as_transport_error("discard from", peer), self._on_stream():
            expected = Description(num_blocks, self._kv.block_bytes, None)
            channel = self._incoming_from(peer, number.session).meet(number.number, expected)
            for blocks in self._pieces(range(num_blocks)):
                channel.receive(channel.staging[: len(blocks) * self._kv.block_bytes])

    def give_up_push(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        with _as_transport_error("push to", peer):
            self._outgoing_to(peer, number.session).give_up(number.number)

    def give_up_receive(self, peer: WorkerEndpoint, number: PushNumber) -> None:
        with _as_transport_error("receive from", peer):
            self._incoming_from(peer, number.session).give_up(number.number)

    def drop(self, peer: WorkerEndpoint) -> None:
        with self._lock:
            ends: list[Outgoing | Incoming | None] = [self._outgoing.get(peer.worker_id), self._incoming.get(peer.worker_id)]
        for end in ends:
            if end is not None:
                end.drop()

    def forget(self, peer: WorkerEndpoint) -> None:
        self.drop(peer)
        with self._lock:
            self._outgoing.pop(peer.worker_id, None)
            self._incoming.pop(peer.worker_id, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            ends: list[Outgoing | Incoming] = [*self._outgoing.values(), *self._incoming.values()]
        for end in ends:
            end.drop()

    def _outgoing_to(self, peer: WorkerEndpoint, session: int) -> Outgoing:
        with self._lock:
            self._check_open()
            end = self._outgoing.get(peer.worker_id)
            if end is None or end.session != session:
                end = self._outgoing[peer.worker_id] = Outgoing(self._local, peer.worker_id, peer.transports[self.name], session)
            return end

    def _incoming_from(self, peer: WorkerEndpoint, session: int) -> Incoming:
        with self._lock:
            self._check_open()
            end = self._incoming.get(peer.worker_id)
            if end is None or end.session != session:
                end = self._incoming[peer.worker_id] = Incoming(self._local, peer.worker_id, self._store, session)
            return end

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("this transport is closed")

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _describe(self, remote_blocks: Sequence[int]) -> Description:
        digest = hashlib.blake2b(array("q", remote_blocks).tobytes(), digest_size=8).digest()
        return Description(len(remote_blocks), self._kv.block_bytes, int.from_bytes(digest, "little", signed=True))

    def _pieces(self, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Both sides cut a push into the same pieces."""
        for start in range(0, len(blocks), self._blocks_per_piece):
            yield blocks[start : start + self._blocks_per_piece]

    def _gather(self, staging: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        staged = staging[: len(blocks) * self._kv.block_bytes]
        piece = staged if staged.device == self._device else torch.empty_like(staged, device=self._device)
        index = torch.tensor(blocks, device=self._device)
        for layer, part in self._parts(piece, len(blocks)):
            word = _word(layer, part)
            torch.index_select(layer.view(word), 0, index, out=part.view(word))
        if piece is not staged:
            staged.copy_(piece)
        return staged

    def _scatter(self, staged: torch.Tensor, blocks: Sequence[int]) -> None:
        piece = staged.to(self._device)
        index = torch.tensor(blocks, device=self._device)
        for layer, part in self._parts(piece, len(blocks)):
            word = _word(layer, part)
            layer.view(word).index_copy_(0, index, part.view(word))

    def _parts(self, staging: torch.Tensor, num_blocks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer with its place in a piece, shape [num_blocks, block_bytes of the layer]."""
        start = 0
        for layer in self._kv.layers:
            end = start + num_blocks * layer.shape[1]
            yield layer, staging[start:end].view(num_blocks, layer.shape[1])
            start = end

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """On CUDA: beside the engine's own work, and complete at the end, also of a push that fails."""
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self._device)  # a thread begins with the first one, and would make a context there
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()


def _word(layer: torch.Tensor, part: torch.Tensor) -> torch.dtype:
    """Copies by index go element by element, bytes at 1 GB/s on a CPU: eight at a time, where they come so."""
    return torch.int64 if _is_of_words(layer) and _is_of_words(part) else torch.uint8


def _is_of_words(data: torch.Tensor) -> bool:
    return bool(data.shape[1] % 8 == data.stride(0) % 8 == data.storage_offset() % 8 == 0)


@contextmanager
def _as_transport_error(what: str, peer: WorkerEndpoint) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, OSError, LookupError, TransportError) as error:  # torch raises RuntimeErrors of many kinds
        raise TransportError(f"{what} worker {peer.worker_id} at {peer.control} failed: {error}") from error
