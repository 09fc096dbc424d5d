"""Where the time to the first token goes: vLLM's real scheduler, stock and with SLO-aware batches, on a virtual machine.

    python -m benchmarks.ttft --workload azure-conv --traces DIR --scale 0.25 --rate 2.1

The machine's steps take what the roofline says, times a log-normal error; both systems get the same requests at the same times.
The roofline is the one fitted to 4,021 steps of SmolLM2-135M in bfloat16 on one core of an AMD EPYC (Zen 5), unless a step log
(`--dynaserve-step-log`) says what another machine takes.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.parsers import parser_of
from benchmarks.prediction import shape_of
from dynaserve.bench.options import positive, whole
from dynaserve.errors import ConfigError
from dynaserve.step_latency import Roofline, StepSample, fit_roofline
from dynaserve.step_report import read_log
from tests.virtual_engine import Engine
from vllm_plugin.options import PluginOptions
from workloads import arrivals, catalog
from workloads.trace import TraceRequest, WorkloadError

CORE = Roofline(overhead_ms=19.8, token_ms=0.685, knee_tokens=1.4, pair_ms=5.35e-4, decode_ms=0.13, context_ms=2.54e-3)
WARM_UP_STEPS = 50


@dataclass(frozen=True)
class Step:
    took_ms: float
    prefill_tokens: int
    decodes: int

    @property
    def mixed(self) -> bool:
        return self.prefill_tokens > 0 and self.decodes > 0


@dataclass
class Seen:
    """began_s: when a request's first chunk started. chunks: how many steps computed its prompt."""

    arrived_s: dict[str, float] = field(default_factory=dict)
    began_s: dict[str, float] = field(default_factory=dict)
    chunks: Counter[str] = field(default_factory=Counter)
    steps: list[Step] = field(default_factory=list)


def run(engine: Engine, requests: Sequence[TraceRequest], sigma: float, rng: random.Random) -> Seen:
    arrivals_s = [engine.now_s + (request.arrived_at_s or 0.0) for request in requests]
    seen, sent = Seen(), 0
    while sent < len(requests) or engine.scheduler.requests:
        while sent < len(requests) and arrivals_s[sent] <= engine.now_s:
            # Another character, another prompt: nothing is found in the prefix cache.
            engine.add(f"r{sent}", requests[sent].prompt_tokens, requests[sent].output_tokens, like=chr(500 + sent))
            seen.arrived_s[f"r{sent}"] = arrivals_s[sent]
            sent += 1
        if not engine.scheduler.requests:
            engine.now_s = arrivals_s[sent]
            continue
        engine.slowness, before_s = rng.lognormvariate(0.0, sigma), engine.now_s
        scheduled = engine.step()
        prefills = {name: tokens for name, tokens in scheduled.items() if tokens > 1}
        seen.steps.append(Step(1e3 * (engine.now_s - before_s), sum(prefills.values()), len(scheduled) - len(prefills)))
        for name in prefills:
            seen.began_s.setdefault(name, before_s)
            seen.chunks[name] += 1
    return seen


def describe(engine: Engine, seen: Seen, slo_ms: float) -> str:
    ids = list(seen.began_s)
    ttft = 1e3 * np.array([engine.token_times_s[name][0] - seen.arrived_s[name] for name in ids])
    queue = 1e3 * np.array([seen.began_s[name] - seen.arrived_s[name] for name in ids])
    gaps = np.array(engine.gaps_ms(min(seen.arrived_s.values())))
    mixed = [step for step in seen.steps if step.mixed]
    parts = {
        "beside decodes": mixed,
        "decodes alone": [step for step in seen.steps if not step.prefill_tokens],
        "prefill alone": [step for step in seen.steps if not step.decodes],
    }
    total_ms = sum(step.took_ms for step in seen.steps)
    shares = ", ".join(f"{name} {sum(step.took_ms for step in steps) / total_ms:.0%}" for name, steps in parts.items())
    return (
        f"within {slo_ms:g} ms {np.mean(gaps <= slo_ms):.2%}  TTFT P50 {np.median(ttft):.0f} P99 {np.quantile(ttft, 0.99):.0f} ms"
        f"  mean {ttft.mean():.0f} = {queue.mean():.0f} before the first chunk + {(ttft - queue).mean():.0f} in"
        f" {np.mean([seen.chunks[name] for name in ids]):.1f} steps\n      {len(seen.steps)} steps: {shares}; mixed ones take"
        f" {np.mean([step.took_ms for step in mixed]):.0f} ms for {np.mean([step.prefill_tokens for step in mixed]):.0f} tokens of prefill"
        f" beside {np.mean([step.decodes for step in mixed]):.1f} decodes"
    )


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        machine = CORE if args.step_log is None else machine_of(args.step_log)
        requests = plan(args)
    except (ConfigError, WorkloadError, OSError) as error:
        parser.error(str(error))
    logging.disable(logging.WARNING)
    print(f"{machine}\n{len(requests)} requests of {args.workload} x {args.scale:g}, {args.arrivals}, {args.rate:g}/s")
    for name, stock in (("stock", True), ("slo", False)):
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(Path(folder), 7000, PluginOptions(tbt_slo_ms=args.tbt_slo_ms), stock=stock, machine=machine)
            engine.learn()
            print(f"{name:6s}{describe(engine, run(engine, requests, args.sigma, random.Random(args.seed)), args.tbt_slo_ms)}", flush=True)


def machine_of(log: Path) -> Roofline:
    """Whose steps are in the log. Raises ConfigError, and OSError if it cannot be read."""
    steps = list(read_log(log))
    if len(steps) <= WARM_UP_STEPS:
        raise ConfigError(f"{log}: has {len(steps)} steps, of which the first {WARM_UP_STEPS} are left out")
    return fit_roofline([StepSample(shape_of(step.measured), step.measured.measured_ms) for step in steps[WARM_UP_STEPS:]])


def plan(args: argparse.Namespace) -> list[TraceRequest]:
    """Raises WorkloadError."""
    workload = catalog.limited(catalog.scaled(catalog.load(args.workload, args.traces), args.scale), 3500)
    times = arrivals.arrival_times(args.arrivals, workload, args.rate, np.random.default_rng(args.seed))
    return arrivals.schedule(workload, times, requests=None, duration_s=args.duration_s)


def _parser() -> argparse.ArgumentParser:
    options = "--workload azure-conv --traces DIR --scale 0.25 --rate 2.1"
    parser = parser_of("ttft", __doc__.partition("\n")[0], options)
    parser.add_argument("--workload", default="sample", metavar="NAME", help="as of dynaserve bench replay (default: %(default)s)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files")
    parser.add_argument("--scale", type=positive, default=1.0, metavar="X", help="lengths times X (default: %(default)s)")
    parser.add_argument("--arrivals", default="poisson", metavar="PROCESS", help="(default: %(default)s)")
    parser.add_argument("--rate", type=positive, default=1.5, metavar="R", help="requests per second (default: %(default)s)")
    parser.add_argument("--duration-s", type=positive, default=90.0, metavar="T", help="(default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--sigma", type=positive, default=0.0, metavar="S", help="of the steps' log-normal errors (default: none)")
    parser.add_argument("--tbt-slo-ms", type=positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    parser.add_argument("--step-log", type=Path, metavar="FILE", help="of the machine whose steps are imitated")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
