"""`make bench-pairs`: systems that are up at the same time get the same requests, in turns, at given rates.

The speed of a shared machine wanders by a third for seconds and for minutes, and which requests come together matters as much: a
capacity that one search finds is that of its minutes and of its seed. Here the runs of two or more systems follow each other, and what
is compared over several seeds are the first tokens' times and the share of late tokens at a rate near the capacity.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import provenance
from benchmarks.compare.campaign import Campaign, SystemOf
from benchmarks.compare.candidates import CANDIDATES, OURS, SLO_COLOCATED
from benchmarks.endings import ending
from benchmarks.parsers import add_layers, add_max_client_lag, parser_of
from dynaserve.bench import client, compare, systems, trial
from dynaserve.bench.capacity import trial_data
from dynaserve.bench.options import add_eos_token_id, positive, whole
from dynaserve.bench.ratios import paired_ratio
from dynaserve.bench.report import machine
from dynaserve.bench.trial import Trial
from dynaserve.errors import ConfigError, NotTrusted
from dynaserve.files import only_writer, write_in_one_move
from dynaserve.machine import fast_dtype

RESULTS = "pairs.json"
DEFAULT = "(default: %(default)s)"


@dataclass(frozen=True)
class PairedRun:
    workload: str
    system: str
    trial: Trial

    @property
    def mean_ttft_s(self) -> float | None:
        """None: a request failed, so that those that are left are not those of the other run."""
        ttft = self.trial.summary.ttft_ms
        return None if ttft is None or self.trial.summary.failures else 1e-3 * ttft.mean

    @property
    def gaps(self) -> int:
        return 0 if self.trial.summary.tbt_ms is None else self.trial.summary.tbt_ms.count

    @property
    def late_gaps(self) -> int:
        return round((1.0 - (self.trial.summary.token_attainment or 0.0)) * self.gaps)


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 1 if something could not be measured, 2 for bad options."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        rates = _rates(args.cases)
        campaign = _campaign(args, list(rates))
        campaign.check(machine())
        site = campaign.site()
        if (campaign.output / RESULTS).exists():
            raise ConfigError(f"{campaign.output / RESULTS} holds the runs of another call: take another --output, or delete it")
    except ConfigError as error:
        parser.error(str(error))
    told = provenance.of("benchmarks.pairs", arguments, dtype=fast_dtype())
    print(provenance.text(told), flush=True)
    found: list[PairedRun] = []
    try:
        with ending("bench-pairs"), only_writer(campaign.output):
            campaign.learn(site)
            for one in run(campaign, rates, range(campaign.seed, campaign.seed + args.seeds), site.system):
                found.append(one)
                print(_line(one), flush=True)
                write(campaign.output / RESULTS, told, found)
    finally:
        print(f"\n{markdown(campaign.systems, found)}", flush=True)


def run(campaign: Campaign, rates_per_s: Mapping[str, float], seeds: Sequence[int], system_of: SystemOf) -> Iterator[PairedRun]:
    """One run of each system for each workload, seed by seed, after one with all requests at once. Runs that cannot be trusted are told,
    and left out.

    Raises NotTrusted after the last one if there were such, and DynaServeError at once for anything else.
    """
    client.allow_many_connections()
    tbt_slo_ms = campaign.tbt_slos_ms[0]
    left_out: list[str] = []
    with ExitStack() as stack:
        serving = {
            name: stack.enter_context(systems.running(system_of(name, tbt_slo_ms, campaign.output / "logs"))) for name in campaign.systems
        }
        for workload in rates_per_s:  # compiles, allocates, and teaches front-ends how long answers are
            for name in campaign.systems:
                trial.saturation(replace(campaign.replay(workload, tbt_slo_ms), urls=serving[name].urls), campaign.seed)
                serving[name].check()
        for seed in seeds:
            for workload, rate_per_s in rates_per_s.items():
                for name in compare.in_order(campaign.systems, seed):
                    opts = replace(campaign.replay(workload, tbt_slo_ms), urls=serving[name].urls)
                    try:
                        run = trial.run(opts, rate_per_s, seed, front_pids=serving[name].front_pids)
                    except NotTrusted as error:
                        left_out.append(f"{workload}, seed {seed}: {name}")
                        print(f"bench-pairs: {left_out[-1]}: not measured: {error}", file=sys.stderr, flush=True)
                        continue
                    serving[name].check()
                    yield PairedRun(workload, name, run)
    if left_out:
        raise NotTrusted(f"not measured: {'; '.join(left_out)}")


def markdown(names: Sequence[str], found: Sequence[PairedRun]) -> str:
    """By workload: the mean TTFT (s) and the share of late tokens (%) of each system, and the first's TTFT over each other one's, with
    its 95 % interval over the seeds. Seeds of which one run is missing, or had a request that failed, do not count."""
    ratios = [f"TTFT {names[0]} / {name}" for name in names[1:]]
    lines = [f"| {' | '.join(['workload, requests/s', 'seeds', *(f'{name}: TTFT s, late %' for name in names), *ratios])} |"]
    lines.append("|---" * (1 + 2 * len(names)) + "|")
    for workload in dict.fromkeys(one.workload for one in found):
        runs = {(one.system, one.trial.seed): one for one in found if one.workload == workload and one.mean_ttft_s is not None}
        seeds = [seed for seed in dict.fromkeys(seed for _, seed in runs) if all((name, seed) in runs for name in names)]
        if not seeds:
            continue
        cells = [f"{workload}, {runs[names[0], seeds[0]].trial.rate_per_s:g}", str(len(seeds))]
        ttfts_s = []
        for name in names:
            mine = [runs[name, seed] for seed in seeds]
            late = sum(one.late_gaps for one in mine) / max(1, sum(one.gaps for one in mine))
            ttfts_s.append([one.mean_ttft_s or 0.0 for one in mine])
            cells.append(f"{fmean(ttfts_s[-1]):.2f}, {100 * late:.2f}")
        cells += [str(paired_ratio(ttfts_s[0], other)) for other in ttfts_s[1:]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(path: Path, provenance: Mapping[str, Any], found: Sequence[PairedRun]) -> None:
    runs = [{"workload": one.workload, "system": one.system} | trial_data(one.trial) for one in found]
    write_in_one_move(path, json.dumps({**provenance, "runs": runs}, indent=1).encode())


def _line(one: PairedRun) -> str:
    late = 100 * one.late_gaps / max(1, one.gaps)
    run = f"{one.workload}, {one.trial.rate_per_s:g} requests/s, seed {one.trial.seed}: {one.system:14s}"
    ttft = "not counted" if one.mean_ttft_s is None else f"{one.mean_ttft_s:6.2f} s"
    not_sustained = f" ({one.trial.not_sustained})" if one.trial.not_sustained else ""
    return f"{run} mean TTFT {ttft}, {late:5.2f} % of {one.gaps} gaps late{not_sustained}"


def _rates(cases: Sequence[str]) -> dict[str, float]:
    """Raises ConfigError."""
    rates = dict(map(_case, cases))
    if len(rates) < len(cases):
        raise ConfigError(f"--cases {' '.join(cases)} has a workload twice")
    return rates


def _case(text: str) -> tuple[str, float]:
    """Raises ConfigError."""
    workload, colon, rate = text.rpartition(":")
    try:
        rate_per_s = float(rate)
    except ValueError:
        rate_per_s = 0.0
    if not (workload and colon and 0.0 < rate_per_s < float("inf")):
        raise ConfigError(f"--cases {text!r} is not WORKLOAD:RATE with a rate above 0")
    return workload, rate_per_s


def _campaign(args: argparse.Namespace, workloads: Sequence[str]) -> Campaign:
    """Raises ConfigError."""
    if len(args.systems) < 2:
        raise ConfigError(f"--systems has {args.systems[0]} alone; it takes two to compare")
    if twice := [name for name in args.systems if args.systems.count(name) > 1]:
        raise ConfigError(f"--systems has {twice[0]} twice")
    return Campaign(
        workloads=workloads,
        systems=args.systems,
        tbt_slos_ms=(args.tbt_slo_ms,),
        layers=args.layers,
        together=len(args.systems),
        scale=args.scale,
        traces=args.traces,
        duration_s=args.duration_s,
        repetitions=1,
        resolution=1.0,
        most_runs=1,
        seed=args.seed,
        max_client_lag_ms=args.max_client_lag_ms,
        eos_token_id=args.eos_token_id,
        output=args.output,
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("pairs", __doc__, "--traces DIR --cases azure-conv:1.5 hybrid:1.2 --seeds 6 --output build/bench-pairs")
    parser.add_argument("--cases", nargs="+", default=["sample:1.5"], metavar="WORKLOAD:RATE", help=f"requests per second {DEFAULT}")
    parser.add_argument(
        "--systems", nargs="+", choices=CANDIDATES, default=[SLO_COLOCATED, OURS], metavar="NAME", help=f"of make bench-compare {DEFAULT}"
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files; without it there is only sample")
    parser.add_argument("--seeds", type=whole(1), default=6, metavar="N", help=f"of each case {DEFAULT}")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help=f"the first one {DEFAULT}")
    parser.add_argument("--tbt-slo-ms", type=positive, default=100.0, metavar="MS", help=DEFAULT)
    add_layers(parser)
    parser.add_argument("--scale", type=positive, default=0.25, metavar="X", help=f"lengths times X {DEFAULT}")
    parser.add_argument("--duration-s", type=positive, default=60.0, metavar="T", help=f"of each run {DEFAULT}")
    add_max_client_lag(parser)
    add_eos_token_id(parser)
    parser.add_argument("--output", type=Path, default=Path("build/bench-pairs"), metavar="DIR", help=DEFAULT)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
