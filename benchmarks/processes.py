"""What processes of a fleet hold."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Held:
    """By one process. memory_bytes: its own, unshared; open_files: file descriptors, sockets among them."""

    memory_bytes: int
    open_files: int
    sockets: int
    threads: int


def held(pid: int) -> Held:
    process = psutil.Process(pid)
    with process.oneshot():
        sockets = len(process.net_connections("all"))
        return Held(process.memory_full_info().uss, process.num_fds(), sockets, process.num_threads())
