"""All workloads in one table per SLO, as Markdown and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.compare.aims import RIVALS, Rival, judged
from benchmarks.compare.candidates import OURS
from benchmarks.compare.outcome import Compared, Outcome, geometric_mean, values_over


def markdown(at_one_slo: Sequence[Compared]) -> str:
    """at_one_slo: at least one comparison; all have the same systems."""
    parts = [
        f"P99 TBT within {at_one_slo[0].tbt_slo_ms:g} ms, {_runs(at_one_slo)}: capacity in requests/s / goodput in tokens/s / P99 TTFT in s"
        " [/ cores that the front-end keeps busy]; client lag: the greatest P99 of the runs that count, in ms",
        _rows(["", *(one.workload for one in at_one_slo), "client lag"], _systems(at_one_slo)),
        f"Capacity of {OURS} over that of, [95 %]:",
        _rows(["", *(one.workload for one in at_one_slo), "geometric mean"], _ratios(at_one_slo)),
        "\n".join(map(str, judged(at_one_slo))),
    ]
    return "\n\n".join(parts)


def data(at_one_slo: Sequence[Compared]) -> dict[str, Any]:
    """The same for a file."""
    return {
        "tbt_slo_ms": at_one_slo[0].tbt_slo_ms,
        "workloads": {
            one.workload: {
                "commit": one.commit,
                "systems": {name: asdict(outcome) | {"servable": outcome.servable} for name, outcome in one.systems.items()},
                "over": {rival.name: None if (over := one.over_worst(rival.baselines)) is None else asdict(over) for rival in RIVALS},
            }
            for one in at_one_slo
        },
        "mean_over": {rival.name: _mean(rival, at_one_slo) for rival in RIVALS},
        "aims": [asdict(verdict) for verdict in judged(at_one_slo)],
    }


def _runs(at_one_slo: Sequence[Compared]) -> str:
    """Short ones find more where a queue grows: within 20 s it may grow by a second."""
    durations_s = sorted({one.duration_s for one in at_one_slo})
    most = max(one.most_runs for one in at_one_slo)
    return f"runs of {', '.join(f'{duration_s:g}' for duration_s in durations_s)} s, at most {most} of a rate"


def _systems(at_one_slo: Sequence[Compared]) -> Iterator[list[str]]:
    for name in at_one_slo[0].systems:
        outcomes = [one.systems[name] for one in at_one_slo]
        yield [name, *map(_cell, outcomes), _client_lag(outcomes)]


def _cell(outcome: Outcome) -> str:
    if not outcome.servable:
        return f"not servable, {outcome.saturation_per_s:.3g} at once"
    assert outcome.ttft_p99_ms is not None
    least = "≥ " if outcome.is_least else ""
    figures = f"{least}{outcome.capacity_per_s:.3g} / {outcome.goodput_tokens_per_s:.0f} / {outcome.ttft_p99_ms / 1e3:.1f}"
    return figures if outcome.front_cores is None else f"{figures} / {outcome.front_cores:.2f}"


def _client_lag(outcomes: Sequence[Outcome]) -> str:
    lags_ms = [lag_ms for outcome in outcomes if (lag_ms := outcome.client_lag_p99_ms) is not None]
    return f"{max(lags_ms):.1f}" if lags_ms else "-"


def _ratios(at_one_slo: Sequence[Compared]) -> Iterator[list[str]]:
    for rival in RIVALS:
        mean = _mean(rival, at_one_slo)
        yield [rival.name, *(_over(rival, one) for one in at_one_slo), "-" if mean is None else f"{mean:.2f}"]


def _over(rival: Rival, one: Compared) -> str:
    over = one.over_worst(rival.baselines)
    if over is None:
        return "-"
    return str(over) if len(rival.baselines) == 1 else f"{over} ({over.baseline})"


def _mean(rival: Rival, at_one_slo: Sequence[Compared]) -> float | None:
    """None: no baseline is servable anywhere."""
    found = values_over(rival.baselines, at_one_slo)
    return geometric_mean(found.values()) if found else None


def _rows(head: Sequence[str], rows: Iterator[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])
