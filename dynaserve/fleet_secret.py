"""The fleet secret: who knows it may speak on the fleet's ZeroMQ sockets; nobody else is heard, or can read what is said.

Both ends of every connection derive the same Curve25519 key pair from the secret and use it with ZeroMQ's CURVE: a client speaks
to this one server key, a server hears this one client key.  Without a secret the sockets are plain, and reach loopback only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import math
import os
import socket as tcp
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from dynaserve.errors import ConfigError

logger = logging.getLogger("vllm.dynaserve.security")

LEAST_CHARACTERS = 32
OTHERS = 0o027
"""Bits of a file's mode that give it to others; a group may read it, as it must where a secret is mounted into a container."""
_CONTEXT = b"dynaserve fleet secret, curve25519, 1"
"""Sets the key apart from whatever else may be derived from the same secret."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"dynaserve"
_MONITOR_ADDRESS = "inproc://dynaserve.door"
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""A peer without the secret, and one with another, do not get as far as the question who they are. One that only looks whether somebody
listens is not refused: it leaves."""

_UNKNOWN = "an address that is not known any more"

TELL_EVERY_S = 60.0
"""A peer that is refused tries again at once, and a warning each time would bury all others."""


@dataclass(frozen=True)
class FleetSecret:
    """The key pair, in Z85 as ZeroMQ takes it. Both halves are secret here: whoever knows the public one may greet a server."""

    public_key: bytes = field(repr=False)
    secret_key: bytes = field(repr=False)


def derive(secret: str) -> FleetSecret:
    secret_key = z85.encode(hmac.digest(secret.encode(), _CONTEXT, hashlib.sha256))
    return FleetSecret(zmq.curve_public(secret_key), secret_key)


def read(option: str, path: Path) -> FleetSecret:
    """Raises ConfigError, which names option and file and never what is in it."""
    if not zmq.has("curve"):
        raise ConfigError(f"{option} needs ZeroMQ with CURVE, which this pyzmq {zmq.__version__} lacks: install pyzmq's own wheel")
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            lines = file.read().strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{option} {path} cannot be read: {reason}") from None
    if mode & OTHERS:
        raise ConfigError(f"{option} {path} has mode {mode:04o}, so that others may use it: chmod 600 it")
    if len(lines) != 1:
        raise ConfigError(f"{option} {path} has {len(lines)} lines, not one")
    if len(lines[0]) < LEAST_CHARACTERS:
        raise ConfigError(f"{option} {path} holds {len(lines[0])} characters, a secret has at least {LEAST_CHARACTERS}")
    return derive(lines[0])


# -- sockets -------------------------------------------------------------------------------------------------------------


def secure_server(socket: zmq.Socket[Any], secret: FleetSecret | None) -> None:
    """Call it before `bind`, for one socket of a context: from then on it hears peers with this secret only. None: any peer."""
    if secret is None:
        return
    _keep_the_door(socket, z85.decode(secret.public_key))
    socket.curve_secretkey = secret.secret_key
    socket.curve_publickey = secret.public_key
    socket.curve_server = True
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a doorkeeper nobody is let in, instead of everybody


def secure_client(socket: zmq.Socket[Any], secret: FleetSecret | None) -> None:
    """Call it before `connect`: what is sent reaches only a server with this secret. None: whoever listens there."""
    if secret is None:
        return
    socket.curve_secretkey = secret.secret_key
    socket.curve_publickey = secret.public_key
    socket.curve_serverkey = secret.public_key


def _keep_the_door(socket: zmq.Socket[Any], public_key: bytes) -> None:
    """Answers ZeroMQ's question who may enter (ZAP, rfc.zeromq.org/spec/27), and tells who may not, in a thread that ends with the
    context."""
    # A shadow: `destroy` of the context closes its own sockets only, and these belong to the thread.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(socket.context.underlying)
    asks, monitor = context.socket(zmq.REP), context.socket(zmq.PAIR)
    for opened in (asks, monitor):
        opened.linger = 0
    asks.bind(_ZAP_ADDRESS)
    socket.monitor(_MONITOR_ADDRESS, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _REFUSED)
    monitor.connect(_MONITOR_ADDRESS)
    threading.Thread(target=_let_in, args=(asks, monitor, public_key), name="dynaserve-door", daemon=True).start()


def _let_in(asks: zmq.Socket[bytes], monitor: zmq.Socket[bytes], public_key: bytes) -> None:
    poller = zmq.Poller()
    for socket in (asks, monitor):
        poller.register(socket, zmq.POLLIN)
    visitors = _Visitors()
    try:
        while True:
            ready = dict(poller.poll())
            if monitor in ready:
                visitors.take(parse_monitor_message(monitor.recv_multipart()))
            if asks in ready:
                version, request_id, _domain, _address, _identity, mechanism, *credentials = asks.recv_multipart()
                known = mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], public_key)
                asks.send_multipart([version, request_id, b"200" if known else b"400", b"", b"", b""])
    except zmq.ContextTerminated:
        return
    finally:
        asks.close()
        monitor.close()


class _Visitors:
    """Who has connected to one socket, by file descriptor: what ZeroMQ says of a refusal names nobody."""

    def __init__(self) -> None:
        self._addresses: dict[int, str] = {}
        self._refused = False

    def take(self, event: Mapping[str, Any]) -> None:
        kind, number = event["event"], event["value"]
        if kind == zmq.EVENT_ACCEPTED:
            self._addresses[number] = _address_of(number)
        elif kind & _REFUSED:
            self._refused = True  # the end of this connection, which names it, comes next
        elif kind == zmq.EVENT_DISCONNECTED:
            address, refused = self._addresses.pop(number, _UNKNOWN), self._refused
            self._refused = False
            if refused:
                _refusals.add(address)


def _address_of(descriptor: int) -> str:
    with contextlib.suppress(OSError), tcp.fromfd(descriptor, tcp.AF_INET, tcp.SOCK_STREAM) as connection:
        host, port, *_ = connection.getpeername()
        return f"{host}:{port}"
    return _UNKNOWN  # it has gone, or no files are left


class _Refusals:
    """Of all sockets of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._untold = 0
        self._told_s = -math.inf

    def add(self, address: str) -> None:
        with self._lock:
            self._untold += 1
            now_s = time.monotonic()
            if now_s - self._told_s < TELL_EVERY_S:
                return
            untold, self._untold, self._told_s = self._untold, 0, now_s
        logger.warning(
            "refused %d connections of peers without the fleet secret, or with another; the last one came from %s", untold, address
        )


_refusals = _Refusals()


# -- what is reached without a secret ------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Of an address or `localhost`; another name is not, whatever it resolves to now."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def may_reach(address: str, secret: FleetSecret | None) -> bool:
    """Whether a socket with this secret may be opened to `address` (`tcp://host:port`)."""
    return secret is not None or is_loopback(_host_of(address))


def _host_of(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
