"""Whether a server sustained a run: within its SLO, and with a queue that does not grow. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaserve.bench.measures import Slo, Summary
from dynaserve.bench.records import RequestRecord

GROWTH_LIMIT = 0.05
"""Seconds of waiting that each second of arrivals adds; a server that is overloaded by 5 % adds as much."""
FAR_TIMES = 3.0
"""A P99 TBT above so many SLOs is not that of a rate near the capacity."""
_SURE = 2.0
_FEWEST = 8


@dataclass(frozen=True)
class Growth:
    """The least-squares line of a latency over the time of sending: slope (s per s) and its standard error."""

    slope: float
    error: float

    @property
    def is_queue(self) -> bool:
        """Grows by more than the limit, and not by chance."""
        return self.slope > GROWTH_LIMIT and self.slope > _SURE * self.error


class LostCause:
    """Whether a run breaks the TBT SLO however it goes on: already so many gaps are late that P99 is, be all others in time."""

    def __init__(self, gaps: int, slo: Slo) -> None:
        """gaps: of the whole run."""
        self._slo = slo
        # np.percentile interpolates from the element of this rank upwards.
        self._late_left = gaps - math.floor(0.99 * (gaps - 1))

    def is_lost(self, gap_ms: float) -> bool:
        """Called with each gap between two tokens."""
        self._late_left -= gap_ms > self._slo.tbt_ms
        return self._late_left <= 0


def growth(sent_s: Sequence[float], latency_ms: Sequence[float]) -> Growth | None:
    """None: too few requests, or all were sent at once."""
    times, latency_s = np.array(sent_s), np.array(latency_ms) / 1e3
    spread = float(np.sum((times - times.mean()) ** 2)) if len(times) else 0.0
    if len(times) < _FEWEST or spread == 0:
        return None
    slope = float(np.sum((times - times.mean()) * latency_s)) / spread
    residual = latency_s - latency_s.mean() - slope * (times - times.mean())
    return Growth(slope, float(np.sqrt(np.sum(residual**2) / (len(times) - 2) / spread)))


def why_not_sustained(records: Sequence[RequestRecord], summary: Summary, slo: Slo) -> str | None:
    """The first reason, in a few words; None: the run was sustained.

    A request that failed; P99 of all gaps between tokens over the TBT SLO; P99 TTFT over its SLO; a TTFT or an end-to-end time
    that grows over the run. The last finds the queue that neither TTFT nor TBT shows, the one at a hand-off.
    """
    if summary.failures:
        reason, count = next(iter(summary.failures.items()))
        return f"{count} failed: {reason}"
    if summary.tbt_ms is not None and summary.tbt_ms.p99 > slo.tbt_ms:
        return f"P99 TBT {summary.tbt_ms.p99:.1f} ms"
    if slo.ttft_ms is not None and summary.ttft_ms is not None and summary.ttft_ms.p99 > slo.ttft_ms:
        return f"P99 TTFT {summary.ttft_ms.p99:.1f} ms"
    if (line := _queue(records)) is not None:
        name, slope = line
        return f"{name[:-3].upper()} grows by {slope:.2f} s per s"
    return None


def promising_share(records: Sequence[RequestRecord], summary: Summary, slo: Slo) -> float:
    """Of the rate of a run that was not sustained: what its figures say may have been, in (0, 1], or 0 if only far less may.

    Who waits g seconds longer for each second of arrivals is served 1 / (1 + g) times as fast as requests arrive.
    """
    if summary.tbt_ms is not None and summary.tbt_ms.p99 > FAR_TIMES * slo.tbt_ms:
        return 0.0
    line = _queue(records)
    return 1.0 if line is None else 1 / (1 + line[1])


def _queue(records: Sequence[RequestRecord]) -> tuple[str, float] | None:
    """The latency that grows, and by how much; None: no queue does."""
    for name in ("ttft_ms", "e2e_ms"):
        pairs = [(record.sent_s, latency) for record in records if (latency := getattr(record, name)) is not None]
        line = growth([at_s for at_s, _ in pairs], [latency for _, latency in pairs])
        if line is not None and line.is_queue:
            return name, line.slope
    return None
