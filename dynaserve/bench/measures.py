"""From timings to figures, and whether the figures may be shown at all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dynaserve.bench.records import RequestRecord


@dataclass(frozen=True)
class Slo:
    """ttft_ms None: the first token may come at any time."""

    tbt_ms: float
    ttft_ms: float | None = None


@dataclass(frozen=True)
class Distribution:
    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None without values. Percentiles are interpolated between neighbours."""
        array = np.fromiter(values, dtype=float)
        if not array.size:
            return None
        p50, p90, p95, p99 = (float(value) for value in np.percentile(array, (50, 90, 95, 99)))
        return cls(array.size, float(array.mean()), p50, p90, p95, p99, float(array.max()))


@dataclass(frozen=True)
class Summary:
    """Figures of one run.

    duration_s: from the first planned sending to the last end; all rates are over it, but offered_rate_per_s, the plan's own.
    ttft_ms and tbt_ms count every token that came, also of requests that failed later; e2e_ms counts finished requests.
    token_attainment: share of gaps within the TBT SLO; None without gaps. request_attainment: share of all requests that are good,
    that is finished, with every gap within the TBT SLO and the first token within the TTFT SLO.
    goodput_requests_per_s: good requests. goodput_tokens_per_s: tokens that came within their SLO.
    failures: how many by reason; failure_examples: the detail of the first one of each.
    """

    requests: int
    finished: int
    failures: dict[str, int]
    failure_examples: dict[str, str]
    duration_s: float
    offered_rate_per_s: float | None
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Distribution | None
    tbt_ms: Distribution | None
    e2e_ms: Distribution | None
    token_attainment: float | None
    request_attainment: float
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    send_lag_ms: Distribution | None
    loop_lag_ms: Distribution | None

    @property
    def client_lag_p99_ms(self) -> float | None:
        """How late the client sent, or woke up, whichever is more; None: neither is known."""
        return max((lag.p99 for lag in (self.send_lag_ms, self.loop_lag_ms) if lag is not None), default=None)


def summarize(records: Sequence[RequestRecord], loop_lags_ms: Sequence[float], slo: Slo) -> Summary:
    """records: at least one."""
    finished = [record for record in records if record.failure is None]
    failures = [record.failure for record in records if record.failure is not None]
    gaps = np.concatenate([record.gaps_ms for record in records])
    first = min(record.due_s for record in records)
    duration_s = max(record.ended_s for record in records) - first
    within = int(np.count_nonzero(gaps <= slo.tbt_ms))
    timely_first = sum(_is_timely(record.ttft_ms, slo) for record in records)
    good = sum(is_good(record, slo) for record in finished)
    return Summary(
        requests=len(records),
        finished=len(finished),
        failures=dict(Counter(failure.reason for failure in failures).most_common()),
        failure_examples={failure.reason: failure.detail for failure in reversed(failures)},
        duration_s=duration_s,
        offered_rate_per_s=_offered_rate_per_s(records),
        requests_per_s=len(finished) / duration_s,
        prompt_tokens_per_s=sum(record.prompt_tokens for record in finished) / duration_s,
        output_tokens_per_s=sum(len(record.token_times_s) for record in records) / duration_s,
        ttft_ms=Distribution.of(value for record in records if (value := record.ttft_ms) is not None),
        tbt_ms=Distribution.of(gaps),
        e2e_ms=Distribution.of(value for record in finished if (value := record.e2e_ms) is not None),
        token_attainment=within / len(gaps) if len(gaps) else None,
        request_attainment=good / len(records),
        goodput_requests_per_s=good / duration_s,
        goodput_tokens_per_s=(within + timely_first) / duration_s,
        send_lag_ms=Distribution.of(record.send_lag_ms for record in records),
        loop_lag_ms=Distribution.of(loop_lags_ms),
    )


def is_good(record: RequestRecord, slo: Slo) -> bool:
    """Finished, and every token came within its SLO."""
    return record.failure is None and _is_timely(record.ttft_ms, slo) and all(gap <= slo.tbt_ms for gap in record.gaps_ms)


def why_not_exact(records: Sequence[RequestRecord]) -> str | None:
    """Why the lengths are not what the workload says, in one sentence; None: they are, for every finished request."""
    for record in records:
        if record.failure is not None:
            continue
        name, counted = f"request {record.index}", len(record.token_times_s)
        if record.usage_prompt_tokens is None or record.usage_output_tokens is None:
            return f"{name}: the server does not say how many tokens it counted (usage), so the lengths cannot be verified"
        if record.usage_prompt_tokens != record.prompt_tokens:
            return f"{name}: the server counted {record.usage_prompt_tokens} prompt tokens, but {record.prompt_tokens} were sent"
        if record.usage_output_tokens != counted:
            return (
                f"{name}: {counted} tokens were seen in the stream (counted by {record.tokens_counted_by}), but the server counted"
                f" {record.usage_output_tokens}: its events carry several tokens, so gaps between tokens cannot be measured"
            )
    return None


def why_late(summary: Summary, max_lag_ms: float) -> str | None:
    """Why the client itself was too late for its figures to be the server's, in one sentence; None: it was not."""
    for what, lag in (("sent requests", summary.send_lag_ms), ("woke up", summary.loop_lag_ms)):
        if lag is not None and lag.p99 > max_lag_ms:
            return (
                f"the client itself was late: it {what} {lag.p99:.1f} ms after their time at the 99th percentile (at most"
                f" {lag.max:.1f} ms), more than the {max_lag_ms:g} ms of --max-client-lag-ms"
            )
    return None


def _is_timely(ttft_ms: float | None, slo: Slo) -> bool:
    return ttft_ms is not None and (slo.ttft_ms is None or ttft_ms <= slo.ttft_ms)


def _offered_rate_per_s(records: Sequence[RequestRecord]) -> float | None:
    """None if all requests were due at once."""
    times = [record.due_s for record in records]
    span_s = max(times) - min(times)
    return (len(times) - 1) / span_s if span_s > 0 else None
