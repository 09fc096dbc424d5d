"""`dynaserve bench compare`: the capacities of several systems, measured in turns on the same machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from dynaserve.bench import capacity, client, compare_report, options, report, systems, trial
from dynaserve.bench.capacity import Repetition, SearchOptions
from dynaserve.bench.comparison import Comparison, Kept, Turn
from dynaserve.bench.course import Course
from dynaserve.bench.exit_status import status_of
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.systems import Running, System
from dynaserve.bench.trial import Trial
from dynaserve.errors import ConfigError, DynaServeError

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
  url = "http://127.0.0.1:8000"                   # or urls = [...]: requests go to each in turn
  commands = ["vllm serve MODEL --port 8000"]     # none: it runs already
  start_timeout_s = 600

--output gets results.json, report.html (in one file) and its pictures as PNG; the pictures need matplotlib. results.json is written
after each turn: what was measured before an error stays there.

exit status: 0 reported; 2 bad option or server; 3 the figures cannot be trusted."""


T = TypeVar("T")


@dataclass(frozen=True)
class CompareOptions:
    """replay: of every run; its urls are replaced by those of each system. side_by_side: a last run of each system at one rate.

    saturates: each start is followed by a run with all requests at once, and the rates of the search are shares of what the system
    does in its first one. gives_up: as of `trial.run`. kept: turns and saturation rates of a comparison with the same options that ended
    early.
    """

    systems: Sequence[System]
    replay: ReplayOptions
    search: SearchOptions
    output: Path
    side_by_side: bool = True
    saturates: bool = False
    gives_up: bool = False
    kept: Kept = field(default_factory=Kept)


def main(arguments: Sequence[str]) -> None:
    """Ends with the exit status that `--help` tells."""
    provenance = {"command": report.command_line(arguments, "bench compare"), "machine": report.machine()}
    raise SystemExit(status_of("bench compare", lambda: run(parse(arguments), provenance)))


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
    group.add_argument("--system", action="append", default=[], metavar="NAME=URL[,URL...]", help="one that runs already; again for each")
    group.add_argument("--systems", type=Path, metavar="FILE", help="TOML, see below")
    options.add_server(parser.add_argument_group("server"), with_url=False)
    options.add_workload(parser.add_argument_group("workload"))
    options.add_measurement(parser.add_argument_group("measurement"), ("DIR", "folder of the report"))
    capacity.add_search(parser.add_argument_group("search"))
    args = parser.parse_args(arguments)
    chosen = [systems.from_url(text) for text in args.system] + ([] if args.systems is None else systems.from_toml(args.systems))
    names = [system.name for system in chosen]
    if len(set(names)) < max(2, len(names)):
        raise ConfigError(f"a comparison needs at least two systems of different names, not {', '.join(names) or 'none'}")
    if args.output is None:
        raise ConfigError("--output is needed: the folder of the report")
    args.url = chosen[0].urls
    return CompareOptions(chosen, capacity.drawn_options(args), capacity.search_options(args), args.output)


def run(opts: CompareOptions, provenance: Mapping[str, Any]) -> int:
    """Returns the exit status. provenance: `command`, `machine` and what else is to stand in results.json.

    Raises ConfigError, and what a system's `start` raises.
    """
    compare_report.prepare(opts.output)
    client.allow_many_connections()
    measurement = Measurement(opts, lambda comparison: compare_report.keep(opts.output, comparison, provenance))
    try:
        _take(measurement)
    except (DynaServeError, KeyboardInterrupt) as error:
        if not (measured := sum(map(len, measurement.turns.values()))):
            raise
        if measurement.is_complete:
            compare_report.write(opts.output, measurement.comparison, provenance)
        kept = f"turns measured before it: {measured}, in {compare_report.results_path(opts.output)}"
        # Of the same kind, which the exit status tells.
        raise type(error)(f"{str(error) or 'interrupted'}; {kept}") from error
    compare_report.write(opts.output, measurement.comparison, provenance)
    _print(measurement.comparison)
    return 0


def _take(measurement: Measurement) -> None:
    """All turns, and a last run of each system if it is asked for. Raises ConfigError."""
    opts = measurement.opts
    for number in range(opts.search.repetitions):
        for system in in_order(opts.systems, number):
            if measurement.lacks(system.name, number):
                with systems.running(system) as running:
                    measurement.warm_up(system.name, running, number)
                    measurement.search(system.name, running, number)
    if opts.side_by_side:
        measurement.run_side_by_side()


