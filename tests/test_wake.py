"""The bell of a worker and the alarm of an engine core, over real sockets."""

from __future__ import annotations

import contextlib
import threading
import time

import msgspec
import pytest
import zmq

pytest.importorskip("vllm")

from vllm_plugin.wake import Alarm, Bell


def test_a_bell_sets_the_alarm_off() -> None:
    bell, woken = Bell("127.0.0.1", 0), threading.Event()
    alarm = Alarm([bell.address], woken.set)
    while not woken.wait(0.01):  # the first rings may come before the sockets are connected
        bell.ring()
    assert alarm.rings.is_set()
    alarm.close()
    bell.close()


def test_a_bell_tells_of_landed_blocks_without_asking_for_a_step() -> None:
    bell, woken = Bell("127.0.0.1", 0), threading.Event()
    alarm = Alarm([bell.address], woken.set)
    while not woken.wait(0.01):
        bell.ring_landed("t", 3)
    assert alarm.landed[0] == ("t", 0, 3)
    assert not alarm.rings.is_set()
    alarm.close()
    bell.close()


def test_an_alarm_hears_of_each_worker_which_one_it_is() -> None:
    bells = [Bell("127.0.0.1", rank) for rank in (0, 1)]
    alarm = Alarm([bell.address for bell in bells], lambda: None)
    heard: set[tuple[str, int, int]] = set()
    while len(heard) < 2:
        for bell in bells:
            bell.ring_landed("t", 3)
        time.sleep(0.01)
        while alarm.landed:
            heard.add(alarm.landed.popleft())
    assert heard == {("t", 0, 3), ("t", 1, 3)}
    assert alarm.dropped == 0
    alarm.close()
    for bell in bells:
        bell.close()


def test_a_signal_that_no_worker_can_have_sent_is_dropped_and_counted() -> None:
    malformed = [b"\xc1", *map(msgspec.msgpack.encode, [("t", 3), ("t", 1, 3), ("t", -1, 3), ("t", 0, -3), ("t", "0", 3)])]
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        alarm = Alarm([f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"], lambda: None)
        for sign in [*malformed, msgspec.msgpack.encode(("t", 0, 2))]:
            socket.send(sign)
        while not alarm.landed:
            time.sleep(0.01)
        assert list(alarm.landed) == [("t", 0, 2)]
        assert alarm.dropped == len(malformed)
        assert not alarm.rings.is_set()
        alarm.close()


def test_a_bell_that_nobody_hears_is_rung_without_waiting() -> None:
    bell = Bell("127.0.0.1", 0)
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


def test_an_alarm_goes_off_in_time_though_signals_come_all_the_time() -> None:
    bell, woken = Bell("127.0.0.1", 0), []
    alarm = Alarm([bell.address], lambda: woken.append(time.monotonic()))
    rung = 0
    with contextlib.closing(bell), contextlib.closing(alarm):
        alarm.deadline_s = time.monotonic() + 0.1
        while not alarm.rings.wait(0.05) and rung < 200:
            bell.ring_landed("t", 1)
            rung += 1
        assert alarm.rings.is_set()
    assert rung < 200, "it goes off between two signals"


def test_a_closed_alarm_leaves_no_thread() -> None:
    alarm = Alarm([], lambda: None)
    alarm.close()
    assert not alarm._thread.is_alive()
