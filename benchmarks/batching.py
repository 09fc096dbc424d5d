"""`make bench-batching`: stock vLLM against an instance with SLO-aware batches, on this machine, in turns, in one run.

Servers compute on the first core, the client runs on the last. First the load is searched at which stock vLLM keeps about half
of its tokens within the TBT SLO; then both get the same open-loop traces at parts of that load. The full form repeats it three
times, shows medians, and adds stock vLLM with each fixed `--max-num-batched-tokens`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks import prediction
from benchmarks.disturbance import Disturbance, disturb
from benchmarks.load_search import best_rate, next_rate
from benchmarks.runs import Run, Trace, replay
from benchmarks.servers import System, running
from dynaserve.bench.report import machine
from dynaserve.errors import DynaServeError
from dynaserve.local.model import smollm2
from dynaserve.step_report import read_log

STOCK, OURS = "stock", "DynaServe"
FIXED_CHUNKS = (64, 128, 256, 512, 1024, 2048)
LOW, HIGH = 0.45, 0.60
MOST_SEARCHES = 6
DISTURBED_PART = 0.4


@dataclass(frozen=True)
class Form:
    """How much is measured. parts: of the load that was found, to be compared at. chunks: fixed ones of stock vLLM."""

    run_s: float
    repetitions: int
    parts: tuple[float, ...]
    chunks: tuple[int, ...]
    disturb_s: float


QUICK = Form(run_s=45.0, repetitions=1, parts=(0.6, 0.8, 1.0), chunks=(), disturb_s=12.0)
FULL = Form(run_s=90.0, repetitions=3, parts=(0.5, 0.6, 0.7, 0.8, 0.9, 1.0), chunks=FIXED_CHUNKS, disturb_s=30.0)


@dataclass
class Bench:
    """traces: arguments of the replay client, separated by spaces; log: of the steps of our instance."""

    form: Form
    trace: str
    tbt_slo_ms: float
    folder: Path
    runs: int = 0

    @property
    def log(self) -> Path:
        return (self.folder / "steps.csv").absolute()

    def measure(self, name: str, url: str, rate_per_s: float, seconds: float, seed: int) -> Run:
        self.runs += 1
        trace = Trace(tuple(shlex.split(self.trace)), seed, seconds, self.tbt_slo_ms)
        output = self.folder / f"run-{self.runs:03d}.json"
        if self.runs == 1:
            print(f"each run: {shlex.join(trace.command('URL', rate_per_s, output))}, with its own rate, seed and duration")
        run = replay(trace, url, rate_per_s, output)
        print(f"  {self.runs:3d} {_line(name, run)}  seed {seed}, client lag P99 {run.client_lag_ms:.1f} ms", flush=True)
        return run

    def search(self, url: str) -> float:
        """The load at which stock vLLM keeps about half of its tokens within the SLO."""
        tried: dict[float, float] = {}
        rate = next_rate(tried, LOW, HIGH, first=2.0)
        while rate is not None and len(tried) < MOST_SEARCHES:
            tried[rate] = self.measure(STOCK, url, rate, self.form.run_s, seed=1).attainment
            rate = next_rate(tried, LOW, HIGH, first=2.0)
        return best_rate(tried, LOW, HIGH)

    def compare(self, urls: Mapping[str, str], rate_per_s: float) -> dict[str, list[Run]]:
        """In turns; each repetition is another trace, the same for all."""
        runs: dict[str, list[Run]] = {name: [] for name in urls}
        for repetition in range(self.form.repetitions):
            for name, url in urls.items():
                runs[name].append(self.measure(name, url, rate_per_s, self.form.run_s, seed=2 + repetition))
        return runs

    def disturb(self, url: str, rate_per_s: float, core: int) -> Disturbance:
        seconds = self.form.disturb_s
        return disturb(core, seconds, lambda: self.measure(f"{OURS}, disturbed", url, rate_per_s, 3 * seconds, seed=9))


def main() -> None:
    args = _parser().parse_args()
    form = QUICK if args.quick else FULL
    args.output.mkdir(parents=True, exist_ok=True)
    bench = Bench(form, args.trace, args.tbt_slo_ms, args.output)
    print(f"command: {shlex.join(['python', '-m', 'benchmarks.batching', *sys.argv[1:]])}\nmachine: {json.dumps(machine())}", flush=True)
    try:
        run(bench, form, args)
    except DynaServeError as error:
        print(f"bench-batching: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def run(bench: Bench, form: Form, args: argparse.Namespace) -> None:
    model, cores = smollm2(), sorted(os.sched_getaffinity(0))
    common, logs = ["--served-model-name", "model", *shlex.split(args.vllm_args)], bench.folder / "logs"
    slo = ("--dynaserve-batching", "slo", "--tbt-slo-ms", f"{args.tbt_slo_ms:g}", "--dynaserve-step-log", str(bench.log))
    table: dict[float, dict[str, list[Run]]] = {}
    with running([System(STOCK, None), System(OURS, "dynaserve", slo)], model, common, logs) as urls:
        os.sched_setaffinity(0, {cores[-1]})  # of this process, and of the clients that it starts
        for name, url in urls.items():
            bench.measure(f"{name}, warm-up", url, 1.5, 20.0, seed=0)
        rate = args.rate or bench.search(urls[STOCK])
        measured_s = time.monotonic()
        for part in form.parts:
            table[part] = bench.compare(urls, part * rate)
        disturbed = bench.disturb(urls[OURS], DISTURBED_PART * rate, cores[0])
        os.sched_setaffinity(0, set(cores))  # the servers that follow may use all
    for chunk in form.chunks:
        system = System(f"stock {chunk}", None, ("--max-num-batched-tokens", str(chunk)))
        with running([system], model, common, logs) as urls:
            os.sched_setaffinity(0, {cores[-1]})
            bench.measure(f"{system.name}, warm-up", urls[system.name], 1.5, 20.0, seed=0)
            for part in form.parts:
                table[part] |= bench.compare(urls, part * rate)
            os.sched_setaffinity(0, set(cores))
    for part, runs in table.items():
        _print_part(f"{part:.0%} of the load, {part * rate:.3g} requests/s, median of {form.repetitions}", runs)
    _print_best(table, rate)
    _print_prediction(bench.log, measured_s, disturbed)
    raw = {f"{part * rate:.4g}": {name: [asdict(one) for one in runs] for name, runs in by_name.items()} for part, by_name in table.items()}
    (bench.folder / "results.json").write_text(json.dumps({"machine": machine(), "load_per_s": rate, "runs": raw}, indent=1))


def _line(name: str, run: Run) -> str:
    return (
        f"{name:22s} {run.rate_per_s:5.2f}/s {run.finished:4d}/{run.requests:<4d} within SLO {run.attainment:7.2%}"
        f"  TTFT P50 {run.ttft_p50_ms:6.0f} P99 {run.ttft_p99_ms:6.0f} ms  growth {run.growth:5.2f}  TBT P99 {run.tbt_p99_ms:5.0f} ms"
        f"  {run.output_tokens_per_s:6.1f} tokens/s"
    )


def _print_part(title: str, by_name: Mapping[str, Sequence[Run]]) -> None:
    print(f"\n{title}")
    medians = {name: _median(runs) for name, runs in by_name.items()}
    for name, run in medians.items():
        print(f"  {_line(name, run)}")
    stock, ours = medians[STOCK], medians[OURS]
    print(
        f"  {OURS} / {STOCK}: TTFT P50 {ours.ttft_p50_ms / stock.ttft_p50_ms:.2f}, P99 {ours.ttft_p99_ms / stock.ttft_p99_ms:.2f},"
        f" tokens/s {ours.output_tokens_per_s / stock.output_tokens_per_s:.3f}"
    )


def _misses(stock: Run, ours: Run) -> list[str]:
    """Which of the goals are missed at a load."""
    goals = {
        "all requests finish": ours.finished == ours.requests,
        "99 % of tokens within the SLO": ours.attainment >= 0.99,
        "TTFT P50 at most 1.5x": ours.ttft_p50_ms <= 1.5 * stock.ttft_p50_ms,
        "TTFT P99 at most 1.5x": ours.ttft_p99_ms <= 1.5 * stock.ttft_p99_ms,
        "tokens/s within 5 %": ours.output_tokens_per_s >= 0.95 * stock.output_tokens_per_s,
    }
    return [goal for goal, met in goals.items() if not met]


def _print_best(table: Mapping[float, Mapping[str, Sequence[Run]]], rate: float) -> None:
    medians = {part: (_median(runs[STOCK]), _median(runs[OURS])) for part, runs in table.items()}
    print("\ngoals of the comparison")
    for part, (stock, ours) in medians.items():
        missed = ", ".join(_misses(stock, ours)) or "none"
        print(f"  at {part * rate:.3g} requests/s, where stock keeps {stock.attainment:.1%}: missed: {missed}")


def _median(runs: Sequence[Run]) -> Run:
    return Run(**{field: median(getattr(run, field) for run in runs) for field in Run.__dataclass_fields__})


def _print_prediction(log: Path, measured_s: float, disturbed: Disturbance) -> None:
    steps = list(read_log(log))
    quiet = [step for step in steps if measured_s <= step.at_s < disturbed.began_s]
    errors = prediction.errors(quiet)
    print(f"\nprediction: mean absolute error {errors.live:.1%} over {errors.steps} steps, each predicted before it ran;")
    print(f"  {errors.frozen:.1%} on the second half of them by a profile that learnt from the first half only")
    during = [step for step in steps if disturbed.began_s < step.at_s < disturbed.ended_s]
    slowdown = prediction.slowdown(quiet, during)
    print(f"  a busy process on the core got {disturbed.core_share:.0%} of it and made steps {slowdown:.2f}x as long")
    for what, changed_s in (("began", disturbed.began_s), ("ended", disturbed.ended_s)):
        recovered = prediction.steps_to_recover(steps, changed_s)
        print(
            f"  after it {what}: "
            + ("never" if recovered is None else f"{recovered} steps until {prediction.WINDOW_STEPS} in a row were within 15 % on average")
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batching", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="some ten minutes: one repetition, no fixed chunks")
    parser.add_argument(
        "--trace", default="--workload sample --arrivals poisson", metavar="ARGS", help="of dynaserve bench replay (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second (default: searched)")
    parser.add_argument("--tbt-slo-ms", type=float, default=100.0, metavar="MS", help="(default: %(default)s)")
    parser.add_argument("--vllm-args", default="", metavar="ARGS", help="of all servers, separated by spaces")
    parser.add_argument("--output", type=Path, default=Path("build/bench-batching"), metavar="DIR", help="raw data (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main()
