"""The fleet secret: who knows it may speak on the fleet's ZeroMQ sockets; nobody else is heard, or can read what is said.

Both ends of every connection derive the same Curve25519 key pair from the secret and use it with ZeroMQ's CURVE: a client speaks
to this one server key, a server hears this one client key.  Without a secret the sockets are plain, and reach loopback only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from dynaserve.errors import ConfigError

LEAST_CHARACTERS = 32
OTHERS = 0o027
"""Bits of a file's mode that give it to others; a group may read it, as it must where a secret is mounted into a container."""
_CONTEXT = b"dynaserve fleet secret, curve25519, 1"
"""Sets the key apart from whatever else may be derived from the same secret."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"dynaserve"


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
    _keep_the_door(socket.context, z85.decode(secret.public_key))
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


def _keep_the_door(context: zmq.Context[Any], public_key: bytes) -> None:
    """Answers ZeroMQ's question who may enter (ZAP, rfc.zeromq.org/spec/27), in a thread that ends with the context."""
    # A shadow: `destroy` of the context closes its own sockets only, and this one belongs to the thread.
    socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    socket.linger = 0
    socket.bind(_ZAP_ADDRESS)
    threading.Thread(target=_let_in, args=(socket, public_key), name="dynaserve-door", daemon=True).start()


def _let_in(socket: zmq.Socket[bytes], public_key: bytes) -> None:
    try:
        while True:
            version, request_id, _domain, _address, _identity, mechanism, *credentials = socket.recv_multipart()
            known = mechanism == b"CURVE" and len(credentials) == 1 and hmac.compare_digest(credentials[0], public_key)
            socket.send_multipart([version, request_id, b"200" if known else b"400", b"", b"", b""])
    except zmq.ContextTerminated:
        return
    finally:
        socket.close()


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
