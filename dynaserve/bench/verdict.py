"""Whether a server sustained its runs: within its SLO, and with a queue that does not grow. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dynaserve.bench.growth import Growth, Series, growth
from dynaserve.bench.measures import Distribution, Slo
from dynaserve.bench.records import RequestRecord

FAR_TIMES = 3.0
"""A P99 TBT above so many SLOs is not that of a rate near the capacity."""
WAITS = {"ttft_ms": "TTFT", "longest_gap_ms": "longest gap"}
"""Of a request, by attribute: what grows where it waits in a queue."""
_LATE_LIMIT = 0.01
_BLOCKS = 10
_FEW_GAPS = 300
"""If as many as may be late were, by chance none of so many would be in one run of twenty."""

Records = Sequence[RequestRecord]


@dataclass(frozen=True)
class Verdict:
    """reason: the first one why the runs were not sustained, in a few words; None: they were. is_open: as far as their own errors
    tell, a run of other requests may be judged otherwise.

    promising_share: of the rate of runs that were not sustained, what their figures say may have been, in (0, 1], or 0 if only far less
    may. Who waits g seconds longer for each second of arrivals is served 1 / (1 + g) times as fast as requests arrive; where the first
    wait for the last that is a guess.
    """

    reason: str | None
    is_open: bool
    promising_share: float


class LostCause:
    """Whether runs break the TBT SLO however they go on: already so many gaps are late that P99 is, be all others in time."""

    def __init__(self, gaps: int, slo: Slo, late: int = 0) -> None:
        """gaps: of all the runs. late: how many of them are already."""
        self._slo = slo
        # np.percentile interpolates from the element of this rank upwards.
        self._late_left = gaps - math.floor((1 - _LATE_LIMIT) * (gaps - 1)) - late

    @property
    def is_over(self) -> bool:
        return self._late_left <= 0

    def is_lost(self, gap_ms: float) -> bool:
        """Called with each gap between two tokens."""
        self._late_left -= gap_ms > self._slo.tbt_ms
        return self.is_over


def judged(runs: Sequence[Records], slo: Slo) -> Verdict:
    """Of one or more runs at the same rate, together.

    Not sustained is a request that failed; P99 of all gaps between tokens over the TBT SLO; P99 TTFT over its SLO; a TTFT or a
    longest gap of a request that grows over the runs, or a longest gap that falls. The last two find the queue behind the first token that
    P99 TBT does not show, at a hand-off or for memory: decodes that lost their memory are overtaken by those that bring their KV, and wait
    until nobody comes any more. End-to-end times do not tell: they also grow while batches of decodes fill, as long as an answer takes.
    """
    records = [record for run in runs for record in run]
    lines = {name: line for name in WAITS if (line := growth([_timed(run, name) for run in runs])) is not None}
    queues = [(line, told) for name, line in lines.items() if (told := queue_told(WAITS[name], line)) is not None]
    may_fall = any(line.may_be_overtaken for line, _ in queues)
    tbt_p99_ms, tbt_is_open = _p99(gap for record in records for gap in record.gaps_ms), _is_open(runs, slo)
    ttft_p99_ms = _p99(ttft for record in records if (ttft := record.ttft_ms) is not None)

    found: list[tuple[str, bool]] = []
    """Each with whether it is final."""
    if failures := Counter(record.failure.reason for record in records if record.failure is not None).most_common(1):
        reason, count = failures[0]
        found.append((f"{count} failed: {reason}", True))
    if tbt_p99_ms > slo.tbt_ms:
        found.append((f"P99 TBT {tbt_p99_ms:.1f} ms", not tbt_is_open))
    if slo.ttft_ms is not None and ttft_p99_ms > slo.ttft_ms:
        found.append((f"P99 TTFT {ttft_p99_ms:.1f} ms", True))
    found += [(told, not (line.is_open or line.may_be_overtaken)) for line, told in queues]

    is_final = any(final for _, final in found)
    is_open = tbt_is_open or may_fall or any(line.is_open for line in lines.values())
    slope = abs(queues[0][0].slope) if queues else 0.0
    promising_share = 0.0 if tbt_p99_ms > FAR_TIMES * slo.tbt_ms else 1 / (1 + slope)
    return Verdict(found[0][0] if found else None, is_open and not is_final, promising_share)


def queue_told(name: str, line: Growth) -> str | None:
    """What a latency, one of WAITS, says of a queue; None: there is none. A TTFT that falls is that of a cold server."""
    if line.is_queue:
        return f"{name} grows by {line.slope:.2f} s per s"
    if name == WAITS["longest_gap_ms"] and line.is_overtaken:
        return f"{name} falls by {-line.slope:.2f} s per s, as the first wait for the last"
    return None


def _timed(run: Records, name: str) -> Series:
    pairs = [(record.sent_s, latency) for record in run if (latency := getattr(record, name)) is not None]
    return [at_s for at_s, _ in pairs], [latency for _, latency in pairs]


def _is_open(runs: Sequence[Records], slo: Slo) -> bool:
    """Whether the share of late gaps is within its standard error of the one at which P99 is the SLO, or none of too few gaps is late.

    Late gaps come in bursts, so the error is that of the share among blocks of time.
    """
    blocks = np.concatenate([_blocks(run, slo) for run in runs], axis=1)
    late, gaps = blocks.sum(axis=1)
    if not late:
        return bool(0 < gaps < _FEW_GAPS)
    share = late / gaps
    error = math.sqrt(np.sum((blocks[0] - share * blocks[1]) ** 2) * blocks.shape[1] / (blocks.shape[1] - 1)) / gaps
    return bool(abs(share - _LATE_LIMIT) <= error)


def _blocks(run: Records, slo: Slo) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Shape [2, _BLOCKS]: late gaps, and gaps, in each of these parts of the run's time."""
    ends_s = np.array([end_s for record in run for end_s in record.token_times_s[1:]])
    late = np.array([gap > slo.tbt_ms for record in run for gap in record.gaps_ms], dtype=float)
    if not len(ends_s):
        return np.zeros((2, _BLOCKS))
    bounds = np.linspace(ends_s.min(), ends_s.max(), _BLOCKS + 1)[1:-1]
    block = np.searchsorted(bounds, ends_s)
    return np.stack([np.bincount(block, weights=late, minlength=_BLOCKS), np.bincount(block, minlength=_BLOCKS).astype(float)])


def _p99(values: Iterable[float]) -> float:
    """0 without values."""
    found = Distribution.of(values)
    return 0.0 if found is None else found.p99
