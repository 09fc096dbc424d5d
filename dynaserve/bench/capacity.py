"""`dynaserve bench capacity`: the highest rate that one server sustains within its SLO."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console

from dynaserve.bench import client, growth, options, report, search, trial
from dynaserve.bench.exit_status import NOTHING_TO_REPORT, say, status_of
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.trial import Trial
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable, write_in_one_move
from workloads.arrivals import WITHOUT_TRACE

REPETITIONS, RESOLUTION = 3, 0.05
"""Of a search, unless others are asked for."""
LEAST_RESOLUTION = 1e-4
MOST_RUNS = 2
"""Of one rate, unless more are asked for."""
SEARCH_OPTIONS = ("--repetitions", "--resolution", "--most-runs", "--least-rate", "--most-rate")
"""What `add_search` adds."""
ANSWERS_IN_A_RUN = 3
"""How many times the median of its requests' end-to-end times a run takes: in a shorter one decodes have hardly gathered when it ends."""
EXAMPLE = """\
example:
  dynaserve bench capacity --url http://127.0.0.1:8000 --workload sample --rate 2 --duration-s 60 --repetitions 3

A rate passes if no request fails, the P99 of all gaps between tokens is within --tbt-slo-ms, P99 TTFT within --ttft-slo-ms if it
is given, and neither TTFT nor the longest gap of a request grows over the run by more than 0.05 s per second of arrivals; nor does the
longest gap fall by as much, where who came first waits for all who come later. While the standard error of its runs leaves that open,
one with other requests follows, up to --most-runs of them, and all together decide: on a
machine that others use, several short runs tell more than a long one. Each repetition is a search of its own, with its own seed:
requests drawn at random from the workload. The capacity is the median of the repetitions.
Short runs read too high: a run should be several times as long as the longest answer. --output is written after each repetition, with
the capacity after the last one: what was measured before an error stays there.

exit status: 0 reported; 1 not even --least-rate passed; 2 bad option or server; 3 the figures cannot be trusted."""


@dataclass(frozen=True)
class SearchOptions:
    """first_per_s, least_per_s, most_per_s: the rate tried first, and the bounds of those tried. most_runs: of one rate. is_near: the
    first one is near the capacity, so that the next ones are near it."""

    first_per_s: float
    least_per_s: float
    most_per_s: float
    resolution: float
    repetitions: int
    most_runs: int = MOST_RUNS
    is_near: bool = False

    def near(self, rate_per_s: float) -> SearchOptions:
        """The same, beginning at that rate, or at the bound next to it."""
        return replace(self, first_per_s=min(max(rate_per_s, self.least_per_s), self.most_per_s), is_near=True)


@dataclass(frozen=True)
class Repetition:
    """One search: what it found and every run on the way."""

    seed: int
    passed_per_s: float | None
    failed_per_s: float | None
    trials: Sequence[Trial]


def main(arguments: Sequence[str]) -> None:
    """Ends with the exit status that `--help` tells."""
    raise SystemExit(status_of("bench capacity", lambda: run(arguments)))


