"""What the dynamic policy leaves on the table: against every cut tried, and against every fixed fleet plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.paper.baselines import FIRST_PER_S
from benchmarks.paper.setting import DISAGGREGATED, DYNAMIC, SEED, SLO_AWARE, WORKLOADS, Bench, Row, simulations
from dynaserve.bench.simulate import SimulatedRun
from dynaserve.errors import ConfigError

ORACLES = ("exhaustive", "exhaustive:gather=0", "exhaustive:gather=1")
"""With its own fleet plan, and with each fixed one of two instances."""
OVERLOAD = 1.1
"""Times the capacity of `dynamic`: what all are offered."""
WARM_UP = 0.2
"""Of the time in which requests arrive: not counted."""
LEAST_REQUESTS = 50
"""Of a run: of fewer all may have arrived before the first answers come."""
WITHIN = 0.01
PLANNED = {**WORKLOADS, "azure-conv": 6.0, "hybrid": 4.0, "table1-prefill": 1.0}


@dataclass(frozen=True)
class Overloaded:
    """Of one policy, of each seed."""

    tokens_per_s: Sequence[float]
    p99_tbt_ms: Sequence[float]


def oracle(bench: Bench) -> Iterator[Row]:
    """Throughput over that of an oracle that knows all lengths and tries every cut (each --stride-tokens), by workload and SLO.

    `dynamic` knows the lengths as well, unless --expect says what it knows of them: what is compared are the search and the plan, request
    by request by the same objective. The oracle also tries every fleet plan, its own and each fixed one: of the three, the one with the
    highest throughput over all seeds counts, of those with a mean P99 TBT within the SLO or that of `dynamic`, but for 1 %: without an SLO
    to keep, more tokens are no feat. One left out for that is told with what it has. All are overloaded, and offered the same requests; at
    least 0.99 is wanted. The oracle is slow: --requests 2000 is enough. The error is the standard error of the seeds' own ratios. Its time
    grows with the lengths over the stride: 16 tokens are 2 ms of prefill on an A100.
    """
    with simulations() as pool:
        for slo_ms in bench.slos_ms:
            for workload, first in bench.chosen(FIRST_PER_S).items():
                capacity = bench.capacity(workload, first, "--tbt-slo-ms", slo_ms, *DYNAMIC)
                if not capacity:
                    yield Row(
                        f"{workload} at {slo_ms} ms: not servable by dynamic, so that no load is {OVERLOAD:g} times its capacity", 0.0
                    )
                    continue
                yield from compared(
                    f"{workload} at {slo_ms} ms", _overloaded(bench, pool, workload, OVERLOAD * capacity, slo_ms), float(slo_ms)
                )


def compared(what: str, found: Mapping[str, Overloaded], slo_ms: float) -> Iterator[Row]:
    """dynamic over the best oracle, and over each better one that is left out. Of all oracles if none keeps the SLO.

    found: of "dynamic" and of each of ORACLES, with the same seeds, of which there are at least two.
    """
    dynamic = found["dynamic"]
    bound_ms = (1 + WITHIN) * max(slo_ms, fmean(dynamic.p99_tbt_ms))
    keeping = [policy for policy in ORACLES if fmean(found[policy].p99_tbt_ms) <= bound_ms] or ORACLES
    best = max(keeping, key=lambda policy: fmean(found[policy].tokens_per_s))
    ratio, error = _over(dynamic, found[best])
    verdict = "" if ratio >= 1 - WITHIN else ", MISSED"
    yield Row(f"{what}: dynamic / oracle, {best}, +- {error:.3f}{verdict}", ratio)
    for policy in ORACLES:
        there = found[policy]
        if policy not in keeping and fmean(there.tokens_per_s) > fmean(found[best].tokens_per_s):
            ratio, error = _over(dynamic, there)
            p99_ms = fmean(there.p99_tbt_ms)
            yield Row(f"{what}: dynamic / {policy}, +- {error:.3f}, left out: P99 TBT {p99_ms:.1f} and not {bound_ms:.1f} ms", ratio)


def _over(here: Overloaded, there: Overloaded) -> tuple[float, float]:
    """The ratio of the mean throughputs, and the standard error of the seeds' ratios."""
    ratios = [mine / its for mine, its in zip(here.tokens_per_s, there.tokens_per_s, strict=True)]
    return fmean(here.tokens_per_s) / fmean(there.tokens_per_s), stdev(ratios) / len(ratios) ** 0.5