@dataclass
class Measurement:
    """The turns of a comparison. keep: called with what there is after each."""

    opts: CompareOptions
    keep: Callable[[Comparison], None]

    def __post_init__(self) -> None:
        self.turns = {system.name: list(self.opts.kept.turns.get(system.name, ())) for system in self.opts.systems}
        self.runs: dict[str, Trial] = {}
        self.saturation_per_s = dict(self.opts.kept.saturation_per_s)
        self.comparison = Comparison(self.opts.replay.workload, self.opts.replay.slo, self.turns, self.runs, self.saturation_per_s)

    def lacks(self, name: str, number: int) -> bool:
        """Whether that turn of that system, counted from 0, has not been taken: one that failed leaves a gap."""
        return all(turn.repetition.seed != self._seed(number) for turn in self.turns[name])

    @property
    def is_complete(self) -> bool:
        return not any(self.lacks(name, number) for name in self.turns for number in range(self.opts.search.repetitions))

    def warm_up(self, name: str, running: Running, number: int) -> None:
        """Of all systems alike, with all requests at once; the first time tells the saturation. Raises ConfigError."""
        if self.opts.saturates:
            seed = self._seed(number)
            rate = trial.saturation(replace(self.opts.replay, urls=running.urls), seed)
            running.check()
            self.saturation_per_s.setdefault(name, rate)
            print(f"{name}: seed {seed}  {rate:8.3g} requests/s  when all are sent at once", file=sys.stderr, flush=True)

    def search(self, name: str, running: Running, number: int) -> None:
        """Takes that turn: it begins where the system's last one ended, else at the highest capacity found. Raises ConfigError."""
        for _ in self.searching(name, running, number):
            pass

    def searching(self, name: str, running: Running, number: int) -> Iterator[Trial]:
        """The same run by run, so that others can have theirs in between."""
        counted = systems.cut_counts(running.urls)
        search = capacity.finding(partial(self._run, running), self._searching(name), self._seed(number))
        course: Course | None = None
        while True:
            try:
                run = next(search)
            except StopIteration as end:
                found: Repetition = end.value
                break
            if run.not_sustained is None:  # Each rate that passes is above the one before: the last one is what the search finds.
                course = Course.of(run.rate_per_s, run.records, self.opts.replay.slo)
            _tell(name, run)
            yield run
        after = systems.cut_counts(running.urls)
        share = after.since(counted) if counted is not None and after is not None else None
        self.turns[name].append(Turn(found, share, course))
        self.turns[name].sort(key=lambda turn: turn.repetition.seed)
        self.keep(self.comparison)

    def run_side_by_side(self) -> None:
        """Each system at the capacity of the first one. Raises ConfigError."""
        baseline = self.opts.systems[0]
        found: list[Repetition] = [turn.repetition for turn in self.turns[baseline.name]]
        rate = capacity.median_rate(found) or self._bounds(baseline.name).least_per_s
        for system in self.opts.systems:
            with systems.running(system) as running:
                self.warm_up(system.name, running, 0)
                self.runs[system.name] = self._run(running, rate, self.opts.replay.seed)
                _tell(system.name, self.runs[system.name])
            self.keep(self.comparison)

    def _seed(self, number: int) -> int:
        return self.opts.replay.seed + number

    def _searching(self, name: str) -> SearchOptions:
        bounds = self._bounds(name)
        if turns := self.turns[name]:
            return capacity.following(bounds, [turn.repetition for turn in turns])
        known = [rate for taken in self.turns.values() for turn in taken if (rate := turn.repetition.passed_per_s)]
        return bounds.near(max(known)) if known else bounds

    def _bounds(self, name: str) -> SearchOptions:
        unit = self.saturation_per_s.get(name, 1.0)
        search = self.opts.search
        return replace(
            search, first_per_s=search.first_per_s * unit, least_per_s=search.least_per_s * unit, most_per_s=search.most_per_s * unit
        )

    def _run(self, running: Running, rate_per_s: float, seed: int) -> Trial:
        opts = replace(self.opts.replay, urls=running.urls)
        gives_up, most_runs = self.opts.gives_up, self.opts.search.most_runs
        run = trial.run(opts, rate_per_s, seed, front_pids=running.front_pids, gives_up=gives_up, most_runs=most_runs)
        running.check()
        return run


def in_order(chosen: Sequence[T], number: int) -> Sequence[T]:
    """Another one first each time, so that no system has always the machine that the same other one left."""
    first = number % len(chosen)
    return [*chosen[first:], *chosen[:first]]


def _print(comparison: Comparison) -> None:
    table = Table(box=None, pad_edge=False)
    for column in compare_report.columns(comparison):
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in compare_report.rows(comparison):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)


def _tell(name: str, run: Trial) -> None:
    print(f"{name}: seed {run.seed}  {run.rate_per_s:8.3g} requests/s  {capacity.verdict_of(run)}", file=sys.stderr, flush=True)
