"""Signs of life of the engine core, from a thread that goes on while a step runs.

vLLM's engine core says nothing while it computes, so its silence tells a long step from a stopped process no better than its
answers do.  torch's operations give the interpreter free, so this thread runs beside the forward pass, wherever that happens.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import zmq

from dynaserve.fleet_secret import FleetSecret, secure_server
from dynaserve.messages import Holding, Pulse

PULSE_S = 0.2
REST_S = 0.02
"""Since the end of a step. On a CPU the next one takes 14 % longer after 0.14 s, and 1 to 5 % after 0.06 s (docs/measurements.md). Short
enough for a second dummy batch half way between the first one and the hand-over where a step takes 40 ms."""


@dataclass
class StepClock:
    """Which engine steps are in progress; several are where vLLM schedules ahead. Written by one thread, read by another.

    active_s: when the model ran last, on the monotonic clock; many steps only carry messages. holding: after the newest step.
    """

    begun: int = 0
    active_s: float = -math.inf
    holding: Holding = field(default_factory=Holding)
    _running: deque[tuple[int, float, float | None]] = field(default_factory=deque)

    def begin(self, output: object, now_s: float, predicted_ms: float | None) -> None:
        """output: what the scheduler has scheduled."""
        self.begun += 1
        self._running.append((id(output), now_s, predicted_ms))

    def at_rest(self, now_s: float) -> bool:
        """Whether the next step is likely to take longer than those that follow it."""
        return now_s - self.active_s > REST_S

    def end(self, output: object) -> None:
        """Steps that were scheduled before this one are over as well."""
        while any(name == id(output) for name, *_ in self._running):
            self._running.popleft()

    def pulse(self, number: int, now_s: float) -> Pulse:
        oldest = next(iter(self._running.copy()), None)
        if oldest is None:
            return Pulse(number, self.begun, holding=self.holding)
        _, began_s, predicted_ms = oldest
        running_s = max(0.0, now_s - began_s)  # it may have begun since
        return Pulse(number, self.begun, running_s, predicted_ms, self.holding)


class Heart:
    """Sends a `Pulse` every `PULSE_S` to whoever connects to `address`, the gateway, and never waits for it."""

    def __init__(self, host: str, steps: StepClock, secret: FleetSecret | None = None) -> None:
        self._steps = steps
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.linger = 0
        self._socket.set_hwm(4)  # old pulses say nothing
        secure_server(self._socket, secret)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynaserve-heart", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(PULSE_S):
            number += 1
            pulse = self._steps.pulse(number, time.monotonic())
            try:
                self._socket.send(msgspec.msgpack.encode(pulse), zmq.NOBLOCK)
            except zmq.Again:
                continue  # the gateway does not listen yet, or is stopped
