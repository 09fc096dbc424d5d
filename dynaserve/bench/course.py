"""How a run went, small enough to be kept with its figures: what the pictures of its gaps and of its time are drawn from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dynaserve.bench.measures import Slo
from dynaserve.bench.records import RequestRecord

PARTS = 30
"""Of a run's time."""
_SHARES = np.linspace(0.0, 1.0, 201)
"""Of a run's gaps: about as fine as a picture is."""


@dataclass(frozen=True)
class Course:
    """rate_per_s: of requests. gap_quantiles_ms: of the gaps between tokens, at equal distances from the shortest to the longest gap;
    empty: there were none.

    goodput_tokens_per_s: tokens within their SLO, in each of `PARTS` equal parts of the time from the start to `ended_s`.
    """

    rate_per_s: float
    ended_s: float
    gap_quantiles_ms: Sequence[float]
    goodput_tokens_per_s: Sequence[float]

    @classmethod
    def of(cls, rate_per_s: float, records: Sequence[RequestRecord], slo: Slo) -> Course:
        """records: of the whole run, at least one."""
        gaps_ms = [gap for record in records for gap in record.gaps_ms]
        quantiles_ms = _rounded(np.quantile(gaps_ms, _SHARES, method="inverted_cdf")) if gaps_ms else []
        ended_s = max(record.ended_s for record in records)
        good = [at_s for record in records for at_s in _in_time_s(record, slo)]
        counts, edges = np.histogram(good, bins=PARTS, range=(0.0, ended_s))
        return cls(rate_per_s, ended_s, quantiles_ms, _rounded(counts / np.diff(edges)))


def _in_time_s(record: RequestRecord, slo: Slo) -> list[float]:
    """When tokens within their SLO came, the first one by that of TTFT."""
    if record.ttft_ms is None:
        return []
    first = record.token_times_s[:1] if slo.ttft_ms is None or record.ttft_ms <= slo.ttft_ms else ()
    return [*first, *(at_s for at_s, gap in zip(record.token_times_s[1:], record.gaps_ms, strict=True) if gap <= slo.tbt_ms)]


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(float(value), 3) for value in values]
