"""`make bench-compare`: capacity and goodput of several systems on this machine, each of two real vLLM instances, in turns, in one run.

SmolLM2-135M, or its first layers, on one core for each instance; the client and the front-ends share these cores. Each workload at each SLO
is one comparison as `dynaserve bench compare` makes it. First two instances learn how long steps take here; every start begins with that.
In each repetition every system is started once, and once for each SLO where it goes by it. While it runs it has its turn of every
workload: a request for each second of a run, at least 40, all at once (which warms it up, and the first time tells its saturation rate),
then the search for its capacity, from the highest one on that the comparison has found so far. Finished turns stay in the output folder: a
run that was stopped, or one of fewer repetitions, goes on where it was, on the same machine. Where the client was late three times in a
row, the search that it was in is not measured, and everything else is. The pictures of gaps and of time in a report are of runs of the
searches: each system's sustained one at the highest rate. At the end there is one table over all workloads for each SLO. With --together 2
each two systems are up at the same time, and their runs alternate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import provenance
from benchmarks.compare import table
from benchmarks.compare.campaign import Campaign
from benchmarks.compare.candidates import BEHIND_OURS, CANDIDATES, MOST_TOKENS, OURS, SLO_COLOCATED, STOCK, Site
from benchmarks.endings import FAILED, ending
from benchmarks.parsers import add_layers, add_max_client_lag, parser_of
from dynaserve.bench.capacity import MOST_RUNS
from dynaserve.bench.options import add_eos_token_id, positive, whole
from dynaserve.bench.report import machine
from dynaserve.errors import ConfigError
from dynaserve.files import only_writer, write_in_one_move
from dynaserve.machine import fast_dtype

SMOKE_TEST = "SMOKE TEST: too few and too short runs for a figure that means anything; it shows that everything works."
GENERATED = ("sample",)
"""What there is without --traces."""
DEFAULT = "(default: %(default)s)"


@dataclass(frozen=True)
class Form:
    """How much is measured, unless options say otherwise."""

    workloads: tuple[str, ...]
    systems: tuple[str, ...]
    tbt_slos_ms: tuple[float, ...]
    duration_s: float
    repetitions: int
    resolution: float


FULL = Form(
    workloads=("azure-code", "azure-conv", "arxiv-summarization", "mini-reasoning", "hybrid"),
    systems=tuple(name for name in CANDIDATES if name != BEHIND_OURS),
    tbt_slos_ms=(100.0, 50.0),
    duration_s=120.0,
    repetitions=3,
    resolution=0.05,
)
# The search ends as soon as one rate has passed and the next one has not.
QUICK = Form(("azure-code", "azure-conv"), (STOCK, SLO_COLOCATED, OURS), (100.0,), duration_s=10.0, repetitions=1, resolution=0.7)


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 1 if a comparison is missing, 2 for bad options."""
    parser = _parser()
    args = parser.parse_args(arguments)
    campaign = _campaign(args)
    with ExitStack() as held:
        try:
            _check(campaign)
            site = campaign.site()
            held.enter_context(only_writer(campaign.output))
        except ConfigError as error:
            parser.error(str(error))
        _compare(campaign, site, arguments, smoke_test=args.quick)


def _compare(campaign: Campaign, site: Site, arguments: Sequence[str], *, smoke_test: bool) -> None:
    told = provenance.of("benchmarks.compare", arguments, seed=campaign.seed, dtype=fast_dtype(), smoke_test=smoke_test)
    print(provenance.text(told), flush=True)
    with ending("bench-compare"):
        campaign.learn(site)
        campaign.run(site.system, told)
    if missing := report(campaign, told):
        print(f"bench-compare: not measured: {', '.join(missing)}", file=sys.stderr)
        raise SystemExit(FAILED)


