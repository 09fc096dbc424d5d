"""`dynaserve simulate`: a fleet on a virtual clock, driven by the scheduler core that serves."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from dynaserve import latency_profile
from dynaserve.bench import (
    expected_lengths,
    latency_tables,
    options,
    replay,
    report,
    search,
    simulate_options,
    simulated,
    simulated_policy,
    trial,
)
from dynaserve.bench.capacity import drawn_options, middle_rate, search_options
from dynaserve.bench.exit_status import NOTHING_TO_REPORT, status_of
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.simulated import ModelSize, SimulatedSummary
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable, write_in_one_move
from dynaserve.global_scheduler import Options, Policy
from dynaserve.request_placer import step_share
from dynaserve.simulation import Batching, EngineOptions, SimulatedRequest, SimulationOptions, SimulationResult, simulate
from dynaserve.step_latency import ProfileTable
from workloads.trace import TraceRequest


@dataclass(frozen=True)
class Fleet:
    """What is simulated; the seed comes with each run. tables: of each instance, or one of all."""

    tables: Sequence[ProfileTable]
    instances: int
    placement: Options | None
    engine: EngineOptions
    kv_tokens: int
    hand_off_ms: float
    kv_token_ms: float
    kv_token_work_ms: float
    streams_kv: bool
    revises: bool
    expect: str
    step_sigma: float
    drift_sigma: float
    drift_ms: float
    model: ModelSize | None


@dataclass(frozen=True)
class SimulatedRun:
    requests: Sequence[TraceRequest]
    result: SimulationResult
    summary: SimulatedSummary


def main(arguments: Sequence[str]) -> None:
    """Ends with the exit status that `--help` tells."""
    raise SystemExit(status_of("simulate", lambda: run(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError."""
    args = simulate_options.parse(arguments, alone=True)
    fleet = _fleet(args)
    if args.output is not None:
        check_replaceable(args.output)
    found = _capacity(args, fleet) if args.capacity else None
    started_s = time.perf_counter()
    summary = None
    if found is None:
        summary = play(fleet, options.replay_options(args))
        _print(summary, time.perf_counter() - started_s)
    if args.output is not None:
        content = {"command": report.command_line(arguments, "simulate"), **_capacities_data(found), "summary": summary}
        write_in_one_move(args.output, msgspec.json.encode(content))
    if found is not None:
        rates = [one.passed_per_s or 0.0 for one in found]
        middle, at_least = middle_rate(rates), "at least " if any(map(_is_least, found)) else ""
        Console(highlight=False).print(f"capacity {at_least}{middle:.4g} requests/s (least {min(rates):.4g}, most {max(rates):.4g})")
        return 0 if middle > 0 else NOTHING_TO_REPORT
    return 0


def capacities(arguments: Sequence[str]) -> list[float | None]:
    """By repetition, of what the command with these options simulates; None: not servable. Raises ConfigError, also if even the highest
    rate passed: that is no capacity."""
    args = simulate_options.parse(arguments)
    found = _capacity(args, _fleet(args))
    if (unbounded := next(filter(_is_least, found), None)) is not None:
        most = unbounded.passed_per_s
        raise ConfigError(f"even {most:g} requests/s passed, the highest rate tried: a capacity needs a higher --rate or --most-rate")
    return [one.passed_per_s for one in found]


def _capacities_data(found: Sequence[search.Found] | None) -> dict[str, list[Any] | None]:
    """at_least: whether even the highest rate passed. None: nothing was searched."""
    if found is None:
        return {"capacities_per_s": None, "at_least": None}
    return {"capacities_per_s": [one.passed_per_s for one in found], "at_least": [_is_least(one) for one in found]}


def _is_least(found: search.Found) -> bool:
    return found.failed_per_s is None


def one_run(arguments: Sequence[str]) -> SimulatedRun:
    """What the command with these options simulates once. Raises ConfigError."""
    args = simulate_options.parse(arguments)
    fleet, opts = _fleet(args), options.replay_options(args)
    requests, result = _simulate(fleet, opts)
    return SimulatedRun(requests, result, simulated.summarize(requests, result, opts.slo, fleet.kv_tokens, fleet.model))


def play(fleet: Fleet, opts: ReplayOptions) -> SimulatedSummary:
    """One run, with the workload, the rate and the seed of the options. Raises ConfigError."""
    requests, result = _simulate(fleet, opts)
    return simulated.summarize(requests, result, opts.slo, fleet.kv_tokens, fleet.model)


