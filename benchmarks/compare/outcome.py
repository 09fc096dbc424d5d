"""What a comparison found, as its results.json tells. Pure but for the reading."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.compare.candidates import OURS
from dynaserve.bench import compare_report
from dynaserve.bench.capacity import middle_rate
from dynaserve.bench.comparison import Comparison, Kept, Turn
from dynaserve.bench.measures import Slo
from dynaserve.bench.ratios import Ratio, paired_ratio
from dynaserve.errors import ConfigError

LEAST_SHARE = 0.1
"""Of its saturation rate: a system whose capacity is lower is not servable."""


class _System(msgspec.Struct):
    turns: list[Turn]
    saturation_per_s: float | None


class _Results(msgspec.Struct):
    """What a file of a comparison has, with more beside it."""

    options: dict[str, Any]
    machine: dict[str, Any]
    commit: str
    workload: str
    slo: Slo
    systems: dict[str, _System]


_KEYS = frozenset(_Results.__struct_fields__)


@dataclass(frozen=True)
class Outcome:
    """Of one system. rates_per_s: of each repetition the highest that passed, None: not even the least did.

    saturation_per_s: of requests that are sent at once. cut_share, client_lag_p99_ms: as `Comparison` tells them. The rest is of the
    (first) run at the capacity; None: there was none, or nothing is in front of the servers. is_least: even the highest rate that was
    tried passed, so that the capacity is at least this.
    """

    rates_per_s: Sequence[float | None]
    capacity_per_s: float | None
    saturation_per_s: float
    goodput_tokens_per_s: float | None
    ttft_p99_ms: float | None
    front_cores: float | None
    cut_share: float | None
    client_lag_p99_ms: float | None
    is_least: bool = False

    @property
    def servable(self) -> bool:
        return self.capacity_per_s is not None and self.capacity_per_s >= LEAST_SHARE * self.saturation_per_s

    @classmethod
    def of(cls, comparison: Comparison, name: str) -> Outcome:
        run = comparison.at_capacity(name)
        ttft = None if run is None else run.summary.ttft_ms
        return cls(
            rates_per_s=comparison.rates(name),
            capacity_per_s=comparison.capacity_per_s(name),
            saturation_per_s=comparison.saturation_per_s[name],
            goodput_tokens_per_s=None if run is None else run.summary.goodput_tokens_per_s,
            ttft_p99_ms=None if ttft is None else ttft.p99,
            front_cores=None if run is None else run.front_cores,
            cut_share=comparison.cut_share(name),
            client_lag_p99_ms=comparison.client_lag_p99_ms(name),
            is_least=comparison.is_least(name),
        )


@dataclass(frozen=True)
class Over:
    """Capacity of our system over that of a baseline. is_least: it is at least that."""

    baseline: str
    ratio: Ratio
    is_least: bool = False

    def __str__(self) -> str:
        return f"{'≥ ' if self.is_least else ''}{self.ratio}"


@dataclass(frozen=True)
class Compared:
    """One workload at one SLO. systems: by name. commit: what was measured. duration_s: of each run, of which there were at most
    most_runs of a rate."""

    workload: str
    tbt_slo_ms: float
    commit: str
    duration_s: float
    most_runs: int
    systems: Mapping[str, Outcome]

    def over_worst(self, baselines: Iterable[str]) -> Over | None:
        """To that one of these beside which it looks worst; None: none is servable, one side was not measured, or a baseline has a
        capacity of which is only known what it is at least."""
        servable = {name: self.systems[name] for name in baselines if name in self.systems and self.systems[name].servable}
        if OURS not in self.systems or not servable or any(baseline.is_least for baseline in servable.values()):
            return None
        ours = self.systems[OURS]
        found = [Over(name, _ratio(ours.rates_per_s, its.rates_per_s), ours.is_least) for name, its in servable.items()]
        return min(found, key=lambda over: over.ratio.value)


def values_over(baselines: Sequence[str], compared: Iterable[Compared]) -> dict[str, float]:
    """By workload, the ratio to that servable one of these baselines beside which ours looks worst, where there is one."""
    return {one.workload: over.ratio.value for one in compared if (over := one.over_worst(baselines)) is not None}


def why_not_here(folder: Path, options: Mapping[str, Any], repetitions: int, machine: Mapping[str, Any]) -> str | None:
    """Why nothing may be measured into this folder: it holds turns of other options, or lacks some and has those of another machine."""
    results = _read(folder)
    if not any(system["turns"] for system in results.get("systems", {}).values()):
        return None
    if different := differences(results["options"], options):
        return f"holds a comparison with other options, {different}"
    if _first(results, repetitions) is None and (different := differences(results["machine"], machine)):
        return f"holds turns of another machine, {different}"
    return None


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in names)


@dataclass(frozen=True)
class There:
    """commits: what was measured, in words."""

    kept: Kept
    commits: str


def there_is(folder: Path, options: Mapping[str, Any]) -> There | None:
    """What a comparison with these options has measured; None: nothing."""
    results = _read(folder)
    return There(_kept(results), results["commit"]) if results.get("options") == options else None


def read(folder: Path, options: Mapping[str, Any], repetitions: int) -> Compared | None:
    """So many turns of each system; None: the folder holds no comparison with these options, or one that lacks some of them."""
    if (found := asked(folder, options, repetitions)) is None:
        return None
    comparison, results = found
    systems = {name: Outcome.of(comparison, name) for name in comparison.turns}
    return Compared(comparison.workload, comparison.slo.tbt_ms, results["commit"], options["duration_s"], options["most_runs"], systems)


def asked(folder: Path, options: Mapping[str, Any], repetitions: int) -> tuple[Comparison, Mapping[str, Any]] | None:
    """The same as a comparison of these turns alone, with all that results.json tells."""
    results = _read(folder)
    comparison = _first(results, repetitions) if results.get("options") == options else None
    return None if comparison is None else (comparison, results)


def _first(results: Mapping[str, Any], repetitions: int) -> Comparison | None:
    """None: one of these repetitions of some system is not there. There may be more of them."""
    kept, least = _kept(results), results["options"]["seed"]
    seeds = range(least, least + repetitions)
    by_seed = {name: {turn.repetition.seed: turn for turn in taken} for name, taken in kept.turns.items()}
    if any(seed not in taken for taken in by_seed.values() for seed in seeds):
        return None
    turns = {name: [taken[seed] for seed in seeds] for name, taken in by_seed.items()}
    return Comparison(results["workload"], msgspec.convert(results["slo"], Slo), turns, {}, kept.saturation_per_s)


def _kept(results: Mapping[str, Any]) -> Kept:
    systems = msgspec.convert(results["systems"], dict[str, _System])
    saturations = {name: system.saturation_per_s for name, system in systems.items() if system.saturation_per_s is not None}
    return Kept({name: system.turns for name, system in systems.items()}, saturations)


def _read(folder: Path) -> dict[str, Any]:
    """What the folder holds; empty: nothing. Raises ConfigError for a file that is not of such a comparison."""
    path = compare_report.results_path(folder)
    try:
        results = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if missing := _KEYS - set(results if isinstance(results, dict) else ()):
        raise ConfigError(f"{path}: is no comparison of bench-compare, it lacks {', '.join(sorted(missing))}")
    try:
        msgspec.convert(results, _Results)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: is no comparison of bench-compare: {error}") from error
    return dict(results)


def geometric_mean(ratios: Collection[float]) -> float:
    """0 if one of them is. ratios: at least one."""
    return math.prod(ratios) ** (1 / len(ratios))


def _ratio(rates: Sequence[float | None], base: Sequence[float | None]) -> Ratio:
    """Of medians where some repetition found no rate: it counts as 0, as it does in the capacity."""
    medians = [middle_rate(side) for side in (rates, base)]
    return paired_ratio(rates, base) or Ratio(medians[0] / medians[1], None, None)