def _overloaded(bench: Bench, pool: ThreadPoolExecutor, workload: str, rate_per_s: float, slo_ms: str) -> dict[str, Overloaded]:
    """Of `dynamic` and the oracles."""
    offered = ("--rate", f"{rate_per_s:g}", "--drawn", "--tbt-slo-ms", slo_ms, "--batching", "slo")
    forms = {it: ("--policy", f"{it}:stride={bench.stride_tokens}") for it in ORACLES}
    runs = {
        policy: [pool.submit(_once, bench, workload, *offered, *form, "--seed", str(SEED + seed)) for seed in range(bench.seeds)]
        for policy, form in {"dynamic": ("--policy", "dynamic", "--expect", bench.expect), **forms}.items()
    }
    found = {policy: [run.result() for run in seeds] for policy, seeds in runs.items()}
    return {policy: Overloaded(*zip(*seeds, strict=True)) for policy, seeds in found.items()}


def _once(bench: Bench, workload: str, *options: str) -> tuple[float, float]:
    """Tokens per second and P99 TBT."""
    run = bench.run(workload, *options)
    # Answers of one token have no gap, and none that is late.
    return sustained_tokens_per_s(run), run.summary.tbt_ms.p99 or 0.0


def sustained_tokens_per_s(run: SimulatedRun) -> float:
    """Output tokens while requests arrive; an answer's come evenly between its first and its last.

    Not requests that end: a plan that leaves long answers behind ends more of them within any time, and needs longer for all. Raises
    ConfigError if there is none.
    """
    until_ms = 1e3 * (run.requests[-1].arrived_at_s or 0.0)
    since_ms = WARM_UP * until_ms
    tokens = 0.0
    for request, outcome in zip(run.requests, run.result.outcomes, strict=True):
        first_ms, took_ms = outcome.first_token_ms, outcome.end_ms - outcome.first_token_ms
        tokens += since_ms <= first_ms < until_ms
        if took_ms > 0.0:
            within_ms = max(0.0, min(outcome.end_ms, until_ms) - max(first_ms, since_ms))
            tokens += (request.output_tokens - 1) * within_ms / took_ms
    if not tokens:
        counted = f"the last {1 - WARM_UP:.0%} of the time in which they arrive"
        raise ConfigError(f"no token of {len(run.requests)} requests comes in {counted}: take more of them")
    return 1e3 * tokens / (until_ms - since_ms)


def _ratio(found: float, base: float) -> float:
    """Not a number: neither is servable."""
    if base:
        return found / base
    return math.inf if found else math.nan


def plans(bench: Bench) -> Iterator[Row]:
    """Capacity over that of SLO-aware colocation: dynamic, each fixed number of gathering instances, disaggregation."""
    for slo_ms in bench.slos_ms:
        for workload, first in bench.chosen(PLANNED).items():
            slo = ("--tbt-slo-ms", slo_ms)
            colocated = bench.capacity(workload, first, *slo, *SLO_AWARE)
            yield Row(f"{workload} at {slo_ms} ms: SLO-aware colocation, requests/s", colocated)
            systems = {
                "dynamic": DYNAMIC,
                "none gathers": ("--policy", "dynamic:gather=0", "--batching", "slo"),
                "one gathers": ("--policy", "dynamic:gather=1", "--batching", "slo"),
                "disaggregation": (*DISAGGREGATED, "--batching", "slo"),
            }
            for name, options in systems.items():
                found = bench.capacity(workload, first, *slo, *options)
                yield Row(f"{workload} at {slo_ms} ms: {name} / SLO-aware colocation", _ratio(found, colocated))
