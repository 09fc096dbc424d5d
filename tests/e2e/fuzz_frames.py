"""Rubbish, and messages with fields of any kind, on the ZeroMQ sockets of a running fleet: its gateways and transfer agents."""

from __future__ import annotations

import contextlib
from typing import Any

import hypothesis
import msgspec
import zmq
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dynaserve.kv_transfer import wire
from dynaserve.messages import Bye, Hello, InstanceDescription, ToInstance
from tests.e2e.fleet import FleetUnderTest, prompt_of
from tests.test_wire_limits import almost, enveloped

payloads = st.lists(st.binary(max_size=50), max_size=2)
# A goodbye would end the session, and nothing that comes after it would be looked into.
to_gateways = st.builds(lambda header, payload: [header, *payload], almost(ToInstance).filter(lambda frame: b"Bye" not in frame), payloads)
to_agents = st.builds(lambda header, payload: [header, *payload], almost(wire.Message) | enveloped(almost(wire.Message)), payloads)


def fuzz_frames(client: FleetUnderTest, messages: int, seed: int) -> int:
    """Sends so many, to each socket in turn. Returns how many the gateways have dropped and counted.

    Raises AssertionError if the fleet does not cut and serve a request afterwards, or holds anything.
    """
    described = [
        msgspec.json.decode(instance.get("/dynaserve/instance").content, type=InstanceDescription) for instance in client.instances
    ]
    before = dropped(client)
    with zmq.Context() as context, contextlib.ExitStack() as sockets:

        def connect(kind: int, address: str) -> zmq.Socket[bytes]:
            socket = sockets.enter_context(context.socket(kind))
            socket.linger = 1000
            socket.connect(address)
            return socket

        gateways = [connect(zmq.DEALER, instance.gateway) for instance in described]
        agents = [connect(zmq.DEALER, worker.endpoint.control) for instance in described for worker in instance.workers]
        for gateway in gateways:
            gateway.send(msgspec.msgpack.encode(Hello("fuzzer")))
        send_some(gateways, to_gateways, messages // 2, seed)
        send_some(agents, to_agents, messages - messages // 2, seed)
        for gateway in gateways:
            gateway.send(msgspec.msgpack.encode(Bye()))
    length = 70
    cut = client.complete(prompt_of(length), split=length)
    assert cut.same_as(client.complete(prompt_of(length), split=0))
    record = client.record(cut)
    assert record["beta"] is not None, record
    assert record["lifted"] is None, record
    client.wait_until_empty()
    return int(dropped(client) - before)


def send_some(sockets: list[zmq.Socket[bytes]], frames: st.SearchStrategy[list[bytes]], messages: int, seed: int) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=messages, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(sockets), frames)
    def send(socket: zmq.Socket[bytes], message: list[bytes]) -> None:
        with contextlib.suppress(zmq.Again):  # a gateway hears nobody whose answers pile up
            while True:
                socket.recv_multipart(zmq.NOBLOCK)
        socket.send_multipart(message)

    send()


def dropped(client: FleetUnderTest) -> float:
    """Messages that the gateways could not read."""
    samples: list[Any] = []
    for instance in client.instances:
        for family in text_string_to_metric_families(instance.get("/metrics").raise_for_status().text):
            samples += [sample for sample in family.samples if sample.name == "dynaserve_dropped_messages_total"]
    return float(sum(sample.value for sample in samples if sample.labels["reason"] == "malformed"))
