"""Whether the dynamic policy is anywhere worse than a system that one could have had instead."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.paper import setting
from benchmarks.paper.setting import DISAGGREGATED, DYNAMIC, SLO_AWARE, Bench, Row, chunked

LEAST = 0.97
"""Of the best baseline's capacity."""
CHUNKS = ("128", *setting.CHUNKS)
"""Below those that the paper has, one which keeps 50 ms."""
FIRST_PER_S = {
    "azure-code": 4.0,
    "azure-conv": 6.0,
    "bursty-chat": 4.0,
    "arxiv-summarization": 3.0,
    "mini-reasoning": 2.5,
    "hybrid": 4.0,
    "r1-reasoning": 1.0,
    "table1-prefill": 1.2,
    "table1-balanced": 2.5,
    "table1-decode": 2.5,
    "mooncake": 0.5,
}
"""The rate that a search begins with."""
SYSTEMS: dict[str, tuple[str, ...]] = {
    **{f"chunk {chunk}": chunked(chunk) for chunk in CHUNKS},
    "disaggregation": DISAGGREGATED,
    "SLO-aware colocation": SLO_AWARE,
    "dynamic": DYNAMIC,
}


def baselines(bench: Bench) -> Iterator[Row]:
    """Capacity of each fixed chunk, disaggregation, SLO-aware colocation and dynamic, by workload and SLO; at least 0.97 is wanted."""
    with setting.simulations() as pool:
        for workload, first in bench.chosen(FIRST_PER_S).items():
            for slo_ms in bench.slos_ms:
                started = {
                    name: pool.submit(bench.capacity, workload, first, "--tbt-slo-ms", slo_ms, *system) for name, system in SYSTEMS.items()
                }
                found = {name: search.result() for name, search in started.items()}
                for name, capacity in found.items():
                    yield Row(f"{workload} at {slo_ms} ms: {name}, requests/s", capacity)
                best = max((name for name in found if name != "dynamic"), key=lambda name: found[name])
                if found[best]:
                    ratio = found["dynamic"] / found[best]
                    verdict = "" if ratio >= LEAST else ", MISSED"
                    yield Row(f"{workload} at {slo_ms} ms: dynamic / {best}{verdict}", ratio)


def overload(bench: Bench) -> Iterator[Row]:
    """Goodput and mean TTFT of dynamic over those of SLO-aware colocation when twice the first rate of a search comes, then nobody."""
    with setting.simulations() as pool:
        for workload, first in bench.chosen(FIRST_PER_S).items():
            for slo_ms in bench.slos_ms:
                offered = ("--drawn", "--tbt-slo-ms", slo_ms)
                started = [pool.submit(bench.summary, workload, 2 * first, *offered, *system) for system in (SLO_AWARE, DYNAMIC)]
                colocated, dynamic = (run.result() for run in started)
                yield Row(f"{workload} at {slo_ms} ms: goodput", dynamic.goodput_tokens_per_s / colocated.goodput_tokens_per_s)
                if colocated.ttft_ms and dynamic.ttft_ms:
                    yield Row(f"{workload} at {slo_ms} ms: mean TTFT", dynamic.ttft_ms.mean / colocated.ttft_ms.mean)
