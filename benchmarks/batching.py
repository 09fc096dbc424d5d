"""`make bench-batching`: stock vLLM against an instance with SLO-aware batches, on this machine, in turns, in one run.

Servers compute on the first core, the client runs on the last. Two traces (`docs/measurements.md` says why these):
- the load point: a bursty trace, at the rate at which stock vLLM keeps about half of its tokens within the TBT SLO;
- the curve: Poisson arrivals, at parts of the rate at which stock vLLM, saturated, keeps about half of them.
At the load point stock vLLM also runs with fixed `--max-num-batched-tokens`, the best of which is compared in turns with the others.

Each run's raw data stays in the output folder under its own name, and a run that lies there is not measured again: a benchmark
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import prediction
from benchmarks.checkout import commit
from benchmarks.disturbance import disturb
from benchmarks.endings import ending
from benchmarks.goals import OURS, STOCK, best_chunk, line, print_compared
from benchmarks.load_search import best_rate, next_rate
from benchmarks.parsers import parser_of, words
from benchmarks.runs import Run, Trace, read, replay
from benchmarks.servers import Servers, System, running
from dynaserve.bench.options import positive, whole
from dynaserve.bench.report import machine
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable
from dynaserve.local.model import smollm2
from dynaserve.machine import fast_dtype
from dynaserve.step_report import read_log

POINT = "--workload azure-code --arrivals trace --scale 0.25 --requests 100 --max-total-tokens 3500"
CURVE = "--workload azure-conv --arrivals poisson --scale 0.25 --max-total-tokens 3500"
STEADY = ("--workload", "sample", "--arrivals", "poisson")
FIXED_CHUNKS = (64, 128, 256, 512, 1024)
STOCK_CHUNK = 2048
"""What stock vLLM takes by itself."""
LOW, HIGH = 0.45, 0.60
MOST_SEARCHES = 6
QUIET_S = 60.0


@dataclass(frozen=True)
class Form:
    """How much is measured. parts: of the curve's load. disturb_s: how long the core is disturbed."""

    repetitions: int
    chunks: tuple[int, ...]
    parts: tuple[float, ...]
    curve_s: float = 60.0
    disturb_s: float = 20.0


QUICK = Form(repetitions=1, chunks=(), parts=())
FULL = Form(repetitions=3, chunks=FIXED_CHUNKS, parts=(0.6, 0.8, 1.0))


@dataclass
class Bench:
    """point, curve: arguments of the replay client. point_rate: None: searched. common: of all servers."""

    form: Form
    point_rate: float | None
    point: tuple[str, ...]
    curve: tuple[str, ...]
    tbt_slo_ms: float
    common: tuple[str, ...]
    folder: Path

    def __post_init__(self) -> None:
        self.log = (self.folder / "steps.csv").absolute()
        slo = ("--dynaserve-batching", "slo", "--tbt-slo-ms", f"{self.tbt_slo_ms:g}", "--dynaserve-step-log", str(self.log))
        self.stock, self.ours = System(STOCK, None), System(OURS, "dynaserve", slo)
        self.core = min(os.sched_getaffinity(0))
        self.measured_s = 0.0

    @property
    def point_trace(self) -> Trace:
        return Trace(self.point, 1, None, self.tbt_slo_ms)

    @property
    def curve_trace(self) -> Trace:
        return Trace(self.curve, 1, self.form.curve_s, self.tbt_slo_ms)

    def check(self) -> None:
        """Raises ConfigError where a trace cannot be sent: now, rather than when the servers have started."""
        self.point_trace.check()
        if self.form.parts:
            self.curve_trace.check()

    def servers(self, *systems: System) -> Servers:
        return Servers(partial(running, systems, smollm2(), self.common, self.folder / "logs"), self.warm_up)

    def warm_up(self, name: str, url: str) -> None:
        replay(Trace(STEADY, 0, 20.0, self.tbt_slo_ms), url, 1.5, self.folder / f"warm-up-{name.replace(' ', '-')}.json")
        self.measured_s = time.monotonic()

    def measure(self, key: str, servers: Servers, name: str, trace: Trace, rate_per_s: float) -> Run:
        """key: names the raw data, beside the system's name."""
        output = self.folder / f"{key}-{name}.json".replace(" ", "-")
        known = output.exists()
        run = read(output) if known else self._replay(servers.url(name), trace, rate_per_s, output)
        lag = "measured before" if known else f"client lag P99 {run.client_lag_ms:.1f} ms"
        print(f"  {line(name, run)}  {key}, {lag}", flush=True)
        return run

    def _replay(self, url: str, trace: Trace, rate_per_s: float, output: Path) -> Run:
        unfinished = output.with_suffix(".part")
        run = replay(trace, url, rate_per_s, unfinished)
        unfinished.rename(output)
        return run

    def search(self, key: str, servers: Servers, trace: Trace, first: float) -> float:
        """The load at which stock vLLM keeps about half of its tokens within the SLO."""
        print(f"\n{key}: {shlex.join(trace.command('URL', first, Path('RAW')))}, at the load at which stock keeps about half", flush=True)
        tried: dict[float, float] = {}
        rate = next_rate(tried, LOW, HIGH, first)
        while rate is not None and len(tried) < MOST_SEARCHES:
            rate = float(f"{rate:.3g}")
            tried[rate] = self.measure(f"{key}-search-{rate:g}", servers, STOCK, trace, rate).attainment
            rate = next_rate(tried, LOW, HIGH, first)
        return best_rate(tried, LOW, HIGH)

    def best_fixed(self, trace: Trace, rate_per_s: float) -> System | None:
        """Stock vLLM with the best of the fixed chunks; None: that is the one it takes anyway, or none is asked for."""
        runs: dict[int, Run] = {}
        for chunk in self.form.chunks and (*self.form.chunks, STOCK_CHUNK):
            system = fixed(chunk)
            with self.servers(system) as servers:
                runs[chunk] = self.measure(f"point-{rate_per_s:g}-chunks", servers, system.name, trace, rate_per_s)
        best = best_chunk(runs) if runs else STOCK_CHUNK
        return None if best == STOCK_CHUNK else fixed(best)

    def predict(self, servers: Servers) -> str:
        """How well steps were predicted, also while another process wants the core; in words."""
        output = self.folder / "prediction.txt"
        if not output.exists():
            url, seconds = servers.url(OURS), self.form.disturb_s
            # Steps of its own: the runs before may have been measured by an earlier start of the server.
            replay(Trace(STEADY, 8, QUIET_S, self.tbt_slo_ms), url, 1.2, self.folder / "quiet.json")
            work = partial(replay, Trace(STEADY, 9, 3 * seconds, self.tbt_slo_ms), url, 1.2, self.folder / "disturbed.json")
            disturbed = disturb(self.core, seconds, work)
            output.write_text(prediction.report(list(read_log(self.log)), self.measured_s, disturbed))
        return output.read_text()


