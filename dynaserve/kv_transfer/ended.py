"""Whether the process of a peer has ended, as far as its machine says."""

from __future__ import annotations

import socket

TIMEOUT_S = 1.0


def nobody_listens(control: str) -> bool:
    """Whether the machine of this endpoint (`tcp://host:port`) says that no process has the port: the one that had it has ended.

    A process that is stopped still has it, and a machine that is cut off says nothing.
    """
    host, _, port = control.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # silent, or no address at all
        return False
    return False
