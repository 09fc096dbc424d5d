"""Runs the long steps of the installation with a live line each, and shows the last lines of one that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

SHOWN_LINES = 15
QUIET_INTERVAL_S = 20.0  # between lines where there is no terminal to overwrite one on
NOISE = ("Requirement already satisfied", "WARNING: Location")


class StepFailed(Exception):
    """A step's command ended with another status than 0."""


def run_step(title: str, command: Sequence[str], log: Path, *, accept_failure: bool = False) -> bool:
    """Runs `command` to its end, its output appended to `log`; True if it succeeded.

    Raises StepFailed with the last lines unless `accept_failure`.
    """
    started = time.monotonic()
    tail: deque[str] = deque(maxlen=SHOWN_LINES)
    with (
        log.open("a") as log_file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as process,
    ):
        log_file.write(f"$ {' '.join(command)}\n")
        reader = threading.Thread(target=_read, args=(process.stdout, log_file, tail))
        reader.start()
        _watch(title, process, tail, started)
        reader.join()
    succeeded = process.returncode == 0
    if not succeeded and not accept_failure:
        shown = "\n".join(f"    {line}" for line in tail)
        raise StepFailed(f"{title}: failed with status {process.returncode}; its last lines (all of them are in {log}):\n{shown}")
    _show(f"  {title}: {'done' if succeeded else 'not available'}, {time.monotonic() - started:.0f} s", end=True)
    return succeeded


def _read(lines: Iterable[str], log_file: IO[str], tail: deque[str]) -> None:
    for line in lines:
        log_file.write(line)
        if line.strip() and not line.startswith(NOISE):
            tail.append(line.rstrip())


def _watch(title: str, process: subprocess.Popen[str], tail: Sequence[str], started: float) -> None:
    live = sys.stdout.isatty()
    shown = started
    while True:
        try:
            process.wait(timeout=1)
            return
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if live or now - shown >= QUIET_INTERVAL_S:
            shown = now
            _show(f"  {title}: {now - started:.0f} s  {tail[-1].strip()[:70] if tail else ''}", end=not live)


def _show(text: str, *, end: bool) -> None:
    start = "\r\x1b[2K" if sys.stdout.isatty() else ""
    print(start + text, end="\n" if end else "", flush=True)
