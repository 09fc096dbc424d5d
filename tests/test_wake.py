"""The bell of a worker and the alarm of an engine core, over real sockets."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("vllm")

from vllm_plugin.wake import Alarm, Bell


def test_a_bell_sets_the_alarm_off() -> None:
    bell, woken = Bell("127.0.0.1"), threading.Event()
    alarm = Alarm([bell.address], woken.set)
    while not woken.wait(0.01):  # the first rings may come before the sockets are connected
        bell.ring()
    assert alarm.rings.is_set()
    alarm.close()
    bell.close()


def test_a_bell_tells_of_landed_blocks_without_asking_for_a_step() -> None:
    bell, woken = Bell("127.0.0.1"), threading.Event()
    alarm = Alarm([bell.address], woken.set)
    while not woken.wait(0.01):
        bell.ring_landed("t", 3)
    assert alarm.landed[0] == ("t", 3)
    assert not alarm.rings.is_set()
    alarm.close()
    bell.close()


def test_a_bell_that_nobody_hears_is_rung_without_waiting() -> None:
    bell = Bell("127.0.0.1")
    for _ in range(1000):
        bell.ring()
    bell.close()


def test_an_alarm_goes_off_once_when_time_is_up() -> None:
    woken: list[float] = []
    alarm = Alarm([], lambda: woken.append(time.monotonic()))
    deadline_s = time.monotonic() + 0.05
    alarm.deadline_s = deadline_s
    assert alarm.rings.wait(30)
    assert alarm.deadline_s is None
    alarm.close()
    assert len(woken) == 1
    assert woken[0] >= deadline_s


def test_a_closed_alarm_leaves_no_thread() -> None:
    alarm = Alarm([], lambda: None)
    alarm.close()
    assert not alarm._thread.is_alive()
