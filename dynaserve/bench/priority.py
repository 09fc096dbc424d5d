"""A client that shares its machine with the servers it measures goes before them, where it may: on a busy core it would stamp tokens
late, and a server would be told late for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NICENESS = -10


@contextmanager
def before_servers() -> Iterator[int]:
    """Of this thread, for as long as it lasts. Yields the niceness that it runs with: unchanged where the system allows no lower one,
    as it does without privileges."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(usual, _NICENESS))
    except PermissionError:
        yield usual
        return
    try:
        yield os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)
