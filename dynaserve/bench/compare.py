"""`dynaserve bench compare`: the capacities of several systems, measured in turns on the same machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dynaserve.bench import capacity, client, compare_report, options, report, systems, trial
from dynaserve.bench.capacity import Repetition, SearchOptions
from dynaserve.bench.comparison import Comparison, Turn
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.systems import System
from dynaserve.bench.trial import Trial
from dynaserve.errors import ConfigError

EXAMPLE = """\
example:
  dynaserve bench compare --system stock=http://127.0.0.1:8001 --system ours=http://127.0.0.1:8000 \\
      --workload sample --rate 2 --duration-s 60 --output comparison

Each repetition searches the capacity of every system in turn (see `dynaserve bench capacity --help`), in another order each time.
Ratios are to the first system, with the 95 % confidence interval over the repetitions. A last run of each system at one rate, the
capacity of the first, gives the distribution of TBT and the timeline. Systems that cannot run at the same time are described in a
file, and started for each of their turns:

  [[system]]
  name = "stock"
  url = "http://127.0.0.1:8000"
  commands = ["vllm serve MODEL --port 8000"]     # none: it runs already
  start_timeout_s = 600

--output gets results.json, report.html (in one file) and its pictures as PNG; the pictures need matplotlib.

exit status: 0 reported; 2 bad option or server; 3 the figures cannot be trusted."""


@dataclass(frozen=True)
class CompareOptions:
    """replay: of every run; its url is replaced by that of each system."""

    systems: Sequence[System]
    replay: ReplayOptions
    search: SearchOptions
    output: Path


def main(arguments: Sequence[str]) -> None:
    """Ends with the exit status that `--help` tells."""
    raise SystemExit(capacity.status_of("compare", lambda: run(parse(arguments), arguments)))


def parse(arguments: Sequence[str]) -> CompareOptions:
    """Raises ConfigError."""
    parser = options.Parser(
        prog="dynaserve bench compare",
        description="Compares the capacities of several systems, in turns on the same machine.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("systems")
    group.add_argument("--system", action="append", default=[], metavar="NAME=URL", help="one that runs already; again for each")
    group.add_argument("--systems", type=Path, metavar="FILE", help="TOML, see below")
    options.add_server(parser.add_argument_group("server"), with_url=False)
    options.add_workload(parser.add_argument_group("workload"))
    options.add_measurement(parser.add_argument_group("measurement"))
    capacity.add_search(parser.add_argument_group("search"))
    args = parser.parse_args(arguments)
    chosen = [systems.from_url(text) for text in args.system] + ([] if args.systems is None else systems.from_toml(args.systems))
    names = [system.name for system in chosen]
    if len(set(names)) < max(2, len(names)):
        raise ConfigError(f"a comparison needs at least two systems of different names, not {', '.join(names) or 'none'}")
    if args.output is None:
        raise ConfigError("--output is needed: the folder of the report")
    args.url = chosen[0].url
    return CompareOptions(chosen, capacity.drawn_options(args), capacity.search_options(args), args.output)


def run(opts: CompareOptions, arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError."""
    compare_report.prepare(opts.output)
    client.allow_many_connections()
    turns: dict[str, list[Turn]] = {system.name: [] for system in opts.systems}
    for number in range(opts.search.repetitions):
        for system in _in_order(opts.systems, number):
            turns[system.name].append(_turn(opts, system, number, turns[system.name]))
    comparison = Comparison(opts.replay.workload, opts.replay.slo, turns, _side_by_side(opts, turns))
    compare_report.write(opts.output, comparison, report.command_line(arguments, "bench compare"), report.machine())
    _print(comparison)
    return 0


def _in_order(chosen: Sequence[System], number: int) -> Sequence[System]:
    """Another one first each time, so that no system has always the machine that the same other one left."""
    first = number % len(chosen)
    return [*chosen[first:], *chosen[:first]]


def _turn(opts: CompareOptions, system: System, number: int, before: Sequence[Turn]) -> Turn:
    known = [rate for turn in before if (rate := turn.repetition.passed_per_s)]
    searching = replace(opts.search, first_per_s=known[-1] if known else opts.search.first_per_s)
    with systems.running(system):
        counted = systems.cut_counts(system.url)
        found = capacity.find(replace(opts.replay, url=system.url), searching, opts.replay.seed + number, lambda one: _tell(system, one))
        after = systems.cut_counts(system.url)
    share = after.since(counted) if counted is not None and after is not None else None
    return Turn(found, share)


def _side_by_side(opts: CompareOptions, turns: dict[str, list[Turn]]) -> dict[str, Trial]:
    baseline: list[Repetition] = [turn.repetition for turn in turns[opts.systems[0].name]]
    rate = capacity.median_rate(baseline) or opts.search.least_per_s
    runs = {}
    for system in opts.systems:
        with systems.running(system):
            runs[system.name] = trial.run(replace(opts.replay, url=system.url), rate, opts.replay.seed, lambda _: None)
            _tell(system, runs[system.name])
    return runs


def _print(comparison: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    for column in compare_report.COLUMNS:
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in compare_report.rows(comparison):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)


def _tell(system: System, run: Trial) -> None:
    verdict = run.not_sustained or "passed"
    print(f"{system.name}: seed {run.seed}  {run.rate_per_s:8.3g} requests/s  {verdict}", file=sys.stderr, flush=True)
