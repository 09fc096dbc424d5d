"""Capacities of several systems against one of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_T_975 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t at 97.5 %, by degrees of freedom; beyond the last the last is taken, which is wider than the truth."""


@dataclass(frozen=True)
class Ratio:
    """Geometric mean over the repetitions, and the 95 % confidence interval of it; None from fewer than two."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{interval}"


def paired_ratio(rates: Sequence[float | None], baseline: Sequence[float | None]) -> Ratio | None:
    """Repetition by repetition, since those of one number share their requests and their time of the day.

    Student's interval of the mean logarithm. None if one of the two was not servable in some repetition: a ratio of what is left
    would be of lucky repetitions.
    """
    logs = []
    for rate, base in zip(rates, baseline, strict=True):
        if not rate or not base:
            return None
        logs.append(math.log(rate / base))
    mean = float(np.mean(logs))
    if len(logs) < 2:
        return Ratio(math.exp(mean), None, None)
    freedom = min(len(logs) - 1, len(_T_975) - 1)
    half = _T_975[freedom] * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
