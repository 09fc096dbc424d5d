"""Mooncake's transfer engine as a transport: one-sided writes from the sender's paged cache into the receiver's.

Nothing is staged: each layer's memory is registered once, and a push names source and target addresses.  TCP by default
(what runs without special hardware); `DYNASERVE_MOONCAKE_PROTOCOL=rdma` and the like reach the same engine on hosts that
have it (not run yet).

`host` is what peers are told.  The engine itself listens on all interfaces, and over TCP it authenticates nobody:
who reaches its ports can read and write the registered memory, so they belong behind a firewall.

The engine waits for a write by asking without a pause: a whole core, taken from the engine that computes (and Linux lets
threads that yield, as vLLM's workers do, wait for such a one for many seconds). So the last write of a push is submitted
on its own and asked for at intervals; once it has ended, the others have or are about to.

A push to a peer that is stopped ends after `PUSH_TIMEOUT_S`; what the peer's machine has taken by then is still written
when the peer goes on. Nothing in the engine tells when that is over, so a receiver keeps the blocks of a failed transfer
for `late_write_s` of its own time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dynaserve.kv_transfer.block_runs import stretches
from dynaserve.kv_transfer.transport import KvLayers, OneSided, PushNumber, TransportError, TransportUnavailable, WorkerEndpoint

PROTOCOL_VARIABLE = "DYNASERVE_MOONCAKE_PROTOCOL"
PUSH_TIMEOUT_S = 30.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 2e-3
_PENDING, _COMPLETED = 0, 1
_NO_BATCH = (0, 2**64 - 1)
"""What the engine answers when it takes no write."""
_LIBRARIES = "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2"


class _Address(msgspec.Struct, frozen=True):
    """session: of the peer's engine (`host:port`). layers: address of block 0 in every layer."""

    session: str
    layers: list[int]


class MooncakeTransport(OneSided):
    """See the module; `Transport` has the contract."""

    name = "mooncake"
    late_write_s = 5.0

    def __init__(self, worker_id: str, host: str, kv: KvLayers) -> None:  # noqa: ARG002 - the engine names itself
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # it tells of every push
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransportUnavailable(
                f"the Mooncake transfer engine does not load ({error}): pip install 'dynaserve[mooncake]' and {_LIBRARIES}"
            ) from error
        self._kv = kv
        self._engine: Any = TransferEngine()
        self._lock = threading.Lock()
        protocol = os.environ.get(PROTOCOL_VARIABLE, "tcp")
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise TransportUnavailable(f"the Mooncake transfer engine does not start with protocol {protocol} on {host}")
        self._registered = _regions(kv)
        for start, length in self._registered:
            if self._engine.register_memory(start, length) != 0:
                raise TransportUnavailable(f"Mooncake cannot register {length} bytes of KV cache with protocol {protocol}")
        session = f"{host}:{self._engine.get_rpc_port()}"
        layers = [layer.data_ptr() for layer in kv.layers]
        self._address = msgspec.json.encode(_Address(session, layers)).decode()
        self._peers: dict[str, _Address] = {}

    def address(self) -> str:
        return self._address

    def push(
        self,
        peer: WorkerEndpoint,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        number: PushNumber | None,  # noqa: ARG002 - one-sided
    ) -> None:
        address = self._peers.get(peer.worker_id) or self._learn(peer)
        pieces = list(stretches(self._kv, address.layers, local_blocks, remote_blocks))
        sources, targets, lengths = (list(each) for each in zip(*pieces, strict=True))
        failure = self._write(address.session, sources, targets, lengths)
        if failure is not None:
            raise TransportError(f"push to worker {peer.worker_id} at {address.session} failed: {failure}")

    def _write(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> str | None:
        """What went wrong; None once all is written. See the module for the way of waiting."""
        engine = self._engine
        if engine is None:
            return "this transport is closed"
        batch = engine.batch_transfer_async_write(session, sources[:-1], targets[:-1], lengths[:-1]) if len(sources) > 1 else None
        last = engine.transfer_submit_write(session, sources[-1], targets[-1], lengths[-1])
        if batch in _NO_BATCH or last in _NO_BATCH:
            return "Mooncake does not reach it"
        deadline_s = time.monotonic() + PUSH_TIMEOUT_S
        pause_s = _SHORTEST_PAUSE_S
        while (status := engine.transfer_check_status(last)) == _PENDING:
            if time.monotonic() > deadline_s:
                return f"nothing came back for {PUSH_TIMEOUT_S:g} s"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if status != _COMPLETED or (batch is not None and engine.get_batch_transfer_status([batch]) != 0):
            return "Mooncake could not write"
        return None

    def drop(self, peer: WorkerEndpoint) -> None:
        """The engine keeps its own connections and opens new ones as needed; it cannot end a push before its timeout."""
        self._peers.pop(peer.worker_id, None)

    def close(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            for start, _ in self._registered:
                engine.unregister_memory(start)

    def _learn(self, peer: WorkerEndpoint) -> _Address:
        try:
            address = self._peers[peer.worker_id] = msgspec.json.decode(peer.transports[self.name], type=_Address)
        except (KeyError, msgspec.MsgspecError) as error:
            raise TransportError(f"worker {peer.worker_id} has no usable Mooncake address: {error}") from error
        return address


def _regions(kv: KvLayers) -> list[tuple[int, int]]:
    """(address, bytes) of every piece of memory that holds layers; several layers often share one."""
    storages = {layer.untyped_storage().data_ptr(): layer.untyped_storage().nbytes() for layer in kv.layers}
    return sorted(storages.items())
