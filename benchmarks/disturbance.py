"""A busy process on the core that computes, for a while."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

_SPIN = "while True: pass"


@dataclass(frozen=True)
class Disturbance:
    """Monotonic seconds, of the same clock as the steps of the log."""

    began_s: float
    ended_s: float


def disturb(core: int, seconds: float, work: Callable[[], object]) -> Disturbance:
    """Runs `work`, which lasts about three times `seconds`, and disturbs the core in the middle."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        time.sleep(seconds)
        began_s = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", _SPIN])
        try:
            os.sched_setaffinity(process.pid, {core})
            time.sleep(seconds)
        finally:
            process.kill()
            process.wait()
        ended_s = time.monotonic()
        working.result()
    return Disturbance(began_s, ended_s)
