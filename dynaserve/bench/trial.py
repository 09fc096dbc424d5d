"""One run of a workload at one rate, and what came of it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dynaserve.bench import replay
from dynaserve.bench.client import Progress
from dynaserve.bench.measures import Summary, summarize, why_late, why_not_exact
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.prompts import Prompts
from dynaserve.bench.records import RequestRecord
from dynaserve.bench.verdict import why_not_sustained
from dynaserve.errors import ConfigError

ATTEMPTS = 3


@dataclass(frozen=True)
class Trial:
    """not_sustained: why, or None. model: what the server calls it."""

    rate_per_s: float
    seed: int
    model: str
    summary: Summary
    not_sustained: str | None
    records: Sequence[RequestRecord]


class NotTrusted(ConfigError):
    """The client was late, or the server counted otherwise, so that there is no figure."""


def run(opts: ReplayOptions, rate_per_s: float, seed: int, show: Callable[[Progress], None]) -> Trial:
    """Replays at that rate. The same seed has the same requests in the same order, at any rate, of other tokens each time.

    A run in which the client itself was late is repeated, up to ATTEMPTS in all; then NotTrusted is raised.
    """
    opts = replace(opts, rate_per_s=rate_per_s, seed=seed)
    requests = replay.plan_requests(opts)
    for attempt in range(ATTEMPTS):
        prompts = Prompts(secrets.randbits(32), opts.vocabulary)
        server, recording = asyncio.run(replay.measure(opts, requests, prompts, show))
        summary = summarize(recording.records, recording.loop_lags_ms, opts.slo)
        if problem := why_not_exact(recording.records):
            raise NotTrusted(problem)
        problem = why_late(summary, opts.max_client_lag_ms)
        if problem is None:
            reason = why_not_sustained(recording.records, summary, opts.slo)
            return Trial(rate_per_s, seed, server.model, summary, reason, recording.records)
        if attempt + 1 == ATTEMPTS:
            raise NotTrusted(f"{ATTEMPTS} times in a row at {rate_per_s:.3g} requests/s {problem}")
    raise AssertionError
