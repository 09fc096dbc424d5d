"""The latency table of a fleet, learnt from the steps that its instances report: from nothing, or from one that was measured before.

One table for all: what an instance's steps cost beside it is the scheduler's to learn.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field

from dynaserve.live_profile import KNOWN_STEPS, LiveProfile
from dynaserve.step_latency import BatchShape, ProfileTable
from dynaserve.taught_table import settled

MOST_UNTOLD = 4096
"""The table is told again after so many more at most,"""
LEAST_UNTOLD_MS = 10_000.0
"""and not before so long: every timeline of the fleet is made anew by it, however many instances report."""


@dataclass
class FleetProfile:
    """table: where it begins; None: with nothing."""

    table: InitVar[ProfileTable | None] = None
    _profile: LiveProfile = field(init=False)
    _next_told: int = field(default=KNOWN_STEPS, init=False)
    _told_ms: float = field(default=-math.inf, init=False)

    def __post_init__(self, table: ProfileTable | None) -> None:
        self._profile = LiveProfile(table)

    @property
    def steps(self) -> int:
        """Observed so far."""
        return self._profile.steps

    def observe(self, shape: BatchShape, measured_ms: float, now_ms: float, draft_tokens: int = 0) -> ProfileTable | None:
        """The table, when experience has doubled since it was told; else None. draft_tokens: as `LiveProfile.observe`, and raises as it."""
        self._profile.observe(shape, measured_ms, draft_tokens)
        if self.steps < self._next_told or not self._profile.has_both_kinds:
            return None
        if now_ms - self._told_ms < LEAST_UNTOLD_MS:
            return None
        self._told_ms = now_ms
        self._next_told = self.steps + min(self.steps, MOST_UNTOLD)
        return None if self._profile.table is None else settled(self._profile.table)
