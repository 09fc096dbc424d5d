"""Transfer agents with real sockets and a real transport."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import pytest
import zmq

from dynaserve.kv_transfer import agent as agent_module
from dynaserve.kv_transfer import receiver as rx
from dynaserve.kv_transfer import sender as tx
from dynaserve.kv_transfer.agent import Agent
from dynaserve.kv_transfer.control_plane import ControlPlane
from dynaserve.kv_transfer.mooncake_transport import MooncakeTransport
from dynaserve.kv_transfer.results import Results
from dynaserve.kv_transfer.transport import KvLayers, PushNumber, Transport, WorkerEndpoint
from dynaserve.kv_transfer.wire import Revoke
from tests.cut_sockets import cut_port

torch = pytest.importorskip("torch")

from dynaserve.kv_transfer.torch_transport import TorchTransport  # noqa: E402 - only where torch is

LAYERS, BLOCKS, BLOCK_BYTES = 3, 128, 4096


class Unreachable(MooncakeTransport):
    """Its memory cannot be written: nobody listens at the address that it gives to peers."""

    late_write_s = 0.3

    def address(self) -> str:
        return msgspec.json.encode({"session": "127.0.0.1:1", "layers": [0] * LAYERS}).decode()


@dataclass
class Node:
    """An agent with its cache, and everything that it has reported so far."""

    name: str
    transport_of: Callable[[str, str, KvLayers], Transport] = TorchTransport
    kv: KvLayers = field(init=False)
    agent: Agent = field(init=False)
    seen: Results = field(default_factory=Results)
    rings: int = 0
    landed: list[tuple[str, int]] = field(default_factory=list)

    def ring(self) -> None:
        self.rings += 1

    def ring_landed(self, transfer_id: str, blocks: int) -> None:
        self.landed.append((transfer_id, blocks))

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(ord(self.name[-1]))
        self.kv = KvLayers([torch.randint(0, 256, (BLOCKS, BLOCK_BYTES), dtype=torch.uint8, generator=generator) for _ in range(LAYERS)])
        transport = self.transport_of(self.name, "127.0.0.1", self.kv)
        self.agent = Agent(self.name, "127.0.0.1", self.kv.block_bytes, {transport.name: transport}, self.ring, self.ring_landed)

    def poll(self) -> Results:
        new = self.agent.take_results()
        for mine, theirs in (
            (getattr(self.seen, name), getattr(new, name)) for name in ("sending_stopped", "received", "lost_blocks", "reports")
        ):
            mine.extend(theirs)
        return self.seen

    def block(self, index: int) -> bytes:
        return b"".join(bytes(layer[index].tolist()) for layer in self.kv.layers)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "this never happens"
        time.sleep(0.005)


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    a, b = Node("a"), Node("b")
    yield a, b
    for node in (a, b):
        until(lambda node=node: not sum(node.agent.open_transfers().values()))  # type: ignore[misc]
        node.agent.close()
        node.agent.close()


def expect(b: Node, a: Node, transfer: str, blocks: tuple[int, ...]) -> None:
    """Grants the first block, then the others, and says that these are all."""
    b.agent.submit(rx.Expect(transfer, a.agent.endpoint, "torch", 0, blocks[:1]))
    if blocks[1:]:
        b.agent.submit(rx.Extend(transfer, blocks[1:]))
    b.agent.submit(rx.Complete(transfer, len(blocks)))


def test_chunks_arrive_while_others_are_still_computed(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    expect(b, a, "t", (10, 11, 12))
    a.agent.submit(tx.Ready("t", 0, (1, 2), final=False))
    until(lambda: sum(r.blocks for r in b.poll().reports) == 2)
    assert b.block(10) == a.block(1)
    assert not b.seen.received
    until(lambda: sum(r.blocks for r in a.poll().reports if r.kind == "sent") == 2)
    a.agent.submit(tx.Ready("t", 2, (3,), final=True))
    until(lambda: b.poll().received == ["t"])
    assert [b.block(i) for i in (10, 11, 12)] == [a.block(i) for i in (1, 2, 3)]
    a.agent.submit(tx.Stop("t"))
    until(lambda: a.poll().sending_stopped == ["t"])
    until(lambda: any(r.kind == "delivered" for r in a.poll().reports))
    sent = [r for r in a.seen.reports if r.kind == "sent"]
    assert sum(r.bytes for r in sent if r.before_end) == 2 * b.kv.block_bytes
    assert [(r.blocks, r.bytes) for r in sent if not r.before_end] == [(1, b.kv.block_bytes)]


def test_news_of_a_transfer_ring(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    expect(b, a, "t", (10, 11))
    a.agent.submit(tx.Ready("t", 0, (1,), final=False))
    until(lambda: b.landed == [("t", 1)])
    assert b.rings == 0, "what has landed needs no step"
    a.agent.submit(tx.Ready("t", 1, (2,), final=True))
    until(lambda: b.poll().received == ["t"])
    assert b.landed == [("t", 1), ("t", 1)]
    until(lambda: b.rings > 0)
    a.agent.submit(tx.Stop("t"))
    until(lambda: a.rings > 0)


def test_news_that_nobody_takes_ring_again(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may be lost, and an engine at rest waits for nothing else."""
    monkeypatch.setattr(agent_module, "TELL_AGAIN_S", 0.05)
    a, b = nodes
    expect(b, a, "t", (10,))
    a.agent.submit(tx.Ready("t", 0, (1,), final=True))
    until(lambda: b.rings > 3)
    assert b.poll().received == ["t"]
    time.sleep(0.2)
    taken = b.rings
    time.sleep(0.3)
    assert b.rings == taken
    a.agent.submit(tx.Stop("t"))
    until(lambda: a.poll().sending_stopped == ["t"])


