"""What the survivor of two workers does with their transfers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.kv_transfer import receiver as rx
from dynaserve.kv_transfer import sender as tx
from dynaserve.kv_transfer.agent import PeerLost
from dynaserve.kv_transfer.control_plane import ControlPlane
from dynaserve.kv_transfer.ended import nobody_listens
from dynaserve.kv_transfer.transport import PushNumber, WorkerEndpoint
from dynaserve.kv_transfer.wire import Blocks, Broken, Closed, Done, Grant, Message, Revoke

pytest.importorskip("torch")

from dynaserve.kv_transfer.torch_transport import TorchTransport
from tests.test_agent import Node, until
from tests.test_transport import PatientTransport

A = WorkerEndpoint("a", "tcp://a", {"two": "", "one": ""})
B = WorkerEndpoint("b", "tcp://b", {"two": "", "one": ""})
ONE_SIDED = frozenset({"one"})


@pytest.fixture
def receiver() -> Iterator[rx.Receiver]:
    receiver = rx.Receiver(B, ONE_SIDED)
    yield receiver
    receiver.check_invariants()


def expect(receiver: rx.Receiver, transport: str) -> None:
    receiver.handle(rx.Expect("t", A, transport, 0, (10, 11, 12)))


def test_a_beta_completes_with_what_has_landed(receiver: rx.Receiver) -> None:
    expect(receiver, "two")
    receiver.handle(Blocks("t", "a", "two", [0], PushNumber(1, 0)))
    receiver.handle(rx.Landed("t", (0,)))
    assert receiver.handle(rx.SenderLost("t")) == [rx.Failed("t")]
    assert receiver.handle(rx.Complete("t", 3)) == [tx.Tell(A, Done("t", False)), rx.Received("t", (11, 12))]
    assert not receiver.transfers


def test_a_receive_that_runs_ends_before_its_blocks_are_free(receiver: rx.Receiver) -> None:
    expect(receiver, "two")
    receiver.handle(Blocks("t", "a", "two", [0, 1, 2], PushNumber(1, 0)))
    receiver.handle(rx.Cancel("t"))
    assert receiver.handle(rx.SenderLost("t")) == [rx.Failed("t")]
    assert receiver.handle(rx.ReceiveFailed("t", "dropped"))[-1] == rx.Received("t")


def test_a_cancelled_transfer_does_not_wait_for_the_dead(receiver: rx.Receiver) -> None:
    expect(receiver, "two")
    assert receiver.handle(rx.Cancel("t")) == [tx.Tell(A, Revoke("t", B))]
    assert receiver.handle(rx.SenderLost("t"))[-1] == rx.Received("t")


def test_what_may_still_be_written_is_kept_until_the_sender_says_otherwise(receiver: rx.Receiver) -> None:
    """One-sided: a process that was stopped goes on writing where it stood."""
    expect(receiver, "one")
    receiver.handle(rx.Cancel("t"))
    assert receiver.handle(rx.SenderLost("t")) == [rx.Failed("t")]
    assert "t" in receiver.transfers
    assert receiver.handle(Closed("t"))[-1] == rx.Received("t")


def test_what_a_sender_wrote_that_has_ended_is_waited_for_and_nobody_is_told(receiver: rx.Receiver) -> None:
    expect(receiver, "one")
    receiver.handle(rx.Cancel("t"))
    receiver.handle(rx.SenderLost("t"))
    assert receiver.handle(rx.SenderGone("t"))[-1] == rx.Quarantine("t", "one")
    assert receiver.handle(rx.Quiet("t")) == [rx.Received("t")]
    assert not receiver.transfers


def test_an_alpha_forgets_a_receiver_that_is_lost() -> None:
    sender = tx.Sender("a", ONE_SIDED)
    sender.handle(Grant("t", B, "two", 0, [10, 11]))
    sender.handle(tx.Ready("t", 0, (5,), final=False))
    assert sender.transfers_to("b") == ["t"]
    assert sender.handle(tx.ReceiverLost("t")) == []
    assert sender.handle(tx.Ready("t", 1, (6,), final=True)) == []
    assert sender.handle(tx.Stop("t")) == [], "the push to the dead is still in flight"
    told, stopped = sender.handle(tx.PushFailed("t", "dropped"))
    assert told == tx.Tell(B, Broken("t", "dropped")), "it may only be stopped"
    assert stopped == tx.SendingStopped("t")
    assert not sender.transfers


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(st.sampled_from(["grant", "ready", "done", "failed", "stop", "lost", "revoke"]), max_size=14))
def test_whatever_comes_a_stopped_sender_is_forgotten_after_its_receiver_was_lost(steps: list[str]) -> None:
    sender, told, index = tx.Sender("a", ONE_SIDED), 0, 0
    for step in [*steps, "lost", "stop", "failed"]:
        flying = sender.is_in_flight("t")
        match step:
            case "grant":
                sender.handle(Grant("t", B, "two", index, [10 + index]))
            case "ready":
                sender.handle(tx.Ready("t", index, (20 + index,), final=False))
                index += 1
            case "done" if flying:
                told += sum(isinstance(i, tx.SendingStopped) for i in sender.handle(tx.PushDone("t")))
            case "failed" if flying:
                told += sum(isinstance(i, tx.SendingStopped) for i in sender.handle(tx.PushFailed("t", "dropped")))
            case "stop":
                told += sum(isinstance(i, tx.SendingStopped) for i in sender.handle(tx.Stop("t")))
            case "lost":
                told += sum(isinstance(i, tx.SendingStopped) for i in sender.handle(tx.ReceiverLost("t")))
            case "revoke":
                told += sum(isinstance(i, tx.SendingStopped) for i in sender.handle(Revoke("t", B)))
        sender.check_invariants()
    assert told >= 1
    assert not sender.transfers_to("b")
    assert not sender.is_in_flight("t")


def test_agents_end_their_transfers_with_a_silent_worker_once_it_is_lost() -> None:
    """It neither pushes nor answers, while its machine takes connections for it."""
    alive = Node("alive")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = WorkerEndpoint("silent", f"tcp://127.0.0.1:{listener.getsockname()[1]}", {"torch": "127.0.0.1:1"})
        alive.agent.submit(rx.Expect("in", silent, "torch", 0, (1, 2, 3)))
        alive.agent.submit(rx.Cancel("in"))
        until(lambda: alive.agent.open_transfers()["receiving"] == 1)
        alive.agent.submit(PeerLost("silent", frozenset({"in"})))
        until(lambda: alive.poll().received == ["in"])
    assert alive.agent.open_transfers().total() == 0
    alive.agent.close()


@dataclass
class Silent:
    """A worker that says what the test says, and whose transport answers nobody: as one that was stopped."""

    endpoint: WorkerEndpoint
    plane: ControlPlane

    def say(self, to: Node, *messages: Message) -> None:
        for message in messages:
            self.plane.send(to.agent.endpoint, message)


@contextlib.contextmanager
def silent_worker(name: str) -> Iterator[Silent]:
    with socket.create_server(("127.0.0.1", 0)) as store:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        plane = ControlPlane(context, name, "127.0.0.1", None)
        try:
            yield Silent(WorkerEndpoint(name, plane.address, {PatientTransport.name: f"127.0.0.1:{store.getsockname()[1]}"}), plane)
        finally:
            context.destroy(linger=0)


@pytest.fixture
def silent() -> Iterator[Silent]:
    with silent_worker("silent") as worker:
        yield worker


@pytest.fixture
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends in a test was ended, as with `PatientTransport`."""
    monkeypatch.setattr("dynaserve.kv_transfer.torch_pair._STORE_TIMEOUT_S", 3600.0)


