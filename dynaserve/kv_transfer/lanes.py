"""The threads in which a transfer agent pushes, receives and waits: one for each peer and direction, in order, beside all others."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from dynaserve.kv_transfer import receiver as rx
from dynaserve.kv_transfer import sender as tx
from dynaserve.kv_transfer.transport import Transport, TransportError, WorkerEndpoint

logger = logging.getLogger("vllm.dynaserve.kv_transfer")

Outcome = tx.PushDone | tx.PushFailed | rx.Landed | rx.ReceiveFailed


class Lanes:
    """All methods are for the agent's control thread, and return at once. post: takes how a push or a receive has ended; thread-safe."""

    def __init__(self, transports: Mapping[str, Transport], post: Callable[[Outcome], None]) -> None:
        self._transports = transports
        self._post = post
        self._lanes: dict[tuple[str, str], ThreadPoolExecutor] = {}
        self.losses: Counter[str] = Counter()
        """How often each peer was lost: what had been queued for it before is given up."""

    def run(self, direction: str, peer: WorkerEndpoint, task: Callable[[], None]) -> Future[None]:
        """Runs it after all earlier ones of this direction and peer."""
        key = (direction, peer.worker_id)
        if key not in self._lanes:
            self._lanes[key] = ThreadPoolExecutor(1, thread_name_prefix=f"dynaserve-{direction}")
        return self._lanes[key].submit(task)

    def push(self, push: tx.Push) -> Future[None]:
        losses = self.losses[push.receiver.worker_id]
        return self.run("push", push.receiver, lambda: self._push(push, losses))

    def receive(self, receive: rx.Receive) -> None:
        losses = self.losses[receive.sender.worker_id]
        self.run("receive", receive.sender, lambda: self._receive(receive, losses))

    def discard(self, peer: WorkerEndpoint, refused: rx.Discard) -> None:
        """Takes blocks that nobody wants off the channel. The transport must be one of these."""
        losses = self.losses[peer.worker_id]
        self.run("receive", peer, lambda: self._discard(peer, refused, losses))

    def end_two_sided(self, peer: WorkerEndpoint) -> None:
        """What waits for the two-sided channels with this peer fails soon, and what is queued for them, whosever transfer it is.

        Not in this thread: the end of a channel is told in a store of the peer's.
        """
        self.losses[peer.worker_id] += 1
        self.run("drop", peer, lambda: self._drop_two_sided(peer))

    def forget_channels(self, peer: WorkerEndpoint) -> None:
        """The peer's process has ended: as `end_two_sided`, of all transports and for good."""
        self.losses[peer.worker_id] += 1
        self.run("drop", peer, lambda: self._forget_channels(peer))

    def end(self, worker_id: str) -> None:
        """What is queued for this peer is still carried out; nothing more will be."""
        for key in [key for key in self._lanes if key[1] == worker_id]:
            self._lanes.pop(key).shutdown(wait=False)

    def close(self) -> None:
        """Waits for what is under way: close the transports before."""
        for lane in self._lanes.values():
            lane.shutdown(cancel_futures=True)

    # -- in the threads ------------------------------------------------------------------------------------------------

    def _push(self, push: tx.Push, losses: int) -> None:
        """losses: of the receiver, when this was queued."""
        try:
            transport = self._transport(push.transport)
            try:
                self._await_fence(push, losses)
            except Exception:
                if push.number is not None:
                    transport.give_up_push(push.receiver, push.number)
                raise
            began_s = time.monotonic()
            transport.push(push.receiver, push.local_blocks, push.remote_blocks, push.number)
        except Exception as error:
            logger.warning("push of transfer %s failed: %s", push.transfer_id, error, exc_info=not isinstance(error, TransportError))
            try:
                if push.transport in self._transports:
                    self._transports[push.transport].drop(push.receiver)
            finally:
                self._post(tx.PushFailed(push.transfer_id, str(error)))
        else:
            self._post(tx.PushDone(push.transfer_id, 1e3 * (time.monotonic() - began_s)))

    def _await_fence(self, push: tx.Push, losses: int) -> None:
        """Raises TransportError once the receiver is lost, and what the fence raises."""
        self._check_not_lost(push.receiver, losses)
        if push.fence is not None:
            push.fence()
            self._check_not_lost(push.receiver, losses)

    def _check_not_lost(self, peer: WorkerEndpoint, losses: int) -> None:
        if self.losses[peer.worker_id] != losses:
            raise TransportError(f"worker {peer.worker_id} was lost before its turn came")

    def _receive(self, receive: rx.Receive, losses: int) -> None:
        """losses: of the sender, when this was queued."""
        try:
            transport = self._transport(receive.transport)
            try:
                self._check_not_lost(receive.sender, losses)
            except TransportError:
                transport.give_up_receive(receive.sender, receive.number)
                raise
            transport.receive(receive.sender, receive.local_blocks, receive.number)
        except Exception as error:
            logger.warning("receive of transfer %s failed: %s", receive.transfer_id, error, exc_info=not isinstance(error, TransportError))
            try:
                if receive.transport in self._transports:
                    self._transports[receive.transport].drop(receive.sender)
            finally:
                self._post(rx.ReceiveFailed(receive.transfer_id, str(error)))
        else:
            self._post(rx.Landed(receive.transfer_id, receive.indexes))

    def _discard(self, peer: WorkerEndpoint, refused: rx.Discard, losses: int) -> None:
        transport = self._transports[refused.transport]
        try:
            if self.losses[peer.worker_id] != losses:
                transport.give_up_receive(peer, refused.number)
            else:
                transport.discard(peer, refused.num_blocks, refused.number)
        except TransportError as error:
            logger.warning("refused blocks of %s: %s", refused.sender_id, error)
            transport.drop(peer)

    def _transport(self, name: str) -> Transport:
        try:
            return self._transports[name]
        except KeyError:
            raise TransportError(f"transport {name!r} is not one of this worker's: {', '.join(self._transports)}") from None

    def _drop_two_sided(self, peer: WorkerEndpoint) -> None:
        for transport in self._transports.values():
            if not transport.one_sided:
                transport.drop(peer)

    def _forget_channels(self, peer: WorkerEndpoint) -> None:
        for transport in self._transports.values():
            transport.forget(peer)
