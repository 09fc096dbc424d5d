"""Child processes with a log file each, of which nothing is left after `stop`, nor after this process was killed."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

GUARD_MARGIN_S = 15.0
ERROR = re.compile(r"(?:^|(?<= ))[\w.]+(?:Error|Exception): \S.*")


@dataclass(frozen=True)
class Child:
    """A command under its guard (see `guard`), in a process group of its own: Ctrl-C at the terminal does not reach it.

    Not in a session of its own: Linux shares cores out between sessions (autogroup), and of a session with an engine that keeps one core
    busy little is left for its server on another core, which then waits for hundreds of milliseconds whenever it wakes.

    grace_s: how long a stop waits between SIGTERM and SIGKILL.
    """

    name: str
    log: Path
    guard: subprocess.Popen[bytes]
    grace_s: float

    @property
    def exit_status(self) -> int | None:
        """None while the command runs; 128 + the signal's number if one ended it."""
        return self.guard.poll()

    @property
    def pids(self) -> list[int]:
        """The command, then its descendants; empty once it ended."""
        return [process.pid for process in self.descendants()]

    def descendants(self) -> list[psutil.Process]:
        if self.exit_status is not None:  # the guard's pid may name another process by now
            return []
        try:
            return psutil.Process(self.guard.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def errors(self, count: int = 3) -> list[str]:
        """The first different `SomeError: ...` of the log: the cause, which the last lines often do not show."""
        with self.log.open(errors="replace") as lines:
            found = dict.fromkeys(match[0] for line in lines if (match := ERROR.search(line)))
        return list(found)[:count]

    def last_lines(self, count: int = 20) -> str:
        with self.log.open(errors="replace") as lines:
            return "".join(deque(lines, maxlen=count)).rstrip()


def start_child(name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, grace_s: float = 15.0) -> Child:
    """Starts `command`, its output going to `log`. `env` is added to this process's environment."""
    with log.open("wb") as output:
        guard = subprocess.Popen(
            [sys.executable, "-m", "dynaserve.local.guard", str(grace_s), *command],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    return Child(name, log, guard, grace_s)


def stop_children(children: Iterable[Child]) -> None:
    """SIGTERM to all commands at once, then SIGKILL to what is left of each tree after its grace. Idempotent."""
    trees = [(child, child.descendants()) for child in children]
    for child, _ in trees:
        assert child.guard.stdin is not None
        child.guard.stdin.close()
    for child, tree in trees:
        try:
            child.guard.wait(timeout=child.grace_s + GUARD_MARGIN_S)
        except subprocess.TimeoutExpired:
            child.guard.kill()
            child.guard.wait()
        for process in tree:  # dead already, unless the guard itself was killed
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
