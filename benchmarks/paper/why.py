"""Experiments that explain where the paper's figures are not reached, or exceeded, by more than a fifth: each changes one thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from benchmarks.paper.figures import SLICE_S, course, middle_per_s, one_way, overloaded
from benchmarks.paper.setting import CHUNKS, DISAGGREGATED, DYNAMIC, MODELS, SLO_AWARE, WORKLOADS, Bench, Row, chunked
from benchmarks.paper.tables import OVERLOAD_PER_S, SYSTEMS, TABLE_1, TABLE_2, TABLE_3, TABLE_4, capacities_and_goodput, decision_ms
from dynaserve.errors import ConfigError
from dynaserve.global_scheduler import Policy
from workloads import catalog

UNCALIBRATED = ("--cost-scale", "1", "--overhead-ms", "0.01", "--max-running", "256")


def table1_why(bench: Bench) -> list[Row]:
    """Experiments on what deviates in Table 1: each changes one thing, and has the paper's figure beside it.

    The MFU that the paper's own throughput has, by this count of FLOP; both instances of P2048 D512 below the rate at which the decoding
    one preempts, and KV waits where it was computed; P219 D1467 with more running requests; less KV memory; KV that moves at the end, over
    a link; and the grid as it is.
    """
    return [*_implied_mfu(), *_without_overload(bench), *_more_running(bench), *_less_memory(bench), *_other_steps(bench)]


def _implied_mfu() -> Iterator[Row]:
    size = MODELS["14b"]
    for (shape, system), paper in TABLE_1.items():
        prompt, output = map(int, catalog.SHAPES[shape].split(","))
        pairs = (prompt + output) ** 2 / 2
        flop = 2 * size.parameters * (prompt + output - 1) + 4 * size.layers * size.hidden * pairs
        implied = 100 * paper[6] * flop / (2 * 312e12)
        yield Row(f"{shape} {system} mean MFU % that the paper's requests/s imply", implied, (paper[0] + paper[1]) / 2)


def _without_overload(bench: Bench) -> Iterator[Row]:
    paper = TABLE_1["table1-balanced", "disagg"]
    for rate in (2.0, 2.2, 2.4, 2.6):
        found = bench.summary("table1-balanced", rate, *DISAGGREGATED)
        yield Row(f"table1-balanced disagg at {rate}/s: preemptions", float(found.preemptions))
        yield Row(f"table1-balanced disagg at {rate}/s: P50 TBT ms", found.tbt_ms.p50 or 0.0, paper[4])
        yield Row(f"table1-balanced disagg at {rate}/s: P99 TBT ms", found.tbt_ms.p99 or 0.0, paper[5])
        yield Row(f"table1-balanced disagg at {rate}/s: KV % G1", 100 * found.kv_share[0], paper[2])
        assert found.mfu is not None  # the model's size is told
        yield Row(f"table1-balanced disagg at {rate}/s: MFU % G2", 100 * found.mfu[1], paper[1])


def _more_running(bench: Bench) -> Iterator[Row]:
    for running, system in product(("176", "208", "224", "256"), SYSTEMS):
        paper = TABLE_1["table1-decode", system]
        found = bench.summary("table1-decode", OVERLOAD_PER_S, *SYSTEMS[system], "--max-running", running)
        told = f"table1-decode {system}, {running} running"
        yield Row(f"{told}: requests/s", found.requests_per_s, paper[6])
        yield Row(f"{told}: preemptions", float(found.preemptions))
        yield Row(f"{told}: KV % G2", 100 * found.kv_share[1], paper[3])
        yield Row(f"{told}: P99 TBT ms", found.tbt_ms.p99 or 0.0, paper[5])


LESS_KV_TOKENS = "160000"


def _less_memory(bench: Bench) -> Iterator[Row]:
    """Of disaggregation also with a prompt's memory taken at once, as it is with steps that fit all of it."""
    less = ("--kv-tokens", LESS_KV_TOKENS)
    for shape in ("table1-prefill", "table1-balanced"):
        paper = TABLE_1[shape, "coloc"]
        found = bench.summary(shape, OVERLOAD_PER_S, *SYSTEMS["coloc"], *less)
        told = f"{shape} coloc, {LESS_KV_TOKENS} tokens of KV"
        yield Row(f"{told}: requests/s", found.requests_per_s, paper[6])
        yield Row(f"{told}: KV % G2", 100 * found.kv_share[1], paper[3])
        yield Row(f"{told}: P50 TBT ms", found.tbt_ms.p50 or 0.0, paper[4])
    paper = TABLE_1["table1-prefill", "disagg"]
    found = bench.summary("table1-prefill", OVERLOAD_PER_S, "--policy", "disaggregated", "--chunk", "8192", *less)
    for index in range(2):
        told = f"table1-prefill disagg, {LESS_KV_TOKENS} tokens of KV, chunk 8192: KV % G{index + 1}"
        yield Row(told, 100 * found.kv_share[index], paper[2 + index])


