"""The report of a comparison: a table, pictures, one HTML file with both, and the figures as JSON."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynaserve.bench import compare_plots
from dynaserve.bench.capacity import repetition_data, trial_data
from dynaserve.bench.comparison import Comparison, Turn
from dynaserve.files import check_replaceable, write_in_one_move

_REPORT = "report.html"
_COLUMNS = ("system", "capacity req/s", "least", "most", "ratio [95 %]", "goodput tok/s", "P99 TBT ms", "P99 TTFT ms", "cut", "front cores")
_STYLE = "body{font:15px sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}td,th{padding:.3em .8em;text-align:right}\
th:first-child,td:first-child{text-align:left}tr:nth-child(even){background:#f3f3f3}img{max-width:100%}code{overflow-wrap:anywhere}"


def prepare(folder: Path) -> None:
    """Makes the folder. Raises ConfigError now, rather than after hours, if it cannot be written or nothing can draw."""
    compare_plots.check_installed()
    for name in (results_path(folder).name, _REPORT, *map(_png, compare_plots.NAMES)):
        check_replaceable(folder / name)


def results_path(folder: Path) -> Path:
    return folder / "results.json"


def columns(comparison: Comparison) -> tuple[str, ...]:
    """The last one, how many cores what stands in front of the servers keeps busy, only where that is known."""
    runs = [run for turns in comparison.turns.values() for turn in turns for run in turn.repetition.trials]
    return _COLUMNS if any(run.front_cores is not None for run in runs) else _COLUMNS[:-1]


def rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Of `columns`; goodput, latencies and cores are those of the (first) run at the capacity."""
    shown = len(columns(comparison))
    for system in comparison.turns:
        rates = [rate or 0.0 for rate in comparison.rates(system)]
        run, ratio, share = comparison.at_capacity(system), comparison.ratio(system), comparison.cut_share(system)
        capacity = comparison.capacity_per_s(system)
        measured = ["-"] * 3
        if run is not None:
            tbt, ttft = run.summary.tbt_ms, run.summary.ttft_ms
            measured = [
                f"{run.summary.goodput_tokens_per_s:.0f}",
                *("-" if found is None else f"{found.p99:.1f}" for found in (tbt, ttft)),
            ]
        cells = (
            system,
            "not servable" if capacity is None else f"{'≥ ' if comparison.is_least(system) else ''}{capacity:.3g}",
            f"{min(rates):.3g}",
            f"{max(rates):.3g}",
            "-" if ratio is None else str(ratio),
            *measured,
            "-" if share is None else f"{share:.0%}",
            "-" if run is None or run.front_cores is None else f"{run.front_cores:.2f}",
        )
        yield cells[:shown]


def keep(folder: Path, comparison: Comparison, provenance: Mapping[str, Any], *, complete: bool = False) -> None:
    """results.json with what was measured so far; a comparison that ends here leaves it. provenance: `command`, `machine` and what else is
    to stand there. complete: every system has had all its turns; otherwise there are neither capacities nor ratios."""
    content = json.dumps(_results(comparison, provenance, complete=complete), indent=1)
    write_in_one_move(results_path(folder), content.encode())


def write(folder: Path, comparison: Comparison, provenance: Mapping[str, Any]) -> None:
    """What `keep` and `show` write."""
    keep(folder, comparison, provenance, complete=True)
    show(folder, comparison, provenance)


def show(folder: Path, comparison: Comparison, provenance: Mapping[str, Any]) -> None:
    """report.html and the PNG files."""
    pictures = compare_plots.draw(comparison)
    for name, png in pictures.items():
        write_in_one_move(folder / _png(name), png)
    write_in_one_move(folder / _REPORT, _html(comparison, provenance, pictures).encode())


def _png(name: str) -> str:
    return f"{name}.png"


def _results(comparison: Comparison, provenance: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
    return {
        "complete": complete,
        **provenance,
        "workload": comparison.workload,
        "slo": asdict(comparison.slo),
        "systems": {
            system: {
                "capacity_per_s": comparison.capacity_per_s(system) if complete else None,
                "capacity_is_least": comparison.is_least(system) if complete else None,
                "rates_per_s": comparison.rates(system),
                "saturation_per_s": comparison.saturation_per_s.get(system),
                "ratio": asdict(ratio) if complete and (ratio := comparison.ratio(system)) is not None else None,
                "cut_share": comparison.cut_share(system),
                "at_capacity": trial_data(run) if (run := comparison.at_capacity(system)) is not None else None,
                "turns": [_turn_data(turn) for turn in turns],
                "side_by_side": trial_data(comparison.side_by_side[system]) if system in comparison.side_by_side else None,
            }
            for system, turns in comparison.turns.items()
        },
    }


def _turn_data(turn: Turn) -> dict[str, Any]:
    course = None if turn.course is None else asdict(turn.course)
    return {"repetition": repetition_data(turn.repetition), "cut_share": turn.cut_share, "course": course}


def _html(comparison: Comparison, provenance: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    def row(cells: tuple[str, ...], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    slo = f"P99 TBT {comparison.slo.tbt_ms:g} ms" + ("" if comparison.slo.ttft_ms is None else f", P99 TTFT {comparison.slo.ttft_ms:g} ms")
    repetitions = len(next(iter(comparison.turns.values())))
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>DynaServe comparison</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(comparison.workload)}: {slo}</h1>",
        f"<table>{row(columns(comparison), 'th')}{''.join(row(cells, 'td') for cells in rows(comparison))}</table>",
        f"<p>Capacity: median of {repetitions} searches, least and most beside it; ≥: even the highest rate tried passed. "
        "Ratio: to the first system, geometric mean.</p>",
        *(f'<h2>{html.escape(name)}</h2><img alt="{name}" src="data:image/png;base64,{_text(png)}">' for name, png in pictures.items()),
        *(f"<p>{html.escape(sentence)}</p>" for sentence in _on_courses(comparison)),
        f"<p><code>{html.escape(provenance['command'])}</code></p>",
        f"<p>Client on {html.escape(', '.join(f'{key} {value}' for key, value in provenance['machine'].items()))}</p></html>",
    ]
    return "\n".join(parts)


def _on_courses(comparison: Comparison) -> Iterator[str]:
    """Which runs TBT and timeline show, and which they cannot."""
    courses = comparison.courses
    if comparison.is_side_by_side:
        rate = next(iter(courses.values())).rate_per_s
        yield f"TBT and timeline: each system at {rate:.3g} requests/s."
    elif courses:
        yield "TBT and timeline: of each system its sustained run at the highest rate of those that are kept; its label tells the rate."
    if lacking := [system for system in comparison.turns if system not in courses]:
        yield f"TBT and timeline lack {', '.join(lacking)}: no sustained run is kept that has them."


def _text(png: bytes) -> str:
    return base64.b64encode(png).decode()