def test_transfers_in_both_directions_at_once(nodes: tuple[Node, Node]) -> None:
    rng = random.Random(5)
    a, b = nodes
    sources = {node.name: [node.block(i) for i in range(64)] for node in nodes}
    plans = [
        (node, peer, f"{node.name}{i}", rng.sample(range(64), 4), list(range(64 + 4 * i, 68 + 4 * i)))
        for i in range(16)
        for node, peer in ((a, b), (b, a))
    ]
    rng.shuffle(plans)
    for source, target, transfer, local, remote in plans:
        expect(target, source, transfer, tuple(remote))
        source.agent.submit(tx.Ready(transfer, 0, tuple(local[:3]), final=False))
        source.agent.submit(tx.Ready(transfer, 3, tuple(local[3:]), final=True))
    until(lambda: len(a.poll().received) == len(b.poll().received) == 16)
    for source, target, transfer, local, remote in plans:
        assert [target.block(i) for i in remote] == [sources[source.name][i] for i in local]
        source.agent.submit(tx.Stop(transfer))


def test_transfers_end_though_their_control_connections_are_cut(nodes: tuple[Node, Node]) -> None:
    rng = random.Random(6)
    a, b = nodes
    ports = [int(node.agent.endpoint.control.rpartition(":")[2]) for node in nodes]
    cancelled = {f"t{i}" for i in range(2, 40, 3)}
    for i in range(40):
        transfer = f"t{i}"
        b.agent.submit(rx.Expect(transfer, a.agent.endpoint, "torch", 0, (64 + i,)))
        b.agent.submit(rx.Cancel(transfer) if transfer in cancelled else rx.Complete(transfer, 1))
        a.agent.submit(tx.Ready(transfer, 0, (i,), final=True))
        if i % 4 == 0:
            cut_port(os.getpid(), rng.choice(ports))
            time.sleep(0.05 * rng.random())
    until(lambda: {f"t{i}" for i in range(40)} == set(b.poll().received))
    for i in range(40):
        a.agent.submit(tx.Stop(f"t{i}"))
        if f"t{i}" not in cancelled:
            assert b.block(64 + i) == a.block(i)
        if i % 4 == 0:
            cut_port(os.getpid(), rng.choice(ports))
    until(lambda: {f"t{i}" for i in range(40)} == set(a.poll().sending_stopped))


