"""The paper's Figure 6 of this machine: latency and throughput over the number of decodes, a line per prefill size.

Where a line crosses the SLO lies its latency-constrained-utilization point: the most decodes that run within it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from dynaserve.errors import ConfigError
from dynaserve.profiling.sweep import PointRecord


class Mark(NamedTuple):
    """One measured point: medians."""

    decodes: int
    latency_ms: float
    tokens_per_s: float


def lines(records: Sequence[PointRecord], context_tokens: int) -> dict[int, list[Mark]]:
    """By prefill size, in order of decodes. Points without decodes belong to every context."""
    by_prefill: dict[int, list[Mark]] = defaultdict(list)
    for record in records:
        point = record.point
        if point.context_tokens == context_tokens or not point.decodes:
            latency_ms = median(step.measured_ms for step in record.steps)
            tokens = median(step.prefill_tokens + step.decodes for step in record.steps)
            by_prefill[point.prefill_tokens].append(Mark(point.decodes, latency_ms, 1e3 * tokens / latency_ms))
    return {prefill: sorted(marks) for prefill, marks in sorted(by_prefill.items())}


def utilization_point(marks: Sequence[Mark], slo_ms: float) -> Mark | None:
    """Where the line last crosses the SLO upwards, linear between points; None: it lies on one side throughout."""
    for before, after in reversed(list(pairwise(marks))):
        if before.latency_ms <= slo_ms < after.latency_ms:
            share = (slo_ms - before.latency_ms) / (after.latency_ms - before.latency_ms)
            decodes = before.decodes + share * (after.decodes - before.decodes)
            return Mark(round(decodes), slo_ms, before.tokens_per_s + share * (after.tokens_per_s - before.tokens_per_s))
    return None


def draw(path: Path, records: Sequence[PointRecord], slo_ms: float, title: str) -> None:
    """Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'dynaserve[plots]'") from error
    contexts = sorted({record.point.context_tokens for record in records if record.point.decodes})
    figure = Figure(figsize=(10, 3.4 * max(1, len(contexts))), layout="constrained")
    axes: Any = figure.subplots(max(1, len(contexts)), 2, squeeze=False)
    for row, context in zip(axes, contexts, strict=False):
        for prefill, marks in lines(records, context).items():
            _draw_line(row, prefill, marks, slo_ms)
        row[0].axhline(slo_ms, color="red", linestyle="--", linewidth=1)
        row[0].set(title=f"context {context}", xlabel="decodes", ylabel="latency, ms")
        row[1].set(title=f"context {context}", xlabel="decodes", ylabel="tokens/s")
        row[0].legend(title="prefill tokens", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)


def _draw_line(row: Any, prefill: int, marks: Sequence[Mark], slo_ms: float) -> None:
    decodes = [mark.decodes for mark in marks]
    (line,) = row[0].plot(decodes, [mark.latency_ms for mark in marks], marker=".", label=str(prefill))
    row[1].plot(decodes, [mark.tokens_per_s for mark in marks], marker=".", color=line.get_color())
    crossing = utilization_point(marks, slo_ms)
    if crossing is not None:
        row[0].plot([crossing.decodes], [crossing.latency_ms], marker="*", markersize=12, color=line.get_color())
        row[1].plot([crossing.decodes], [crossing.tokens_per_s], marker="*", markersize=12, color=line.get_color())
