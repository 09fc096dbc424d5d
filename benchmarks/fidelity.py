"""`make bench-fidelity`: the same workload, rate and policy on two real instances and in the simulator with their own latencies.

Two instances of SmolLM2, one core each, with SLO-aware batches; a front-end for each policy. First all requests of a run are sent at
once: half of the rate at which they are answered is that of all runs, unless --rate is given. Another run teaches the instances their
profile. The simulator then gets, for each policy, the profile of each instance as that had learnt it by the end of its runs, the errors
of their predictions meanwhile, how long hand-overs took beside steps, and the very same requests at the same times; one run of them
decides about a rate of the search for a capacity, here and there. It has no front-end and no client, which share the cores of the real
one. Hand-overs are timed under disaggregation, where beta's own first step is one of decodes.
The simulator is told the exact lengths of answers (`--expect exact`), while the front-end predicts them from the answers that it has
seen, and from `max_tokens`, which is the exact length, too.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from benchmarks import provenance
from benchmarks.compare.candidates import whole_fleet
from benchmarks.endings import ending
from benchmarks.parsers import MAX_CLIENT_LAG_MS, parser_of, words
from dynaserve import direct_http
from dynaserve.bench import options, replay, simulate, simulate_options, trial
from dynaserve.bench.capacity import drawn_options
from dynaserve.bench.exit_status import NOT_TRUSTED, NOTHING_TO_REPORT
from dynaserve.bench.options import ReplayOptions, positive, seed
from dynaserve.errors import ConfigError, DynaServeError
from dynaserve.files import check_replaceable, write_in_one_move
from dynaserve.local.fleet import INDEX, LocalFleet
from dynaserve.local.model import smollm2
from dynaserve.machine import fast_dtype
from dynaserve.step_report import read_log

DISAGGREGATED = "disaggregated"
POLICIES = ("colocated", DISAGGREGATED, "dynamic")
"""In this order: what is measured of the second is told to the simulator for the third, too."""
WITHIN = 0.15
SHARE = 0.5
LEAST_HAND_OFF_MS = 0.1
SEARCH = ("--repetitions", "1", "--most-runs", "1")
"""For a capacity, real or simulated: other runs would be of other requests, and the real search makes them only where the first leaves a
rate open."""
MOST_STEP_TOKENS = 2048
MOST_RUNNING = 128
START_TIMEOUT_S = 900.0
LAG_LIMIT = ("--max-client-lag-ms", f"{MAX_CLIENT_LAG_MS:g}")
TABLE = "fidelity.csv"


@dataclass(frozen=True)
class Figures:
    goodput_tokens_per_s: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    ttft_p50_ms: float
    capacity_per_s: float | None = None
    """0: not servable; None: not searched."""


@dataclass(frozen=True)
class Load:
    """arguments: of `dynaserve bench replay` and `dynaserve simulate` alike, but for the rate. rate_per_s None: to be found."""

    arguments: tuple[str, ...]
    rate_per_s: float | None
    tbt_slo_ms: float
    searches: bool

    def shared(self) -> list[str]:
        rate = [] if self.rate_per_s is None else ["--rate", f"{self.rate_per_s:g}"]
        return [*self.arguments, *rate, "--tbt-slo-ms", f"{self.tbt_slo_ms:g}"]

    def replay_options(self, url: str) -> ReplayOptions:
        """Raises ConfigError."""
        return options.parse(["--url", url, *self.shared(), *LAG_LIMIT])

    def check(self) -> None:
        """Raises ConfigError where the client or the simulator would refuse it: now, rather than when instances have started for it.

        Whether a workload that ends is long enough for a rate that is to be found is not known yet.
        """
        simulated, opts = simulate_options.parse(self.shared()), self.replay_options("http://not-asked")
        trial.plan_at_once(opts, opts.seed)
        if self.rate_per_s is not None:
            replay.plan_requests(opts)
        if self.searches:
            drawn_options(simulated)


@dataclass(frozen=True)
class Timing:
    """What the simulator is told of the real instances. sigma: errors of predicted steps. hand_off_ms None: nothing was cut so far."""

    sigma: float
    hand_off_ms: float | None

    def arguments(self) -> list[str]:
        hand_off = [] if self.hand_off_ms is None else ["--hand-off-ms", f"{self.hand_off_ms:.4g}"]
        return ["--step-sigma", f"{self.sigma:.4g}", *hand_off]


def kv_tokens(dtype: str) -> int:
    """How many one GiB holds of SmolLM2-135M: keys and values of 30 layers of 3 heads of 64."""
    return (1 << 30) // (2 * 30 * 3 * 64 * {"bfloat16": 2, "float32": 4}[dtype])


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 1 if something could not be measured, 2 for bad options, 130 when interrupted."""
    parser = _parser()
    args = parser.parse_args(arguments)
    requests = (*args.trace, "--duration-s", f"{args.duration_s:g}", "--seed", str(args.seed))
    load = Load(requests, args.rate, args.tbt_slo_ms, not args.quick)
    try:
        load.check()
        check_replaceable(args.output / TABLE)
    except ConfigError as error:
        parser.error(str(error))
    told = provenance.of("benchmarks.fidelity", arguments, dtype=fast_dtype())
    print(provenance.text(told), flush=True)
    with ending("bench-fidelity"):
        run(load, args.output)
        provenance.keep(args.output / TABLE, told)