def _simulate(fleet: Fleet, opts: ReplayOptions, fewest: int = 0) -> tuple[list[TraceRequest], SimulationResult]:
    requests = replay.plan_requests(opts, fewest)
    expected = expected_lengths.expected(fleet.expect, [row.output_tokens for row in requests], np.random.default_rng((opts.seed, 2)))
    rows = [
        SimulatedRequest((row.arrived_at_s or 0.0) * 1e3, row.prompt_tokens, row.output_tokens, tokens)
        for row, tokens in zip(requests, expected, strict=True)
    ]
    setting = SimulationOptions(
        instances=fleet.instances,
        round_robin=fleet.placement is None,
        placement=fleet.placement or Options(Policy.colocated),
        engine=fleet.engine,
        hand_off_ms=fleet.hand_off_ms,
        kv_token_ms=fleet.kv_token_ms,
        kv_token_work_ms=fleet.kv_token_work_ms,
        streams_kv=fleet.streams_kv,
        revises=fleet.revises,
        step_sigma=fleet.step_sigma,
        drift_sigma=fleet.drift_sigma,
        drift_ms=fleet.drift_ms,
        tbt_slo_ms=opts.slo.tbt_ms,
        ttft_slo_ms=opts.slo.ttft_ms or math.inf,
        seed=opts.seed,
    )
    try:
        return requests, simulate(fleet.tables, rows, setting)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _capacity(args: argparse.Namespace, fleet: Fleet) -> list[search.Found]:
    searching, base = search_options(args, most_runs=1), drawn_options(args)
    if trial.seeds(base.seed + searching.repetitions - 1, searching.most_runs)[-1] > options.MOST_SEED:
        more = f"{searching.repetitions} --repetitions of {searching.most_runs} --most-runs"
        raise ConfigError(f"--seed {base.seed} with {more} goes beyond {options.MOST_SEED}, the last seed")
    found = []
    for number in range(searching.repetitions):
        opts = replace(base, seed=base.seed + number)

        def passes(rate_per_s: float, opts: ReplayOptions = opts) -> bool:
            # A rate at which nobody comes in the duration of a run is judged by its first request.
            at_rate = replace(opts, rate_per_s=rate_per_s)
            runs = [_simulate(fleet, replace(at_rate, seed=seed), fewest=1) for seed in trial.seeds(opts.seed, searching.most_runs)]
            reason = simulated.why_not_sustained(runs, opts.slo)
            print(f"seed {opts.seed}  {rate_per_s:8.4g} requests/s  {reason or 'passed'}", file=sys.stderr)
            return reason is None

        bounds = searching.least_per_s, searching.most_per_s
        found.append(search.highest_rate(passes, searching.first_per_s, searching.resolution, *bounds))
    return found


def _fleet(args: argparse.Namespace) -> Fleet:
    tables = tables_of(args)
    size = (args.parameters, args.layers, args.hidden, args.peak_tflops)
    if any(size) and not all(size):
        raise ConfigError("--parameters, --layers, --hidden and --peak-tflops are needed together, for MFU")
    slo_ms = args.tbt_slo_ms if args.batching == "slo" else math.inf
    expected_lengths.check(args.expect)
    kv_token_ms = 0.0 if args.kv_gbytes_per_s is None else args.kv_token_bytes / args.kv_gbytes_per_s / 1e6
    if args.kv_on_host and not kv_token_ms:
        raise ConfigError("--kv-on-host needs --kv-gbytes-per-s: moving KV takes as much of the steps")
    kv_token_work_ms = kv_token_ms if args.kv_on_host else 0.0
    placement = simulated_policy.parse(args.policy, args.instances, args.hand_off_ms, kv_token_ms, kv_token_work_ms)
    engine = EngineOptions(
        batching=Batching.slo if args.batching == "slo" else Batching.fixed_chunk,
        max_step_tokens=args.chunk,
        max_running=args.max_running,
        kv_tokens=args.kv_tokens,
        min_prefill_tokens=args.min_prefill_tokens,
        slo_ms=slo_ms,
        margin=step_share(args.step_sigma),
    )
    model = ModelSize(*size) if all(size) else None
    return Fleet(
        tables=tables,
        instances=args.instances,
        placement=placement,
        engine=engine,
        kv_tokens=args.kv_tokens,
        hand_off_ms=args.hand_off_ms,
        kv_token_ms=kv_token_ms,
        kv_token_work_ms=kv_token_work_ms,
        streams_kv=args.kv_transfer == "blocks",
        revises=not args.fixed_hand_offs,
        expect=args.expect,
        step_sigma=args.step_sigma,
        drift_sigma=args.drift_sigma or 0.0,
        drift_ms=1e3 * args.drift_s,
        model=model,
    )


def tables_of(args: argparse.Namespace) -> list[ProfileTable]:
    """Of each instance, where there are as many profiles, or one of all. Raises ConfigError."""
    if args.profile is None:
        return [table_of(args)]
    if len(args.profile) not in (1, args.instances):
        raise ConfigError(f"--profile names {len(args.profile)} files for {args.instances} instances: it must be one, or one of each")
    return [table_of(argparse.Namespace(**vars(args) | {"profile": profile})) for profile in args.profile]


def table_of(args: argparse.Namespace) -> ProfileTable:
    """What a step takes, by the options of `simulate_options.add_latency`. Raises ConfigError."""
    sources = [source for source in (args.profile, args.gpu_grid, args.roofline) if source is not None]
    if len(sources) != 1:
        raise ConfigError(f"one of --profile, --gpu-grid and --roofline is needed, not {len(sources)} of them")
    of_grid = ("--gpu-model", "--gpu", "--overhead-ms", "--cost-scale")
    simulate_options.check_needed(args, "--gpu-grid", args.gpu_grid is not None, *of_grid)
    if args.profile is not None:
        return latency_profile.load(args.profile)
    if args.roofline is not None:
        return latency_tables.from_coefficients(args.roofline)
    if args.gpu_model is None or args.gpu is None:
        raise ConfigError("--gpu-grid needs --gpu-model and --gpu")
    overhead_ms = simulate_options.OVERHEAD_MS if args.overhead_ms is None else args.overhead_ms
    return latency_tables.from_grid(args.gpu_grid, args.gpu_model, args.gpu, overhead_ms, args.cost_scale or simulate_options.COST_SCALE)


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
