"""Figures of a simulated run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaserve.bench.growth import Series, growth
from dynaserve.bench.measures import Distribution, Slo
from dynaserve.bench.verdict import WAITS, queue_told
from dynaserve.simulation import InstanceUse, SimulationResult, gap_bin_ms
from workloads.trace import TraceRequest

_QUANTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Gaps:
    """Percentiles of TBT, 0.5 % wide bins' middles; None without gaps."""

    count: int
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True)
class ModelSize:
    """For FLOP counts: a token costs 2 FLOP a parameter, and 4 * layers * hidden for each token that it attends to."""

    parameters: float
    layers: int
    hidden: int
    peak_tflops: float

    def mfu(self, use: InstanceUse, duration_s: float) -> float:
        """The share of the peak over that time."""
        flop = 2 * self.parameters * use.tokens + 4 * self.layers * self.hidden * use.attention_pairs
        return float(flop) / (self.peak_tflops * 1e12 * duration_s)


@dataclass(frozen=True)
class SimulatedSummary:
    """Rates are over duration_s, from the first arrival to the last token; mfu, kv_share and busy by instance.

    kv_share: KV tokens held over those there are, while a step runs. goodput_tokens_per_s: tokens within their SLO, first ones
    counted by the TTFT SLO. revised_share: hand-offs moved or lifted after their placement, over all requests. hand_off_wait_ms:
    of cut requests, from alpha's end until the last of its KV is there. not_sustained: why, or None, as `dynaserve bench capacity` judges.
    """

    requests: int
    duration_s: float
    offered_per_s: float | None
    requests_per_s: float
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    token_attainment: float | None
    ttft_ms: Distribution | None
    e2e_ms: Distribution | None
    tbt_ms: Gaps
    cut_share: float
    revised_share: float
    hand_off_wait_ms: Distribution | None
    preemptions: int
    busy: Sequence[float]
    kv_share: Sequence[float]
    mfu: Sequence[float] | None
    not_sustained: str | None


def summarize(
    requests: Sequence[TraceRequest], result: SimulationResult, slo: Slo, kv_tokens: int, model: ModelSize | None
) -> SimulatedSummary:
    """requests: those of the simulation, at least one, with arrival times."""
    arrived = np.array([request.arrived_at_s or 0.0 for request in requests]) * 1e3
    outcomes = result.outcomes
    ttft = np.array([outcome.first_token_ms for outcome in outcomes]) - arrived
    e2e = np.array([outcome.end_ms for outcome in outcomes]) - arrived
    duration_s = float(result.end_ms - arrived[0]) / 1e3
    tokens = sum(request.output_tokens for request in requests)
    late = sum(outcome.late_gaps for outcome in outcomes)
    gaps = gap_percentiles(result.gap_counts)
    late_first = 0 if slo.ttft_ms is None else int(np.count_nonzero(ttft > slo.ttft_ms))
    span_s = float(arrived[-1] - arrived[0]) / 1e3
    return SimulatedSummary(
        requests=len(requests),
        duration_s=duration_s,
        offered_per_s=(len(requests) - 1) / span_s if span_s else None,
        requests_per_s=len(requests) / duration_s,
        output_tokens_per_s=tokens / duration_s,
        goodput_tokens_per_s=(tokens - late - late_first) / duration_s,
        token_attainment=1 - late / gaps.count if gaps.count else None,
        ttft_ms=Distribution.of(ttft),
        e2e_ms=Distribution.of(e2e),
        tbt_ms=gaps,
        cut_share=sum(outcome.split_token > 0 for outcome in outcomes) / len(outcomes),
        revised_share=(result.moved + result.lifted) / len(outcomes),
        hand_off_wait_ms=Distribution.of(outcome.hand_off_wait_ms for outcome in outcomes if outcome.split_token),
        preemptions=sum(use.preemptions for use in result.uses),
        busy=[use.busy_ms / duration_s / 1e3 for use in result.uses],
        kv_share=[use.kv_token_ms / use.busy_ms / kv_tokens if use.busy_ms else 0.0 for use in result.uses],
        mfu=None if model is None else [model.mfu(use, duration_s) for use in result.uses],
        not_sustained=why_not_sustained([(requests, result)], slo),
    )


def gap_percentiles(counts: Sequence[int]) -> Gaps:
    """From the counts of a simulation's bins."""
    sums = np.cumsum(counts)
    total = int(sums[-1])
    if not total:
        return Gaps(0, None, None, None, None)
    bins = [int(np.searchsorted(sums, quantile * total)) for quantile in _QUANTILES]
    return Gaps(total, *((gap_bin_ms(bin_) + gap_bin_ms(bin_ + 1)) / 2 for bin_ in bins))


def why_not_sustained(runs: Sequence[tuple[Sequence[TraceRequest], SimulationResult]], slo: Slo) -> str | None:
    """As `verdict.judged` of one or more runs at the same rate, together: requests with arrival times, and what became of them."""
    gaps = gap_percentiles(np.sum([result.gap_counts for _, result in runs], axis=0).tolist())
    if gaps.p99 is not None and gaps.p99 > slo.tbt_ms:
        return f"P99 TBT {gaps.p99:.1f} ms"
    first_tokens = [_first_tokens(*run) for run in runs]
    if slo.ttft_ms is not None and (p99 := float(np.percentile(np.concatenate([ms for _, ms in first_tokens]), 99))) > slo.ttft_ms:
        return f"P99 TTFT {p99:.1f} ms"
    for name, waits in (("ttft_ms", first_tokens), ("longest_gap_ms", [_longest_gaps(*run) for run in runs])):
        line = growth(waits)
        if line is not None and (told := queue_told(WAITS[name], line)) is not None:
            return told
    return None


def _first_tokens(requests: Sequence[TraceRequest], result: SimulationResult) -> Series:
    arrived_s = [request.arrived_at_s or 0.0 for request in requests]
    return arrived_s, [one.first_token_ms - 1e3 * at_s for one, at_s in zip(result.outcomes, arrived_s, strict=True)]


def _longest_gaps(requests: Sequence[TraceRequest], result: SimulationResult) -> Series:
    """An answer of one token has none."""
    pairs = [(request, one) for request, one in zip(requests, result.outcomes, strict=True) if request.output_tokens > 1]
    return [request.arrived_at_s or 0.0 for request, _ in pairs], [one.longest_gap_ms for _, one in pairs]
