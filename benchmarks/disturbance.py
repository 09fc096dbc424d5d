"""Busy processes on the core that computes, for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

_SPIN = "while True: pass"
PROCESSES = 8
"""One of them alone gets 9 to 15 % of a core beside a vLLM worker (Linux 6.18, why is not known), which makes steps 1.03 times as long."""


@dataclass(frozen=True)
class Disturbance:
    """Monotonic seconds, of the same clock as the steps of the log. core_share: of the core, what the processes got."""

    began_s: float
    ended_s: float
    core_share: float


def disturb(core: int, seconds: float, work: Callable[[], object]) -> Disturbance:
    """Runs `work`, which lasts about three times `seconds`, and disturbs the core in the middle."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        time.sleep(seconds)
        began_s = time.monotonic()
        # Sessions of their own: Linux shares a core between sessions first.
        processes = [subprocess.Popen([sys.executable, "-c", _SPIN], start_new_session=True) for _ in range(PROCESSES)]
        try:
            for process in processes:
                os.sched_setaffinity(process.pid, {core})
            time.sleep(seconds)
            used_s = sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process in processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        ended_s = time.monotonic()
        working.result()
    return Disturbance(began_s, ended_s, used_s / (ended_s - began_s))
