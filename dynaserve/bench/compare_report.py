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
from dynaserve.bench.capacity import trial_data
from dynaserve.bench.comparison import Comparison
from dynaserve.errors import ConfigError

COLUMNS = ("system", "capacity req/s", "least", "most", "ratio [95 %]", "goodput tok/s", "P99 TBT ms", "P99 TTFT ms", "cut")
_STYLE = "body{font:15px sans-serif;max-width:1000px;margin:2em auto;padding:0 1em}td,th{padding:.3em .8em;text-align:right}\
th:first-child,td:first-child{text-align:left}tr:nth-child(even){background:#f3f3f3}img{max-width:100%}code{overflow-wrap:anywhere}"


def prepare(folder: Path) -> None:
    """Makes the folder. Raises ConfigError now, rather than after hours, if it cannot be written or nothing can draw."""
    compare_plots.check_installed()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").open("ab").close()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Of COLUMNS; goodput and latencies are those of the sustained run at the highest rate."""
    for system in comparison.turns:
        rates = [rate or 0.0 for rate in comparison.rates(system)]
        best, ratio, share = comparison.best(system), comparison.ratio(system), comparison.cut_share(system)
        capacity = comparison.capacity_per_s(system)
        measured = ["-"] * 3
        if best is not None:
            tbt, ttft = best.summary.tbt_ms, best.summary.ttft_ms
            measured = [
                f"{best.summary.goodput_tokens_per_s:.0f}",
                *("-" if found is None else f"{found.p99:.1f}" for found in (tbt, ttft)),
            ]
        yield (
            system,
            "not servable" if capacity is None else f"{capacity:.3g}",
            f"{min(rates):.3g}",
            f"{max(rates):.3g}",
            "-" if ratio is None else str(ratio),
            *measured,
            "-" if share is None else f"{share:.0%}",
        )


def write(folder: Path, comparison: Comparison, command: str, machine: Mapping[str, Any]) -> None:
    """results.json, report.html and the PNG files."""
    (folder / "results.json").write_text(json.dumps(_results(comparison, command, machine), indent=1))
    pictures = compare_plots.draw(comparison)
    for name, png in pictures.items():
        (folder / f"{name}.png").write_bytes(png)
    (folder / "report.html").write_text(_html(comparison, command, machine, pictures))


def _results(comparison: Comparison, command: str, machine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "command": command,
        "machine": dict(machine),
        "workload": comparison.workload,
        "slo": asdict(comparison.slo),
        "systems": {
            system: {
                "capacity_per_s": comparison.capacity_per_s(system),
                "rates_per_s": comparison.rates(system),
                "ratio": None if (ratio := comparison.ratio(system)) is None else asdict(ratio),
                "cut_share": comparison.cut_share(system),
                "trials": [trial_data(run) for turn in turns for run in turn.repetition.trials],
                "side_by_side": trial_data(comparison.side_by_side[system]),
            }
            for system, turns in comparison.turns.items()
        },
    }


def _html(comparison: Comparison, command: str, machine: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    def row(cells: tuple[str, ...], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

    slo = f"P99 TBT {comparison.slo.tbt_ms:g} ms" + ("" if comparison.slo.ttft_ms is None else f", P99 TTFT {comparison.slo.ttft_ms:g} ms")
    repetitions = len(next(iter(comparison.turns.values())))
    rate = next(iter(comparison.side_by_side.values())).rate_per_s
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>DynaServe comparison</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(comparison.workload)}: {slo}</h1>",
        f"<table>{row(COLUMNS, 'th')}{''.join(row(cells, 'td') for cells in rows(comparison))}</table>",
        f"<p>Capacity: median of {repetitions} searches, least and most beside it. Ratio: to the first system, geometric mean.</p>",
        *(f'<h2>{html.escape(name)}</h2><img alt="{name}" src="data:image/png;base64,{_text(png)}">' for name, png in pictures.items()),
        f"<p>TBT and timeline: each system at {rate:.3g} requests/s.</p>",
        f"<p><code>{html.escape(command)}</code></p>",
        f"<p>Client on {html.escape(', '.join(f'{key} {value}' for key, value in machine.items()))}</p></html>",
    ]
    return "\n".join(parts)


def _text(png: bytes) -> str:
    return base64.b64encode(png).decode()
