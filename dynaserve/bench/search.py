"""The search for the highest rate that passes. Pure: the caller tries the rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

FACTOR = 1.6
"""From one rate to the next, at most, while only passes, or only failures, are known."""


@dataclass(frozen=True)
class Found:
    """passed_per_s: the highest rate that passed below the lowest that did not; None: not even the least one passed.

    failed_per_s None: even the highest rate passed, so the capacity is at least `passed_per_s`.
    """

    passed_per_s: float | None
    failed_per_s: float | None


def highest_rate(
    passes: Callable[[float], bool], first: float, resolution: float, least: float, most: float, step: float = FACTOR
) -> Found:
    """Brackets the capacity from `first`, then halves the bracket (in its logarithm) to failed / passed <= 1 + resolution.

    step: from `first` to the next rate; the one after it is its square, FACTOR at most.
    Requires 0 < least <= first <= most and 1 < step. Rates outside [least, most] are not tried.
    """
    passed: float | None = None
    failed: float | None = None
    rate = first
    while passed is None or failed is None:
        if passes(rate):
            passed = rate
            if failed is None and rate == most:
                break
            rate = min(most, rate * step)
        else:
            failed = rate
            if passed is None and rate == least:
                break
            rate = max(least, rate / step)
        step = min(FACTOR, step * step)
    while passed is not None and failed is not None and failed / passed > 1 + resolution:
        middle = math.sqrt(passed * failed)
        if passes(middle):
            passed = middle
        else:
            failed = middle
    return Found(passed, failed)