def run(load: Load, folder: Path) -> None:
    """Raises DynaServeError."""
    profile, table = folder / "learnt.json", []
    logs = [folder / f"steps-{index}.csv" for index in range(LocalFleet.instances)]
    hand_off_ms: float | None = None
    fleet = _fleet(load, folder)
    with fleet:
        load = _at_a_rate(load, fleet.frontend_url)
        _replay(load, fleet.frontend_url, folder / "learning.json")
        # One that only prefills later on would go on learning from that alone.
        shutil.copyfile(folder / "profile-0.json", profile)
        for policy in POLICIES:
            slo = ("--fleet-tbt-slo-ms", f"{load.tbt_slo_ms:g}")
            fleet.place_by(("--policy", policy, "--latency-profile", str(profile.absolute()), *slo))
            check, began_s = whole_fleet(fleet), time.monotonic()
            real = _replay(load, fleet.frontend_url, folder / f"{policy}.json")
            if policy == DISAGGREGATED:
                hand_off_ms = hand_off_ms_of(last_records(fleet.frontend_url), real.tbt_p50_ms)
            if load.searches:
                real = _with_capacity(real, load, fleet.frontend_url, folder / f"{policy}-capacity.json")
            check()
            timing = Timing(sigma_of(logs, began_s), hand_off_ms)
            simulated = _simulate(load, policy, learnt_by(folder, policy, fleet.urls), timing)
            table.append((policy, real, simulated))
            _print(policy, real, simulated, timing)
            _write(folder / TABLE, table)


def learnt_by(folder: Path, policy: str, urls: Sequence[str]) -> list[Path]:
    """What each instance has learnt by now, kept under the policy's name. On one machine two of them differ, and from one hour to the
    next both. In the order of their URLs, by which policies tell instances apart: that of the simulated ones."""
    kept = []
    for index in sorted(range(len(urls)), key=urls.__getitem__):
        kept.append(folder / f"{policy}-learnt-{index}.json")
        shutil.copyfile(folder / f"profile-{index}.json", kept[-1])
    return kept


def _at_a_rate(load: Load, url: str) -> Load:
    """Raises ConfigError."""
    opts = load.replay_options(url)
    at_once_per_s = trial.saturation(opts, opts.seed)
    found = replace(load, rate_per_s=load.rate_per_s or SHARE * at_once_per_s)
    print(f"all at once {at_once_per_s:.3g} requests/s; runs at {found.rate_per_s:.3g}", flush=True)
    return found


