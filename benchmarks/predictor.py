"""`make bench-predictor`: when requests were expected to end, and when they did.

Two real instances of SmolLM2, one core each, behind a front-end with `--policy dynamic`. A few callers that never pause teach the
instances' latency profile, which the front-end starts with, and show what the machine can serve; requests at a steady rate below that
are then compared with what was expected of each when it was placed. Answers have the lengths that their callers name: what is
measured is the time, not the length.

How long a request takes is also for those to decide who come after it. So they come at even intervals in one run and at random in
another, and the report says whether the load was steady or a queue grew, and what of the errors is chance (`hindsight.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.endings import ending
from benchmarks.fidelity import MOST_RUNNING, MOST_STEP_TOKENS, kv_tokens, sigma_of
from benchmarks.hindsight import Shape, Times, by_chance, with_all_known
from benchmarks.parsers import parser_of
from dynaserve import direct_http
from dynaserve.bench.growth import growth
from dynaserve.bench.options import positive, whole
from dynaserve.bench.report import machine
from dynaserve.errors import ConfigError, DynaServeError
from dynaserve.execution_predictor import InstanceLimits
from dynaserve.files import check_replaceable, write_in_one_move
from dynaserve.global_scheduler import Options, Policy
from dynaserve.latency_profile import load
from dynaserve.local.fleet import INDEX, LocalFleet
from dynaserve.local.model import smollm2
from dynaserve.machine import fast_dtype
from dynaserve.simulation import Batching, EngineOptions, SimulationOptions
from dynaserve.step_latency import ProfileTable
from dynaserve.step_report import read_log

PROMPTS = (64, 1024)
OUTPUTS = (16, 192)
"""Tokens, drawn evenly between."""
CALLERS = 8
ARRIVALS = EVEN, POISSON = "even", "poisson"
INSTANCES = 2
TBT_SLO_MS = 100.0
STEADY_SHARE = 0.7
"""Of the rate that the callers were served at: a load at which no queue grows, whatever the machine."""


@dataclass(frozen=True)
class Ended:
    """A request that ended by itself; milliseconds from its arrival. arrived_s: seconds of any one clock."""

    arrived_s: float
    ttft_ms: float
    expected_ttft_ms: float
    end_ms: float
    expected_end_ms: float
    cut: bool
    revisions: int


def drawn(requests: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts of random tokens, each with the length of its answer."""
    rng = random.Random(seed)
    return [([rng.randrange(1000, 40000) for _ in range(prompt)], outputs) for prompt, outputs in (shape(rng) for _ in range(requests))]


def shape(rng: random.Random) -> Shape:
    return rng.randint(*PROMPTS), rng.randint(*OUTPUTS)


def gap_s(rng: random.Random, rate_per_s: float, arrivals: str) -> float:
    """arrivals: one of ARRIVALS."""
    return 1.0 / rate_per_s if arrivals == EVEN else rng.expovariate(rate_per_s)


def ask(fleet: LocalFleet, prompt: list[int], outputs: int) -> str:
    """The answer's id."""
    body = {
        "model": str(fleet.model),
        "prompt": prompt,
        "max_tokens": outputs,
        "ignore_eos": True,
        "temperature": 0,
        "vllm_xargs": {"dynaserve_expected_tokens": outputs},
    }
    answer = direct_http.post(f"{fleet.frontend_url}/v1/completions", body, timeout_s=600).raise_for_status().json()
    return str(answer["id"])


def saturate(fleet: LocalFleet, requests: int, seed: int) -> float:
    """Callers that ask again as soon as they are answered; returns the requests per second that they were served at."""
    with ThreadPoolExecutor(CALLERS) as pool:
        started_s = time.monotonic()
        list(pool.map(lambda request: ask(fleet, *request), drawn(requests, seed)))
        return requests / (time.monotonic() - started_s)


def replay(fleet: LocalFleet, rate_per_s: float, requests: int, arrivals: str, seed: int) -> list[str]:
    """Sends at times fixed beforehand, whatever comes back; returns the ids of the answers."""
    rng = random.Random(seed)
    with ThreadPoolExecutor(256) as pool:
        due_s, tasks = time.monotonic(), []
        for prompt, outputs in drawn(requests, seed):
            due_s += gap_s(rng, rate_per_s, arrivals)
            time.sleep(max(0.0, due_s - time.monotonic()))
            tasks.append(pool.submit(ask, fleet, prompt, outputs))
        return [task.result() for task in tasks]