def fixed(chunk: int) -> System:
    return System(f"stock {chunk}", None, ("--max-num-batched-tokens", str(chunk)))


def run(bench: Bench, provenance: Mapping[str, Any]) -> None:
    """provenance: for the raw data."""
    form = bench.form
    point, curve = bench.point_trace, bench.curve_trace
    with bench.servers(bench.stock) as servers:
        point_rate = bench.point_rate or bench.search("point", servers, point, first=3.0)
        curve_rate = bench.search("curve", servers, curve, first=3.0) if form.parts else None
    best = bench.best_fixed(point, point_rate)
    systems = [bench.stock, bench.ours, *([best] if best else [])]
    compared: dict[str, dict[str, list[Run]]] = {}
    with bench.servers(*systems) as servers:
        title = f"load point, --rate {point_rate:g}"
        compared[title] = {system.name: [] for system in systems}
        for repetition in range(form.repetitions):
            for name, runs in compared[title].items():
                runs.append(bench.measure(f"point-{point_rate:g}-{repetition}", servers, name, point, point_rate))
        for part in form.parts:
            assert curve_rate is not None
            rate = float(f"{part * curve_rate:.3g}")
            compared[f"curve, --rate {rate:g}"] = {
                name: [bench.measure(f"curve-{rate:g}", servers, name, curve, rate)] for name in (STOCK, OURS)
            }
        predicted = bench.predict(servers)
    for title, by_name in compared.items():
        print_compared(title, by_name)
    print(f"\n{predicted}")
    raw = {title: {name: [asdict(one) for one in runs] for name, runs in by_name.items()} for title, by_name in compared.items()}
    (bench.folder / "results.json").write_text(json.dumps({**provenance, "runs": raw}, indent=1))


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 1 if something could not be measured, 2 for bad options, 130 when interrupted."""
    parser = _parser()
    args = parser.parse_args(arguments)
    bench, known = _bench(args), args.output / "settings.json"
    try:
        bench.check()
        check_replaceable(known)
    except ConfigError as error:
        parser.error(str(error))
    provenance = {"commit": commit(), "machine": machine(), "dtype": fast_dtype()}
    chosen = {name: getattr(args, name) for name in ("point", "curve", "tbt_slo_ms", "vllm_args")}
    settings = json.dumps({**provenance, **chosen, "traces": str(args.traces)})
    if known.exists() and known.read_text() != settings:
        parser.error(f"{args.output} holds runs of other options, another commit or machine, {known.read_text()}: take another --output")
    known.write_text(settings)
    print(
        f"command: {shlex.join(['python', '-m', 'benchmarks.batching', *arguments])}\n{json.dumps(provenance)}",
        flush=True,
    )
    with ending("bench-batching"):
        run(bench, provenance)


def _bench(args: argparse.Namespace) -> Bench:
    form = QUICK if args.quick else FULL
    return Bench(
        form=replace(form, repetitions=args.repetitions or form.repetitions),
        point_rate=args.point_rate,
        point=_with(args.traces, args.point),
        curve=_with(args.traces, args.curve),
        tbt_slo_ms=args.tbt_slo_ms,
        common=("--served-model-name", "model", *args.vllm_args),
        folder=args.output,
    )


def _with(traces: Path | None, arguments: Sequence[str]) -> tuple[str, ...]:
    return (*arguments, *(() if traces is None else ("--traces", str(traces))))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("batching", __doc__.partition("\n")[0], "--quick --traces DIR --output build/bench-batching")
    parser.add_argument("--quick", action="store_true", help="some twelve minutes: the load point once, no fixed chunks, no curve")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files that --point and --curve name")
    parser.add_argument("--point", type=words, default=POINT, metavar="ARGS", help="of dynaserve bench replay (default: %(default)s)")
    parser.add_argument("--point-rate", type=positive, metavar="R", help="of --point, in requests per second (default: searched)")
    parser.add_argument("--repetitions", type=whole(1), metavar="N", help="of the load point (default: 3; --quick: 1)")
    parser.add_argument("--curve", type=words, default=CURVE, metavar="ARGS", help="of dynaserve bench replay (default: %(default)s)")
    parser.add_argument("--tbt-slo-ms", type=positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    of_all = "of all servers (default: %(default)s)"
    parser.add_argument("--vllm-args", type=words, default="--max-num-seqs 64", metavar="ARGS", help=of_all)
    parser.add_argument("--output", type=Path, default=Path("build/bench-batching"), metavar="DIR", help="raw data (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
