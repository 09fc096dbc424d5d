"""The two ends of a channel when one of them is late, gives up, or is dropped while it opens: what follows arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dynaserve.kv_transfer.transport import TransportError

pytest.importorskip("torch")

from dynaserve.kv_transfer import torch_pair
from dynaserve.kv_transfer.torch_transport import TorchTransport
from tests.test_transport import BriefTransport, HastyTransport, Local, assert_moves

Pair = tuple[Local, Local]


def two_workers(transport: type[TorchTransport]) -> Iterator[Pair]:
    pair = Local(transport.name, "worker-0", seed=0), Local(transport.name, "worker-1", seed=1)
    yield pair
    for worker in pair:
        worker.stop()


@pytest.fixture
def brief() -> Iterator[Pair]:
    """Their timeout is 4 s."""
    yield from two_workers(BriefTransport)


@pytest.fixture
def hasty() -> Iterator[Pair]:
    """Their timeout is 15 s."""
    yield from two_workers(HastyTransport)


def endpoint(worker: Local) -> Any:
    return worker.call("endpoint")


def test_a_push_after_one_that_its_receiver_gave_up_arrives(brief: Pair) -> None:
    """The receiver had gone to a generation that the sender had begun, and left it before the sender came."""
    a, b = brief
    assert_moves(a, b, 1, 2)
    a.call("drop", endpoint(b))
    with pytest.raises(TransportError, match="nothing has come"):
        b.call("receive", endpoint(a), [3])
    b.call("drop", endpoint(a))
    with pytest.raises(TransportError, match="given up"):
        a.call("push", endpoint(b), [1], [3])
    assert_moves(a, b, 4, 5)


@pytest.mark.parametrize("late", ["sender", "receiver"])
@pytest.mark.parametrize("is_open", [False, True], ids=["the first push", "after a drop"])
def test_an_end_may_be_late_by_more_than_gloo_waits(hasty: Pair, late: str, is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_pair, "_CONNECT_SHARE", 5)  # as everywhere but in tests
    a, b = hasty
    if is_open:
        assert_moves(a, b, 1, 2)
        a.call("drop", endpoint(b))
    calls: list[Any] = [(b, "receive", (endpoint(a), [3])), (a, "push", (endpoint(b), [1], [3]))]
    if late == "receiver":
        calls.reverse()
    (early, *call), (tardy, *other) = calls
    waiting = early.start(call[0], *call[1])
    time.sleep(3.5)
    tardy.call(other[0], *other[1])
    waiting()
    assert_moves(a, b, 4, 5)


class Interrupted:
    """Calls `interrupt` at the wait of this number, before or after it."""

    def __init__(self, waits: torch_pair.Waits, number: int, when: str, interrupt: Callable[[], None]) -> None:
        self.reached = False
        self._within = waits.within
        self._left = number
        self._when = when
        self._interrupt = interrupt
        waits.within = self.within  # type: ignore[method-assign]

    def within(self, *args: Any, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left == -1 and self._when == "before":
            self._fire()
        try:
            return self._within(*args, **kwargs)
        finally:
            if self._left == -1 and self._when == "after":
                self._fire()

    def _fire(self) -> None:
        self.reached = True
        self._interrupt()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("end", "number"), [*(("sender", n) for n in range(4)), *(("receiver", n) for n in range(3))])
def test_a_drop_at_any_moment_of_an_opening_loses_no_later_push(hasty: Pair, end: str, number: int, when: str) -> None:
    a, b = hasty
    sender, receiver = a.worker.transport, b.worker.transport
    assert isinstance(sender, HastyTransport)
    assert isinstance(receiver, HastyTransport)
    if end == "sender":
        waits, drop = sender._outgoing_to(endpoint(b), 0)._waits, lambda: sender.drop(endpoint(b))
    else:
        waits, drop = receiver._incoming_from(endpoint(a), 0)._waits, lambda: receiver.drop(endpoint(a))
    interrupted = Interrupted(waits, number, when, drop)

    def ends(worker: Local, peer: Local, method: str, *blocks: list[int]) -> None:
        try:
            worker.call(method, endpoint(peer), *blocks)
        except TransportError:
            worker.call("drop", endpoint(peer))

    receiving = threading.Thread(target=ends, args=(b, a, "receive", [3]))
    receiving.start()
    ends(a, b, "push", [1], [3])
    receiving.join()
    assert interrupted.reached
    assert_moves(a, b, 4, 5)
