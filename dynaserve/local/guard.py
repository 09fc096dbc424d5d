"""Runs one command, and leaves none of its processes behind, however the command, its parent or this process is stopped.

`python -m dynaserve.local.guard GRACE_S COMMAND ...`: the parent holds the other end of stdin and ends the command by
closing it, which the kernel does for a parent that was killed. As a "subreaper" this process inherits every orphan of
the command, so that none can escape. Exit status: the command's, or 128 + the number of the signal that ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_S = 10.0


class Stopped(Exception):
    """A signal asked this process to end."""


def main() -> None:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    child: subprocess.Popen[bytes] | None = None
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
        _wait_for_parent_or(child)
    except Stopped:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        status = 1 if child is None else _end(child, grace_s)
        _kill_orphans()
    raise SystemExit(status if status >= 0 else 128 - status)


def _wait_for_parent_or(child: subprocess.Popen[bytes]) -> None:
    handle = os.pidfd_open(child.pid)
    try:
        select.select([sys.stdin.fileno(), handle], [], [])
    finally:
        os.close(handle)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> int:
    if child.poll() is None:
        child.terminate()
    try:
        return child.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _kill_orphans() -> None:
    """Until none is left: a process may start another while it is being killed."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (orphans := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(0.01)


def _die_with_parent() -> None:
    """The last belt, for a guard that gets SIGKILL."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    main()
