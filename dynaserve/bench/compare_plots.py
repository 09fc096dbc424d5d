"""The pictures of a comparison, as PNG."""

from __future__ import annotations

import importlib.util
from io import BytesIO
from typing import Any

import numpy as np

from dynaserve.bench.capacity import middle_rate
from dynaserve.bench.comparison import Comparison
from dynaserve.bench.measures import Slo
from dynaserve.bench.records import RequestRecord
from dynaserve.errors import ConfigError

_TIMELINE_BINS = 30


def check_installed() -> None:
    """Raises ConfigError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the pictures need matplotlib, which is not installed: pip install 'dynaserve[plots]'")


def draw(comparison: Comparison) -> dict[str, bytes]:
    """PNG by name: capacity, goodput, and of the runs side by side tbt, timeline. Raises ConfigError without matplotlib."""
    check_installed()
    pictures = {"capacity": _capacity(comparison), "goodput": _goodput(comparison)}
    if comparison.side_by_side:
        pictures |= {"tbt": _tbt(comparison), "timeline": _timeline(comparison)}
    return pictures


def axes_of(x: str, y: str) -> tuple[Any, Any]:
    """A figure and its axes, with those labels."""
    from matplotlib.figure import Figure  # Not pyplot: it keeps global state and looks for a display.

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def png_of(figure: Any) -> bytes:
    """The figure as a file."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _capacity(comparison: Comparison) -> bytes:
    figure, axes = axes_of("", "capacity, requests/s")
    for place, system in enumerate(comparison.turns):
        rates = [rate or 0.0 for rate in comparison.rates(system)]
        middle = middle_rate(rates)
        axes.bar(place, middle, yerr=[[middle - min(rates)], [max(rates) - middle]], capsize=5)
    axes.set_xticks(range(len(comparison.turns)), list(comparison.turns))
    return png_of(figure)


def _goodput(comparison: Comparison) -> bytes:
    """A line through the rates that were sustained; the others, of which a run may have been given up early, are crosses."""
    figure, axes = axes_of("offered requests/s (x: not sustained)", "goodput, tokens/s within the SLO")
    for system, turns in comparison.turns.items():
        trials = [run for turn in turns for run in turn.repetition.trials]
        runs = sorted((run.rate_per_s, run.summary.goodput_tokens_per_s, run.not_sustained is None) for run in trials)
        kept, lost = ([(rate, goodput) for rate, goodput, sustained in runs if sustained == wanted] for wanted in (True, False))
        (line,) = axes.plot([rate for rate, _ in kept], [goodput for _, goodput in kept], "o-", label=system)
        axes.plot([rate for rate, _ in lost], [goodput for _, goodput in lost], "x", color=line.get_color())
    axes.legend()
    return png_of(figure)


def _tbt(comparison: Comparison) -> bytes:
    figure, axes = axes_of("time between tokens, ms", "share of gaps")
    for system, run in comparison.side_by_side.items():
        gaps = np.sort([gap for record in run.records for gap in record.gaps_ms])
        if len(gaps):
            axes.plot(gaps, np.arange(1, len(gaps) + 1) / len(gaps), label=system)
    axes.axvline(comparison.slo.tbt_ms, color="gray", linestyle="--")
    axes.set_xscale("symlog", linthresh=1)
    axes.legend()
    return png_of(figure)


def _timeline(comparison: Comparison) -> bytes:
    figure, axes = axes_of("seconds since the start", "goodput, tokens/s within the SLO")
    for system, run in comparison.side_by_side.items():
        good = [at_s for record in run.records for at_s in _in_time_s(record, comparison.slo)]
        counts, edges = np.histogram(good, bins=_TIMELINE_BINS, range=(0.0, max(record.ended_s for record in run.records)))
        axes.stairs(counts / np.diff(edges), edges, label=system)
    axes.legend()
    return png_of(figure)


def _in_time_s(record: RequestRecord, slo: Slo) -> list[float]:
    """When tokens within their SLO came, the first one by that of TTFT."""
    if record.ttft_ms is None:
        return []
    first = record.token_times_s[:1] if slo.ttft_ms is None or record.ttft_ms <= slo.ttft_ms else ()
    return [*first, *(at_s for at_s, gap in zip(record.token_times_s[1:], record.gaps_ms, strict=True) if gap <= slo.tbt_ms)]
