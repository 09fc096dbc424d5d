"""The fleet secret over real sockets: who has it is served, who has not is not heard, and disturbs nobody."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from dynaserve import fleet, fleet_secret
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.fleet_secret import FleetSecret, derive, is_loopback, may_reach, read, secure_client, secure_server
from dynaserve.instance_link import InstanceLink
from dynaserve.kv_transfer.agent import Agent
from dynaserve.kv_transfer.control_plane import ControlPlane
from dynaserve.kv_transfer.ended import nobody_listens
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.kv_transfer.wire import Closed, Envelope, Revoke
from dynaserve.serve import configure
from tests.test_fleet_links import Gateway, description
from vllm_plugin.options import PluginOptions, add_arguments

OURS, THEIRS = derive("o" * 32), derive("t" * 32)
GOOD_LINE = "0123456789abcdef0123456789abcdef"


# -- the file ------------------------------------------------------------------------------------------------------------


def secret_file(path: Path, content: str, mode: int = 0o600) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def test_equal_lines_are_equal_secrets_whatever_the_space_around_them(tmp_path: Path) -> None:
    one = read("--fleet-secret-file", secret_file(tmp_path / "one", GOOD_LINE))
    assert one == read("--fleet-secret-file", secret_file(tmp_path / "two", f"{GOOD_LINE} \n"))
    assert one != read("--fleet-secret-file", secret_file(tmp_path / "three", f"{GOOD_LINE}!\n"))


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        ("", 0o600, "has 0 lines, not one"),
        (f"{GOOD_LINE}\n{GOOD_LINE}\n", 0o600, "has 2 lines, not one"),
        (f"{GOOD_LINE[:31]}\n", 0o600, "holds 31 characters, a secret has at least 32"),
        (GOOD_LINE, 0o620, "has mode 0620, so that others may use it: chmod 600 it"),
        (GOOD_LINE, 0o604, "has mode 0604, so that others may use it: chmod 600 it"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused_in_a_sentence(tmp_path: Path, content: str, mode: int, sentence: str) -> None:
    path = secret_file(tmp_path / "file", content, mode)
    with pytest.raises(ConfigError) as refusal:
        read("--fleet-secret-file", path)
    assert str(refusal.value) == f"--fleet-secret-file {path} {sentence}"


def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be read: No such file or directory"):
        read("--fleet-secret-file", tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="binary cannot be read: it is not text"):
        read("--fleet-secret-file", tmp_path / "binary")


def test_a_secret_is_not_printed() -> None:
    assert repr(OURS) == "FleetSecret()"


# -- what is reached without one -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("*", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
    ],
)
def test_loopback_is_what_its_address_says(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:5", "tcp://name:5", "ipc:///tmp/socket", "tcp://[bad:5", "nonsense"])
def test_only_loopback_is_reached_without_a_secret(address: str) -> None:
    assert not may_reach(address, None)
    assert may_reach(address, OURS)
    assert may_reach("tcp://127.0.0.1:5", None)
    assert may_reach("tcp://[::1]:5", None)


@pytest.mark.parametrize(
    ("gateway", "secured", "secret", "sentence"),
    [
        ("tcp://127.0.0.1:5", False, None, None),
        ("tcp://10.0.0.1:5", True, OURS, None),
        ("tcp://10.0.0.1:5", False, None, "gateway tcp://10.0.0.1:5 of instance http://a is not at a loopback address"),
        ("tcp://127.0.0.1:5", True, None, "instance http://a has a fleet secret, this front-end has none: give --fleet-secret-file"),
        ("tcp://127.0.0.1:5", False, OURS, "instance http://a has none: give it --dynaserve-fleet-secret-file"),
    ],
)
def test_a_frontend_joins_an_instance_with_its_secret_or_at_loopback(
    gateway: str, secured: bool, secret: FleetSecret | None, sentence: str | None
) -> None:
    instance = Instance("http://a", msgspec.structs.replace(description(gateway, "first"), secured=secured))
    with contextlib.nullcontext() if sentence is None else pytest.raises(ConfigError, match=sentence):
        fleet.check_reach(instance, secret)


def test_an_instance_needs_a_secret_to_listen_to_a_network(tmp_path: Path) -> None:
    assert PluginOptions().read_secret() is None
    with pytest.raises(ConfigError) as refusal:
        PluginOptions(host="10.0.0.1").read_secret()
    assert str(refusal.value) == "--dynaserve-host 10.0.0.1 is not a loopback address, and there is no --dynaserve-fleet-secret-file"
    path = secret_file(tmp_path / "secret", GOOD_LINE)
    assert PluginOptions(host="10.0.0.1", fleet_secret_file=str(path)).read_secret() == derive(GOOD_LINE)


def test_the_engines_processes_get_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret_file(tmp_path / "secret", GOOD_LINE)
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = PluginOptions.from_args(parser.parse_args(["--dynaserve-fleet-secret-file", "secret"]))
    assert options.to_config()["fleet_secret_file"] == str(tmp_path / "secret")
    assert GOOD_LINE not in str(options.to_config())


def test_a_frontend_reads_its_secret_before_it_asks_anybody(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--fleet-secret-file .* has mode 0644"):
        configure(["--instances", "http://192.0.2.1:9", "--fleet-secret-file", str(secret_file(tmp_path / "secret", GOOD_LINE, 0o644))])


# -- sockets -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def router() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    with zmq.Context() as context:
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        secure_server(socket, OURS)
        yield socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        socket.close()


@contextlib.contextmanager
def dealer(address: str, secret: FleetSecret | None, **keys: bytes) -> Iterator[zmq.Socket[bytes]]:
    """keys: in place of those of the secret."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        secure_client(socket, secret)
        for name, key in keys.items():
            setattr(socket, name, key)
        socket.connect(address)
        yield socket


