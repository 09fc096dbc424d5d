"""Control messages between agents come once and in order, over connections that are cut."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from dynaserve.kv_transfer.control_plane import (
    KEEPALIVE_EVERY_S,
    KEEPALIVE_IDLE_S,
    KEEPALIVE_PROBES,
    LONGEST_UNACKNOWLEDGED_MS,
    ControlPlane,
)
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.kv_transfer.wire import Closed, Envelope
from tests.cut_sockets import _connections, cut_port


class End:
    """A control plane with what it has heard, served as an agent does."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], worker_id: str) -> None:
        self.plane = ControlPlane(context, worker_id, "127.0.0.1", None)
        self.endpoint = WorkerEndpoint(worker_id, self.plane.address, {})
        self.port = int(self.plane.address.rpartition(":")[2])
        self.heard: list[str] = []
        self.cuts = 0

    def serve(self, timeout_ms: int = 1) -> None:
        self.plane.poller.poll(timeout_ms)
        self.heard += [message.transfer_id for message in self.plane.receive()]
        for peer in self.plane.take_cut():
            self.cuts += 1
            self.plane.reconnect(peer.worker_id)
        self.plane.send_acks()

    def unacknowledged(self) -> int:
        return sum(len(outbox.unacknowledged) for outbox in self.plane._outboxes.values())


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    context = zmq.Context()
    yield End(context, "a"), End(context, "b")
    context.destroy(linger=0)


def envelope(sender_id: str, session: int, number: int, message: object) -> bytes:
    return msgspec.msgpack.encode(Envelope(sender_id, session, number, msgspec.Raw(msgspec.msgpack.encode(message))))


def serve_until_heard(ends: tuple[End, End], wanted: list[str]) -> None:
    a, b = ends
    deadline_s = time.monotonic() + 30
    while b.heard != wanted or a.unacknowledged():
        assert time.monotonic() < deadline_s, b.heard
        assert b.heard == wanted[: len(b.heard)]
        a.serve()
        b.serve()


@pytest.mark.parametrize("seed", range(5))
def test_each_message_comes_once_and_in_order_whatever_is_cut(ends: tuple[End, End], seed: int) -> None:
    rng = random.Random(seed)
    a, b = ends
    wanted = [str(i) for i in range(400)]
    for i, name in enumerate(wanted):
        a.plane.send(b.endpoint, Closed(name))
        if rng.random() < 0.03:
            cut_port(os.getpid(), b.port)
        if rng.random() < 0.1:
            rng.choice(ends).serve(0)
        if i % 100 == 50:
            serve_until_heard(ends, wanted[: i + 1])
            assert cut_port(os.getpid(), b.port) > 0
    serve_until_heard(ends, wanted)
    assert a.cuts > 0
    assert b.plane.dropped == 0


def test_a_connection_that_has_nothing_to_say_is_made_anew_with_the_next_message(ends: tuple[End, End]) -> None:
    a, b = ends
    a.plane.send(b.endpoint, Closed("first"))
    serve_until_heard(ends, ["first"])
    assert cut_port(os.getpid(), b.port) > 0
    while not a.cuts:
        a.serve()
    assert cut_port(os.getpid(), b.port) == 0
    a.plane.send(b.endpoint, Closed("second"))
    serve_until_heard(ends, ["first", "second"])


def test_a_peer_that_had_been_forgotten_is_heard_from_the_beginning(ends: tuple[End, End]) -> None:
    a, b = ends
    for name in ("first", "second"):
        a.plane.send(b.endpoint, Closed(name))
    serve_until_heard(ends, ["first", "second"])
    a.plane.forget("b")
    assert a.plane.peer("b") is None
    a.plane.send(b.endpoint, Closed("third"))
    serve_until_heard(ends, ["first", "second", "third"])


@pytest.mark.parametrize(("session", "number"), [(1, 3), (0, 0)])
def test_what_is_out_of_its_turn_is_dropped(ends: tuple[End, End], session: int, number: int) -> None:
    _, b = ends
    in_turn = [envelope("c", 1, 0, Closed("first")), envelope("c", 1, 1, Closed("second"))]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(b.plane.address)
        for frame in (in_turn[0], envelope("c", session, number, Closed("wrong")), in_turn[1]):
            socket.send(frame)
        while len(b.heard) < 2:
            b.serve()
    assert (b.heard, b.plane.dropped) == (["first", "second"], 1)


