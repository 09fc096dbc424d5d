"""The paper's testbed in the simulator: A100 and Qwen2.5, and the systems that it compares."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynaserve.bench import latency_tables, simulate, simulated_policy
from dynaserve.bench.capacity import middle_rate
from dynaserve.bench.simulate import SimulatedRun
from dynaserve.bench.simulated import SimulatedSummary
from dynaserve.errors import ConfigError
from dynaserve.files import write_in_one_move
from dynaserve.step_latency import ProfileTable
from workloads import catalog

GPU = "a100_sxm"
COST_SCALE, OVERHEAD_MS = 1.2, 2.5
CALIBRATION = ("--cost-scale", f"{COST_SCALE:g}", "--overhead-ms", f"{OVERHEAD_MS:g}", "--max-running", "128")
"""Chosen so that the six throughputs of Table 1 fit, and used for everything else."""
CHUNKS = ("256", "384", "512", "1024", "2048")
"""Of vLLM, among which the paper tunes colocation for each workload."""
DISAGGREGATED = ("--policy", "disaggregated", "--chunk", "2048")
DYNAMIC = ("--policy", "dynamic", "--batching", "slo")
SLO_AWARE = ("--policy", "colocated", "--batching", "slo")
SLOS_MS = ("100", "50")
SEED = 1
"""Of each run; of several, or of several searches, that of the first."""
SEEDS = 10
"""Of `oracle`: one run differs by some 1.5 % from another that is placed but for one request alike."""
EXACT = "exact"
"""What policies know of the lengths of answers (`dynaserve simulate --expect`)."""
WORKLOADS = {"azure-code": 4.0, "bursty-chat": 4.0, "arxiv-summarization": 3.0, "mini-reasoning": 2.5}
"""Of Figures 8 and 9, and the rate that a search begins with."""


@dataclass(frozen=True)
class Model:
    """kv_tokens: of an instance, by aiconfigurator's estimate for 90 % of its memory. kv_token_bytes: of all its devices."""

    name: str
    parameters: float
    layers: int
    hidden: int
    devices: int
    kv_tokens: int
    kv_token_bytes: int


MODELS = {
    "14b": Model("qwen2.5-14b", 14.77e9, 48, 5120, 1, 219168, 196608),
    "32b": Model("qwen2.5-32b", 32.76e9, 64, 5120, 2, 304288, 262144),
    "72b": Model("qwen2.5-72b", 72.71e9, 80, 8192, 4, 440880, 327680),
}


def chunked(chunk: str) -> tuple[str, ...]:
    """Colocation with vLLM's chunked prefill behind a round robin."""
    return ("--policy", "round-robin", "--chunk", chunk)


@dataclass(frozen=True)
class Row:
    """paper None: it has no such figure."""

    what: str
    here: float
    paper: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.here / self.paper if self.paper else None


@dataclass(frozen=True)
class Bench:
    """Where the data is, and how long each run is.

    traces None: only fixed shapes and mini-reasoning can be loaded. requests None: all that the workload has, or --duration-s.
    workloads, slos_ms: of a table over many; workloads None: all of it. stride_tokens, seeds, expect: of `oracle`: how far apart it tries
    cuts, how many runs of each policy, and what `dynamic` knows of lengths.
    """

    grid: Path
    traces: Path | None
    requests: int | None
    repetitions: int
    model: Model = MODELS["14b"]
    workloads: Sequence[str] | None = None
    slos_ms: Sequence[str] = SLOS_MS
    stride_tokens: int = simulated_policy.USUAL_STRIDE_TOKENS
    seeds: int = SEEDS
    expect: str = EXACT

    def chosen(self, first_per_s: Mapping[str, float]) -> dict[str, float]:
        """Of a table's workloads those that are wanted. Raises ConfigError where it lacks one of them, WorkloadError where one cannot be
        loaded: now, rather than after hours."""
        if unknown := [name for name in self.workloads or () if name not in first_per_s]:
            raise ConfigError(f"--workloads: this table has {', '.join(first_per_s)}, and not {', '.join(unknown)}")
        chosen = {name: rate for name, rate in first_per_s.items() if self.workloads is None or name in self.workloads}
        for name in chosen:
            catalog.load(name, self.traces)
        return chosen

    def table(self) -> ProfileTable:
        """What a step takes. Raises ConfigError."""
        return latency_tables.from_grid(self.grid, self.model.name, GPU, OVERHEAD_MS, COST_SCALE)

    def options(self, workload: str, *more: str) -> list[str]:
        model = self.model
        size = ("--parameters", str(model.parameters), "--layers", str(model.layers), "--hidden", str(model.hidden))
        return [
            *("--gpu-grid", str(self.grid), "--gpu-model", model.name, "--gpu", GPU),
            *(() if self.traces is None else ("--traces", str(self.traces))),
            *(*CALIBRATION, *size, "--peak-tflops", str(312 * model.devices), "--kv-tokens", str(model.kv_tokens)),
            *(("--kv-token-bytes", str(model.kv_token_bytes)) if "--kv-gbytes-per-s" in more else ()),
            *("--seed", str(SEED), "--workload", workload, *more),
            *(() if self.requests is None else ("--requests", str(self.requests))),
        ]

    def run(self, workload: str, *more: str) -> SimulatedRun:
        """Raises ConfigError."""
        return simulate.one_run(self.options(workload, *more))

    def summary(self, workload: str, rate_per_s: float, *more: str) -> SimulatedSummary:
        """Raises ConfigError."""
        return self.run(workload, "--rate", f"{rate_per_s:g}", *more).summary

    def capacity(self, workload: str, first_per_s: float, *more: str) -> float:
        """0: not servable. Raises ConfigError."""
        searching = ("--rate", f"{first_per_s:g}", "--repetitions", str(self.repetitions), "--resolution", "0.03")
        return middle_rate(simulate.capacities(self.options(workload, *searching, *more)))

    def best_chunk(self, workload: str, first_per_s: float, *more: str) -> tuple[str, float]:
        """The chunk of the highest capacity, as the paper tunes colocation, and that capacity."""
        found = {chunk: self.capacity(workload, first_per_s, *chunked(chunk), *more) for chunk in CHUNKS}
        best = max(found, key=lambda chunk: found[chunk])
        return best, found[best]


@contextmanager
def simulations() -> Iterator[ThreadPoolExecutor]:
    """A thread for each core: the simulator lets other threads run meanwhile. What has not begun when the block is left never does, so that
    Ctrl-C waits for what is running only."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def show(rows: Sequence[Row]) -> None:
    """As a table on standard output."""
    width = max(len(row.what) for row in rows)
    print(f"{'':{width}s}  {'here':>10s}  {'paper':>10s}  {'ratio':>6s}")
    for row in rows:
        paper = "" if row.paper is None else f"{row.paper:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        print(f"{row.what:{width}s}  {row.here:10.4g}  {paper:>10s}  {ratio:>6s}")


def write(path: Path, rows: Sequence[Row]) -> None:
    """As CSV."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["what", "here", "paper", "ratio"])
    writer.writerows((row.what, row.here, row.paper, row.ratio) for row in rows)
    write_in_one_move(path, text.getvalue().encode())