def report(campaign: Campaign, told: dict[str, Any]) -> list[str]:
    """Prints the tables and keeps them in the output folder; returns the comparisons that are missing. told: the provenance."""
    found, missing = campaign.found()
    commits = sorted({commit for at_one_slo in found for one in at_one_slo for commit in one.commit.split(", ")})
    head = [SMOKE_TEST] if told["smoke_test"] else []
    head += [f"measured at several commits: {', '.join(commits)}"] if len(commits) > 1 else []
    text = "\n\n".join([*head, *map(table.markdown, found)])
    print(f"\n{text}", flush=True)
    write_in_one_move(campaign.output / "table.md", f"{text}\n".encode())
    content = {**told, "missing": missing, "slos": [table.data(at_one_slo) for at_one_slo in found]}
    write_in_one_move(campaign.output / "table.json", json.dumps(content, indent=1).encode())
    return missing


def _campaign(args: argparse.Namespace) -> Campaign:
    form = QUICK if args.quick else FULL
    return Campaign(
        workloads=args.workloads or (form.workloads if args.traces else GENERATED),
        systems=args.systems or form.systems,
        tbt_slos_ms=args.tbt_slo_ms or form.tbt_slos_ms,
        layers=args.layers,
        together=args.together,
        scale=args.scale,
        traces=args.traces,
        duration_s=args.duration_s or form.duration_s,
        repetitions=args.repetitions or form.repetitions,
        resolution=args.resolution or form.resolution,
        most_runs=args.most_runs,
        seed=args.seed,
        max_client_lag_ms=args.max_client_lag_ms,
        eos_token_id=args.eos_token_id,
        output=args.output or Path(f"build/bench-compare{'-quick' if args.quick else ''}"),
    )


def _check(campaign: Campaign) -> None:
    """Raises ConfigError."""
    chosen = {"--workloads": campaign.workloads, "--systems": campaign.systems, "--tbt-slo-ms": campaign.tbt_slos_ms}
    for option, values in chosen.items():
        if len(set(values)) < len(values):
            raise ConfigError(f"{option} has a value twice: {_words(tuple(values))}")
    if len(campaign.systems) < 2:
        raise ConfigError(f"--systems has {campaign.systems[0]} only: a comparison needs at least two")
    campaign.check(machine())


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("compare", __doc__, "--traces DIR --workloads azure-code hybrid --output build/bench-compare")

    def both(name: str) -> str:
        full, quick = (getattr(form, name) for form in (FULL, QUICK))
        return f"(default: {_words(full)}; --quick: {_words(quick)})"

    parser.add_argument("--quick", action="store_true", help="some ten minutes: a smoke test, whose figures mean nothing")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the trace files; without it the workload is sample")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help=f"as for dynaserve bench {both('workloads')}")
    parser.add_argument("--systems", nargs="+", choices=CANDIDATES, metavar="NAME", help=f"ratios are those of {OURS} {both('systems')}")
    parser.add_argument("--tbt-slo-ms", nargs="+", type=positive, metavar="MS", help=f"each {both('tbt_slos_ms')}")
    add_layers(parser)
    together = "systems that are up at a time, run for run in turns: a machine that is slow for a while is so for all of them"
    parser.add_argument("--together", type=whole(1), default=1, metavar="N", help=f"{together}; 7 GB each {DEFAULT}")
    parser.add_argument(
        "--scale", type=positive, default=0.25, metavar="X", help=f"lengths times X; above {MOST_TOKENS} tokens left out {DEFAULT}"
    )
    parser.add_argument(
        "--duration-s", type=positive, metavar="T", help=f"of each run; several times as long as an answer takes {both('duration_s')}"
    )
    parser.add_argument("--repetitions", type=whole(1), metavar="N", help=f"searches of each system {both('repetitions')}")
    parser.add_argument("--resolution", type=positive, metavar="X", help=f"lowest failed / highest passed - 1 {both('resolution')}")
    most_runs = "runs of a rate, while their error leaves open whether it is sustained"
    parser.add_argument("--most-runs", type=whole(1), default=MOST_RUNS, metavar="N", help=f"{most_runs} {DEFAULT}")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help=f"of the requests and arrivals {DEFAULT}")
    add_max_client_lag(parser)
    add_eos_token_id(parser)
    where = "(default: build/bench-compare; --quick: build/bench-compare-quick)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"reports {where}")
    return parser


def _words(value: object) -> str:
    return " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in (value if isinstance(value, tuple) else (value,)))


if __name__ == "__main__":
    main(sys.argv[1:])
