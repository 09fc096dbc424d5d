"""The pictures of a comparison, as PNG."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np

from dynaserve.bench.capacity import middle_rate
from dynaserve.bench.comparison import Comparison
from dynaserve.bench.course import Course
from dynaserve.errors import ConfigError

NAMES = ("capacity", "goodput", "tbt", "timeline")
"""Of the pictures that `draw` makes at most."""
_COLOURS = 10
"""Of matplotlib's own cycle."""


def check_installed() -> None:
    """Raises ConfigError if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the pictures need matplotlib, which is not installed: pip install 'dynaserve[plots]'")


def draw(comparison: Comparison) -> dict[str, bytes]:
    """PNG by name: capacity, goodput, and, if the courses of runs are kept, tbt, timeline. Raises ConfigError without matplotlib."""
    check_installed()
    pictures = {"capacity": _capacity(comparison), "goodput": _goodput(comparison)}
    if courses := comparison.courses:
        pictures |= {"tbt": _tbt(comparison, courses), "timeline": _timeline(comparison, courses)}
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


def _tbt(comparison: Comparison, courses: Mapping[str, Course]) -> bytes:
    figure, axes = axes_of("time between tokens, ms", "share of gaps")
    for system, course in courses.items():
        if gaps_ms := course.gap_quantiles_ms:
            axes.plot(gaps_ms, np.linspace(0.0, 1.0, len(gaps_ms)), label=label(system, course), **_line(comparison, system))
    axes.axvline(comparison.slo.tbt_ms, color="gray", linestyle="--")
    axes.set_xscale("symlog", linthresh=1)
    axes.legend()
    return png_of(figure)


def _timeline(comparison: Comparison, courses: Mapping[str, Course]) -> bytes:
    figure, axes = axes_of("seconds since the start", "goodput, tokens/s within the SLO")
    for system, course in courses.items():
        goodput = course.goodput_tokens_per_s
        edges_s = np.linspace(0.0, course.ended_s, len(goodput) + 1)
        axes.stairs(goodput, edges_s, label=label(system, course), **_line(comparison, system))
    axes.legend()
    return png_of(figure)


def label(system: str, course: Course) -> str:
    """With the rate, which may be another one for each system."""
    return f"{system}, {course.rate_per_s:.3g} requests/s"


def _line(comparison: Comparison, system: str) -> dict[str, str]:
    """Of the colour that the system has in the other pictures, also where one before it is left out."""
    place = list(comparison.turns).index(system)
    return {"color": f"C{place}", "linestyle": "-" if place < _COLOURS else ":"}
