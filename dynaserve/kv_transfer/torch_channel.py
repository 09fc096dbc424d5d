"""A Gloo process group of two ranks that carries tensors one way and can be ended by another thread."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SENDER, RECEIVER = 0, 1
_DATA_TAG, _END_TAG = 0, 1
_AT_ONCE = timedelta(milliseconds=1)


class Channel:
    """One end of the group; the constructor returns when the other end has come.

    store: where both ends meet, empty before. rank: SENDER or RECEIVER. host: the address that the peer connects to.
    staging: memory of the host for what is sent or received, of `staging_bytes`, used by the caller only. pinned: for bytes that come
    from CUDA, or go there. meet_timeout_s: of one step of the other end's coming.
    `send` and `receive` return when the tensor may be reused; they raise RuntimeError when the peer is gone, the channel
    is ended, or nothing moves for `timeout_s`; then the channel is of no more use.  A message must not be longer than the
    tensor that receives it: Gloo ends the *process* that gets more bytes than it expects.  And it forgets a send that its own thread
    begins, as the receiver has become ready, on a connection that was reset just before (by its pair.cc): the timeout ends that.
    """

    def __init__(
        self, store: dist.Store, rank: int, host: str, staging_bytes: int, pinned: bool, timeout_s: float, meet_timeout_s: float
    ) -> None:
        self.ended = False
        self.staging = torch.empty(staging_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._other_rank = 1 - rank
        self._timeout_s = timeout_s
        self._group: Any = _make_group(store, rank, host, meet_timeout_s)

    def send(self, tensor: torch.Tensor) -> None:
        self._wait(self._group.send([tensor], self._other_rank, _DATA_TAG))

    def receive(self, tensor: torch.Tensor) -> None:
        self._wait(self._group.recv([tensor], self._other_rank, _DATA_TAG))

    def end(self) -> None:
        """Closes the connection: what is under way on it, at either end, fails now. Thread-safe, idempotent."""
        self.ended = True
        # Gloo's abort() ends neither an operation nor a connection; an operation whose time is over ends both.
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1, dtype=torch.uint8)], self._other_rank, _END_TAG).wait(_AT_ONCE)

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=self._timeout_s))


def _make_group(store: dist.Store, rank: int, host: str, meet_timeout_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=meet_timeout_s)
    return dist.ProcessGroupGloo(store, rank, 2, options)
