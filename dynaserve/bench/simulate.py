"""`dynaserve simulate`: a fleet on a virtual clock, driven by the scheduler core that serves."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from dynaserve import latency_profile
from dynaserve.bench import latency_tables, options, replay, report, search, simulated
from dynaserve.bench.capacity import add_search, drawn_options, search_options
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.simulated import ModelSize, SimulatedSummary
from dynaserve.errors import ConfigError
from dynaserve.global_scheduler import Options, Policy, parse_policy
from dynaserve.simulation import Batching, EngineOptions, SimulatedRequest, SimulationOptions, simulate
from dynaserve.step_latency import ProfileTable

QUANTILE_SIGMAS = 2.33
EXAMPLE = """\
example:
  dynaserve simulate --roofline 10,0.2,16,0.00002,0.2,0.0005 --workload sample --rate 4 --requests 200 --instances 2 --batching slo

Latencies of steps: --profile (what an instance has kept with --dynaserve-profile), --gpu-grid with --gpu-model and --gpu, or
--roofline. The batch rule of --batching slo is the one that serves. With --capacity it searches the highest rate that is
sustained, as `dynaserve bench capacity` does, from --rate on.

Not modelled: the bandwidth of KV transfers (--hand-off-ms is all a hand-off costs), prefix caches, the front-end's time.

exit status: 0 reported; 1 with --capacity, not even the least rate passed; 2 bad option."""


@dataclass(frozen=True)
class Fleet:
    """What is simulated; the seed comes with each run."""

    table: ProfileTable
    instances: int
    placement: Options | None
    engine: EngineOptions
    kv_tokens: int
    hand_off_ms: float
    step_sigma: float
    model: ModelSize | None


def main(arguments: Sequence[str]) -> None:
    """Ends with the exit status that `--help` tells."""
    try:
        status = run(arguments)
    except ConfigError as error:
        print(f"dynaserve simulate: {error}", file=sys.stderr)
        status = 2
    raise SystemExit(status)


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError."""
    args = _parse(arguments)
    fleet = _fleet(args)
    if args.output is not None:
        report.check_writable(args.output)
    found = _capacity(args, fleet) if args.capacity else None
    started_s = time.perf_counter()
    summary = None
    if found is None:
        summary = play(fleet, options.replay_options(args))
        _print(summary, time.perf_counter() - started_s)
    if args.output is not None:
        content = {"command": report.command_line(arguments, "simulate"), "capacities_per_s": found, "summary": summary}
        args.output.write_bytes(msgspec.json.encode(content))
    if found is not None:
        rates = [rate or 0.0 for rate in found]
        Console(highlight=False).print(f"capacity {float(np.median(rates)):.4g} requests/s (least {min(rates):.4g}, most {max(rates):.4g})")
        return 0 if np.median(rates) > 0 else 1
    return 0


def capacities(arguments: Sequence[str]) -> list[float | None]:
    """By repetition, of what the command with these options simulates; None: not servable. Raises ConfigError."""
    args = _parse(arguments)
    return _capacity(args, _fleet(args))


def play(fleet: Fleet, opts: ReplayOptions) -> SimulatedSummary:
    """One run, with the workload, the rate and the seed of the options. Raises ConfigError."""
    requests = replay.plan_requests(opts)
    rows = [SimulatedRequest((row.arrived_at_s or 0.0) * 1e3, row.prompt_tokens, row.output_tokens, row.output_tokens) for row in requests]
    setting = SimulationOptions(
        instances=fleet.instances,
        round_robin=fleet.placement is None,
        placement=fleet.placement or Options(Policy.colocated),
        engine=fleet.engine,
        hand_off_ms=fleet.hand_off_ms,
        step_sigma=fleet.step_sigma,
        tbt_slo_ms=opts.slo.tbt_ms,
        seed=opts.seed,
    )
    try:
        result = simulate(fleet.table, rows, setting)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return simulated.summarize(requests, result, opts.slo, fleet.kv_tokens, fleet.model)


def _capacity(args: argparse.Namespace, fleet: Fleet) -> list[float | None]:
    searching, base = search_options(args), drawn_options(args)
    found = []
    for number in range(searching.repetitions):
        opts = replace(base, seed=base.seed + number)

        def passes(rate_per_s: float, opts: ReplayOptions = opts) -> bool:
            reason = play(fleet, replace(opts, rate_per_s=rate_per_s)).not_sustained
            print(f"seed {opts.seed}  {rate_per_s:8.4g} requests/s  {reason or 'passed'}", file=sys.stderr)
            return reason is None

        bounds = searching.least_per_s, searching.most_per_s
        found.append(search.highest_rate(passes, searching.first_per_s, searching.resolution, *bounds).passed_per_s)
    return found