def stranger_keys() -> dict[str, bytes]:
    """Of one who has found out the server's key, but has no secret."""
    public_key, secret_key = zmq.curve_keypair()
    return {"curve_publickey": public_key, "curve_secretkey": secret_key}


@pytest.mark.parametrize(
    ("secret", "keys"),
    [(THEIRS, {}), (None, {}), (OURS, stranger_keys())],
    ids=["another secret", "no secret", "the server's key only"],
)
def test_a_stranger_is_not_heard_while_a_right_peer_goes_on(
    router: tuple[zmq.Socket[bytes], str], secret: FleetSecret | None, keys: dict[str, bytes]
) -> None:
    socket, address = router
    with dealer(address, OURS) as right, dealer(address, secret, **keys) as wrong:
        for number in range(50):
            with contextlib.suppress(zmq.Again):  # turned away for good
                wrong.send(b"stranger", zmq.NOBLOCK)
            right.send(b"%d" % number)
            assert socket.poll(30_000)
            identity, frame = socket.recv_multipart()
            assert frame == b"%d" % number
            socket.send_multipart([identity, frame])
            assert right.poll(30_000)
            assert right.recv() == frame
            time.sleep(0.01)  # for the stranger's handshakes
        assert not socket.poll(200)
        assert not wrong.poll(0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the log is told of strangers, each time."""
    monkeypatch.setattr(fleet_secret, "_refusals", fleet_secret._Refusals())
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    fleet_secret.logger.addHandler(handler)
    yield lines
    fleet_secret.logger.removeHandler(handler)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("secret", "keys"),
    [(THEIRS, {}), (None, {}), (OURS, stranger_keys())],
    ids=["another secret", "no secret", "the server's key only"],
)
def test_a_stranger_is_told_to_the_log_with_its_address(
    router: tuple[zmq.Socket[bytes], str],
    told: list[str],
    secret: FleetSecret | None,
    keys: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_secret, "TELL_EVERY_S", 0.0)
    _, address = router
    sentence = r"refused 1 connections of peers without the fleet secret, or with another; the last one came from (.*)"

    def is_told() -> bool:
        """ZeroMQ says nothing of one that leaves as it is refused, and knows no address of one that has left: another one is sent then."""
        with dealer(address, secret, **keys):
            until_s = time.monotonic() + 2
            while not told and time.monotonic() < until_s:
                time.sleep(0.005)
        match = re.fullmatch(sentence, told.pop()) if told else None
        return match is not None and re.fullmatch(r"127\.0\.0\.1:\d+", match[1]) is not None

    wait_for(is_told)


def test_strangers_are_told_seldom_and_counted(
    router: tuple[zmq.Socket[bytes], str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = router
    with dealer(address, THEIRS):  # it tries ten times a second
        wait_for(lambda: fleet_secret._refusals._untold >= 3)
        assert len(told) == 1
        monkeypatch.setattr(fleet_secret, "TELL_EVERY_S", 0.0)
        wait_for(lambda: len(told) > 1)
    assert re.match(r"refused ([4-9]|\d\d) connections", told[1])


def test_right_peers_and_who_only_looks_are_not_told(router: tuple[zmq.Socket[bytes], str], told: list[str]) -> None:
    socket, address = router
    for _ in range(3):
        with dealer(address, OURS) as right:
            right.send(b"hello")
            assert socket.poll(30_000)
            socket.recv_multipart()
        assert not nobody_listens(address)
    time.sleep(0.2)
    assert told == []


def test_a_server_that_cannot_ask_about_its_peers_hears_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_secret, "_keep_the_door", lambda *_: None)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        secure_server(socket, OURS)
        with dealer(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", OURS) as right:
            right.send(b"hello")
            assert not socket.poll(500)


def test_a_client_with_a_secret_tells_nothing_to_a_server_without() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        with dealer(f"tcp://127.0.0.1:{port}", OURS) as client:
            client.send(b"for the fleet only")
            assert not impostor.poll(500)


def test_raw_rubbish_on_the_port_disturbs_nobody(router: tuple[zmq.Socket[bytes], str]) -> None:
    import socket as plain

    socket, address = router
    port = int(address.rpartition(":")[2])
    with dealer(address, OURS) as right:
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000, b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes(100)):
            with plain.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(rubbish)
            right.send(rubbish)
            assert socket.poll(30_000)
            assert socket.recv_multipart()[1] == rubbish
        assert not socket.poll(200)


def test_the_doorkeeper_ends_with_its_context() -> None:
    before = set(threading.enumerate())
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    secure_server(socket, OURS)
    (door,) = set(threading.enumerate()) - before
    context.destroy(linger=0)
    door.join(timeout=30)
    assert not door.is_alive()
    assert socket.closed


# -- front-ends and agents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("secret", "joins"), [(OURS, True), (THEIRS, False), (None, False)])
def test_a_link_opens_with_the_secret_of_the_gateway(secret: FleetSecret | None, joins: bool) -> None:
    async def scenario() -> None:
        context, gateway = zmq.asyncio.Context(), Gateway(secret=OURS)
        gateway.start(context)
        right = InstanceLink(context, gateway.address, "right", 1, OURS)
        asked = InstanceLink(context, gateway.address, "asked", 1, secret)
        try:
            await right.open("first", timeout_s=30)
            if joins:
                await asked.open("first", timeout_s=30)
            else:
                with pytest.raises(ConfigError, match="does not answer"):
                    await asked.open("first", timeout_s=0.5)
            assert len(gateway.identities) == (2 if joins else 1)
        finally:
            right.close()
            asked.close()
            gateway.cut()
            await asyncio.sleep(0)
            context.destroy(linger=0)

    asyncio.run(scenario())


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent("agent", "127.0.0.1", 1, {}, secret=OURS)
    yield agent
    agent.close()


def ask(agent: Agent, secret: FleetSecret | None, reply_to: str, linger_ms: int = 30_000) -> None:
    """Sends what an agent answers with `Closed`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = linger_ms
        secure_client(socket, secret)
        socket.connect(agent.endpoint.control)
        socket.send(
            msgspec.msgpack.encode(
                Envelope("peer", 0, 0, msgspec.Raw(msgspec.msgpack.encode(Revoke("t", WorkerEndpoint("peer", reply_to, {})))))
            )
        )


def test_an_agent_hears_and_answers_peers_with_its_secret_only(agent: Agent) -> None:
    context = zmq.Context()
    peer = ControlPlane(context, "peer", "127.0.0.1", OURS)
    for stranger in (THEIRS, None):
        ask(agent, stranger, peer.address, linger_ms=200)
    assert not peer.poller.poll(300)
    ask(agent, OURS, peer.address)
    assert peer.poller.poll(30_000)
    assert list(peer.receive()) == [Closed("t")]
    context.destroy(linger=0)
    assert agent.dropped_messages == 0


def test_an_agent_without_a_secret_speaks_to_loopback_only() -> None:
    agent = Agent("agent", "127.0.0.1", 1, {})
    ask(agent, None, "tcp://192.0.2.1:9")
    deadline_s = time.monotonic() + 30
    while not agent.dropped_messages:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    agent.close()
