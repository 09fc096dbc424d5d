"""The engine core's signs of life, over a real socket."""

from __future__ import annotations

import msgspec
import pytest
import zmq

pytest.importorskip("vllm")

import torch

from dynaserve.messages import Holding, Pulse
from vllm_plugin.heart import REST_S, Heart, StepClock


def test_a_pulse_tells_the_oldest_step_in_progress() -> None:
    steps, first, second = StepClock(), object(), object()
    assert steps.pulse(1, 10.0) == Pulse(1)
    steps.begin(first, 10.0, 20.0)
    steps.begin(second, 10.5, None)
    assert steps.pulse(2, 11.0) == Pulse(2, 2, 1.0, 20.0)
    steps.end(first)
    assert steps.pulse(3, 11.0) == Pulse(3, 2, 0.5, None)
    steps.end(second)
    steps.holding = Holding(parked=2, quarantined_blocks=7)
    assert steps.pulse(4, 11.0) == Pulse(4, 2, holding=Holding(2, 0, 7))


def test_the_end_of_a_step_ends_those_before_it() -> None:
    steps, first, second = StepClock(), object(), object()
    steps.begin(first, 10.0, None)
    steps.begin(second, 10.5, None)
    steps.end(second)
    assert steps.pulse(1, 11.0) == Pulse(1, 2)


def test_the_heart_beats_while_this_thread_computes() -> None:
    heart = Heart("127.0.0.1", StepClock())
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.connect(heart.address)
        first = msgspec.msgpack.decode(socket.recv(), type=Pulse).number
        matrix = torch.ones(500, 500)
        while not socket.poll(0):  # a step is nothing but this
            matrix = matrix @ matrix * 2e-3
        assert msgspec.msgpack.decode(socket.recv(), type=Pulse).number > first
        heart.close()


def test_a_heart_that_nobody_feels_does_not_wait() -> None:
    heart = Heart("127.0.0.1", StepClock())
    heart.close()


def test_an_engine_is_at_rest_a_while_after_its_last_step() -> None:
    clock = StepClock()
    assert clock.at_rest(0.0), "it has not run yet"
    clock.active_s = 10.0
    assert not clock.at_rest(10.0 + 0.9 * REST_S)
    assert clock.at_rest(10.0 + 1.1 * REST_S)