def read(record: dict[str, Any]) -> Ended:
    expected, actual = record["expected"], record["timeline_ms"]
    return Ended(
        arrived_s=record["arrived_s"],
        ttft_ms=actual["first_token"],
        expected_ttft_ms=expected["ttft_ms"],
        end_ms=actual["finished"],
        expected_end_ms=expected["end_ms"],
        cut=record["split_token"] is not None,
        revisions=len(record["revisions"]),
    )


def report(ended: Sequence[Ended]) -> None:
    print(f"{len(ended)} requests, {sum(one.cut for one in ended)} cut, {sum(one.revisions for one in ended)} revisions")
    print(f"  {steadiness(ended)}")
    print(f"  first token: {_errors([(one.ttft_ms, one.expected_ttft_ms) for one in ended])}")
    print(f"  end: {_errors([(one.end_ms, one.expected_end_ms) for one in ended])}", flush=True)


def report_hindsight(ended: Sequence[Ended], known: Sequence[Times]) -> None:
    print(f"  first token, all arrivals known: {_errors([(one.ttft_ms, now.ttft_ms) for one, now in zip(ended, known, strict=True)])}")
    print(f"  end, all arrivals known: {_errors([(one.end_ms, now.end_ms) for one, now in zip(ended, known, strict=True)])}", flush=True)


def _errors(pairs: Sequence[tuple[float, float]]) -> str:
    """pairs: actual and expected."""
    errors = [abs(actual - expected) / actual for actual, expected in pairs]
    bias = median(actual / expected for actual, expected in pairs)
    return f"absolute error median {median(errors):.1%}, p95 {_p95(errors):.1%}; actual over expected, median {bias:.2f}"


def _p95(errors: Sequence[float]) -> float:
    return quantiles(errors, n=20, method="inclusive")[18]


def steadiness(ended: Sequence[Ended]) -> str:
    """Whether the queue grew, in words."""
    trend = growth([([one.arrived_s for one in ended], [one.ttft_ms for one in ended])])
    if trend is None:
        return "too few to tell whether the load was steady"
    verdict = "not a steady load: take a lower --rate" if trend.is_queue else "a steady load"
    return f"TTFT grows by {trend.slope:.3f} +- {trend.error:.3f} s per s, {verdict}"


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 1 if something could not be measured, 2 for bad options, 130 when interrupted."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        for arrivals in ARRIVALS if args.output is not None else ():
            check_replaceable(_records_of(args.output, arrivals))
    except ConfigError as error:
        parser.error(str(error))
    print(f"machine: {json.dumps(machine())}; seed {args.seed}; {fast_dtype()}", flush=True)
    with ending("bench-predictor"):
        run(args)


