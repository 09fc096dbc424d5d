"""The search for the highest rate that passes. Pure: the caller tries the rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
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


def highest_rate(passes: Callable[[float], bool], first: float, resolution: float, least: float, most: float) -> Found:
    """`steps`, where whoever asks can wait, and a failure tells nothing more."""
    search = steps(first, resolution, least, most)
    rate = next(search)
    while True:
        told = None if passes(rate) else rate
        try:
            rate = search.send(told)
        except StopIteration as end:
            found: Found = end.value
            return found


def steps(first: float, resolution: float, least: float, most: float, step: float = FACTOR) -> Generator[float, float | None, Found]:
    """Brackets the capacity from `first`, then halves the bracket (in its logarithm) to failed / passed <= 1 + resolution.

    Yields the rates to try. Is sent None for one that passed, or what may pass by what its failure told, or the rate itself: it is the
    next, and if it passes, then one just above it. step: from `first` to the next rate; the one after it is its square, FACTOR at most.
    Requires 0 < least <= first <= most and 1 < step. Rates outside [least, most] are not tried.
    """
    passed: float | None = None
    failed: float | None = None
    rate, is_told = first, False
    while passed is None or failed is None:
        told = yield rate
        if told is None:
            passed = rate
            if failed is None and rate == most:
                break
            rate = min(most, rate * step)
        else:
            failed = rate
            if passed is None and rate == least:
                break
            stepped = rate / step
            # What was told once, and failed, is not taken for more than a step would be.
            following = told if told < rate and not is_told else min(told, stepped)
            rate, is_told = max(least, following), least < told == following
        step = min(FACTOR, step * step)
    while passed is not None and failed is not None and failed / passed > 1 + resolution:
        rate = math.sqrt(passed * failed)
        if is_told:
            rate, is_told = min(rate, passed * (1 + resolution)), False
        if (yield rate) is None:
            passed = rate
        else:
            failed = rate
    return Found(passed, failed)
