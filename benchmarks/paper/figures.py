"""Figures 3, 5, 8, 9, 10 and 11 of the paper, and section 6.6's transfer, in the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.paper.setting import DISAGGREGATED, DYNAMIC, MODELS, SLO_AWARE, WORKLOADS, Bench, Row, chunked
from benchmarks.sensitivity import balance
from dynaserve.bench.simulate import SimulatedRun
from dynaserve.errors import ConfigError
from workloads import catalog

OVERLOAD_PER_S = 8.0
P1024_D1024 = "fixed:1024,1024"
"""Of Figure 5."""
SLICE_S = 360.0
"""Of Figure 10."""
FIGURE_9 = {"coloc, best chunk": (1.15, 2.37, 3.07), "disagg": (1.09, 1.37, 1.67)}
"""The least, the mean and the most of the paper's ratios."""
SMALL_CHUNKS = ("256", "384", "512")
"""Larger ones take longer than 100 ms here."""
FIXED_STEPS = [(f"chunk {chunk}", chunked(chunk), 52.0) for chunk in ("1024", "1536", "2048")]
"""Of Figure 11; the paper does not tell the chunk of its 52 %."""
SAME_PLACES = [
    (f"dynamic, chunk {chunk}", ("--policy", "dynamic", "--batching", "vllm", "--chunk", chunk), None) for chunk in ("512", "2048")
]
"""As `slo`, but for the batches."""


def figure3(bench: Bench) -> list[Row]:
    """Minutes of a trace in which prefill takes more of an instance than decoding, by the simulator's latencies.

    A prompt token costs its share of a step of 2048, an output token its share of a step of 32 decodes.
    """
    table, rows = bench.table(), []
    for name in ("azure-code", "azure-conv", "bursty-chat"):
        minutes = balance.minutes_of(name, catalog.load(name, bench.traces).requests, table)
        shares = [minute.prefill_share for minute in minutes]
        rows.append(Row(f"{name}: minutes in which prefill takes more, of {len(minutes)}", sum(share > 0.5 for share in shares)))
        rows += [Row(f"{name}: prefill's share of the work, {name_}", float(value)) for name_, value in _spread(shares)]
    return rows


def figure5(bench: Bench) -> list[Row]:
    """Throughput of P1024 D1024 against where it is cut, always from the first instance to the second; and what never cuts.

    Also without the first and the last tenth of the ends: answers are equal, so that the seats that begin together end together, and
    whether an instance has a last round of them more than the other is some per cent of a run.
    """
    cuts = (256, 512, 768, 1024, 1152, 1280, 1408, 1536, 1792)
    systems = {f"cut at {split}": one_way(split) for split in cuts} | {"SLO-aware, whole": SLO_AWARE, "dynamic": DYNAMIC}
    rows = []
    for name, options in systems.items():
        run = overloaded(bench, *options)
        rows.append(Row(f"{name}: requests/s", run.summary.requests_per_s))
        rows.append(Row(f"{name}: requests/s, middle of the run", middle_per_s(run)))
    return rows


def one_way(split: int) -> tuple[str, ...]:
    """P1024 D1024 cut at that token, always from the first instance to the second."""
    return ("--policy", f"fixed:{split / 2047:.4f}:one-way", "--batching", "slo")


def overloaded(bench: Bench, *options: str) -> SimulatedRun:
    """Of P1024 D1024. Raises ConfigError."""
    return bench.run(P1024_D1024, "--rate", f"{OVERLOAD_PER_S:g}", *options)


def middle_per_s(run: SimulatedRun) -> float:
    """Requests that end, between the first and the last tenth of them."""
    ends_s = np.array([outcome.end_ms for outcome in run.result.outcomes]) / 1e3
    first_s, last_s = np.quantile(ends_s, (0.1, 0.9))
    return float(np.count_nonzero((ends_s > first_s) & (ends_s <= last_s)) / (last_s - first_s))


def figure8(bench: Bench) -> list[Row]:
    """Goodput over rate, three models, tokens/s, colocation with its best chunk each time, and with SLO-aware batches, which the paper has
    not; then the best ratios that the paper names.

    The most over colocation also by chunk: what a chunk does that is not the best at each point.
    """
    rows = []
    most = dict.fromkeys(("coloc", "disagg", "SLO-aware coloc", *SMALL_CHUNKS), 0.0)
    others = {"disagg": DISAGGREGATED, "SLO-aware coloc": SLO_AWARE, "dynamic": DYNAMIC}
    for size, model in MODELS.items():
        scaled = replace(bench, model=model)
        for workload in WORKLOADS:
            for rate in (1.0, 2.0, 4.0, 6.0, 8.0):
                systems = {**{chunk: chunked(chunk) for chunk in SMALL_CHUNKS}, **others}
                goodput = {
                    name: scaled.summary(workload, rate, "--drawn", *options).goodput_tokens_per_s for name, options in systems.items()
                }
                goodput["coloc"] = max(goodput[chunk] for chunk in SMALL_CHUNKS)
                rows += [Row(f"{size} {workload} {rate:g}/s {name}", goodput[name]) for name in ("coloc", *others)]
                most = {name: max(found, goodput["dynamic"] / goodput[name]) for name, found in most.items()}
    rows += [Row(f"most of dynamic / coloc, chunk {chunk}", most[chunk], 1.91) for chunk in SMALL_CHUNKS]
    rows.append(Row("most of dynamic / coloc", most["coloc"], 1.91))
    rows.append(Row("most of dynamic / disagg", most["disagg"], 1.61))
    rows.append(Row("most of dynamic / SLO-aware coloc", most["SLO-aware coloc"]))
    return rows


