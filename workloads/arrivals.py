"""When requests arrive. All randomness comes from the generator that is passed in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np

from workloads.catalog import Workload
from workloads.trace import TraceRequest, WorkloadError

WITHOUT_TRACE = ("poisson", "gamma:CV", "bursty:FACTOR,SECONDS")
PROCESSES = (*WITHOUT_TRACE, "trace", "trace-spread")
_RANGES = {"gamma": ((1e-3, 1e3),), "bursty": ((1.0, 1e6), (1e-3, 1e9))}
"""Of the numbers of a process: beyond them a generator makes next to no progress."""


def gamma(rate_per_s: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Endless arrival times, in seconds, with gamma-distributed gaps of mean 1 / rate; cv, their standard deviation over mean, is the
    burstiness (1: a Poisson process). They have gone on for ever when the time begins: each second expects as many."""
    shape = 1 / cv**2
    mean_s = 1 / (rate_per_s * shape)
    # The gap in which an arbitrary time lies is longer than most; of a Poisson process, which has no memory, the rest is as any gap.
    now_s = rng.gamma(shape, mean_s) if cv == 1 else rng.random() * rng.gamma(shape + 1, mean_s)
    while True:
        yield now_s
        now_s += rng.gamma(shape, mean_s)


def bursty(rate_per_s: float, factor: float, seconds: float, rng: np.random.Generator) -> Iterator[float]:
    """Endless arrival times, in seconds, of a Poisson process whose rate changes between a calm one and one that is `factor` times as
    high (a Markov-modulated process). Each lasts an exponential time of mean `seconds`; their mean is the rate; it begins with either."""
    rates_per_s = [2 * rate_per_s / (1 + factor), 2 * rate_per_s * factor / (1 + factor)]
    now_s, busy = 0.0, int(rng.random() < 0.5)
    while True:
        ends_s = now_s + rng.exponential(seconds)
        # What is left of a gap when the rate changes is forgotten, as such gaps have no memory.
        while (now_s := now_s + rng.exponential(1 / rates_per_s[busy])) < ends_s:
            yield now_s
        now_s, busy = ends_s, 1 - busy


def replay(requests: Sequence[TraceRequest], rate_per_s: float | None = None) -> Iterator[float]:
    """The trace's own times from its first request on, stretched so that the whole trace has that mean rate; None keeps them.

    Stretching keeps the shape of bursts. A part of the trace has the mean rate only if it is as busy as the whole.
    """
    times = [request.arrived_at_s for request in requests if request.arrived_at_s is not None]
    if len(times) < len(requests):
        raise WorkloadError("the workload has no arrival times of its own: choose an arrival process and a rate")
    span_s = times[-1] - times[0]
    if rate_per_s is not None and span_s == 0:
        raise WorkloadError(f"all {len(times)} requests of the workload arrive at once: they have no rate that could be changed")
    stretch = 1.0 if rate_per_s is None else (len(times) - 1) / span_s / rate_per_s
    return ((time_s - times[0]) * stretch for time_s in times)


def spread(requests: Sequence[TraceRequest], rng: np.random.Generator) -> list[TraceRequest]:
    """Requests that share one recorded time, at random times of their bin.

    Some traces record arrivals in bins (Mooncake's: 3 s). The bin is the least time between two different arrivals; a trace
    without equal times is returned as it is.
    """
    times = [request.arrived_at_s for request in requests if request.arrived_at_s is not None]
    distinct = np.unique(times)
    if len(times) < len(requests) or len(distinct) in (1, len(times)):
        return list(requests)
    bin_s = float(np.diff(distinct).min())
    later = np.sort(np.array(times) + bin_s * rng.random(len(times)))
    return [replace(request, arrived_at_s=float(at_s)) for request, at_s in zip(requests, later, strict=True)]


def arrival_times(process: str, workload: Workload, rate_per_s: float | None, rng: np.random.Generator) -> Iterator[float]:
    """process: one of PROCESSES. Raises WorkloadError, also if a rate is needed and there is none."""
    if process == "trace":
        return replay(workload.requests, rate_per_s)
    if process == "trace-spread":
        return replay(spread(workload.requests, rng), rate_per_s)
    kind, values = _numbers(process)
    if rate_per_s is None:
        raise WorkloadError(f"arrivals {process} need a rate")
    if kind == "bursty":
        return bursty(rate_per_s, values[0], values[1], rng)
    return gamma(rate_per_s, values[0], rng)


def schedule(
    workload: Workload, times: Iterator[float], *, requests: int | None, duration_s: float | None, fewest: int = 0
) -> list[TraceRequest]:
    """The first requests with these arrival times: that many, and only those before `duration_s`; None: no such bound.

    fewest: so many, but no more than `requests`, however late they arrive. Raises WorkloadError if the workload ends before either bound
    is reached, or has no end and no bound.
    """
    if workload.endless and requests is None and duration_s is None:
        raise WorkloadError(f"workload {workload.name} has no end: say how many requests or seconds")
    planned: list[TraceRequest] = []
    for row, at_s in zip(cycle(workload.requests) if workload.endless else workload.requests, times, strict=False):
        is_late = duration_s is not None and at_s >= duration_s and len(planned) >= fewest
        if is_late or len(planned) == requests:
            break
        planned.append(replace(row, arrived_at_s=at_s))
    else:
        _check_end(workload, planned, requests, duration_s)
    if not planned:
        raise WorkloadError(f"no request of workload {workload.name} arrives in the first {duration_s} s")
    return planned


def _numbers(process: str) -> tuple[str, list[float]]:
    """`gamma` and its CV, `bursty` and its factor and seconds. Raises WorkloadError."""
    kind, _, text = ("gamma", ":", "1") if process == "poisson" else process.partition(":")
    try:
        values = [float(number) for number in text.split(",")]
    except ValueError:
        values = []
    if len(values) != len(_RANGES.get(kind, ())) or not values:
        raise WorkloadError(f"no arrivals {process!r}; there is {', '.join(PROCESSES)}")
    for value, (least, most) in zip(values, _RANGES[kind], strict=True):
        if not least <= value <= most:
            raise WorkloadError(f"arrivals {process!r}: {value:g} is not between {least:g} and {most:g}")
    return kind, values


def _check_end(workload: Workload, planned: Sequence[TraceRequest], requests: int | None, duration_s: float | None) -> None:
    """Called when the workload is exhausted."""
    if requests is None and duration_s is not None:
        raise WorkloadError(f"workload {workload.name} ends after {planned[-1].arrived_at_s:.1f} s, before {duration_s} s")
    if requests is not None and len(planned) < requests:
        raise WorkloadError(f"workload {workload.name} has {len(planned)} requests, not {requests}")
