"""One run of a workload at one rate, and what came of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from dynaserve.bench import replay
from dynaserve.bench.client import IsLost, Recording
from dynaserve.bench.endpoint import Endpoint
from dynaserve.bench.measures import Summary, summarize, why_late, why_not_exact
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.processes import CpuTime
from dynaserve.bench.prompts import Prompts
from dynaserve.bench.records import RequestRecord
from dynaserve.bench.verdict import LostCause, judged
from dynaserve.errors import ConfigError, NotTrusted
from workloads.trace import TraceRequest

ATTEMPTS = 3
FEWEST_AT_ONCE = 40
"""As many as two instances of a small machine have running: the ends of a few long answers would make most of the time otherwise."""
_NEXT_SEED = 1 << 20
"""More than the last run's: no repetition has it."""


@dataclass(frozen=True)
class Trial:
    """not_sustained: why, or None. model: what the server calls it. front_cores: that the processes in front of the servers kept busy,
    on average; None: they are not known. promising_per_s: of a rate that was not sustained, as `verdict.Verdict` tells. others: of the
    runs that have decided together with the first one, which all other figures are of."""

    rate_per_s: float
    seed: int
    model: str
    summary: Summary
    not_sustained: str | None
    records: Sequence[RequestRecord] = ()
    front_cores: float | None = None
    promising_per_s: float | None = None
    others: Sequence[Summary] = ()


def run(
    opts: ReplayOptions,
    rate_per_s: float,
    seed: int,
    *,
    front_pids: Sequence[int] = (),
    gives_up: bool = False,
    most_runs: int = 1,
    attempts: int = ATTEMPTS,
) -> Trial:
    """Replays at that rate. The same seed has the same requests in the same order, at any rate, of other tokens each time.

    gives_up: nothing more is sent once P99 TBT is over its SLO whatever comes; whether the rate was sustained is the same.
    most_runs: while the errors of the runs leave open whether their rate is sustained, one with other requests follows, up to so many in
    all, and all together decide. attempts: how often a run in which the client was late is tried in all; then NotTrusted is raised.
    """
    opts = replace(opts, rate_per_s=rate_per_s)
    # At a low rate nothing may arrive in the duration: the first request decides then.
    plans = [replay.plan_requests(replace(opts, seed=one), fewest=1) for one in seeds(seed, most_runs)]
    gaps = sum(request.output_tokens - 1 for requests in plans for request in requests)
    cause, done = LostCause(gaps, opts.slo), list[_Done]()
    for requests in plans:
        done.append(_trusted(opts, requests, cause if gives_up else None, front_pids, attempts))
        late = sum(gap > opts.slo.tbt_ms for one in done for record in one.records for gap in record.gaps_ms)
        cause = LostCause(gaps, opts.slo, late)
        verdict = judged([one.records for one in done], opts.slo)
        if cause.is_over or not verdict.is_open:
            break
    first, *others = done
    promising_per_s = None if verdict.reason is None else rate_per_s * verdict.promising_share
    told = [one.summary for one in others]
    return Trial(rate_per_s, seed, first.model, first.summary, verdict.reason, first.records, first.front_cores, promising_per_s, told)


def seeds(seed: int, runs: int) -> list[int]:
    """Of the runs that decide about a rate together."""
    return [seed + number * _NEXT_SEED for number in range(runs)]


def saturation(opts: ReplayOptions, seed: int) -> float:
    """Requests per second when the `requests` of the options are all sent at once, or one for each second of their duration, at least
    `FEWEST_AT_ONCE`.

    Raises ConfigError if one is not answered, as a server that refuses some is faster with the others, and as `plan_at_once`.
    """
    requests = plan_at_once(opts, seed)
    _, _, summary = _measured(opts, requests)
    if failed := summary.requests - summary.finished:
        raise ConfigError(f"{failed} of {summary.requests} requests fail when all are sent at once: {summary.failure_examples}")
    return summary.requests_per_s


def plan_at_once(opts: ReplayOptions, seed: int) -> list[TraceRequest]:
    """What `saturation` sends. Raises ConfigError."""
    count = opts.requests or max(FEWEST_AT_ONCE, round(opts.duration_s or 0.0))
    planned = replay.plan_requests(replace(opts, rate_per_s=1.0, duration_s=None, requests=count, seed=seed))
    return [replace(request, arrived_at_s=0.0) for request in planned]


@dataclass(frozen=True)
class _Done:
    """One run."""

    model: str
    summary: Summary
    records: Sequence[RequestRecord]
    front_cores: float | None


def _trusted(
    opts: ReplayOptions,
    requests: Sequence[TraceRequest],
    cause: LostCause | None,
    front_pids: Sequence[int],
    attempts: int,
) -> _Done:
    """cause: by which the run is given up; None: it is not."""
    for _ in range(attempts):
        cpu = CpuTime(front_pids)
        servers, recording, summary = _measured(opts, requests, copy(cause).is_lost if cause else lambda _: False)
        front_cores = cpu.spent_s() / summary.duration_s if front_pids else None
        problem = why_late(summary, opts.max_client_lag_ms)
        if problem is None:
            return _Done(servers[0].model, summary, recording.records, front_cores)
    often = f"{attempts} times in a row " if attempts > 1 else ""
    raise NotTrusted(f"{often}at {opts.rate_per_s:.3g} requests/s {problem}")


def _measured(
    opts: ReplayOptions, requests: Sequence[TraceRequest], is_lost: IsLost = lambda _: False
) -> tuple[Sequence[Endpoint], Recording, Summary]:
    prompts = Prompts(secrets.randbits(32), opts.vocabulary)
    servers, recording = asyncio.run(replay.measure(opts, requests, prompts, lambda _: None, is_lost))
    if problem := why_not_exact(recording.records):
        raise NotTrusted(problem)
    return servers, recording, summarize(recording.records, recording.loop_lags_ms, opts.slo)