def _fleet(load: Load, folder: Path) -> LocalFleet:
    where = folder.absolute()
    for index in range(LocalFleet.instances):
        (where / f"profile-{index}.json").unlink(missing_ok=True)  # of an earlier call, which ended with prefill alone on one of them
    ours = ("--dynaserve-batching", "slo", "--tbt-slo-ms", f"{load.tbt_slo_ms:g}")
    files = ("--dynaserve-profile", f"{where}/profile-{INDEX}.json", "--dynaserve-step-log", f"{where}/steps-{INDEX}.csv")
    limits = ("--max-num-batched-tokens", str(MOST_STEP_TOKENS), "--max-num-seqs", str(MOST_RUNNING))
    return LocalFleet(
        smollm2(),
        vllm_args=("--served-model-name", "model", *limits, *ours, *files),
        dtype=fast_dtype(),
        log_dir=where / "logs",
        start_timeout_s=START_TIMEOUT_S,
    )


def _replay(load: Load, url: str, output: Path) -> Figures:
    """Raises DynaServeError."""
    command = ["replay", "--url", url, *load.shared(), *LAG_LIMIT, "--output", str(output)]
    return figures_of(_bench(command, output, trial.ATTEMPTS)["summary"])


def figures_of(summary: Mapping[str, Any]) -> Figures:
    """Raises DynaServeError where requests failed, as those that are left are other ones than the simulator has, or no token followed
    another."""
    if summary["failures"]:
        raise DynaServeError(f"of {summary['requests']} requests some failed: {summary['failures']}")
    tbt, ttft = summary["tbt_ms"], summary["ttft_ms"]
    if tbt is None:
        raise DynaServeError(f"none of {summary['requests']} answers had a second token: there is no TBT")
    return Figures(summary["goodput_tokens_per_s"], tbt["p50"], tbt["p99"], ttft["p50"])


def _with_capacity(real: Figures, load: Load, url: str, output: Path) -> Figures:
    command = ["capacity", "--url", url, *load.shared(), *SEARCH, *LAG_LIMIT, "--output", str(output)]
    found = _bench(command, output)
    if found["capacity_is_least"]:
        raise DynaServeError(f"even {found['capacity_per_s']:.3g} requests/s passed, the highest rate tried: the capacity is not known")
    return replace(real, capacity_per_s=found["capacity_per_s"] or 0.0)


