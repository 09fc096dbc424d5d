"""How long each step took on a GPU, by the GPU's own clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """As `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Event) -> float: ...


def cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)
    return event


class StepTimer:
    """A step lasts from the end of the one before it to its own, both on the GPU.

    The host does not know either. With asynchronous scheduling it launches the next step before it takes the answer of this one
    (`EngineCore.step_with_batch_queue`, v1/engine/core.py), and a step that no CUDA graph holds as a whole takes it 10 to 20 ms to
    launch, as measured on an H200: by its clock a step of decodes takes as long as the prefill that comes after it.
    """

    def __init__(self, make_event: Callable[[], Event] = cuda_event) -> None:
        self._make_event = make_event
        self._launched: deque[tuple[int, Event]] = deque()

    def launched(self, number: int) -> None:
        """Everything of the step is in the current stream. Numbers rise."""
        event = self._make_event()
        event.record()
        self._launched.append((number, event))

    def take(self) -> list[tuple[int, float]]:
        """Number and milliseconds of each step that has ended since the last call, but for the very first one."""
        ended: list[tuple[int, float]] = []
        while len(self._launched) > 1 and self._launched[1][1].query():
            _, before = self._launched.popleft()
            number, event = self._launched[0]
            ended.append((number, before.elapsed_time(event)))
        return ended
