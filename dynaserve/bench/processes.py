"""CPU time that processes of a measured system spend."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of these processes so far, user and system."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


class CpuTime:
    """Of these processes, since it was made. One that has ended in between does not count."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._before_s = _spent_s(pids)

    def spent_s(self) -> float:
        return sum(now_s - self._before_s[pid] for pid, now_s in _spent_s(self._before_s).items())


def _spent_s(pids: Iterable[int]) -> dict[int, float]:
    spent_s = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            spent_s[pid] = cpu_s([pid])
    return spent_s