def push_to(silent: Silent, alive: Node, names: list[str]) -> None:
    """Returns when the first push waits for the silent worker, and the others behind it."""
    for block, name in enumerate(names):
        alive.agent.submit(tx.Ready(name, 0, (block,), final=False))
        silent.say(alive, Grant(name, silent.endpoint, PatientTransport.name, 0, [block]))
    until(lambda: all(alive.agent._sender.is_in_flight(name) for name in names))


def until_broken(silent: Silent, names: set[str]) -> None:
    """The silent worker is told, for when it goes on."""
    heard: set[str] = set()

    def all_heard() -> bool:
        heard.update(message.transfer_id for message in silent.plane.receive() if isinstance(message, Broken))
        return names <= heard

    until(all_heard)


def until_returned(call: Callable[[], None]) -> None:
    """In a thread of its own, which a test that fails does not wait for."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: not thread.is_alive())


@pytest.mark.usefixtures("no_time_limit")
def test_all_that_waits_to_be_pushed_ends_as_its_receiver_is_lost(silent: Silent) -> None:
    alive, names = Node("alive", PatientTransport), ["t1", "t2", "t3"]
    push_to(silent, alive, names)
    for name in names:
        alive.agent.submit(tx.Stop(name))
    time.sleep(0.2)
    assert not alive.poll().sending_stopped
    alive.agent.submit(PeerLost("silent", frozenset(names)))
    alive.agent.retract(names)
    until(lambda: sorted(alive.poll().sending_stopped) == names)
    assert alive.agent.open_transfers().total() == 0
    alive.agent.close()


@pytest.mark.usefixtures("no_time_limit")
def test_a_step_that_overwrites_blocks_tells_of_the_lost_before_it_waits_for_pushes(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM tells of the preemptions of a step before it binds the metadata; nothing but the loss ends a push here."""
    pytest.importorskip("vllm")
    from vllm_plugin.connector import DynaServeConnector, StepCommands
    from vllm_plugin.kv_worker import KvWorker

    monkeypatch.setattr("dynaserve.kv_transfer.agent.RETRACT_WITHIN_S", 3600.0)
    alive, names = Node("alive", PatientTransport), ["t1", "t2"]
    with contextlib.closing(alive.agent):
        push_to(silent, alive, names)
        connector = object.__new__(DynaServeConnector)  # its worker half, without an engine
        connector.worker = object.__new__(KvWorker)
        connector.worker.agent = alive.agent
        step = StepCommands([("", PeerLost("silent", frozenset(names)))], preempted=["t2"])
        until_returned(lambda: connector.handle_preemptions(step))
        connector.bind_connector_metadata(step)
        for name in names:
            alive.agent.submit(tx.Stop(name))
        until(lambda: sorted(alive.poll().sending_stopped) == names)
        assert alive.agent.open_transfers().total() == 0


