"""Cuts the TCP connections of living processes, as a network that fails does: their sockets are shut down from outside."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

_PIDFD_GETFD = 438
"""The system call, on every architecture (Linux 5.6); whoever may trace a process may have its files."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def cut_port(pid: int, port: int) -> int:
    """All connections of this process in which either end has this port. Returns how many ends."""
    cut = 0
    for connected in _connections(pid):
        with suppress(OSError):
            if port in (connected.getsockname()[1], connected.getpeername()[1]):
                connected.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def cut_sockets(pids: Sequence[int]) -> int:
    """All connections of these processes but those among themselves. Returns how many."""
    own_ports = {connected.getsockname()[1] for pid in pids for connected in _connections(pid)}
    cut = 0
    for pid in pids:
        for connected in _connections(pid):
            with suppress(OSError):  # its peer was faster
                if connected.getpeername()[1] not in own_ports:
                    connected.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def _connections(pid: int) -> Iterator[socket.socket]:
    """Duplicates, each open until the next one is asked for."""
    pidfd = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if (found := _socket_of(pidfd, link)) is None:
                continue
            with found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM and _is_connected(found):
                    yield found
    finally:
        os.close(pidfd)


def _socket_of(pidfd: int, link: Path) -> socket.socket | None:
    with suppress(FileNotFoundError):  # closed meanwhile
        if not str(link.readlink()).startswith("socket:"):
            return None
        duplicate = _LIBC.syscall(_PIDFD_GETFD, pidfd, int(link.name), 0)
        if duplicate >= 0:
            try:
                return socket.socket(fileno=duplicate)
            except OSError:  # the number is that of another file by now
                os.close(duplicate)
                return None
        if (error := ctypes.get_errno()) != errno.EBADF:
            raise OSError(error, os.strerror(error))
    return None


def _is_connected(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True
