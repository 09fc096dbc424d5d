"""Control messages between transfer agents: each comes once, and in order, whatever happens to the connections meanwhile.

ZeroMQ loses in silence what is under way on a connection that ends, and connects anew.  A lost `Closed` or `Done` would keep
blocks for ever, so a message has a sequence number and is kept until its receiver has acknowledged it; on the next connection
all that are kept are sent again, and the receiver drops what it has had.  Nothing is sent twice on one connection: TCP does that.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq

from dynaserve.fleet_secret import FleetSecret, may_reach, secure_client, secure_server
from dynaserve.kv_transfer.transport import TransportError, WorkerEndpoint
from dynaserve.kv_transfer.wire import LONGEST_MESSAGE_BYTES, Ack, Envelope, Message

logger = logging.getLogger("vllm.dynaserve.kv_transfer")

_ACK = msgspec.msgpack.Decoder(Ack)
_ENVELOPE = msgspec.msgpack.Decoder(Envelope)
_MESSAGE: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_UNREADABLE = (ValueError, msgspec.MsgspecError, RecursionError)
"""What the decoders raise, the last of them for 2 kB that are nested too deeply."""
_UNUSABLE = (errno.EINVAL, errno.ENODEV, errno.EPROTONOSUPPORT)
"""What ZeroMQ says of an address that is none. All else is a want of files, sockets or memory, and passes."""

KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 5, 5, 3
"""After how long without a word the kernel asks the other end's whether the connection is still there, how often, and how many times."""
LONGEST_UNACKNOWLEDGED_MS = 20_000
"""For how long the other end's kernel may leave what was sent without an answer; Linux alone would try for a quarter of an hour. A machine
that has vanished, and a firewall that has forgotten the connection, are noticed in this time. A stopped process is not cut, for its kernel
answers, until that has room for nothing more; then what it has not acknowledged is sent again."""


class ControlPlane:
    """All control connections of one worker; used by one thread.

    host: address to bind to. poller: holds all of its sockets. dropped: messages that could not be read or sent.
    owes_acks: `send_acks` has something to do, which may wait: it bounds what senders keep. lacks_connections: `take_cut` has
    something to tell, of which no socket of the poller says anything.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], worker_id: str, host: str, secret: FleetSecret | None) -> None:
        self.poller = zmq.Poller()
        self.dropped = 0
        self._context = context
        self._worker_id = worker_id
        self._secret = secret
        self._outboxes: dict[str, _Outbox] = {}
        self._sessions = itertools.count()
        self._heard: dict[str, tuple[int, int]] = {}
        """By sender: its session, and the number that comes next. A few bytes for each start of a peer."""
        self._owed: dict[bytes, int] = {}
        self._inbox = context.socket(zmq.ROUTER)
        self._inbox.linger = 0
        self._inbox.maxmsgsize = LONGEST_MESSAGE_BYTES
        _keep_alive(self._inbox)
        secure_server(self._inbox, secret)
        self._inbox.bind_to_random_port(f"tcp://{host}")
        # By number: ZeroMQ says nothing of a name that cannot be looked up for a moment.
        self.address = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.poller.register(self._inbox, zmq.POLLIN)

    @property
    def owes_acks(self) -> bool:
        return bool(self._owed)

    @property
    def lacks_connections(self) -> bool:
        return any(outbox.has_failed for outbox in self._outboxes.values())

    def send(self, peer: WorkerEndpoint, message: Message) -> None:
        """Never waits. What cannot be sent to anybody, its address being none, is counted as dropped; what cannot be sent now is kept."""
        if peer.worker_id not in self._outboxes:
            self._outboxes[peer.worker_id] = _Outbox(self, peer, self._worker_id, next(self._sessions))
        outbox = self._outboxes[peer.worker_id]
        try:
            outbox.send(message)
        except (zmq.ZMQError, TransportError) as error:
            may_pass = isinstance(error, zmq.ZMQError) and error.errno not in _UNUSABLE
            if outbox.has_connected or may_pass:
                _tell_retry(peer.worker_id, error)
                return
            del self._outboxes[peer.worker_id]
            self.dropped += 1
            logger.warning("dropped a message to %s at %r: %s", peer.worker_id, peer.control, error)

    def receive(self) -> Iterator[Message]:
        """What has come."""
        while True:
            try:
                connection, *frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                (frame,) = frames
                envelope = _ENVELOPE.decode(frame)
                # What is rubbish in an envelope has its number: the messages behind it are not held up.
                if self._is_next(envelope, connection):
                    yield _MESSAGE.decode(envelope.message)
            except _UNREADABLE as error:
                self.dropped += 1
                logger.warning("dropped a malformed transfer message of %d bytes: %s", sum(map(len, frames)), error)

    def _is_next(self, envelope: Envelope, connection: bytes) -> bool:
        sender_id, session = envelope.sender_id, envelope.session
        current, number = self._heard.get(sender_id, (-1, 0))
        if session > current:  # the sender had forgotten us, or we hear it for the first time
            current, number = session, 0
        if session < current or envelope.number > number:
            self.dropped += 1
            logger.warning("dropped message %d.%d of %s: %d.%d comes next", session, envelope.number, sender_id, current, number)
            return False
        is_new = envelope.number == number
        self._heard[sender_id] = current, number + is_new
        self._owed[connection] = number + is_new
        return is_new

    def send_acks(self) -> None:
        for connection, count in self._owed.items():
            self._inbox.send_multipart([connection, msgspec.msgpack.encode(Ack(count))], zmq.NOBLOCK)  # dropped where it has ended
        self._owed.clear()

    def take_cut(self) -> list[WorkerEndpoint]:
        """Peers to which the connection has ended since the last call, or could not be made though something waits for it."""
        return [outbox.peer for outbox in self._outboxes.values() if outbox.has_been_cut()]

    def peer(self, worker_id: str) -> WorkerEndpoint | None:
        """One that has been sent something and not been forgotten."""
        return self._outboxes[worker_id].peer if worker_id in self._outboxes else None

    def reconnect(self, worker_id: str) -> None:
        """Sends again what has not been acknowledged, if that takes a new connection; else the next message makes it."""
        if worker_id in self._outboxes and self._outboxes[worker_id].unacknowledged:
            try:
                self._outboxes[worker_id].connect()
            except zmq.ZMQError as error:
                _tell_retry(worker_id, error)

    def forget(self, worker_id: str) -> None:
        if worker_id in self._outboxes:
            self._outboxes.pop(worker_id).disconnect()

    def open_socket(self, peer: WorkerEndpoint) -> zmq.Socket[bytes]:
        if not peer.control.startswith("tcp://"):
            raise TransportError("it is not tcp://HOST:PORT")
        if not may_reach(peer.control, self._secret):
            raise TransportError("without a fleet secret only loopback is reached")
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.set_hwm(0)  # the control thread must never wait for a peer
        socket.maxmsgsize = LONGEST_MESSAGE_BYTES
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        _keep_alive(socket)
        secure_client(socket, self._secret)
        return socket


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    """To be called before the socket is bound or connected."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, LONGEST_UNACKNOWLEDGED_MS)  # while something is unacknowledged the kernel does not ask


