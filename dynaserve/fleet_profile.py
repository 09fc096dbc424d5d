"""The latency table of a fleet, learnt from the steps that its instances report: from nothing, or from one that was measured before.

One table for all: what an instance's steps cost beside it is the scheduler's to learn.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field

from dynaserve.live_profile import WARM_UP_STEPS, LiveProfile
from dynaserve.step_latency import BatchShape, ProfileTable
from dynaserve.taught_table import settled

FIRST_STEPS = 128 + WARM_UP_STEPS
"""Before so many the table is not told: a few seconds of traffic. At this number and its doubles it has just been fitted."""
LEAST_OF_A_KIND = 8
"""Of these, steps with prefill, and steps without: from one kind alone the other cannot be told."""
MOST_UNTOLD = 4096
"""The table is told again after so many more at most,"""
LEAST_UNTOLD_MS = 10_000.0
"""and not before so long: every timeline of the fleet is made anew by it, however many instances report."""


@dataclass
class FleetProfile:
    """table: where it begins; None: with nothing. steps: observed so far."""

    table: InitVar[ProfileTable | None] = None
    steps: int = field(default=0, init=False)
    _with_prefill: int = field(default=0, init=False)
    _profile: LiveProfile = field(init=False)
    _next_told: int = field(default=FIRST_STEPS, init=False)
    _told_ms: float = field(default=-math.inf, init=False)

    def __post_init__(self, table: ProfileTable | None) -> None:
        self._profile = LiveProfile(table)

    def observe(self, shape: BatchShape, measured_ms: float, now_ms: float) -> ProfileTable | None:
        """The table, when experience has doubled since it was told; else None. Raises ValueError as `LiveProfile.observe`."""
        self._profile.observe(shape, measured_ms)
        self.steps += 1
        self._with_prefill += shape.prefill_tokens > 0
        if self.steps < self._next_told or min(self._with_prefill, self.steps - self._with_prefill) < LEAST_OF_A_KIND:
            return None
        if now_ms - self._told_ms < LEAST_UNTOLD_MS:
            return None
        self._told_ms = now_ms
        self._next_told = self.steps + min(self.steps, MOST_UNTOLD)
        return None if self._profile.table is None else settled(self._profile.table)