def _other_steps(bench: Bench) -> Iterator[Row]:
    shape = "table1-prefill"
    paper = TABLE_1[shape, "disagg"]
    for moves, rate in (("blocks", "25"), ("blocks", "50"), ("end", "25"), ("end", "50")):
        found = bench.summary(shape, OVERLOAD_PER_S, *DISAGGREGATED, "--kv-transfer", moves, "--kv-gbytes-per-s", rate)
        yield Row(f"{shape} disagg, KV by {moves} over {rate} GB/s: P99 TBT ms", found.tbt_ms.p99 or 0.0, paper[5])
    found = bench.summary(shape, OVERLOAD_PER_S, *DISAGGREGATED, "--cost-scale", "1", "--overhead-ms", "0.01")
    yield Row(f"{shape} disagg, the grid as it is: requests/s", found.requests_per_s, paper[6])
    yield Row(f"{shape} disagg, the grid as it is: P50 TBT ms", found.tbt_ms.p50 or 0.0, paper[4])


def table2_why(bench: Bench) -> Iterator[Row]:
    """Experiments on Table 2: answers of as many tokens as the paper's requests have of goodput, then the grid as it is."""
    wanted = fmean(goodput / per_s for per_s, goodput in TABLE_2.values())
    requests = catalog.load("hybrid", bench.traces).requests
    factor = wanted / fmean(request.output_tokens for request in requests)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "hybrid.csv"
        lines = [f",{one.prompt_tokens},{max(1, round(factor * one.output_tokens))}" for one in requests]
        path.write_text("\n".join(["arrived_at_s,prompt_tokens,output_tokens", *lines, ""]))
        for told, more in ((f"answers x {factor:.2f}", ()), (f"answers x {factor:.2f}, the grid as it is, 256 running", UNCALIBRATED)):
            for row in capacities_and_goodput(bench, f"file:{path}", *more):
                yield Row(f"{told}: {row.what}", row.here, row.paper)
    for row in capacities_and_goodput(bench, "hybrid", *UNCALIBRATED):
        yield Row(f"the grid as it is, 256 running: {row.what}", row.here, row.paper)


def table3_why(bench: Bench) -> list[Row]:
    """The paper's own search (Algorithm 1), in this C++ core: whether the search is what takes less time, or how it is computed."""
    return [
        Row(f"{rate} requests/s: ms a request, Algorithm 1", decision_ms(bench, rate, Policy.paper), paper_ms)
        for rate, paper_ms in TABLE_3.items()
    ]


def table4_why(bench: Bench) -> list[Row]:
    """At which rate of requests the fleet has the paper's goodput: whether it was at its limit there."""
    return [
        Row(f"{rate} requests/s: goodput, tokens/s", bench.summary("normal:219,1467,0", rate, *DYNAMIC).goodput_tokens_per_s, TABLE_4[0])
        for rate in (2.3, 2.46, 2.6, 2.8, 3.0, OVERLOAD_PER_S)
    ]


BEST_CUT = 0.3
"""Of Figure 5, as a share of the answer."""
CUTS = (0.0, 0.1, 0.2, BEST_CUT, 0.4, 0.5, 0.6, 0.7)
NO_FACTOR = ("--cost-scale", "1", "--overhead-ms", "2.5")
MORE_RUNNING = ("--max-running", "256")
CUT_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "as in figure5": (),
    "cost scale 1": NO_FACTOR,
    "256 running": MORE_RUNNING,
    "cost scale 1, 256 running": (*NO_FACTOR, *MORE_RUNNING),
    f"{LESS_KV_TOKENS} tokens of KV": ("--kv-tokens", LESS_KV_TOKENS),
    "vLLM's steps": ("--batching", "vllm"),
}


def figure5_why(bench: Bench) -> Iterator[Row]:
    """Where the best cut of Figure 5 lies inside the answer under overload, in other settings.

    Each setting changes one thing, and the fourth two. The figure is requests/s in the middle of the run, as the paper tells no load.
    """
    cuts = {share: one_way(1024 + round(1024 * share)) for share in CUTS}
    for setting, more in CUT_SETTINGS.items():
        yield from _best_cut(setting, {share: middle_per_s(overloaded(bench, *cut, *more)) for share, cut in cuts.items()})


