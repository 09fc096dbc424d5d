"""What is too large, out of range or rubbish on the fleet's sockets is dropped, and disturbs nobody."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve import fleet, stock
from dynaserve.errors import ConfigError
from dynaserve.kv_transfer import wire
from dynaserve.kv_transfer.agent import Agent
from dynaserve.kv_transfer.control_plane import ControlPlane
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.kv_transfer.wire import LONGEST_MESSAGE_BYTES, LONGEST_REASON, Closed, Revoke
from dynaserve.messages import (
    LONGEST_REQUEST_ID,
    Abort,
    Announce,
    Continue,
    Ended,
    FromInstance,
    InstanceDescription,
    Lifted,
    LoraAdded,
    Refused,
    Revoked,
    Run,
    SenderLost,
    Step,
    ToInstance,
    Welcome,
    WorkerDescription,
)

PEER = WorkerEndpoint("peer", "tcp://127.0.0.1:1", {})

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars, max_size=3)


def fields_of(message: type[Any]) -> list[str]:
    return [field.name for kind in message.__args__ for field in msgspec.structs.fields(kind)]


def almost(message: Any) -> st.SearchStrategy[bytes]:
    """Rubbish, and messages of a known type with fields of any."""
    kinds = st.sampled_from([kind.__name__ for kind in message.__args__])
    body = st.dictionaries(st.sampled_from(fields_of(message)), values)
    return st.binary(max_size=200) | st.builds(lambda kind, fields: msgspec.msgpack.encode({**fields, "type": kind}), kinds, body)


_sessions = itertools.count()


def enveloped(messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Each the first of a session, so that it is looked into."""

    def envelope(message: bytes) -> bytes:
        header = {"sender_id": "stranger", "session": next(_sessions), "number": 0}
        return msgspec.msgpack.encode(header | {"message": msgspec.Raw(message)})

    return messages.map(envelope)


def unbounded(what: Any, where: str = "") -> Iterator[str]:
    """Fields of a type, and of all types in it, that have a string, list or dict of any length."""
    kinds = msgspec.inspect
    if isinstance(what, kinds.StrType | kinds.BytesType | kinds.ListType | kinds.DictType) and what.max_length is None:
        yield where
    match what:
        case kinds.StructType(cls=cls, fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{cls.__name__}.{field.name}")
        case kinds.UnionType(types=parts) | kinds.TupleType(item_types=parts):
            for part in parts:
                yield from unbounded(part, where)
        case kinds.ListType(item_type=item):
            yield from unbounded(item, where)
        case kinds.DictType(key_type=key, value_type=value):
            yield from unbounded(key, where)
            yield from unbounded(value, where)


@pytest.mark.parametrize(
    "message",
    [ToInstance, FromInstance, InstanceDescription, wire.Envelope, wire.Ack, stock._Version, stock._Models],
    ids=["ToInstance", "FromInstance", "InstanceDescription", "Envelope", "Ack", "stock version", "stock models"],
)
def test_nothing_that_is_heard_is_of_any_length(message: Any) -> None:
    assert not set(unbounded(msgspec.inspect.type_info(message)))


@given(almost(ToInstance))
def test_a_gateway_decodes_a_message_or_refuses_it(frame: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError):
        assert isinstance(msgspec.msgpack.decode(frame, type=ToInstance), ToInstance.__args__)


@pytest.mark.parametrize(
    "message",
    [
        Run(""),
        Run("r" * (2 * LONGEST_REQUEST_ID + 1)),
        Run("r", -1, "t"),
        Run("r", 1 << 31, "t"),
        Run("r", 5, ""),
        Run("r", 5, "t" * 129),
        Run("r", output_token_ids=[-1]),
        Continue("r", 5, [1 << 31]),
        SenderLost(["w"] * 4097),
        Abort(["r"] * ((1 << 20) + 1)),
        Announce("r", 5, "t", "torch", [WorkerEndpoint("w" * 129, "tcp://h", {})]),
        Announce("r", 5, "t", "torch", [WorkerEndpoint("w", "tcp://h" * 4096, {})]),
        Announce("r", 5, "t", "torch", [WorkerEndpoint("w", "tcp://h", {"torch": "a" * ((1 << 16) + 1)})]),
        Announce("r", 5, "t", "torch", [WorkerEndpoint("w", "tcp://h", {str(number): "" for number in range(257)})]),
    ],
)
def test_what_is_out_of_range_is_no_message(message: ToInstance) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToInstance)


@pytest.mark.parametrize("message", [Welcome("e" * 4097), Step([Ended("r" * (2 * LONGEST_REQUEST_ID + 1), 0, 0)], None, 0.0)])
def test_what_is_too_long_is_no_answer(message: FromInstance) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromInstance)


WORKER = WorkerEndpoint("w" * 32, "tcp://10.0.0.5:54321", {"torch": "10.0.0.5:54322", "mooncake": "140736000000000," * 512})


