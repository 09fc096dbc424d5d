"""`make bench-overload`: what clients get when three times as many come as the fleet can serve.

Instances of SmolLM2 with SLO-aware batches, one core each. One core is left to the front-end and the client: beside an engine they
make its steps as irregular as they are busy, and its margin, and so its throughput, would tell of the client. The load rises until
requests are refused; the last load before is the fleet's capacity. Then comes a multiple of it. Throughput is counted while requests
come, without the time in which the first ones fill the fleet and the last ones end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parsers import parser_of
from dynaserve import direct_http
from dynaserve.bench import options, trial
from dynaserve.bench.measures import Summary
from dynaserve.bench.options import positive, whole
from dynaserve.bench.records import RequestRecord
from dynaserve.bench.report import machine
from dynaserve.bench.trial import Trial
from dynaserve.errors import DynaServeError
from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import smollm2
from dynaserve.machine import StolenTime, fast_dtype
from dynaserve.metrics_page import total

WORKLOAD = "fixed:128,32"
FILLING_S = 10.0
"""At the beginning of each load, before the fleet is full."""
STEP = 1.4
"""The load rises by this factor."""
REFUSED = "HTTP 429"
TBT_TOKENS, TBT_TOKENS_IN_SLO = "dynaserve_tbt_tokens_total", "dynaserve_tbt_tokens_in_slo_total"
ATTAINMENT, THROUGHPUT = 0.98, 0.9
"""Goals: least share of the gaps between tokens within the SLO, and least part of the best throughput."""


@dataclass(frozen=True)
class Load:
    """tokens_per_s: of output, while requests came. in_time_at_instances: of the gaps, the share within the SLO as the instances'
    own schedulers count them, before tokens travel to the client."""

    rate_per_s: float
    summary: Summary
    tokens_per_s: float
    in_time_at_instances: float

    @property
    def refused(self) -> int:
        return self.summary.failures.get(REFUSED, 0)

    @property
    def failed(self) -> int:
        return self.summary.requests - self.summary.finished - self.refused

    def row(self) -> str:
        ttft, attainment = self.summary.ttft_ms, self.summary.token_attainment
        assert ttft is not None
        assert attainment is not None
        times = f"{ttft.p50:.0f} | {ttft.p99:.0f} | {attainment:.1%} | {self.in_time_at_instances:.1%}"
        counts = f"{self.summary.requests} | {self.summary.finished} | {self.refused} | {self.failed}"
        return f"| {self.rate_per_s:.2f} | {counts} | {self.tokens_per_s:.1f} | {times} |"


def tokens_while_they_came(records: Sequence[RequestRecord], duration_s: float) -> float:
    """Output tokens per second, from FILLING_S on."""
    first_s = min(record.due_s for record in records)
    counted = sum(FILLING_S < at_s - first_s <= duration_s for record in records for at_s in record.token_times_s)
    return counted / (duration_s - FILLING_S)


def token_counts(urls: Sequence[str]) -> tuple[float, float]:
    """What the instances count of the gaps between their tokens: all, and those within the SLO."""
    pages = [direct_http.get(f"{url}/metrics", timeout_s=60).raise_for_status().text for url in urls]
    counted, in_time = (sum(total(page, name) for page in pages) for name in (TBT_TOKENS, TBT_TOKENS_IN_SLO))
    return counted, in_time


def measure(fleet: LocalFleet, rate_per_s: float, duration_s: float, args: argparse.Namespace) -> Load:
    """Raises NotTrusted if the client was late: the instances have counted that run, too."""
    before = token_counts(fleet.urls)
    chosen = ["--url", fleet.frontend_url, "--workload", WORKLOAD, "--rate", f"{rate_per_s:g}", "--duration-s", f"{duration_s:g}"]
    slo = ["--tbt-slo-ms", f"{args.tbt_slo_ms:g}", "--max-client-lag-ms", f"{args.max_client_lag_ms:g}"]
    run: Trial = trial.run(options.parse([*chosen, *slo]), rate_per_s, args.seed, attempts=1)
    counted, in_time = (after - then for after, then in zip(token_counts(fleet.urls), before, strict=True))
    if not counted:
        raise SystemExit(f"the instances have counted no {TBT_TOKENS}: did no request get a second token?")
    load = Load(rate_per_s, run.summary, tokens_while_they_came(run.records, duration_s), in_time / counted)
    print(load.row(), flush=True)
    return load


def overload(fleet: LocalFleet, args: argparse.Namespace) -> bool:
    """Whether every goal is reached. Raises DynaServeError."""
    print("| requests/s | asked | 200 | 429 | otherwise | output tokens/s | TTFT P50, ms | P99 | gaps within the SLO | for the instances |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rising = [measure(fleet, args.first_rate, args.step_s, args)]
    while not rising[-1].refused:
        if rising[-1].failed:
            raise SystemExit(f"requests failed before the fleet had too many: {rising[-1].summary.failure_examples}")
        rising.append(measure(fleet, rising[-1].rate_per_s * STEP, args.step_s, args))
    if len(rising) == 1:
        raise SystemExit(f"the fleet refuses requests at {args.first_rate:g} requests/s already: choose a lower --first-rate")
    capacity = rising[-2].rate_per_s
    stolen = StolenTime()
    over = measure(fleet, args.times * capacity, args.overload_s, args)
    best = max(load.tokens_per_s for load in rising)
    part = over.tokens_per_s / best
    attainment = over.summary.token_attainment or 0.0
    print(f"\nmeanwhile taken by the host of this machine: {stolen} of its cores' time")
    print(f"capacity {capacity:.2f} requests/s; {args.times:g} times that for {args.overload_s:g} s:")
    goals = {
        f"refused: {over.refused} of {over.summary.requests} (goal: some, or nothing was overloaded)": over.refused > 0,
        f"answered otherwise than with 200 or 429: {over.failed} (goal 0) {over.summary.failure_examples}": not over.failed,
        f"gaps of accepted requests within {args.tbt_slo_ms:g} ms: {attainment:.1%} (goal {ATTAINMENT:.0%})": attainment >= ATTAINMENT,
        f"throughput over the best of the loads before: {part:.2f} (goal {THROUGHPUT})": part >= THROUGHPUT,
    }
    for text, reached in goals.items():
        print(f"  {'reached' if reached else 'MISSED'}: {text}")
    return all(goals.values())


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    for option, seconds in (("--step-s", args.step_s), ("--overload-s", args.overload_s)):
        if seconds <= FILLING_S:
            parser.error(f"{option} {seconds:g} leaves nothing to count: the first {FILLING_S:g} s of a load fill the fleet")
    command = shlex.join(["python", "-m", "benchmarks.overload", *arguments])
    print(f"command: {command}; seed {args.seed}; {fast_dtype()}\nmachine: {json.dumps(machine())}", flush=True)
    print(
        f"{WORKLOAD}, Poisson arrivals, {args.instances} instances; SLO: TBT {args.tbt_slo_ms:g} ms, TTFT {args.ttft_slo_ms:g} ms\n",
        flush=True,
    )
    try:
        with tempfile.TemporaryDirectory() as logs, _fleet(args, Path(logs)) as fleet:
            reached = overload(fleet, args)
    except DynaServeError as error:
        print(f"bench-overload: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    raise SystemExit(0 if reached else 1)


def _fleet(args: argparse.Namespace, logs: Path) -> LocalFleet:
    return LocalFleet(
        smollm2(),
        instances=args.instances,
        dtype=fast_dtype(),
        vllm_args=["--dynaserve-batching", "slo", "--tbt-slo-ms", f"{args.tbt_slo_ms:g}", "--no-enable-prefix-caching"],
        frontend_args=["--fleet-tbt-slo-ms", f"{args.tbt_slo_ms:g}", "--fleet-ttft-slo-ms", f"{args.ttft_slo_ms:g}"],
        log_dir=logs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("overload", __doc__, "--first-rate 6 --tbt-slo-ms 200 --ttft-slo-ms 10000")
    instances = max(1, len(os.sched_getaffinity(0)) - 1)
    parser.add_argument(
        "--instances", type=whole(1), default=instances, metavar="N", help="(default: one less than cores, here %(default)s)"
    )
    parser.add_argument("--tbt-slo-ms", type=positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    parser.add_argument("--ttft-slo-ms", type=positive, default=5000.0, metavar="MS", help="(default: %(default)s)")
    parser.add_argument("--first-rate", type=positive, default=1.0, metavar="R", help="requests per second (default: %(default)s)")
    longer = f"more than the {FILLING_S:g} s that fill the fleet"
    parser.add_argument(
        "--step-s", type=positive, default=40.0, metavar="T", help=f"how long each load of the rise takes, {longer} (default: %(default)s)"
    )
    parser.add_argument("--times", type=positive, default=3.0, metavar="X", help="the capacity (default: %(default)s)")
    parser.add_argument(
        "--overload-s", type=positive, default=120.0, metavar="T", help=f"how long the overload takes, {longer} (default: %(default)s)"
    )
    # The client shares its cores with engines that are overloaded.
    parser.add_argument("--max-client-lag-ms", type=positive, default=1000.0, metavar="MS", help="at P99 (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of the arrivals (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
