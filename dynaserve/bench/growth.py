"""Whether what requests wait for grows over a run: a line through their latencies, and how far chance alone may have tilted it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LIMIT = 0.05
"""Seconds of waiting that each second of arrivals adds; a server that is overloaded by 5 % adds as much."""
_SURE = 2.0
FEWEST = 8
"""Requests of which a line is drawn."""
_BLOCKS = 10
_LAGS = np.arange(1, 4)
_FEWEST_IN_BLOCKS = 2 * _BLOCKS

Array = np.ndarray[tuple[int], np.dtype[np.float64]]
Series = tuple[Sequence[float], Sequence[float]]
"""Of the requests of a run: when each was sent, in s, and a latency of it, in ms."""


@dataclass(frozen=True)
class Growth:
    """The least-squares line of a latency over the time of sending: slope (s per s).

    error: its standard error. Those who wait in one queue wait alike, and what it has gained by chance stays for a while: so the error is
    many times `independent_error`, which it would have if each request's latency had nothing to do with its neighbours'.
    """

    slope: float
    error: float
    independent_error: float

    @property
    def is_queue(self) -> bool:
        """Grows by more than the limit, and not as a few requests may by chance."""
        return self.slope > LIMIT and self.slope > _SURE * self.independent_error

    @property
    def is_overtaken(self) -> bool:
        """Falls by more than the limit, and more surely than by chance: a queue in which who came first waits for those who come later."""
        return self.slope < -LIMIT and -self.slope > _SURE * self.independent_error

    @property
    def may_be_overtaken(self) -> bool:
        """It is, by a slope that its error may have made."""
        return self.is_overtaken and self.slope + self.error >= -LIMIT

    @property
    def is_open(self) -> bool:
        """Neither below the limit by its error, nor above it by as much."""
        is_below = self.slope + self.error <= LIMIT
        return not is_below and not (self.is_queue and self.slope - self.error > LIMIT)


def growth(runs: Sequence[Series]) -> Growth | None:
    """The slope that is common to the runs, each with a height of its own. None: too few requests, or all were sent at once."""
    lines = [(np.array(sent_s), np.array(latency_ms) / 1e3) for sent_s, latency_ms in runs if len(sent_s)]
    centred = [(times - times.mean(), latency_s - latency_s.mean()) for times, latency_s in lines]
    spreads = [float(np.sum(times**2)) for times, _ in centred]
    spread = sum(spreads)
    left_over = sum(len(times) for times, _ in centred) - len(lines) - 1
    if left_over < FEWEST - 2 or spread == 0:
        return None
    slope = float(sum(np.sum(times * latency_s) for times, latency_s in centred)) / spread
    residual = float(sum(np.sum((latency_s - slope * times) ** 2) for times, latency_s in centred))
    independent = math.sqrt(residual / left_over / spread)
    # Each run has its share in the slope by its spread.
    wander = math.sqrt(sum((one * _error(*line)) ** 2 for one, line in zip(spreads, centred, strict=True))) / spread
    return Growth(slope, max(independent, wander), independent)


def _error(times: Array, latency_s: Array) -> float:
    """Of the slope of one run, by its variogram: half the variance of the differences between blocks of requests that are so many apart
    is the same at each distance where latencies are independent, and grows with it where they wander as a queue does. 0: too few requests.

    Means of blocks of a random walk whose variance grows by s in each block differ by s (k - 1/3) over k blocks, and the line through it
    has a slope of variance 6/5 s per block and squared duration; independent means of variance w differ by 2 w, and their line has 12 w
    over their number and the squared duration.
    """
    if len(times) < _FEWEST_IN_BLOCKS:
        return 0.0
    order = np.argsort(times, kind="stable")
    means = np.array([block.mean() for block in np.array_split(latency_s[order], _BLOCKS)])
    number = np.arange(_BLOCKS)
    wander = means - np.polyval(np.polyfit(number, means, 1), number)
    apart = np.array([np.var(wander[lag:] - wander[:-lag], ddof=1) for lag in _LAGS])
    walk = float(np.clip(np.polyfit(_LAGS, apart, 1)[0], 0.0, 1.5 * apart[0]))
    alone = max(0.0, float(apart[0]) - 2 / 3 * walk) / 2
    return math.sqrt(1.2 * walk * _BLOCKS + 12 * alone / _BLOCKS) / float(np.ptp(times))
