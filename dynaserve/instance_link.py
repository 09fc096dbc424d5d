"""One connection of a front-end to the gateway of an instance.

It is never mended: ZeroMQ would connect anew and lose, in silence, what was under way.  Who loses a link opens another one.

A gateway that says nothing is asked for a greeting: whoever connects to a ZeroMQ socket gets its first byte at once, from the I/O
thread.  So an event loop that is busy for seconds, or a long hold of the interpreter's lock, is not taken for a death, and a process
that is stopped is.  How long it has not answered is counted in looks of our own event loop: a pause of ours is nobody's silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dynaserve.errors import ConfigError
from dynaserve.fleet_secret import FleetSecret, secure_client
from dynaserve.liveness import Limits
from dynaserve.messages import LONGEST_ANSWER_FRAME_BYTES, Beat, Bye, FromInstance, Hello, ToInstance, Welcome

_DECODER: msgspec.msgpack.Decoder[FromInstance] = msgspec.msgpack.Decoder(FromInstance)


LOOK_S, MOST_UNANSWERED = 0.25, 6
"""How often it is looked whether the instance has said anything, and after how many looks without a word or a greeting it is dead."""
LATE_LOOK_S = 0.4
"""What is longer between two looks is our own doing, and counts for nothing: an answer may lie there unread."""
PING_MS, NO_PONG_MS = 1_000, 10_000
"""ZeroMQ's own heartbeats: how often either end pings, and how long it waits for the answer. Its clock also runs while the process
that waits is paused, so the wait is long."""


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Ends connections to machines that have vanished. To be called before the socket is bound or connected."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, NO_PONG_MS)


class LinkLost(Exception):
    """The connection has ended; the sentence says what was observed."""


class Link(Protocol):
    """What `FleetLinks` needs of a connection to an instance: `InstanceLink`, or that to a server without the plugin."""

    closed: bool

    async def open(self, instance_epoch: str, timeout_s: float) -> None: ...
    async def send(self, message: ToInstance, frames: Sequence[Any] = ()) -> None: ...
    async def receive(self) -> list[bytes]: ...
    async def ended(self) -> str: ...
    def close(self, *, bye: bool = False) -> None: ...


class InstanceLink:
    """Sends and receives whole messages, in order, until it is lost or closed.

    gateway: its address. session: of this front-end, larger than that of any link before it. secret: of the fleet, if it has one.
    limits: by which its life is judged.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        gateway: str,
        frontend_id: str,
        session: int,
        secret: FleetSecret | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._gateway = gateway
        self._limits = limits or Limits()
        self._hello = Hello(frontend_id, session=session)
        self.closed = False
        self._heard = False
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 500  # of a goodbye
        self._socket.set_hwm(0)  # sends never wait: an abort cannot overtake an announcement
        self._socket.setsockopt(zmq.ROUTING_ID, f"{frontend_id}.{session}".encode())
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        keep_alive(self._socket)
        self._socket.maxmsgsize = LONGEST_ANSWER_FRAME_BYTES
        secure_client(self._socket, secret)
        self._doubt = "" if secret is None else "; does it hold another fleet secret?"
        try:
            self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        except zmq.ZMQError:  # no files are left
            self._socket.close(linger=0)
            raise

    async def open(self, instance_epoch: str, timeout_s: float) -> None:
        """Returns when the instance of this epoch has answered and its engine core runs; raises ConfigError, naming the gateway."""
        try:
            _host_and_port(self._gateway)
            self._socket.connect(self._gateway)
        except (ValueError, zmq.ZMQError) as error:
            raise ConfigError(f"the gateway's address {self._gateway} is none: {error}") from error
        await self.send(self._hello)
        try:
            await asyncio.wait_for(self._greet(instance_epoch), timeout_s)
        except TimeoutError:
            raise ConfigError(f"the gateway {self._gateway} does not answer{self._doubt}") from None
        except LinkLost as error:
            raise ConfigError(f"the gateway {self._gateway} does not answer: {error}") from error
        except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(f"the gateway {self._gateway} does not answer as one: {error}") from error

    async def _greet(self, instance_epoch: str) -> None:
        """A gateway answers also for an engine core that is stopped: only a second pulse proves that it runs. And an engine core pulses
        while its workers hang."""
        pulses: set[int] = set()
        welcome = False
        while not welcome or len(pulses) < 2:
            message = _DECODER.decode((await self.receive())[0])
            if isinstance(message, Welcome):
                if message.instance_epoch != instance_epoch:
                    raise ConfigError(f"the gateway {self._gateway} belongs to another instance")
                welcome = True
            elif isinstance(message, Beat) and message.pulse is not None:
                if (reason := self._limits.why_stuck(message.pulse)) is not None:
                    raise ConfigError(f"the instance of gateway {self._gateway} hangs: {reason}")
                pulses.add(message.pulse.number)

    async def send(self, message: ToInstance, frames: Sequence[Any] = ()) -> None:
        """What is sent on a closed link is lost, as on a link whose other end has gone."""
        if not self.closed:
            with contextlib.suppress(zmq.Again):  # the connection has ended; without NOBLOCK this would wait for another one
                await self._socket.send_multipart([msgspec.msgpack.encode(message), *frames], zmq.NOBLOCK)

    async def receive(self) -> list[bytes]:
        """The next message; raises LinkLost when there will be none."""
        try:
            frames: list[bytes] = await self._socket.recv_multipart()
        except (zmq.ZMQError, asyncio.CancelledError) as error:
            if self.closed:
                raise LinkLost("closed") from error
            raise
        self._heard = True
        return frames

    async def ended(self) -> str:
        """Waits until the connection has ended, or the instance answers no more, and returns how."""
        cut, silent = asyncio.create_task(self._cut()), asyncio.create_task(self._silent())
        try:
            await asyncio.wait((cut, silent), return_when=asyncio.FIRST_COMPLETED)
            return (cut if cut.done() else silent).result()
        finally:
            cut.cancel()
            silent.cancel()
            await asyncio.gather(cut, silent, return_exceptions=True)

    async def _silent(self) -> str:
        now_s = asyncio.get_running_loop().time
        unanswered = 0
        greeting: asyncio.Task[bool] | None = None
        try:
            while unanswered < MOST_UNANSWERED:
                before_s = now_s()
                await asyncio.sleep(LOOK_S)
                on_time = now_s() - before_s < LATE_LOOK_S
                heard, self._heard = self._heard, False
                if greeting is not None and greeting.done():
                    heard |= greeting.result()
                    greeting = None
                unanswered = 0 if heard else unanswered + on_time
                if not heard and greeting is None:
                    greeting = asyncio.create_task(_greeted(*_host_and_port(self._gateway)))
        finally:
            if greeting is not None:
                greeting.cancel()
        return f"its API process has not answered for {MOST_UNANSWERED * LOOK_S:g} s"

    async def _cut(self) -> str:
        try:
            event = parse_monitor_message(await self._monitor.recv_multipart())
        except (zmq.ZMQError, asyncio.CancelledError) as error:
            if self.closed:
                raise LinkLost("closed") from error
            raise
        return "its connection was cut" if event["event"] == zmq.EVENT_DISCONNECTED else "its connection was closed"

    def close(self, *, bye: bool = False) -> None:
        """bye: say so, for the instance to stop what runs for us. Idempotent; also where the event loop has gone."""
        if self.closed:
            return
        self.closed = True
        if self._socket.closed:  # with its context
            return
        if bye:
            with contextlib.suppress(zmq.Again):  # the connection has ended
                zmq.Socket.shadow(self._socket.underlying).send(msgspec.msgpack.encode(Bye()), zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=None if bye else 0)


def _host_and_port(gateway: str) -> tuple[str, int]:
    """Raises ValueError."""
    at = urlsplit(gateway)
    if at.scheme != "tcp" or not at.hostname or at.port is None:
        raise ValueError("it is not tcp://HOST:PORT")
    return at.hostname, at.port


async def _greeted(host: str, port: int) -> bool:
    """Whether a ZeroMQ socket there sends the first byte that it sends to anybody (ZMTP 3.1, 2.1). Waits for it for ever."""
    try:
        reader, writer = await asyncio.open_connection(host, port, family=socket.AF_INET)  # as ZeroMQ does without its IPV6 option
    except OSError:
        return False
    try:
        return bool(await reader.read(1))
    except OSError:
        return False
    finally:
        writer.close()
