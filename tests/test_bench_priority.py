"""The niceness of the bench client: lower than the servers' where that is allowed, and never for longer than a replay."""

from __future__ import annotations

import multiprocessing
import os
import resource
from multiprocessing.connection import Connection

import pytest

from dynaserve.bench.priority import before_servers

NOBODY = 65534


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def expected(usual: int) -> int:
    """Whether this process may is not told by its user: root in a container may not."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(usual, -10))
    except PermissionError:
        return usual
    os.setpriority(os.PRIO_PROCESS, 0, usual)
    return min(usual, -10)


def test_what_it_tells_is_what_it_has_and_it_gives_it_back_whatever_happens() -> None:
    usual = niceness()
    lowered = expected(usual)
    with before_servers() as told:
        assert told == niceness() == lowered
    assert niceness() == usual
    with pytest.raises(ValueError, match="of the replay"), before_servers():
        raise ValueError("of the replay")
    assert niceness() == usual


def replay_unprivileged(told: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    before = niceness()
    with before_servers() as during:
        told.send((before, during, niceness()))


def test_without_the_right_to_it_stays_as_it_is() -> None:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=replay_unprivileged, args=(there,))
    child.start()
    try:
        assert here.poll(60)
        before, during, actual = here.recv()
    finally:
        child.join()
    assert before == during == actual