@pytest.mark.usefixtures("no_time_limit")
def test_a_step_does_not_wait_for_pushes_to_a_worker_of_whose_loss_a_later_step_would_tell(silent: Silent) -> None:
    alive, names = Node("alive", PatientTransport), ["of another", "t"]
    with contextlib.closing(alive.agent):
        push_to(silent, alive, names)
        until_returned(lambda: alive.agent.retract(["t"]))
        until_broken(silent, set(names))
        alive.agent.submit(PeerLost("silent", frozenset({"t"})))
        for name in names:
            alive.agent.submit(tx.Stop(name))
        until(lambda: sorted(alive.poll().sending_stopped) == names)


def test_all_that_waits_to_be_received_ends_as_its_sender_is_lost(silent: Silent) -> None:
    alive, names = Node("alive", PatientTransport), ["t1", "t2", "t3"]
    for number, name in enumerate(names):
        alive.agent.submit(rx.Expect(name, silent.endpoint, PatientTransport.name, 0, (number,)))
        until(lambda: alive.agent.open_transfers()["receiving"] > number)  # noqa: B023 - what nobody expects is discarded
        silent.say(alive, Blocks(name, "silent", PatientTransport.name, [0], PushNumber(1, number)))
    until(lambda: sum(transfer.receiving for transfer in alive.agent._receiver.transfers.values()) == len(names))
    for name in names:
        alive.agent.submit(rx.Complete(name, 1))
    time.sleep(0.2)
    assert not alive.poll().received
    alive.agent.submit(PeerLost("silent", frozenset(names)))
    until(lambda: sorted(alive.poll().received) == names)
    assert sorted(alive.seen.lost_blocks) == [0, 1, 2]
    alive.agent.close()


def test_agents_notice_by_themselves_that_a_worker_has_ended() -> None:
    alive, ended = Node("alive"), Node("ended")
    for source, target in ((ended, alive), (alive, ended)):
        target.agent.submit(rx.Expect(target.name, source.agent.endpoint, "torch", 0, (1, 2, 3)))
        source.agent.submit(tx.Ready(target.name, 0, (1,), final=False))
    until(lambda: sum(report.kind == "received" for report in alive.poll().reports) == 1)
    until(lambda: sum(report.kind == "sent" for report in alive.poll().reports) == 1)
    transport = alive.agent._transports["torch"]
    assert isinstance(transport, TorchTransport)
    ends: list[Any] = [transport._incoming["ended"], transport._outgoing["ended"]]
    assert all(end._channel is not None for end in ends)
    ended.agent.close()
    alive.agent.submit(rx.Complete("alive", 3))
    alive.agent.submit(tx.Stop("ended"))
    until(lambda: alive.poll().received == ["alive"] and alive.seen.sending_stopped == ["ended"])
    assert alive.seen.lost_blocks == [2, 3]
    until(lambda: all(end._channel is None for end in ends))
    until(lambda: not transport._incoming and not transport._outgoing)
    until(lambda: alive.agent.open_transfers().total() == 0)
    alive.agent.close()


