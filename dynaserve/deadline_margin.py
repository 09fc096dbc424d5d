"""How far ahead of its deadline a step has to end, by prediction, so that one in a hundred misses it."""

from __future__ import annotations

import math
from dataclasses import dataclass

LATE_SHARE = 0.01
NORMAL_SIGMAS = 2.33
"""What one in a hundred normally distributed errors exceeds."""
_LEAST_SIGMAS, _MOST_SIGMAS = 1.0, 5.0
_GAIN = 0.2


@dataclass
class DeadlineMargin:
    """sigmas: how many standard deviations of the predictor's error. Begins as for a normal distribution, and follows the errors
    that are seen: up at once when a step took longer, down slowly, so that `LATE_SHARE` of them stay above."""

    sigmas: float = NORMAL_SIGMAS

    def share(self, sigma: float) -> float:
        """Of the time that is left, what the prediction may take. sigma: of the logarithm of measured over predicted."""
        return math.exp(-self.sigmas * sigma)

    def observe(self, predicted_ms: float, measured_ms: float, sigma: float) -> None:
        exceeded = math.log(measured_ms / predicted_ms) > self.sigmas * sigma
        self.sigmas += _GAIN * (exceeded - LATE_SHARE)
        self.sigmas = min(_MOST_SIGMAS, max(_LEAST_SIGMAS, self.sigmas))