def _bench(arguments: Sequence[str], output: Path, attempts: int = 1) -> dict[str, Any]:
    """attempts: how often in all it is tried where its figures cannot be trusted, as those of a late client. Raises DynaServeError."""
    command = [sys.executable, "-m", "dynaserve.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == NOT_TRUSTED and attempts > 1:
        print(f"  tried again: {done.stderr[-500:].strip()}", file=sys.stderr, flush=True)
        return _bench(arguments, output, attempts - 1)
    if done.returncode not in (0, NOTHING_TO_REPORT):
        raise DynaServeError(f"{shlex.join(arguments)}: exit status {done.returncode}: {done.stderr[-500:]}")
    raw: dict[str, Any] = json.loads(output.read_bytes())
    return raw


def sigma_of(logs: Sequence[Path], began_s: float) -> float:
    """Of the logarithm of measured over predicted, since then. Raises DynaServeError if nothing was predicted."""
    steps = [step for log in logs for step in read_log(log) if step.at_s >= began_s]
    errors = [math.log(step.measured.measured_ms / step.predicted_ms) for step in steps if step.predicted_ms]
    if not errors:
        raise DynaServeError(f"{', '.join(map(str, logs))}: no step was predicted")
    print(f"  {len(errors)} steps took {math.exp(fmean(errors)):.2f} of what was predicted, on geometric average", flush=True)
    return max(1e-6, pstdev(errors))


def last_records(url: str) -> list[dict[str, Any]]:
    """Of the last sequences that the front-end remembers."""
    with direct_http.client(timeout_s=30) as client:
        ids = {request["request_id"] for request in client.get(f"{url}/dynaserve/snapshot").raise_for_status().json()["requests"]}
        answers = [client.get(f"{url}/dynaserve/requests/{each}").raise_for_status().json() for each in sorted(ids)]
    return [record for answer in answers for record in answer["sequences"]]


def hand_off_ms_of(records: Sequence[Mapping[str, Any]], step_ms: float) -> float | None:
    """The median, from alpha's standing until beta's first token, without the rest of the step that its instance was running and beta's
    own, of step_ms: the simulator has both as well. None: nothing was cut."""
    handed_over = [one for one in records if {"alpha_parked", "beta_resumed"} <= one["timeline_ms"].keys()]
    times_ms = [
        one["timeline_ms"]["beta_resumed"] - one["timeline_ms"]["alpha_parked"] - (one["step_rest_ms"] or 0.0) for one in handed_over
    ]
    return max(LEAST_HAND_OFF_MS, median(times_ms) - step_ms) if times_ms else None


def _simulate(load: Load, policy: str, profiles: Sequence[Path], timing: Timing) -> Figures:
    """The margin of the local scheduler and the noise of the steps are both the measured sigma."""
    fleet = ("--profile", *map(str, profiles), "--policy", policy, "--batching", "slo", "--expect", "exact")
    limits = ("--chunk", str(MOST_STEP_TOKENS), "--max-running", str(MOST_RUNNING), "--kv-tokens", str(kv_tokens(fast_dtype())))
    arguments = [*fleet, *timing.arguments(), *limits, *load.shared()]
    found = simulate.one_run(arguments).summary
    capacity = simulate.capacities([*arguments, *SEARCH])[0] or 0.0 if load.searches else None
    ttft = math.nan if found.ttft_ms is None else found.ttft_ms.p50
    return Figures(found.goodput_tokens_per_s, found.tbt_ms.p50 or math.nan, found.tbt_ms.p99 or math.nan, ttft, capacity)


def rows(real: Figures, simulated: Figures) -> list[tuple[str, float, float, float]]:
    """Name, real, simulated, and their ratio: infinite where only the simulated fleet does anything, 1 where neither does."""
    names = [name for name in Figures.__dataclass_fields__ if getattr(real, name) is not None]
    pairs = [(name, getattr(real, name), getattr(simulated, name)) for name in names]
    return [(name, here, there, there / here if here else math.inf if there else 1.0) for name, here, there in pairs]


def _print(policy: str, real: Figures, simulated: Figures, timing: Timing) -> None:
    hand_overs = "" if timing.hand_off_ms is None else f", hand-overs take {timing.hand_off_ms:.1f} ms"
    print(f"{policy}, errors of predicted steps sigma {timing.sigma:.3f}{hand_overs}")
    for name, measured, found, ratio in rows(real, simulated):
        verdict = "" if abs(ratio - 1) <= WITHIN else f"  not within {WITHIN:.0%}"
        print(f"  {name:22s} real {measured:9.4g}  simulated {found:9.4g}  ratio {ratio:.2f}{verdict}", flush=True)


def _write(path: Path, table: Sequence[tuple[str, Figures, Figures]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["policy", "figure", "real", "simulated", "ratio"])
    for policy, real, simulated in table:
        writer.writerows((policy, *row) for row in rows(real, simulated))
    write_in_one_move(path, text.getvalue().encode())


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fidelity", __doc__, "--quick --rate 1.5 --output build/bench-fidelity")
    parser.add_argument("--quick", action="store_true", help="some twenty minutes: without the searches for capacities")
    requests = "requests, as for dynaserve simulate (default: %(default)s)"
    parser.add_argument("--trace", type=words, default="--workload sample --drawn", metavar="ARGS", help=requests)
    parser.add_argument(
        "--rate", type=positive, metavar="R", help=f"requests per second (default: {SHARE:g} of those answered when all come at once)"
    )
    parser.add_argument("--duration-s", type=positive, default=120.0, metavar="T", help="of a run (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="of the requests and their arrivals (default: %(default)s)")
    parser.add_argument("--tbt-slo-ms", type=positive, default=100.0, metavar="MS", help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("build/bench-fidelity"), metavar="DIR", help="raw data (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