def test_rubbish_in_an_envelope_holds_nothing_up(ends: tuple[End, End]) -> None:
    _, b = ends
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(b.plane.address)
        for frame in (envelope("c", 0, 0, 7), b"\xc1", envelope("c", 0, 1, Closed("next"))):
            socket.send(frame)
        while not b.heard:
            b.serve()
    assert (b.heard, b.plane.dropped) == (["next"], 2)


NESTED = b"\x91" * 2000 + b"\xc0"
"""2 kB, deeper than the decoder goes."""


@pytest.mark.parametrize("part", ["envelope", "message"])
def test_what_is_nested_too_deeply_holds_nothing_up(ends: tuple[End, End], part: str) -> None:
    _, b = ends
    unknown_field = {"type": "Closed", "transfer_id": "t", "unknown": msgspec.Raw(NESTED)}
    rubbish = b"\x81\xa7unknown" + NESTED if part == "envelope" else envelope("c", 0, 0, unknown_field)
    with zmq.Context() as context, context.socket(zmq.DEALER) as wrong:
        wrong.connect(b.plane.address)
        for frame in (rubbish, envelope("d", 0, 0, Closed("next"))):
            wrong.send(frame)
        while not b.heard:
            b.serve()
    assert (b.heard, b.plane.dropped) == (["next"], 1)


def test_an_acknowledgement_that_is_none_is_dropped(ends: tuple[End, End]) -> None:
    a, _ = ends
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as wrong:
        port = wrong.bind_to_random_port("tcp://127.0.0.1")
        a.plane.send(WorkerEndpoint("c", f"tcp://127.0.0.1:{port}", {}), Closed("t"))
        connection, _ = wrong.recv_multipart()
        for frame in (b"\xc1", b"\x81\xa7unknown" + NESTED, msgspec.msgpack.encode({"count": 2**61})):
            wrong.send_multipart([connection, frame])
        while a.unacknowledged():
            a.serve()
    context.destroy(linger=0)
    assert a.plane.dropped == 2


def test_a_machine_that_has_vanished_is_noticed_at_both_ends(ends: tuple[End, End]) -> None:
    a, b = ends
    a.plane.send(b.endpoint, Closed("first"))
    serve_until_heard(ends, ["first"])
    wanted = (1, KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES, LONGEST_UNACKNOWLEDGED_MS)
    asked = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    found = []
    for end in _connections(os.getpid()):
        if b.port in (end.getsockname()[1], end.getpeername()[1]):
            is_asked = end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found.append((is_asked, *(end.getsockopt(socket.IPPROTO_TCP, option) for option in asked)))
    assert found == [wanted, wanted]


@pytest.fixture
def crowded() -> Iterator[tuple[End, End, list[zmq.Socket[bytes]]]]:
    """Two ends in a context that has no room for another socket, and what takes it."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 5)
    yield End(context, "a"), End(context, "b"), [context.socket(zmq.DEALER) for _ in range(3)]
    context.destroy(linger=0)


def test_what_could_not_be_sent_for_want_of_sockets_is_kept_and_goes_later(crowded: tuple[End, End, list[zmq.Socket[bytes]]]) -> None:
    a, b, hogs = crowded
    for name in ("first", "second"):
        a.plane.send(b.endpoint, Closed(name))
    assert (a.plane.dropped, a.unacknowledged()) == (0, 2)
    for _ in range(3):
        assert a.plane.lacks_connections
        assert a.plane.take_cut() == [b.endpoint]
        assert (a.plane.lacks_connections, a.plane.take_cut()) == (False, []), "told once"
        a.plane.reconnect("b")
    for hog in hogs:
        hog.close(linger=0)
    serve_until_heard((a, b), ["first", "second"])
    assert not a.plane.lacks_connections


@pytest.mark.parametrize(
    "control", ["", "nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "udp://127.0.0.1:9", "tipc://{1,2}", "foo://x:1"]
)
def test_what_has_no_address_is_dropped(ends: tuple[End, End], control: str) -> None:
    a, _ = ends
    nobody = WorkerEndpoint("c", control, {})
    a.plane.send(nobody, Closed("t"))
    assert (a.plane.dropped, a.plane.peer("c"), a.plane.take_cut()) == (1, None, [])