def test_retract_returns_when_nothing_is_read_any_more(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.agent.submit(tx.Ready("t", 0, (1, 2, 3), final=False))
    a.agent.retract(["t"])
    for layer in a.kv.layers:
        layer[1:4] = 0  # the engine gives the blocks to somebody else
    a.agent.submit(tx.Ready("t", 0, (5, 6, 7), final=True))
    expect(b, a, "t", (10, 11, 12))
    until(lambda: b.poll().received == ["t"])
    assert [b.block(i) for i in (10, 11, 12)] == [a.block(i) for i in (5, 6, 7)]
    a.agent.submit(tx.Stop("t"))


class SlowOneSided(TorchTransport):
    """Copies into the memory of a node of this process, once it may."""

    one_sided = True
    targets: ClassVar[dict[str, KvLayers]] = {}
    may_push: ClassVar[threading.Event] = threading.Event()

    def push(self, peer: WorkerEndpoint, local_blocks: Sequence[int], remote_blocks: Sequence[int], number: PushNumber | None) -> None:
        assert number is None
        self.may_push.wait(30)
        for mine, theirs in zip(self._kv.layers, self.targets[peer.worker_id].layers, strict=True):
            theirs[list(remote_blocks)] = mine[list(local_blocks)]


def test_retract_does_not_wait_for_a_push_that_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Node("a", SlowOneSided), Node("b", SlowOneSided)
    monkeypatch.setitem(SlowOneSided.targets, "b", b.kv)
    monkeypatch.setattr(SlowOneSided, "may_push", threading.Event())
    first, again = a.block(1), a.block(5)
    for name, block in (("first", 10), ("t", 11)):
        expect(b, a, name, (block,))
        a.agent.submit(tx.Ready(name, 0, (1,), final=True))
        until(lambda name=name: a.agent._sender.is_in_flight(name))  # type: ignore[misc]
    a.agent.retract(["t"])
    assert a.agent._sender.is_in_flight("first"), "it waits for nothing that is under way"
    a.agent.submit(tx.Ready("t", 0, (5,), final=True))
    SlowOneSided.may_push.set()
    until(lambda: sorted(b.poll().received) == ["first", "t"])
    assert (b.block(10), b.block(11), b.seen.lost_blocks) == (first, again, [])
    for name in ("first", "t"):
        a.agent.submit(tx.Stop(name))
    until(lambda: sorted(a.poll().sending_stopped) == ["first", "t"])
    assert not a.agent._one_sided_pushes
    for node in (a, b):
        assert node.agent.open_transfers().total() == 0
        node.agent.close()


def test_retract_waits_for_a_one_sided_push_under_way_as_long_as_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = Node("a", SlowOneSided), Node("b", SlowOneSided)
    monkeypatch.setitem(SlowOneSided.targets, "b", b.kv)
    monkeypatch.setattr(SlowOneSided, "may_push", threading.Event())
    monkeypatch.setattr("dynaserve.kv_transfer.agent.RETRACT_WITHIN_S", 0.01)
    expect(b, a, "t", (10,))
    a.agent.submit(tx.Ready("t", 0, (1,), final=True))
    until(lambda: "t" in a.agent._one_sided_pushes and a.agent._one_sided_pushes["t"].running())
    retracting = threading.Thread(target=a.agent.retract, args=(["t"],), daemon=True)
    retracting.start()
    time.sleep(0.1)
    assert retracting.is_alive()
    assert not a.agent._lanes.losses, "nothing is given up for it"
    SlowOneSided.may_push.set()
    until(lambda: not retracting.is_alive())
    until(lambda: b.poll().received == ["t"])
    assert (b.block(10), b.seen.lost_blocks) == (a.block(1), [])
    a.agent.submit(tx.Stop("t"))
    until(lambda: a.poll().sending_stopped == ["t"])
    for node in (a, b):
        node.agent.close()


def test_a_cancelled_transfer_is_reported_once_the_sender_has_stopped(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    expect(b, a, "t", tuple(range(10, 40)))
    a.agent.submit(tx.Ready("t", 0, tuple(range(5)), final=False))
    b.agent.submit(rx.Cancel("t"))
    until(lambda: b.poll().received == ["t"])
    assert not b.seen.lost_blocks
    a.agent.submit(tx.Stop("t"))
    until(lambda: a.poll().sending_stopped == ["t"])


def test_malformed_control_messages_are_dropped_and_counted(nodes: tuple[Node, Node]) -> None:
    a, _ = nodes
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(a.agent.endpoint.control)
        for frame in (b"", b"\xc1", b"\x80" * 1000):
            socket.send(frame)
        until(lambda: a.agent.dropped_messages == 3)


def test_a_peer_with_an_impossible_address_is_counted_and_disturbs_nobody(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    stranger = WorkerEndpoint("stranger", "no address", {})
    context = zmq.Context()
    plane = ControlPlane(context, "stranger", "127.0.0.1", None)  # held until the end: the context closes its sockets while they live
    plane.send(a.agent.endpoint, Revoke("t", stranger))
    until(lambda: a.agent.dropped_messages == 1)
    context.destroy(linger=0)
    expect(b, a, "u", (10,))
    a.agent.submit(tx.Ready("u", 0, (1,), final=True))
    until(lambda: b.poll().received == ["u"])
    a.agent.submit(tx.Stop("u"))


@pytest.mark.mooncake
def test_blocks_of_a_one_sided_push_that_failed_come_back_after_a_quarantine() -> None:
    a, b = Node("a", MooncakeTransport), Node("b", Unreachable)
    b.agent.submit(rx.Expect("t", a.agent.endpoint, "mooncake", 0, (10, 11)))
    a.agent.submit(tx.Ready("t", 0, (1,), final=False))
    until(lambda: any(r.kind == "failed" for r in b.poll().reports))
    (failed,) = (r for r in b.seen.reports if r.kind == "failed")
    b.agent.submit(rx.Complete("t", 2))
    until(lambda: b.poll().received == ["t"])
    assert time.monotonic() - failed.at_s >= Unreachable.late_write_s
    assert b.seen.lost_blocks == [10, 11]
    a.agent.submit(tx.Stop("t"))
    until(lambda: a.poll().sending_stopped == ["t"])
    for node in (a, b):
        node.agent.close()


def test_a_push_whose_fence_fails_takes_no_later_one_with_it(nodes: tuple[Node, Node]) -> None:
    a, b = nodes

    def fence() -> None:
        raise RuntimeError("the device has gone")

    for name, target, wait in (("t1", 10, None), ("t2", 11, fence), ("t3", 12, None)):
        expect(b, a, name, (target,))
        a.agent.submit(tx.Ready(name, 0, (1,), final=True, fence=wait))
        until(lambda name=name: name in b.poll().received)  # type: ignore[misc]
        a.agent.submit(tx.Stop(name))
    assert b.seen.lost_blocks == [11]
    assert b.block(12) == b.block(10) == a.block(1)
