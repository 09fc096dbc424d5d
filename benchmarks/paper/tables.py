"""Tables 1 to 4 of the paper in the simulator."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

from benchmarks.paper.setting import DISAGGREGATED, DYNAMIC, SLO_AWARE, Bench, Row, chunked
from dynaserve.execution_predictor import InstanceLimits
from dynaserve.global_scheduler import GlobalScheduler, InstanceState, Options, Policy, RequestSpec, Slo

TABLE_1: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("table1-prefill", "disagg"): (43.24, 0.19, 4.83, 5.77, 22.70, 58.09, 0.83, 100.0),
    ("table1-prefill", "coloc"): (38.94, 38.94, 39.67, 40.03, 309.68, 352.93, 1.49, 1.73),
    ("table1-balanced", "disagg"): (30.59, 7.93, 1.17, 94.83, 47.0, 65.11, 2.56, 99.83),
    ("table1-balanced", "coloc"): (21.26, 21.26, 94.23, 95.7, 46.86, 336.81, 2.83, 84.09),
    ("table1-decode", "disagg"): (2.09, 14.34, 0.0, 96.27, 50.63, 74.47, 1.68, 99.95),
    ("table1-decode", "coloc"): (13.98, 13.98, 95.2, 95.33, 47.99, 162.67, 2.86, 94.46),
}
_FIGURES = ("MFU % G1", "MFU % G2", "KV % G1", "KV % G2", "P50 TBT ms", "P99 TBT ms", "requests/s", "attainment %")
OVERLOAD_PER_S = 5.0
SYSTEMS = {"coloc": chunked("2048"), "disagg": DISAGGREGATED}


def table1(bench: Bench) -> list[Row]:
    """Overload: as fast as each system goes."""
    rows = []
    for (shape, system), paper in TABLE_1.items():
        here = _saturated(bench, shape, *SYSTEMS[system])
        rows += [Row(f"{shape} {system} {name}", value, published) for name, value, published in zip(_FIGURES, here, paper, strict=True)]
    return rows


TABLE_2 = {"coloc": (4.6, 316.32), "disagg": (5.9, 399.31), "dynamic": (7.4, 473.84)}
"""Capacity in requests/s, and goodput there in tokens/s."""


def table2(bench: Bench) -> list[Row]:
    """Capacity of the hybrid workload, and goodput at that rate."""
    return capacities_and_goodput(bench, "hybrid")


def capacities_and_goodput(bench: Bench, workload: str, *more: str) -> list[Row]:
    """Of that workload with the systems of Table 2, and its figures beside them."""
    first_per_s = 4.0
    chunk, colocated = bench.best_chunk(workload, first_per_s, *more)
    systems = {"coloc": chunked(chunk), "disagg": DISAGGREGATED, "SLO-aware coloc": SLO_AWARE, "dynamic": DYNAMIC}
    rows = []
    for name, options in systems.items():
        paper_per_s, paper_goodput = TABLE_2.get(name, (None, None))
        capacity = colocated if name == "coloc" else bench.capacity(workload, first_per_s, *options, *more)
        told = f"coloc, chunk {chunk}" if name == "coloc" else name
        rows.append(Row(f"{told}: capacity, requests/s", capacity, paper_per_s))
        if capacity:
            goodput = bench.summary(workload, capacity, "--drawn", *options, *more).goodput_tokens_per_s
            rows.append(Row(f"{told}: goodput there, tokens/s", goodput, paper_goodput))
    return rows


TABLE_3 = {6: 17.47, 8: 15.48, 10: 14.40, 12: 13.70, 14: 14.85, 16: 14.54}


def table3(bench: Bench) -> list[Row]:
    """Median milliseconds of a decision of the dynamic policy on this machine, called from Python, without the front-end around it."""
    return [
        Row(f"{rate} requests/s: ms a request", decision_ms(bench, rate, Policy.dynamic), paper_ms) for rate, paper_ms in TABLE_3.items()
    ]


def decision_ms(bench: Bench, rate_per_s: float, policy: Policy) -> float:
    """Median, of requests that come and end as in a simulated run of the dynamic policy on two instances."""
    limits = InstanceLimits(max_requests=128, max_step_tokens=2048, kv_tokens=bench.model.kv_tokens, step_ms=95.0)
    run = bench.run("bursty-chat", "--rate", f"{rate_per_s:g}", "--drawn", *DYNAMIC)
    scheduler = GlobalScheduler(Options(policy), bench.table())
    for name in "ab":
        scheduler.observe(InstanceState(name, limits=limits))
    events = [((request.arrived_at_s or 0.0) * 1e3, 0, number) for number, request in enumerate(run.requests)]
    events += [(outcome.end_ms, 1, number) for number, outcome in enumerate(run.result.outcomes)]
    took_ms = []
    for at_ms, ends, number in sorted(events):
        if ends:
            scheduler.finish(str(number), at_ms)
            continue
        outputs = run.requests[number].output_tokens
        spec = RequestSpec(
            request_id=str(number),
            prompt_tokens=run.requests[number].prompt_tokens,
            max_output_tokens=outputs,
            expected_output_tokens=outputs,
            slo=Slo(tbt_ms=100.0),
        )
        started_s = time.perf_counter()
        scheduler.place(spec, at_ms)
        took_ms.append((time.perf_counter() - started_s) * 1e3)
    return median(took_ms)


TABLE_4 = {0: 3606.93, 10: 3591.0, 50: 3564.9, 100: 3501.85}


def table4(bench: Bench) -> list[Row]:
    """Answers of N(1467, sigma) tokens, all expected to have 1467, under overload; then answers that are not expected at all."""
    goodput = {
        sigma: bench.summary(f"normal:219,1467,{sigma}", OVERLOAD_PER_S, *DYNAMIC, "--expect", "fixed:1467").goodput_tokens_per_s
        for sigma in TABLE_4
    }
    rows = [Row(f"sigma {sigma}: goodput, tokens/s", goodput[sigma], paper) for sigma, paper in TABLE_4.items()]
    rows += [
        Row(f"sigma {sigma}: goodput over that of sigma 0", goodput[sigma] / goodput[0], paper / TABLE_4[0])
        for sigma, paper in TABLE_4.items()
    ]
    exact = bench.summary("mini-reasoning", OVERLOAD_PER_S, *DYNAMIC).goodput_tokens_per_s
    for how in ("lognormal:0.2", "lognormal:0.5", "lognormal:1", "mean"):
        found = bench.summary("mini-reasoning", OVERLOAD_PER_S, *DYNAMIC, "--expect", how).goodput_tokens_per_s
        rows.append(Row(f"mini-reasoning, {how}: goodput over that of exact lengths", found / exact))
    return rows


def _saturated(bench: Bench, shape: str, *options: str) -> tuple[float, ...]:
    found = bench.summary(shape, OVERLOAD_PER_S, *options)
    mfu = [100 * share for share in found.mfu or ()]
    kv = [100 * share for share in found.kv_share]
    attainment = 100 * (found.token_attainment or 0.0)
    return (*mfu, *kv, found.tbt_ms.p50 or 0.0, found.tbt_ms.p99 or 0.0, found.requests_per_s, attainment)
