"""A busy process on the core that computes, for a while."""

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


@dataclass(frozen=True)
class Disturbance:
    """Monotonic seconds, of the same clock as the steps of the log. core_share: of the core, what the process got."""

    began_s: float
    ended_s: float
    core_share: float


def disturb(core: int, seconds: float, work: Callable[[], object]) -> Disturbance:
    """Runs `work`, which lasts about three times `seconds`, and disturbs the core in the middle."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        time.sleep(seconds)
        began_s = time.monotonic()
        # A session of its own: Linux shares a core between sessions first.
        process = subprocess.Popen([sys.executable, "-c", _SPIN], start_new_session=True)
        try:
            os.sched_setaffinity(process.pid, {core})
            time.sleep(seconds)
            used = psutil.Process(process.pid).cpu_times()
        finally:
            process.kill()
            process.wait()
        ended_s = time.monotonic()
        working.result()
    return Disturbance(began_s, ended_s, (used.user + used.system) / (ended_s - began_s))
