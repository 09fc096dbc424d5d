"""What the dynamic policy leaves on the table: against every cut tried, and against every fixed fleet plan."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.paper.baselines import FIRST_PER_S
from benchmarks.paper.setting import DISAGGREGATED, DYNAMIC, SLO_AWARE, WORKLOADS, Bench, Row
from dynaserve.bench.simulate import SimulatedRun

ORACLES = ("exhaustive", "exhaustive:gather=0", "exhaustive:gather=1")
"""With its own fleet plan, and with each fixed one of two instances."""
OVERLOAD = 1.1
"""Times the capacity of `dynamic`: what all are offered."""
WITHIN = 0.01
SLOS_MS = ("100", "50")
PLANNED = {**WORKLOADS, "azure-conv": 6.0, "hybrid": 4.0, "table1-prefill": 1.0}


def oracle(bench: Bench) -> Iterator[Row]:
    """Throughput over that of an oracle that knows all lengths and tries every cut (each 16th token), by workload and SLO.

    The oracle also tries every fleet plan, its own and each fixed one, and keeps the best. All are overloaded, and offered the same
    requests; at least 0.99 is wanted. The oracle is slow: --requests 1000 is enough.
    """
    for slo_ms in SLOS_MS:
        for workload, first in FIRST_PER_S.items():
            setting = ("--tbt-slo-ms", slo_ms, "--batching", "slo")
            rate = OVERLOAD * (bench.capacity(workload, first, *setting, "--policy", "dynamic") or first)
            found = {
                policy: sustained_per_s(bench.run(workload, "--rate", f"{rate:g}", "--drawn", *setting, "--policy", policy))
                for policy in ("dynamic", *ORACLES)
            }
            best = max(ORACLES, key=lambda policy: found[policy])
            ratio = found["dynamic"] / found[best]
            verdict = "" if ratio >= 1 - WITHIN else ", MISSED"
            yield Row(f"{workload} at {slo_ms} ms: dynamic / oracle, {best}{verdict}", ratio)


def sustained_per_s(run: SimulatedRun) -> float:
    """Requests per second between the first and the last fifth to end: neither the start nor the last answers count."""
    ends_ms = sorted(outcome.end_ms for outcome in run.result.outcomes)
    first, last = len(ends_ms) // 5, 4 * len(ends_ms) // 5
    return 1e3 * (last - first) / (ends_ms[last] - ends_ms[first])


def plans(bench: Bench) -> Iterator[Row]:
    """Capacity over that of SLO-aware colocation: dynamic, each fixed number of gathering instances, disaggregation."""
    for slo_ms in SLOS_MS:
        for workload, first in PLANNED.items():
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
                yield Row(f"{workload} at {slo_ms} ms: {name} / SLO-aware colocation", found / colocated if colocated else 0.0)