def run(arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError."""
    parser = options.Parser(
        prog="dynaserve bench capacity",
        description="Searches for the highest rate that a server sustains within its SLO.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options.add_server(parser.add_argument_group("server"))
    options.add_workload(parser.add_argument_group("workload"))
    options.add_measurement(parser.add_argument_group("measurement"))
    add_search(parser.add_argument_group("search"))
    args = parser.parse_args(arguments)
    opts, searching = drawn_options(args), search_options(args)
    if opts.output is not None:
        check_replaceable(opts.output)
    client.allow_many_connections()
    console, found = Console(highlight=False), _repetitions(arguments, opts, searching)
    capacity = median_rate(found)
    for repetition in found:
        console.print(f"seed {repetition.seed}: {bracket(repetition)}", markup=False)
    if capacity is None:
        nothing = f"not servable: in most repetitions not even {searching.least_per_s:g} requests/s passed"
        return say("bench capacity", nothing, NOTHING_TO_REPORT)
    told = f"TBT {opts.slo.tbt_ms:g} ms" + ("" if opts.slo.ttft_ms is None else f", TTFT {opts.slo.ttft_ms:g} ms")
    least = "at least " if is_least(found) else ""
    console.print(f"capacity {least}{capacity:.3g} requests/s ({opts.workload}, P99 within {told}, {len(found)} repetitions)", markup=False)
    return 0


def _repetitions(arguments: Sequence[str], opts: ReplayOptions, searching: SearchOptions) -> list[Repetition]:
    """All searches, each of which is in --output when it is over. Raises ConfigError."""
    found: list[Repetition] = []
    measure = partial(trial.run, opts, most_runs=searching.most_runs)
    try:
        for number in range(searching.repetitions):
            found.append(find(measure, following(searching, found), opts.seed + number, _tell))
            if opts.output is not None:
                _write(opts.output, arguments, opts, found, complete=len(found) == searching.repetitions)
    except (ConfigError, KeyboardInterrupt) as error:
        if opts.output is None or not found:
            raise
        kept = f"repetitions measured before it: {len(found)}, in {opts.output}"
        # Of the same kind, which the exit status tells.
        raise type(error)(f"{str(error) or 'interrupted'}; {kept}") from error
    return found


def add_search(group: Any, *, measured: bool = True) -> None:
    """measured False: simulated. What is not given is None until `search_options`."""
    group.add_argument("--repetitions", type=options.whole(1), metavar="N", help=f"searches, each of another seed (default: {REPETITIONS})")
    group.add_argument(
        "--resolution", type=options.positive, metavar="X", help=f"lowest failed / highest passed - 1 (default: {RESOLUTION:g})"
    )
    group.add_argument(
        "--most-runs",
        type=options.whole(1),
        metavar="N",
        help=f"of one rate, while they leave it open (default: {MOST_RUNS})" if measured else "of one rate, judged together (default: 1)",
    )
    group.add_argument("--least-rate", type=options.positive, metavar="R", help="lowest rate tried (default: --rate / 64)")
    group.add_argument("--most-rate", type=options.positive, metavar="R", help="highest rate tried (default: --rate x 64)")


def search_options(args: argparse.Namespace, most_runs: int = MOST_RUNS) -> SearchOptions:
    """most_runs: unless others are asked for. Raises ConfigError."""
    if args.rate is None:
        raise ConfigError("--rate is needed: the first rate that is tried, near the expected capacity")
    least, most = args.least_rate or args.rate / 64, args.most_rate or args.rate * 64
    if not least <= args.rate <= most:
        raise ConfigError(f"--rate {args.rate:g} is not between --least-rate {least:g} and --most-rate {most:g}")
    resolution = args.resolution or RESOLUTION
    if resolution < LEAST_RESOLUTION:
        raise ConfigError(f"--resolution {resolution:g} is finer than {LEAST_RESOLUTION:g}, below which no run tells two rates apart")
    return SearchOptions(args.rate, least, most, resolution, args.repetitions or REPETITIONS, args.most_runs or most_runs)


def drawn_options(args: argparse.Namespace) -> ReplayOptions:
    """Raises ConfigError if a run would have no end, or would follow a trace whose requests it does not send."""
    if args.requests is None and args.duration_s is None:
        raise ConfigError("--duration-s or --requests is needed: how long each run is")
    if args.arrivals.startswith("trace"):
        raise ConfigError(f"--arrivals {args.arrivals}: requests are drawn at random, so arrivals are one of {', '.join(WITHOUT_TRACE)}")
    return replace(options.replay_options(args), drawn=True)


def following(searching: SearchOptions, found: Sequence[Repetition]) -> SearchOptions:
    """The search after these: it begins at the last rate that passed, or at the least one if none did."""
    if not found:
        return searching
    known = [rate for repetition in found if (rate := repetition.passed_per_s)]
    return searching.near(known[-1]) if known else replace(searching, first_per_s=searching.least_per_s)


def find(measure: Callable[[float, int], Trial], searching: SearchOptions, seed: int, tell: Callable[[Trial], None]) -> Repetition:
    """One search. measure: one run at that rate, with that seed. tell: called after each run, which is kept without its requests."""
    runs = finding(measure, searching, seed)
    while True:
        try:
            run = next(runs)
        except StopIteration as end:
            found: Repetition = end.value
            return found
        tell(run)


def finding(measure: Callable[[float, int], Trial], searching: SearchOptions, seed: int) -> Generator[Trial, None, Repetition]:
    """The same run by run: yields each when it is over, and makes the next one when it is asked to."""
    trials: list[Trial] = []
    bounds = searching.least_per_s, searching.most_per_s
    step = min(search.FACTOR, 1 + searching.resolution) if searching.is_near else search.FACTOR
    rates = search.steps(searching.first_per_s, searching.resolution, *bounds, step)
    rate_per_s = next(rates)
    while True:
        run = measure(rate_per_s, seed)
        trials.append(replace(run, records=()))
        yield run
        failed = rate_per_s if run.promising_per_s is None else run.promising_per_s
        try:
            rate_per_s = rates.send(None if run.not_sustained is None else failed)
        except StopIteration as end:
            found: search.Found = end.value
            return Repetition(seed, found.passed_per_s, found.failed_per_s, trials)


def median_rate(found: Sequence[Repetition]) -> float | None:
    """Of the highest rates that passed; a search in which none did counts as 0. None: the median is 0."""
    return middle_rate(repetition.passed_per_s for repetition in found) or None


def is_least(found: Iterable[Repetition]) -> bool:
    """Whether in one of the searches even the highest rate that was tried passed: the capacity is at least what is told."""
    return any(repetition.failed_per_s is None for repetition in found)


def middle_rate(rates: Iterable[float | None]) -> float:
    """The median, the lower one of two: a rate that was tried. None counts as 0."""
    return median_low([rate or 0.0 for rate in rates])


def bracket(repetition: Repetition) -> str:
    if repetition.passed_per_s is None:
        return f"not even {repetition.failed_per_s:.3g} requests/s passed"
    if repetition.failed_per_s is None:
        return f"even {repetition.passed_per_s:.3g} requests/s passed, the highest rate tried"
    return f"{repetition.passed_per_s:.3g} requests/s passed, {repetition.failed_per_s:.3g} did not"


def trial_data(run: Trial) -> dict[str, Any]:
    """For the raw data, without the single requests."""
    fields = {name: getattr(run, name) for name in ("rate_per_s", "seed", "model", "not_sustained", "front_cores")}
    return fields | {"summary": asdict(run.summary), "others": [asdict(other) for other in run.others]}


def repetition_data(one: Repetition) -> dict[str, Any]:
    """The same of a search."""
    return asdict(replace(one, trials=())) | {"trials": [trial_data(run) for run in one.trials]}


def _write(path: Path, arguments: Sequence[str], opts: ReplayOptions, found: Sequence[Repetition], *, complete: bool) -> None:
    """complete: these are all repetitions; otherwise there is no capacity, as where it is not servable."""
    content = {
        "command": report.command_line(arguments, "bench capacity"),
        "machine": report.machine(),
        "workload": opts.workload,
        "complete": complete,
        "capacity_per_s": median_rate(found) if complete else None,
        "capacity_is_least": is_least(found) if complete else None,
        "repetitions": [repetition_data(one) for one in found],
    }
    write_in_one_move(path, json.dumps(content, indent=1).encode())


def verdict_of(run: Trial) -> str:
    return f"{run.not_sustained or 'passed'}{f' (of {1 + len(run.others)} runs)' if run.others else ''}{_brevity(run)}"


def _brevity(run: Trial) -> str:
    """What there is to say against a run that passed."""
    e2e_ms, duration_s, requests = run.summary.e2e_ms, run.summary.duration_s, run.summary.requests + sum(o.requests for o in run.others)
    if not run.not_sustained and requests < growth.FEWEST:
        return f"; too few to be sure: of {requests} requests nobody can tell whether a queue grows"
    if run.not_sustained or e2e_ms is None or ANSWERS_IN_A_RUN * e2e_ms.p50 <= 1e3 * duration_s:
        return ""
    return f"; too short to be sure: a request takes {e2e_ms.p50 / 1e3:.2g} s of its {duration_s:.2g}, so batches have hardly filled"


def _tell(run: Trial) -> None:
    print(f"seed {run.seed}  {run.rate_per_s:8.3g} requests/s  {verdict_of(run)}", file=sys.stderr, flush=True)