@pytest.mark.parametrize(
    "message",
    [
        Abort([f"{number}".zfill(2 * LONGEST_REQUEST_ID) for number in range(10_000)]),
        Announce("r", 5, "t" * 128, "torch", [WORKER] * 4096),
        SenderLost([WORKER.worker_id] * 4096),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_large_fleet_says_is_heard(message: ToInstance) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToInstance) == message


def test_an_instance_may_have_4096_workers() -> None:
    workers = [WorkerDescription(WORKER, "layout " * 100, 1)] * 4096
    assert msgspec.json.decode(msgspec.json.encode(workers), type=list[WorkerDescription]) == workers


@pytest.mark.parametrize("kind", [Refused, Revoked, Lifted])
def test_a_reason_that_is_too_long_is_cut_where_it_is_made(kind: type[Refused | Revoked | Lifted]) -> None:
    message = Step([kind("r", "no room" + "." * (1 << 20)), kind("r", "." * LONGEST_REASON)], None, 0.0)
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromInstance)
    assert heard == message
    assert isinstance(heard, Step)
    long, longest = (event.reason for event in heard.events if isinstance(event, kind))
    assert long.startswith("no room")
    assert long.endswith("...")
    assert (len(long), longest) == (LONGEST_REASON, "." * LONGEST_REASON)


def test_a_loader_s_or_a_transport_s_words_are_cut_as_well() -> None:
    added = LoraAdded(1, "x" * (1 << 20))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(added), type=FromInstance) == added
    assert LoraAdded(1, None).error is None
    broken = wire.Broken("t", "x" * (1 << 20))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(broken), type=wire.Message) == broken


@pytest.mark.parametrize(
    "message",
    [
        wire.Grant("t", PEER, "torch", 0, [-1]),
        wire.Grant("t", PEER, "torch", -1, [1]),
        wire.Blocks("t", "peer", "torch", [1 << 31], None),
        wire.Done("", True),
        wire.Closed("t" * 129),
        wire.Blocks("t", "", "torch", [1], None),
        wire.Blocks("t", "peer", "t" * 4097, [1], None),
        wire.Revoke("t", WorkerEndpoint("p" * 129, "tcp://127.0.0.1:1", {})),
    ],
)
def test_a_block_out_of_range_is_no_control_message(message: wire.Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=wire.Message)


# -- at a front-end ------------------------------------------------------------------------------------------------------

DEEP_JSON = b'{"unknown":' + b"[" * 2000 + b"]" * 2000 + b"}"


@contextlib.contextmanager
def server_that_answers(answers: dict[str, bytes]) -> Iterator[str]:
    """By path; anything else is not found. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(answers.get(self.path, b""))

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("answer", [DEEP_JSON, b'{"dtype": "\xff"}', b"{}"], ids=["nested too deeply", "not text", "empty"])
@pytest.mark.parametrize(("path", "sentence"), [("/dynaserve/instance", "in another format"), ("/version", "nor a vLLM server")])
def test_an_instance_that_describes_itself_in_rubbish_is_refused_in_a_sentence(path: str, sentence: str, answer: bytes) -> None:
    with server_that_answers({path: answer}) as url, pytest.raises(ConfigError, match=sentence):
        fleet.describe(url, allow_stock=True)


# -- at an agent ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    agent = Agent("agent", "127.0.0.1", 1, {})
    yield agent
    agent.close()


@pytest.fixture(scope="module")
def right_peer(agent: Agent) -> Iterator[Peer]:
    peer = Peer(agent)
    yield peer
    peer.close()


class Peer:
    """Asks the agent what it answers at once."""

    def __init__(self, agent: Agent) -> None:
        self.context = zmq.Context()
        self.plane = ControlPlane(self.context, "right peer", "127.0.0.1", None)
        self.endpoint = WorkerEndpoint("right peer", self.plane.address, {})
        self.agent = agent
        self.asked = 0
        self.rubbish = self.context.socket(zmq.DEALER)
        self.rubbish.connect(agent.endpoint.control)

    def close(self) -> None:
        self.context.destroy(linger=0)

    def is_served(self) -> bool:
        self.asked += 1
        transfer_id = f"right {self.asked}"
        self.plane.send(self.agent.endpoint, Revoke(transfer_id, self.endpoint))
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            self.plane.poller.poll(30_000)
            self.plane.take_cut()
            if answers := list(self.plane.receive()):
                return answers == [Closed(transfer_id)]
        return False


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(almost(wire.Message) | enveloped(almost(wire.Message)), min_size=1, max_size=3))
def test_an_agent_goes_on_whatever_it_is_told(right_peer: Peer, frames: list[bytes]) -> None:
    right_peer.rubbish.send_multipart(frames)
    assert right_peer.is_served()


def test_an_agent_goes_on_after_what_is_nested_too_deeply(right_peer: Peer) -> None:
    right_peer.rubbish.send(b"\x81\xa7unknown" + b"\x91" * 2000 + b"\xc0")
    assert right_peer.is_served()


def test_a_message_that_is_too_long_ends_the_connection_of_its_sender_only(agent: Agent, right_peer: Peer) -> None:
    assert right_peer.is_served()
    with zmq.Context() as context, context.socket(zmq.DEALER) as wrong:
        wrong.linger = 0
        monitor = wrong.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        wrong.connect(agent.endpoint.control)
        wrong.send(bytes(LONGEST_MESSAGE_BYTES + 1))
        deadline_s = time.monotonic() + 30
        while not monitor.poll(10):
            assert right_peer.is_served()
            assert time.monotonic() < deadline_s
        wrong.disable_monitor()
        monitor.close()
    assert right_peer.is_served()
