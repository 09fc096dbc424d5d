"""What is too large, out of range or rubbish on the fleet's sockets is dropped, and disturbs nobody."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.kv_transfer import wire
from dynaserve.kv_transfer.agent import Agent
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.kv_transfer.wire import LONGEST_MESSAGE_BYTES, Closed, Revoke
from dynaserve.messages import LONGEST_REQUEST_ID, Continue, Run, SenderLost, ToInstance

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
    ],
)
def test_what_is_out_of_range_is_no_message(message: ToInstance) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToInstance)


@pytest.mark.parametrize(
    "message",
    [
        wire.Grant("t", PEER, "torch", 0, [-1]),
        wire.Grant("t", PEER, "torch", -1, [1]),
        wire.Blocks("t", "peer", "torch", [1 << 31]),
        wire.Done("", True),
        wire.Closed("t" * 129),
    ],
)
def test_a_block_out_of_range_is_no_control_message(message: wire.Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=wire.Message)


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
        self.outbox, self.inbox = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.outbox.linger = self.inbox.linger = 0
        address = f"tcp://127.0.0.1:{self.inbox.bind_to_random_port('tcp://127.0.0.1')}"
        self.endpoint = WorkerEndpoint("right peer", address, {})
        self.outbox.connect(agent.endpoint.control)
        self.asked = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def is_served(self) -> bool:
        self.asked += 1
        transfer_id = f"right {self.asked}"
        self.outbox.send(msgspec.msgpack.encode(Revoke(transfer_id, self.endpoint)))
        return bool(self.inbox.poll(30_000)) and msgspec.msgpack.decode(self.inbox.recv(), type=wire.Message) == Closed(transfer_id)


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(almost(wire.Message), min_size=1, max_size=3))
def test_an_agent_goes_on_whatever_it_is_told(right_peer: Peer, frames: list[bytes]) -> None:
    right_peer.outbox.send_multipart(frames)
    assert right_peer.is_served()


def test_a_message_that_is_too_long_ends_the_connection_of_its_sender_only(agent: Agent, right_peer: Peer) -> None:
    assert right_peer.is_served()
    with zmq.Context() as context, context.socket(zmq.PUSH) as wrong:
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