def _fleet(args: argparse.Namespace) -> Fleet:
    sources = [source for source in (args.profile, args.gpu_grid, args.roofline) if source is not None]
    if len(sources) != 1:
        raise ConfigError(f"one of --profile, --gpu-grid and --roofline is needed, not {len(sources)} of them")
    size = (args.parameters, args.layers, args.hidden, args.peak_tflops)
    if any(size) and not all(size):
        raise ConfigError("--parameters, --layers, --hidden and --peak-tflops are needed together, for MFU")
    slo_ms = args.tbt_slo_ms if args.batching == "slo" else math.inf
    try:
        placement = None if args.policy == "round-robin" else parse_policy(args.policy, args.instances)
    except ValueError as error:
        raise ConfigError(f"{error}, or 'round-robin'") from error
    engine = EngineOptions(
        batching=Batching.slo if args.batching == "slo" else Batching.fixed_chunk,
        max_step_tokens=args.chunk,
        max_running=args.max_running,
        kv_tokens=args.kv_tokens,
        min_prefill_tokens=args.min_prefill_tokens,
        slo_ms=slo_ms,
        margin=math.exp(-QUANTILE_SIGMAS * args.step_sigma),
    )
    model = ModelSize(*size) if all(size) else None
    return Fleet(_table(args), args.instances, placement, engine, args.kv_tokens, args.hand_off_ms, args.step_sigma, model)


def _table(args: argparse.Namespace) -> ProfileTable:
    if args.profile is not None:
        return latency_profile.load(args.profile)
    if args.roofline is not None:
        return latency_tables.from_coefficients(args.roofline)
    if args.gpu_model is None or args.gpu is None:
        raise ConfigError("--gpu-grid needs --gpu-model and --gpu")
    return latency_tables.from_grid(args.gpu_grid, args.gpu_model, args.gpu, args.overhead_ms, args.cost_scale)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    args = _parser().parse_args(arguments)
    # What a replay needs and a simulation has not.
    args.url, args.model, args.api_key, args.extra_body = "http://simulated", None, None, {}
    args.warmup, args.timeout_s, args.max_client_lag_ms, args.vocabulary = 0, 1.0, 1.0, range(1)
    return args


def _parser() -> options.Parser:
    parser = options.Parser(
        prog="dynaserve simulate",
        description="Simulates a fleet on a virtual clock.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_latency(parser.add_argument_group("latency of steps"))
    _add_fleet(parser.add_argument_group("fleet"))
    options.add_workload(parser.add_argument_group("workload"))
    group = parser.add_argument_group("measurement")
    group.add_argument("--tbt-slo-ms", type=options.positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    group.add_argument("--ttft-slo-ms", type=options.positive, metavar="MS", help="(default: none)")
    group.add_argument("--output", type=Path, metavar="FILE", help="the figures as JSON")
    searching = parser.add_argument_group("search")
    searching.add_argument("--capacity", action="store_true", help="search the highest sustained rate")
    add_search(searching)
    return parser


def _add_latency(group: Any) -> None:
    group.add_argument("--profile", type=Path, metavar="FILE", help="of --dynaserve-profile")
    group.add_argument("--gpu-grid", type=Path, metavar="FILE", help="CSV of measured steps")
    group.add_argument("--gpu-model", metavar="NAME", help="in the grid, as qwen2.5-14b")
    group.add_argument("--gpu", metavar="NAME", help="in the grid, as a100_sxm")
    group.add_argument(
        "--overhead-ms", type=options.positive, default=2.5, metavar="MS", help="of the host, a step of the grid (default: 2.5)"
    )
    group.add_argument("--cost-scale", type=options.positive, default=1.0, metavar="X", help="the grid's times are multiplied (default: 1)")
    group.add_argument(
        "--roofline", metavar="O,T,K,P,D,C", help="overhead ms, ms a token, knee tokens, ms a pair, a decode, a context token"
    )
    group.add_argument("--step-sigma", type=options.positive, default=0.02, metavar="X", help="log-normal noise of steps (default: 0.02)")


def _add_fleet(group: Any) -> None:
    group.add_argument("--instances", type=options.whole(1), default=2, metavar="N", help="(default: 2)")
    group.add_argument("--policy", default="round-robin", help="round-robin, or a policy of `dynaserve serve` (default: round-robin)")
    group.add_argument("--batching", choices=("vllm", "slo"), default="vllm", help="(default: vllm)")
    group.add_argument("--chunk", type=options.whole(1), default=2048, metavar="N", help="most tokens of a step (default: 2048)")
    group.add_argument("--min-prefill-tokens", type=options.whole(0), default=16, metavar="N", help="of a late step (default: 16)")
    group.add_argument("--max-running", type=options.whole(1), default=256, metavar="N", help="requests at a time (default: 256)")
    group.add_argument("--kv-tokens", type=options.whole(1), default=219168, metavar="N", help="KV cache (default: 219168)")
    group.add_argument("--hand-off-ms", type=options.positive, default=2.0, metavar="MS", help="(default: 2)")
    group.add_argument("--parameters", type=options.positive, metavar="N", help="of the model, for MFU")
    group.add_argument("--layers", type=options.whole(1), metavar="N")
    group.add_argument("--hidden", type=options.whole(1), metavar="N", help="query heads x head size")
    group.add_argument("--peak-tflops", type=options.positive, metavar="X", help="of the device")


def _print(summary: SimulatedSummary, took_s: float) -> None:
    console = Console(highlight=False)
    for name, value in asdict(summary).items():
        shown = value
        if isinstance(value, dict):
            shown = "  ".join(f"{key} {number:.4g}" for key, number in value.items() if number is not None)
        elif isinstance(value, list):
            shown = "  ".join(f"{number:.3f}" for number in value[:8]) + (" ..." if len(value) > 8 else "")
        elif isinstance(value, float):
            shown = f"{value:.4g}"
        console.print(f"{name:24s} {shown}", markup=False, soft_wrap=True)
    console.print(f"{'simulated in':24s} {took_s:.2f} s", markup=False)