def figure9(bench: Bench) -> Iterator[Row]:
    """Capacity by model and workload, requests/s, and the mean, the least and the most of the ratios, of each model and of all."""
    over: dict[str, dict[str, list[float]]] = {}
    for size, model in MODELS.items():
        scaled = replace(bench, model=model)
        for workload, first in WORKLOADS.items():
            chunk, best = scaled.best_chunk(workload, first)
            found = {
                "coloc, best chunk": best,
                "coloc, chunk 2048": scaled.capacity(workload, first, *chunked("2048")),
                "disagg": scaled.capacity(workload, first, *DISAGGREGATED),
                "SLO-aware coloc": scaled.capacity(workload, first, *SLO_AWARE),
            }
            dynamic = scaled.capacity(workload, first, *DYNAMIC)
            for name, value in found.items():
                yield Row(f"{size} {workload} {name} {chunk if 'best' in name else ''}".strip(), value)
                if value:
                    over.setdefault(name, {}).setdefault(size, []).append(dynamic / value)
            yield Row(f"{size} {workload} dynamic", dynamic)
    for name, by_size in over.items():
        for size, ratios in by_size.items():
            yield Row(f"{size} dynamic / {name}, mean of {len(ratios)}", float(np.mean(ratios)))
        yield from ratio_rows(name, [ratio for ratios in by_size.values() for ratio in ratios])


def ratio_rows(name: str, ratios: Sequence[float]) -> list[Row]:
    """Of `dynamic` over that system, at least one, beside those of Figure 9."""
    least, mean, most = FIGURE_9.get(name, (None, None, None))
    told = f"dynamic / {name}"
    return [
        Row(f"{told}, mean of {len(ratios)}", float(np.mean(ratios)), mean),
        Row(f"{told}, least", min(ratios), least),
        Row(f"{told}, most", max(ratios), most),
    ]


def figure10(bench: Bench) -> list[Row]:
    """Goodput, tokens/s, of every six minutes of a recorded course of arrivals: the 42 minutes of bursty-chat."""
    rows = []
    whole = replace(bench, requests=None)
    systems = {"coloc, chunk 512": chunked("512"), "disagg": DISAGGREGATED, "SLO-aware coloc": SLO_AWARE, "dynamic": DYNAMIC}
    for name, options in systems.items():
        run = whole.run("bursty-chat", "--arrivals", "trace", *options)
        rows += [Row(f"{name}, minutes {6 * part} to {6 * part + 6}", goodput) for part, goodput in enumerate(course(run, SLICE_S))]
    return rows


def figure11(bench: Bench) -> list[Row]:
    """Share of gaps within 100 ms under overload, and the longest percentiles: round robin over fixed chunks, `dynamic` over them, and over
    SLO-aware batches, and SLO-aware batches where nothing is cut."""
    rows = []
    for workload in ("azure-code", "bursty-chat"):
        for name, options, paper in (*FIXED_STEPS, *SAME_PLACES, ("slo", DYNAMIC, 99.0), ("SLO-aware coloc", SLO_AWARE, None)):
            found = bench.summary(workload, OVERLOAD_PER_S, "--drawn", *options)
            rows.append(Row(f"{workload} {name}: gaps within 100 ms, %", 100 * (found.token_attainment or 0.0), paper))
            rows.append(Row(f"{workload} {name}: P99 TBT ms", found.tbt_ms.p99 or 0.0))
    return rows


def transfer(bench: Bench) -> list[Row]:
    """Section 6.6: KV that is waited for at a hand-off, when it moves block by block and when it moves at the end."""
    rows = []
    for gbytes_per_s in ("1", "5", "25"):
        wait_ms = {}
        for how in ("end", "blocks"):
            options = ("--policy", "paper", "--batching", "slo", "--kv-gbytes-per-s", gbytes_per_s, "--kv-transfer", how)
            found = bench.summary("mini-reasoning", 2.0, *options).hand_off_wait_ms
            if found is None:
                raise ConfigError(f"no hand-off among {bench.requests} requests: take more of them")
            wait_ms[how] = found.mean
            rows.append(Row(f"{gbytes_per_s} GB/s, {how}: mean wait ms", wait_ms[how]))
        rows.append(Row(f"{gbytes_per_s} GB/s: saved, %", 100 * (1 - wait_ms["blocks"] / wait_ms["end"]), 94.0))
    return rows


def course(run: SimulatedRun, slice_s: float) -> list[float]:
    """Of each slice in which requests arrive: tokens of the requests that ended in it, but those late, per second."""
    began_s, last_s = (run.requests[index].arrived_at_s or 0.0 for index in (0, -1))
    tokens = [0] * (int((last_s - began_s) // slice_s) + 1)
    for request, outcome in zip(run.requests, run.result.outcomes, strict=True):
        part = int((outcome.end_ms / 1e3 - began_s) // slice_s)
        if part < len(tokens):
            tokens[part] += request.output_tokens - outcome.late_gaps
    return [count / slice_s for count in tokens]


def _spread(values: list[float]) -> list[tuple[str, float]]:
    return [("least", min(values)), ("median", float(np.median(values))), ("most", max(values))]