def _tell_retry(worker_id: str, error: Exception) -> None:
    """No files are left, for instance. The next message or the next look at the peer tries again."""
    logger.warning("no connection to %s, which is tried again: %s", worker_id, error)


class _Outbox:
    """What goes to one peer, over one connection after the other.

    unacknowledged: encoded, by number, from the oldest on. has_failed: it could not be connected, which nobody has been told yet.
    """

    def __init__(self, plane: ControlPlane, peer: WorkerEndpoint, worker_id: str, session: int) -> None:
        self.peer = peer
        self.unacknowledged: deque[bytes] = deque()
        self.has_connected = False
        self.has_failed = False
        self._plane = plane
        self._worker_id = worker_id
        self._session = session
        self._acknowledged = 0
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def send(self, message: Message) -> None:
        """Raises zmq.ZMQError or TransportError where the peer's address is none."""
        number = self._acknowledged + len(self.unacknowledged)
        self.unacknowledged.append(
            msgspec.msgpack.encode(Envelope(self._worker_id, self._session, number, msgspec.Raw(msgspec.msgpack.encode(message))))
        )
        if self._socket is None:
            self.connect()
        else:
            self._write(self._socket, self.unacknowledged[-1])

    def connect(self) -> None:
        if self._socket is not None:
            return
        self.has_failed = True
        socket = self._plane.open_socket(self.peer)
        try:
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
            socket.connect(self.peer.control)
        except zmq.ZMQError:
            socket.disable_monitor()
            socket.close(linger=0)
            raise
        self._socket, self._monitor, self.has_connected, self.has_failed = socket, monitor, True, False
        for opened in (socket, monitor):
            self._plane.poller.register(opened, zmq.POLLIN)
        for frame in self.unacknowledged:
            self._write(self._socket, frame)

    @staticmethod
    def _write(socket: zmq.Socket[bytes], frame: bytes) -> None:
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # the connection has ended, as its monitor is about to say: it goes over the next one
            return

    def has_been_cut(self) -> bool:
        """Since the last call, or could not be connected. Takes what the peer has acknowledged before."""
        if self._socket is None or self._monitor is None:
            failed, self.has_failed = self.has_failed, False
            return failed
        while self._socket.poll(0):
            self._take_ack(self._socket.recv())
        if not self._monitor.poll(0):
            return False
        self.disconnect()
        return True

    def _take_ack(self, frame: bytes) -> None:
        try:
            count = _ACK.decode(frame).count
        except _UNREADABLE as error:
            self._plane.dropped += 1
            logger.warning("dropped a malformed acknowledgement of %s: %s", self.peer.worker_id, error)
            return
        for _ in range(min(count - self._acknowledged, len(self.unacknowledged))):
            self.unacknowledged.popleft()
            self._acknowledged += 1

    def disconnect(self) -> None:
        if self._socket is None or self._monitor is None:
            return
        for socket in (self._socket, self._monitor):
            self._plane.poller.unregister(socket)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._socket = self._monitor = None
