"""The latency table of a fleet that was given none, learnt from the steps that its instances report.

One table for all: what an instance's steps cost beside it is the scheduler's to learn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaserve.live_profile import LiveProfile
from dynaserve.step_latency import BatchShape, ProfileTable

FIRST_STEPS = 128
"""So many tell decodes from prefill and short contexts from long ones, in a few seconds of traffic."""


@dataclass
class FleetProfile:
    """steps: observed so far."""

    steps: int = 0
    _profile: LiveProfile = field(default_factory=LiveProfile)
    _next_told: int = FIRST_STEPS

    def observe(self, shape: BatchShape, measured_ms: float) -> ProfileTable | None:
        """The table, when experience has doubled since it was told; else None. Raises ValueError as `LiveProfile.observe`."""
        self.steps += 1
        self._profile.observe(shape, measured_ms)
        if self.steps < self._next_told:
            return None
        self._next_told = 2 * self.steps
        return self._profile.table
