"""What a comparison found, as its results.json tells. Pure but for the reading."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.compare.candidates import OURS
from dynaserve.bench import compare_report
from dynaserve.bench.comparison import Kept, Turn
from dynaserve.bench.ratios import Ratio, paired_ratio

LEAST_SHARE = 0.1
"""Of its saturation rate: a system whose capacity is lower is not servable."""


@dataclass(frozen=True)
class Outcome:
    """Of one system. rates_per_s: of each repetition the highest that passed, None: not even the least did.

    saturation_per_s: of requests that are sent at once. The rest is of the sustained run at the highest rate; None: there was none, or
    nothing is in front of the servers.
    """

    rates_per_s: Sequence[float | None]
    capacity_per_s: float | None
    saturation_per_s: float
    goodput_tokens_per_s: float | None
    ttft_p99_ms: float | None
    front_cores: float | None
    cut_share: float | None

    @property
    def servable(self) -> bool:
        return self.capacity_per_s is not None and self.capacity_per_s >= LEAST_SHARE * self.saturation_per_s

    @classmethod
    def of(cls, system: Mapping[str, Any]) -> Outcome:
        best = system["best"]
        ttft = best and best["summary"]["ttft_ms"]
        return cls(
            rates_per_s=system["rates_per_s"],
            capacity_per_s=system["capacity_per_s"],
            saturation_per_s=system["saturation_per_s"],
            goodput_tokens_per_s=best and best["summary"]["goodput_tokens_per_s"],
            ttft_p99_ms=ttft and ttft["p99"],
            front_cores=best and best["front_cores"],
            cut_share=system["cut_share"],
        )


@dataclass(frozen=True)
class Over:
    """Capacity of our system over that of a baseline."""

    baseline: str
    ratio: Ratio


@dataclass(frozen=True)
class Compared:
    """One workload at one SLO. systems: by name. commit: what was measured."""

    workload: str
    tbt_slo_ms: float
    commit: str
    systems: Mapping[str, Outcome]

    def over_best(self, baselines: Iterable[str]) -> Over | None:
        """To that one of these which has the highest capacity; None: none is servable, or one side was not measured."""
        servable = [name for name in baselines if name in self.systems and self.systems[name].servable]
        if OURS not in self.systems or not servable:
            return None
        best = max(servable, key=lambda name: self.systems[name].capacity_per_s or 0.0)
        return Over(best, _ratio(self.systems[OURS].rates_per_s, self.systems[best].rates_per_s))


def values_over(baselines: Sequence[str], compared: Iterable[Compared]) -> dict[str, float]:
    """By workload, the ratio to the best servable one of these baselines, where there is one."""
    return {one.workload: over.ratio.value for one in compared if (over := one.over_best(baselines)) is not None}


def holds_other(folder: Path, options: Mapping[str, Any]) -> bool:
    """Whether the folder holds a finished comparison with other options."""
    results = _read(folder)
    return results.get("complete", False) and results.get("options") != options


@dataclass(frozen=True)
class There:
    """commits: what was measured, in words."""

    kept: Kept
    commits: str


def there_is(folder: Path, options: Mapping[str, Any], repetitions: int, machine: Mapping[str, Any]) -> There | None:
    """What a comparison with these options has measured, on this machine if turns are lacking; None: nothing."""
    results = _read(folder)
    if results.get("options") != options or (results.get("machine") != machine and not _is_whole(results, repetitions)):
        return None
    systems = results["systems"]
    turns = {name: msgspec.convert(system["turns"], list[Turn]) for name, system in systems.items()}
    saturation = {name: system["saturation_per_s"] for name, system in systems.items() if system["saturation_per_s"] is not None}
    return There(Kept(turns, saturation), results["commit"])


def read(folder: Path, options: Mapping[str, Any], repetitions: int) -> Compared | None:
    """None: the folder holds no comparison with these options, or one with fewer turns of some system."""
    results = _read(folder)
    if results.get("options") != options or not _is_whole(results, repetitions):
        return None
    systems = {name: Outcome.of(system) for name, system in results["systems"].items()}
    return Compared(results["workload"], results["slo"]["tbt_ms"], results["commit"], systems)


def _is_whole(results: Mapping[str, Any], repetitions: int) -> bool:
    return bool(results["complete"]) and all(len(system["turns"]) >= repetitions for system in results["systems"].values())


def _read(folder: Path) -> dict[str, Any]:
    """What the folder holds; empty: nothing."""
    try:
        results: dict[str, Any] = json.loads(compare_report.results_path(folder).read_bytes())
    except (OSError, ValueError):
        return {}
    return results


def geometric_mean(ratios: Collection[float]) -> float:
    """0 if one of them is. ratios: at least one."""
    return math.prod(ratios) ** (1 / len(ratios))


def _ratio(rates: Sequence[float | None], base: Sequence[float | None]) -> Ratio:
    """Of medians where some repetition found no rate: it counts as 0, as it does in the capacity."""
    medians = [float(np.median([rate or 0.0 for rate in side])) for side in (rates, base)]
    return paired_ratio(rates, base) or Ratio(medians[0] / medians[1], None, None)
