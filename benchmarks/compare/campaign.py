"""Comparisons side by side, as each start of a system is expensive, and kept on disk turn by turn: one that was stopped goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.compare import lesson
from benchmarks.compare.candidates import CANDIDATES, MOST_TOKENS, Site
from benchmarks.compare.outcome import LEAST_SHARE, Compared, asked, read, there_is, why_not_here
from dynaserve.bench import client, compare, compare_plots, compare_report, options, replay, report, systems, trial
from dynaserve.bench.capacity import SearchOptions
from dynaserve.bench.compare import CompareOptions, Measurement
from dynaserve.bench.comparison import Comparison
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.systems import Running, System
from dynaserve.bench.trial import Trial
from dynaserve.errors import ConfigError, DynaServeError
from dynaserve.local.model import first_layers
from dynaserve.machine import fast_dtype

FIRST_SHARE, MOST_SHARE = 0.9, 16.0
"""Of a system's saturation rate: what its search tries first, and at most. Rates beyond what it keeps in time are given up early, others
take the whole time: it begins high. Saturation is that of a system which has just been started, and may be a fourth of what it sustains
for short answers later on."""
REQUEST_TIMEOUT_S = 3600.0

SystemOf = Callable[[str, float, Path], System]
"""By name, TBT SLO and folder of its logs."""


@dataclass(frozen=True)
class Campaign:
    """What is compared, and how thoroughly. layers: of the model. together: how many systems are up at a time, run for run in turns.
    eos_token_id None: clients tell lengths. output: gets a folder for each comparison."""

    workloads: Sequence[str]
    systems: Sequence[str]
    tbt_slos_ms: Sequence[float]
    layers: int
    together: int
    scale: float
    traces: Path | None
    duration_s: float
    repetitions: int
    resolution: float
    most_runs: int
    seed: int
    max_client_lag_ms: float
    eos_token_id: int | None
    output: Path

    def check(self, machine: Mapping[str, Any]) -> None:
        """Raises ConfigError where a workload cannot be sent, nothing can draw, or something else, or another machine, was measured into
        the same folder, or its latencies were learnt from something else: now, rather than when systems have started."""
        compare_plots.check_installed()
        self._check_folders()
        for workload, tbt_slo_ms in self._comparisons():
            replay.plan_requests(replace(self.replay(workload, tbt_slo_ms), rate_per_s=1.0, duration_s=None, requests=1))
            folder, its_options = self.folder(workload, tbt_slo_ms), self._options(workload, tbt_slo_ms)
            if reason := why_not_here(folder, its_options, self.repetitions, machine):
                raise ConfigError(f"{folder} {reason}: take another --output, or delete it")
        if self._profile.exists() and (reason := lesson.why_not_of(self._profile, self._lesson(machine))):
            raise ConfigError(f"{self._profile} {reason}: take another --output, or delete it")

    def _check_folders(self) -> None:
        """Raises ConfigError."""
        names: dict[Path, str] = {}
        for workload, tbt_slo_ms in self._comparisons():
            name = f"{workload} at {tbt_slo_ms} ms"
            if (other := names.setdefault(self.folder(workload, tbt_slo_ms), name)) != name:
                raise ConfigError(f"{other} and {name} would have the same folder: compare them in two runs")

    def site(self) -> Site:
        """Raises ConfigError. Latencies are those of so many layers: another campaign in the same folder learns its own."""
        return Site(first_layers(self.layers), self._profile)

    def learn(self, site: Site) -> None:
        """The latencies that starts begin with, where a system goes by them: with others than the other starts it would be another system.
        Raises ConfigError, FleetFailed."""
        if any(CANDIDATES[name].slo_batches for name in self.systems):
            if not site.profile.exists():  # What it is of comes first: one that does not say so is of no use.
                lesson.keep(site.profile, self._lesson(report.machine()))
            site.learn(self.tbt_slos_ms[0], self.output / "logs", self.teach)

    def run(self, system_of: SystemOf, provenance: Mapping[str, Any]) -> None:
        """Measures what is not there yet: a repetition after the other, in each `together` systems after the others, and all workloads
        while they run. What fails is told, and left out. Reports are of the repetitions that are asked for, whenever they were measured.
        provenance: for each results.json."""
        client.allow_many_connections()
        under_way = {one: self._measurement(*one, provenance) for one in self._comparisons()}
        for number in range(self.repetitions):
            for starts in self._starts(number):
                lacking = {
                    name: {one: it for one, it in under_way.items() if one[1] in tbt_slos_ms and it.lacks(name, number)}
                    for name, tbt_slos_ms in starts.items()
                }
                due = [name for name in starts if lacking[name]]
                for first in range(0, len(due), self.together):
                    with ExitStack() as stack:
                        serving = []
                        for name in due[first : first + self.together]:
                            print(f"\n{name}, P99 TBT within {_words(starts[name])} ms, repetition {number + 1}", flush=True)
                            with _telling(name):
                                running = stack.enter_context(systems.running(system_of(name, starts[name][0], self.output / "logs")))
                                serving.append(_Serving(name, running, lacking[name]))
                        self._take_turns(number, serving)
        for one in self._comparisons():
            if found := asked(self.folder(*one), self._options(*one), self.repetitions):
                comparison, results = found
                compare_report.show(self.folder(*one), comparison, results)

    def teach(self, running: Running) -> None:
        """Of each workload what tells a saturation, all at once. Raises ConfigError."""
        for workload in self.workloads:
            opts = replace(self.replay(workload, self.tbt_slos_ms[0]), urls=running.urls)
            rate_per_s = trial.saturation(opts, self.seed)
            print(f"learning the latency of steps: {workload}  {rate_per_s:8.3g} requests/s", file=sys.stderr, flush=True)

    def found(self) -> tuple[list[list[Compared]], list[str]]:
        """What is there, by SLO, and the names of comparisons that are not."""
        there: dict[float, list[Compared]] = {}
        missing = []
        for workload, tbt_slo_ms in self._comparisons():
            compared = read(self.folder(workload, tbt_slo_ms), self._options(workload, tbt_slo_ms), self.repetitions)
            if compared is None:
                missing.append(f"{workload} at {tbt_slo_ms:g} ms")
            else:
                there.setdefault(tbt_slo_ms, []).append(compared)
        return list(there.values()), missing

    def _take_turns(self, number: int, serving: Sequence[_Serving]) -> None:
        """Of systems that run. The saturation of each is the same at each SLO that it is judged by."""
        for workload in self.workloads:
            saturation_per_s: dict[str, float] = {}
            for tbt_slo_ms in self.tbt_slos_ms:
                searches: dict[str, Iterator[Trial]] = {}
                for one in serving:
                    if (measurement := one.lacking.get((workload, tbt_slo_ms))) is None:
                        continue
                    with _telling(f"{one.name}, {workload}, {tbt_slo_ms:g} ms"):
                        print(f"{workload}, {tbt_slo_ms:g} ms", file=sys.stderr, flush=True)
                        if one.name not in saturation_per_s:
                            measurement.warm_up(one.name, one.running, number)
                            saturation_per_s[one.name] = measurement.saturation_per_s[one.name]
                        measurement.saturation_per_s.setdefault(one.name, saturation_per_s[one.name])
                        searches[one.name] = measurement.searching(one.name, one.running, number)
                _alternate(searches, f"{workload}, {tbt_slo_ms:g} ms")

    def _measurement(self, workload: str, tbt_slo_ms: float, provenance: Mapping[str, Any]) -> Measurement:
        """Goes on with the turns that there are."""
        chosen, its_options = self._compare_options(workload, tbt_slo_ms), self._options(workload, tbt_slo_ms)
        commits = provenance["commit"]
        if there := there_is(chosen.output, its_options):
            taken = sum(map(len, there.kept.turns.values()))
            print(f"{workload}, {tbt_slo_ms:g} ms: turns measured before: {taken}, at {there.commits}", flush=True)
            chosen = replace(chosen, kept=there.kept)
            commits = ", ".join(sorted({*there.commits.split(", "), commits}))
        compare_report.prepare(chosen.output)
        told = {**provenance, "commit": commits, "options": its_options, "latencies_of": lesson.of(self._profile)}

        def keep(comparison: Comparison) -> None:
            compare_report.keep(chosen.output, comparison, told, complete=measurement.is_complete)

        measurement = Measurement(chosen, keep)
        return measurement

    def _starts(self, number: int) -> Iterator[dict[str, Sequence[float]]]:
        """For each SLO the systems that start, and by which SLOs each is judged while it runs: those that do not go by it, by all."""
        first, *_ = self.tbt_slos_ms
        for tbt_slo_ms in self.tbt_slos_ms:
            starts: dict[str, Sequence[float]] = {}
            for name in compare.in_order(self.systems, number):
                if CANDIDATES[name].slo_batches:
                    starts[name] = (tbt_slo_ms,)
                elif tbt_slo_ms == first:
                    starts[name] = self.tbt_slos_ms
            yield starts

    @property
    def _profile(self) -> Path:
        return self.output / f"profile-{self.layers}-layers.json"

    def _lesson(self, machine: Mapping[str, Any]) -> lesson.Lesson:
        return lesson.Lesson(list(self.workloads), self.scale, self._traces, fast_dtype(), dict(machine))

    @property
    def _traces(self) -> str | None:
        return None if self.traces is None else str(self.traces.resolve())

    def folder(self, workload: str, tbt_slo_ms: float) -> Path:
        return self.output / f"{re.sub(r'[^a-zA-Z0-9.]+', '-', workload)}-tbt-{tbt_slo_ms:g}"

    def _comparisons(self) -> Iterator[tuple[str, float]]:
        """All workloads at the first SLO come first."""
        return ((workload, tbt_slo_ms) for tbt_slo_ms, workload in product(self.tbt_slos_ms, self.workloads))

    def _options(self, workload: str, tbt_slo_ms: float) -> dict[str, Any]:
        """All that decides what a turn measures, as JSON gives it back."""
        names = ("layers", "together", "scale", "duration_s", "resolution", "most_runs", "seed", "max_client_lag_ms")
        common = {name: getattr(self, name) for name in names}
        systems = {name: asdict(CANDIDATES[name]) for name in self.systems}
        own = {"workload": workload, "tbt_slo_ms": tbt_slo_ms, "systems": systems, "traces": self._traces, "dtype": fast_dtype()}
        # What was measured before there was the option is the same as without it.
        return {**common, **own, **({} if self.eos_token_id is None else {"eos_token_id": self.eos_token_id})}

    def _compare_options(self, workload: str, tbt_slo_ms: float) -> CompareOptions:
        return CompareOptions(
            systems=[System(name) for name in self.systems],
            replay=self.replay(workload, tbt_slo_ms),
            search=SearchOptions(FIRST_SHARE, LEAST_SHARE, MOST_SHARE, self.resolution, self.repetitions, self.most_runs),
            output=self.folder(workload, tbt_slo_ms),
            side_by_side=False,
            saturates=True,
            gives_up=True,
        )

    def replay(self, workload: str, tbt_slo_ms: float) -> ReplayOptions:
        requests = ["--workload", workload, "--scale", f"{self.scale:g}", "--max-total-tokens", str(MOST_TOKENS), "--drawn"]
        traces = [] if self.traces is None else ["--traces", str(self.traces)]
        length = ["--duration-s", f"{self.duration_s:g}", "--seed", str(self.seed)]
        limits = ["--max-client-lag-ms", f"{self.max_client_lag_ms:g}", "--timeout-s", f"{REQUEST_TIMEOUT_S:g}"]
        hidden = [] if self.eos_token_id is None else ["--eos-token-id", str(self.eos_token_id)]
        slo = ["--tbt-slo-ms", f"{tbt_slo_ms:g}"]
        return options.parse(["--url", "http://not-started", *hidden, *requests, *traces, *length, *slo, *limits])


@dataclass(frozen=True)
class _Serving:
    """A system that runs, and the comparisons in which it has a turn to take."""

    name: str
    running: Running
    lacking: Mapping[tuple[str, float], Measurement]


def _words(tbt_slos_ms: Sequence[float]) -> str:
    return " and ".join(f"{slo:g}" for slo in tbt_slos_ms)


def _alternate(searches: Mapping[str, Iterator[Trial]], what: str) -> None:
    """One run of each in turns, until all searches are over."""
    left = dict(searches)
    while left:
        for name, search in list(left.items()):
            run = None
            with _telling(f"{name}, {what}"):
                run = next(search, None)
            if run is None:
                del left[name]


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """An error inside is told and ends only this."""
    try:
        yield
    except DynaServeError as error:
        print(f"bench-compare: {what}: not measured: {error}", file=sys.stderr, flush=True)
