"""Finds the load at which a server keeps a given share of its tokens within the SLO. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

STEP = 1.6


def next_rate(tried: Mapping[float, float], low: float, high: float, first: float) -> float | None:
    """The next rate to try; None: one of those tried keeps a share in [low, high], or the nearest two are within 5 %.

    tried: attainment by rate. It falls with the rate, but for noise.
    """
    if not tried:
        return first
    if any(low <= attainment <= high for attainment in tried.values()):
        return None
    under = [rate for rate, attainment in tried.items() if attainment > high]
    over = [rate for rate, attainment in tried.items() if attainment < low]
    if not over:
        return max(under) * STEP
    if not under:
        return min(over) / STEP
    below, above = max(under), min(over)
    if above < 1.05 * below:
        return None
    share = (tried[below] - (low + high) / 2) / (tried[below] - tried[above])
    return math.exp(math.log(below) + min(0.8, max(0.2, share)) * math.log(above / below))


def best_rate(tried: Mapping[float, float], low: float, high: float) -> float:
    """The tried rate whose attainment is nearest to the middle of [low, high]; of equals the highest."""
    middle = (low + high) / 2
    return min(tried, key=lambda rate: (round(abs(tried[rate] - middle), 2), -rate))
