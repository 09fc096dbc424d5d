"""The aims of the comparison, and whether they are met. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.compare.candidates import BEHIND_OURS, CANDIDATES, CHUNKS, DISAGGREGATED, OURS, SLO_COLOCATED, STOCK, fixed
from benchmarks.compare.outcome import Compared, geometric_mean, values_over


@dataclass(frozen=True)
class Rival:
    """One baseline, or, in each workload, the one of several beside which ours looks worst."""

    name: str
    baselines: tuple[str, ...]


DEFAULT = Rival("stock's default chunk", (STOCK,))
_TUNED = [chunk for chunk in CHUNKS if chunk not in (96, 384)]
TUNED = Rival(f"the best of chunks {', '.join(map(str, _TUNED))} and disaggregation", (*map(fixed, _TUNED), DISAGGREGATED))
UNCUT = Rival("SLO-aware colocation", (SLO_COLOCATED,))
ALL = Rival("the best of all baselines", tuple(name for name in CANDIDATES if name not in (OURS, BEHIND_OURS)))
RIVALS = (DEFAULT, TUNED, UNCUT, ALL)

REAL_PROMPTS = ("azure-code", "azure-conv", "arxiv-summarization", "hybrid")
PREFILL_HEAVY = ("azure-code", "arxiv-summarization", "hybrid")
"""Instances prefill for most of their time. The first simulation, from which the aims are, gained at 100 ms on azure-code only."""


@dataclass(frozen=True)
class Aim:
    """The least ratio to a rival: of the mean over the workloads, or of each. workloads None: all. tbt_slo_ms None: at every SLO."""

    rival: Rival
    least: float
    of_mean: bool
    workloads: tuple[str, ...] | None = None
    tbt_slo_ms: float | None = None


AIMS = (
    Aim(DEFAULT, 4.0, of_mean=True, workloads=REAL_PROMPTS),
    Aim(DEFAULT, 0.97, of_mean=False, workloads=("mini-reasoning",)),
    Aim(TUNED, 1.15, of_mean=True, tbt_slo_ms=100.0),
    Aim(TUNED, 1.25, of_mean=True, tbt_slo_ms=50.0),
    Aim(UNCUT, 1.08, of_mean=False, workloads=PREFILL_HEAVY, tbt_slo_ms=100.0),
    Aim(UNCUT, 1.2, of_mean=True, tbt_slo_ms=50.0),
    Aim(ALL, 0.97, of_mean=False),
)


@dataclass(frozen=True)
class Verdict:
    """value: the ratio that the aim is about; None: there is none, since nothing was measured or no baseline is servable."""

    aim: str
    value: float | None
    met: bool | None

    def __str__(self) -> str:
        if self.value is None:
            return f"not measured, or no baseline is servable: {self.aim}"
        return f"{'met' if self.met else 'MISSED'}: {self.aim}: {self.value:.2f}"


def judged(at_one_slo: Sequence[Compared]) -> list[Verdict]:
    """The aims at that SLO."""
    return [_verdict(aim, at_one_slo) for aim in AIMS if aim.tbt_slo_ms in (None, at_one_slo[0].tbt_slo_ms)]


def _verdict(aim: Aim, at_one_slo: Sequence[Compared]) -> Verdict:
    meant = [one for one in at_one_slo if aim.workloads is None or one.workload in aim.workloads]
    ratios = values_over(aim.rival.baselines, meant)
    missing = sorted({name for one in meant for name in aim.rival.baselines if name not in one.systems})
    text = f"at least {aim.least:g} times {aim.rival.name}"
    if not ratios:
        return Verdict(text, None, None)
    text += f", {'mean' if aim.of_mean else 'each'} of {', '.join(ratios)}"
    text += f" (not measured: {', '.join(missing)})" if missing else ""
    value = geometric_mean(ratios.values()) if aim.of_mean else min(ratios.values())
    return Verdict(text, value, value >= aim.least)