@pytest.mark.parametrize("is_sender", [True, False])
def test_transfers_of_a_front_end_that_has_not_lost_the_worker_go_on(*, is_sender: bool) -> None:
    """Between the same two workers; either of them is lost for the other front-end."""
    source, target = Node("source"), Node("target")
    for name, blocks in (("its", (1, 2)), ("of another", (3, 4))):
        target.agent.submit(rx.Expect(name, source.agent.endpoint, "torch", 0, blocks))
        source.agent.submit(tx.Ready(name, 0, blocks[:1], final=False))
    until(lambda: sum(report.kind == "received" for report in target.poll().reports) == 2)
    until(lambda: sum(report.kind == "sent" for report in source.poll().reports) == 2)
    survivor, dead = (target, source) if is_sender else (source, target)
    survivor.agent.submit(PeerLost(dead.name, frozenset({"its"})))
    source.agent.submit(tx.Ready("of another", 1, (4,), final=True))
    target.agent.submit(rx.Complete("of another", 2))
    until(lambda: target.poll().received == ["of another"])
    if is_sender:
        target.agent.submit(rx.Complete("its", 2))
        until(lambda: target.poll().received == ["of another", "its"])
        assert target.seen.lost_blocks == [2]
    else:
        source.agent.submit(tx.Ready("its", 1, (2,), final=True))
        source.agent.submit(tx.Stop("its"))
        until(lambda: source.poll().sending_stopped == ["its"])
        sent = [report.blocks for report in source.seen.reports if (report.transfer_id, report.kind) == ("its", "sent")]
        assert sent == [1], "nothing more of its own"
    for node in (source, target):
        node.agent.close()


@pytest.mark.usefixtures("no_time_limit")
def test_the_channel_that_a_lost_transfer_waits_on_ends_and_those_of_others_behind_it_hear_of_it(silent: Silent) -> None:
    alive = Node("alive", PatientTransport)
    push_to(silent, alive, ["its", "of another"])
    alive.agent.submit(PeerLost("silent", frozenset({"its"})))
    until(lambda: not alive.agent._sender.is_in_flight("of another"))
    until_broken(silent, {"of another"})
    alive.agent.close()


@pytest.mark.usefixtures("no_time_limit")
def test_a_push_holds_the_channel_though_its_receiver_wants_no_more(silent: Silent) -> None:
    alive = Node("alive", PatientTransport)
    with contextlib.closing(alive.agent):
        push_to(silent, alive, ["its", "of another"])
        silent.say(alive, Done("its", complete=False))
        until(lambda: alive.agent._sender.transfers["its"].receiver is None)
        alive.agent.submit(PeerLost("silent", frozenset({"its"})))
        until(lambda: not alive.agent._sender.is_in_flight("its"))


@pytest.mark.usefixtures("no_time_limit")
def test_the_loss_of_a_worker_ends_no_channel_for_what_is_under_way_with_a_third(silent: Silent) -> None:
    """A front-end names all of its transfers; those of another one go on."""
    alive, its = Node("alive", PatientTransport), frozenset({"its", "its with the third"})
    with contextlib.closing(alive.agent), silent_worker("third") as third:
        push_to(silent, alive, ["of another"])
        push_to(third, alive, ["its with the third"])
        silent.say(alive, Grant("its", silent.endpoint, PatientTransport.name, 0, [5]))
        until(lambda: alive.agent.open_transfers()["sending"] == 3)
        alive.agent.submit(PeerLost("silent", its))
        until(lambda: alive.agent.open_transfers()["sending"] == 2)
        assert not alive.agent._lanes.losses
        alive.agent.submit(PeerLost("third", its))
        until(lambda: not alive.agent._sender.is_in_flight("its with the third"))
        assert alive.agent._sender.is_in_flight("of another")
        assert not alive.agent._lanes.losses["silent"]


class OneSided(TorchTransport):
    """Nothing is pushed here; what counts is what a receiver may believe."""

    one_sided = True
    late_write_s = 0.2


def test_blocks_of_a_one_sided_sender_that_has_ended_come_back_and_those_of_one_that_is_silent_do_not() -> None:
    """Both are lost; at the port of the silent one a connection can still be made, as with a process that is stopped."""
    alive, ended, silent = Node("alive", OneSided), Node("ended", OneSided), Node("silent", OneSided)
    ended.agent.close()
    for peer in (ended, silent):
        alive.agent.submit(rx.Expect(peer.name, peer.agent.endpoint, "torch", 0, (1, 2, 3) if peer is ended else (4, 5, 6)))
        alive.agent.submit(PeerLost(peer.name, frozenset({peer.name})))
        alive.agent.submit(PeerLost(peer.name, frozenset({peer.name})))
        alive.agent.submit(rx.Complete(peer.name, 3))
    until(lambda: alive.poll().received == ["ended"])
    assert sorted(alive.seen.lost_blocks) == [1, 2, 3]
    assert alive.agent.open_transfers()["receiving"] == 1
    until(lambda: [thread.name.startswith("dynaserve-drop") for thread in threading.enumerate()].count(True) == 1)  # the silent one's
    silent.agent.close()
    until(lambda: alive.poll().received == ["ended", "silent"])
    alive.agent.close()


def test_a_port_that_nobody_has_any_more_is_told_from_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaserve.kv_transfer.ended.TIMEOUT_S", 0.2)
    with socket.socket() as listener, contextlib.ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        control = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert not nobody_listens(control)
        for _ in range(4):  # its queue is full: connections are neither taken nor refused
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        assert not nobody_listens(control)
    assert nobody_listens(control)