def _best_cut(told: str, per_s: Mapping[float, float]) -> Iterator[Row]:
    """per_s: requests, by the share of the answer that is before the cut."""
    best = max(per_s, key=lambda share: per_s[share])
    yield Row(f"{told}: best cut, share of the answer", best, BEST_CUT)
    yield Row(f"{told}: requests/s there", per_s[best])
    yield Row(f"{told}: requests/s at {BEST_CUT:g}, the paper's", per_s[BEST_CUT])
    yield Row(f"{told}: requests/s at the end of the prompt", per_s[0.0])


def figure9_why(bench: Bench) -> Iterator[Row]:
    """Figure 9 by the chunk of colocation: the mean over the workloads of `dynamic` over it, and how many of them it serves."""
    dynamic = {workload: bench.capacity(workload, first, *DYNAMIC) for workload, first in WORKLOADS.items()}
    for chunk in ("256", "320", "384", "416", "448", "480", "512", "640"):
        found = {workload: bench.capacity(workload, first, *chunked(chunk)) for workload, first in WORKLOADS.items()}
        ratios = [dynamic[workload] / capacity for workload, capacity in found.items() if capacity]
        yield Row(f"dynamic / coloc, chunk {chunk}, mean of {len(ratios)}", fmean(ratios), 2.37)


FASTER = (1.0, 1.5, 2.0, 3.0)
"""Times the rate of the trace; the first is Figure 10."""


def figure10_why(bench: Bench) -> Iterator[Row]:
    """Figure 10 as fast as it is and 1.5, 2 and 3 times as fast: in how many slices `dynamic` has the most, as it has in the paper in all.

    Whether a system is at its limit: which share of all tokens comes in time, and of requests that end while others arrive. A slice is as
    much shorter as the trace is faster, and has the same arrivals.
    """
    requests = catalog.load("bursty-chat", bench.traces).requests
    span_s = (requests[-1].arrived_at_s or 0.0) - (requests[0].arrived_at_s or 0.0)
    if not span_s:
        raise ConfigError(f"all {len(requests)} requests of bursty-chat arrive at once: there is no rate that could be changed")
    tokens = sum(request.output_tokens for request in requests)
    for factor in FASTER:
        slice_s, told = SLICE_S / factor, f"{factor:g} x its rate"
        colocated, goodput = _courses(bench, factor * (len(requests) - 1) / span_s, slice_s)
        for name, slices in goodput.items():
            yield from (Row(f"{told}: {name}, slice {number}", here) for number, here in enumerate(slices, start=1))
            yield Row(f"{told}: {name}, tokens in time, % of all", 100 * slice_s * sum(slices) / tokens)
        yield from _on_top(told, goodput, (colocated, "disagg"))


def _courses(bench: Bench, rate_per_s: float, slice_s: float) -> tuple[str, dict[str, list[float]]]:
    """Goodput, tokens/s, of each slice by system, with the chunk that has the most of it in all; first the name of that one."""
    whole = replace(bench, requests=None)

    def course_of(options: tuple[str, ...]) -> list[float]:
        return course(whole.run("bursty-chat", "--arrivals", "trace", "--rate", f"{rate_per_s:g}", *options), slice_s)

    chunks = {f"coloc, chunk {chunk}": course_of(chunked(chunk)) for chunk in CHUNKS}
    best = max(chunks, key=lambda name: sum(chunks[name]))
    others = {"disagg": DISAGGREGATED, "SLO-aware coloc": SLO_AWARE, "dynamic": DYNAMIC}
    return best, {best: chunks[best], **{name: course_of(options) for name, options in others.items()}}


def _on_top(told: str, goodput: Mapping[str, list[float]], published: tuple[str, str]) -> Iterator[Row]:
    """published: the systems that the paper has beside `dynamic`."""
    dynamic = goodput["dynamic"]
    wins = sum(all(here > goodput[name][index] for name in published) for index, here in enumerate(dynamic))
    yield Row(f"{told}: slices in which dynamic has the most of the paper's systems", float(wins), float(len(dynamic)))
    for name, others in goodput.items():
        ratios = [here / there for here, there in zip(dynamic, others, strict=True) if there]
        if name != "dynamic" and ratios:
            yield Row(f"{told}: dynamic / {name}, mean of {len(ratios)} slices", fmean(ratios))