def run(args: argparse.Namespace) -> None:
    """Raises DynaServeError."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        with fleet_of(profile, Path(folder) / "teach", "--policy", "colocated") as fleet:
            served_per_s = saturate(fleet, args.requests // 2, args.seed)
            _wait_for(profile)
        rate_per_s = STEADY_SHARE * served_per_s if args.rate is None else args.rate
        print(f"{CALLERS} callers were served at {served_per_s:.2f} requests/s; compared at {rate_per_s:.2f}", flush=True)
        for arrivals in ARRIVALS:
            print(f"arrivals: {arrivals}", flush=True)
            compare(profile, Path(folder) / arrivals, rate_per_s, arrivals, args)


def compare(learnt: Path, folder: Path, rate_per_s: float, arrivals: str, args: argparse.Namespace) -> None:
    """learnt: the profile, which the front-end starts with; the instances go on learning with a copy. Raises DynaServeError."""
    folder.mkdir()
    table = load(learnt)
    profile = folder / "profile.json"
    shutil.copyfile(learnt, profile)
    began_s = time.monotonic()
    with fleet_of(profile, folder, "--policy", "dynamic", "--latency-profile", str(learnt)) as fleet:
        ids = replay(fleet, rate_per_s, args.requests, arrivals, args.seed + 1)
        # Of two that are sent at nearly the same time, the second may arrive first.
        records = sorted((_record(fleet, request_id) for request_id in ids), key=lambda record: float(record["arrived_s"]))
    if args.output is not None:
        write_in_one_move(_records_of(args.output, arrivals), json.dumps(records, indent=1).encode())
    ended = [read(record) for record in records]
    report(ended)
    logs = [folder / f"steps-{index}.csv" for index in range(INSTANCES)]
    sigma = max(sigma_of([log], began_s) for log in logs)
    limits = InstanceLimits(
        max_requests=MOST_RUNNING, max_step_tokens=MOST_STEP_TOKENS, kv_tokens=kv_tokens(fast_dtype()), step_ms=step_limit_ms(logs)
    )
    report_hindsight(ended, with_all_known(records, table, limits))
    report_chance(records, table, limits, sigma, rate_per_s, arrivals, args.seed)


def _records_of(folder: Path, arrivals: str) -> Path:
    return folder / f"{arrivals}.json"


def step_limit_ms(logs: Sequence[Path]) -> float:
    """That steps of prefill and decodes aimed at, in the median. Raises DynaServeError if there was none."""
    steps = [step for log in logs for step in read_log(log)]
    limits_ms = [step.limit_ms for step in steps if step.limit_ms is not None and step.measured.prefill_tokens]
    if not limits_ms:
        raise DynaServeError(f"none of {len(steps)} steps had prefill beside decodes: take more --requests or a higher --rate")
    return median(limits_ms)


def report_chance(
    records: Sequence[dict[str, Any]],
    table: ProfileTable,
    limits: InstanceLimits,
    sigma: float,
    rate_per_s: float,
    arrivals: str,
    seed: int,
) -> None:
    engine = EngineOptions(
        batching=Batching.slo,
        max_step_tokens=limits.max_step_tokens,
        max_running=limits.max_requests,
        kv_tokens=limits.kv_tokens,
        min_prefill_tokens=limits.min_prefill_tokens,
        slo_ms=TBT_SLO_MS,
        margin=limits.step_ms / TBT_SLO_MS,
    )

    def fleet(seed: int) -> SimulationOptions:
        return SimulationOptions(
            instances=INSTANCES,
            round_robin=False,
            placement=Options(Policy.dynamic),
            engine=engine,
            hand_off_ms=Options(Policy.dynamic).hand_off_ms,
            step_sigma=sigma,
            tbt_slo_ms=TBT_SLO_MS,
            seed=seed,
        )

    def draw(rng: random.Random) -> tuple[float, Shape]:
        return 1e3 * gap_s(rng, rate_per_s, arrivals), shape(rng)

    came = [(1e3 * record["arrived_s"], (record["prompt_tokens"], record["output_tokens"])) for record in records]
    errors = by_chance(came, draw, table, fleet, seed)
    print(f"  end, whoever predicts it before the others have come (simulated): median {median(errors):.1%}, p95 {_p95(errors):.1%}")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("predictor", __doc__.partition("\n")[0], "--rate 0.8 --requests 120")
    followed = f"requests a second (default: {STEADY_SHARE} of what {CALLERS} callers were served at)"
    parser.add_argument("--rate", type=positive, metavar="R", help=followed)
    parser.add_argument("--requests", type=whole(2), default=120, metavar="N", help="compared; half as many teach (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="gets the front-end's records of the requests, as JSON")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of the requests and their arrivals (default: %(default)s)")
    return parser


def fleet_of(profile: Path, logs: Path, *frontend_args: str) -> LocalFleet:
    """Both instances are of one kind: whichever saves last keeps the profile of both."""
    where = logs.absolute()
    batching = ["--dynaserve-batching", "slo", "--tbt-slo-ms", f"{TBT_SLO_MS:g}", "--no-enable-prefix-caching"]
    files = ["--dynaserve-profile", str(profile), "--dynaserve-step-log", f"{where}/steps-{INDEX}.csv"]
    limits = ["--max-num-batched-tokens", str(MOST_STEP_TOKENS), "--max-num-seqs", str(MOST_RUNNING)]
    return LocalFleet(
        smollm2(),
        instances=INSTANCES,
        dtype=fast_dtype(),
        vllm_args=[*batching, *files, *limits],
        frontend_args=frontend_args,
        log_dir=where,
    )


def _record(fleet: LocalFleet, request_id: str) -> dict[str, Any]:
    answer = direct_http.get(f"{fleet.frontend_url}/dynaserve/requests/{request_id}", timeout_s=30).raise_for_status().json()
    (record,) = answer["sequences"]
    return dict(record)


def _wait_for(profile: Path, timeout_s: float = 60.0) -> None:
    """Instances save what they have learnt once no request is left."""
    deadline_s = time.monotonic() + timeout_s
    while not profile.exists():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no instance has saved {profile} within {timeout_s:.0f} s")
        time.sleep(0.5)


if __name__ == "__main__":
    main(sys.argv[1:])
