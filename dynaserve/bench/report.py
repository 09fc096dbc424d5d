"""What a run shows: a line while it runs, a table at its end, and the raw data as a file."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynaserve.bench.client import Progress, Recording
from dynaserve.bench.measures import Distribution, Slo, Summary
from dynaserve.bench.records import RequestRecord
from dynaserve.command_lines import without_secrets
from dynaserve.files import write_in_one_move
from dynaserve.machine import cpu_model

RAW_FORMAT = 1
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


class ProgressLine:
    """Shows progress on stderr: one line that changes on a terminal, a line each time otherwise."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live

    @classmethod
    @contextmanager
    def on(cls, console: Console) -> Iterator[ProgressLine]:
        if not console.is_terminal:
            yield cls(console, None)
            return
        # Drawn from the event loop: a drawing thread would hold the interpreter's lock when a token arrives.
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield cls(console, live)

    def show(self, progress: Progress) -> None:
        line = Text(progress_line(progress))
        if self._live is None:
            self._console.print(line, soft_wrap=True)
        else:
            self._live.update(line, refresh=True)


def progress_line(progress: Progress) -> str:
    running = progress.sent - progress.finished - progress.failed
    return (
        f"{progress.elapsed_s:6.0f} s  sent {progress.sent}/{progress.planned}  running {running}  finished {progress.finished}"
        f"  failed {progress.failed}  {progress.output_tokens} output tokens"
    )


def print_summary(console: Console, run: Mapping[str, Any], summary: Summary, slo: Slo, stolen_share: float | None) -> None:
    """run: how it came about. stolen_share: see `Recording`."""
    told = ", ".join(f"{name} {run[name]}" for name in ("workload", "url", "model", "seed", "prompt_seed"))
    console.print(told, markup=False, soft_wrap=True)
    client = machine()
    stolen = "" if stolen_share is None else f"; {stolen_share:.1%} of their time taken by the host"
    console.print(f"client: {client['cores']} cores of {client['cpu']}{stolen}\n", markup=False, soft_wrap=True)
    console.print(_latency_table(summary))
    for name, value in _figures(summary, slo):
        console.print(f"{name:24s} {value}", markup=False, soft_wrap=True)


def _latency_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms")
    for column in (*_COLUMNS, "count"):
        table.add_column(column, justify="right")
    rows = {"TTFT": summary.ttft_ms, "TBT": summary.tbt_ms, "E2E": summary.e2e_ms, "client: send lag": summary.send_lag_ms}
    for name, distribution in (rows | {"client: loop lag": summary.loop_lag_ms}).items():
        table.add_row(name, *_cells(distribution))
    return table


def _cells(distribution: Distribution | None) -> list[str]:
    if distribution is None:
        return ["-"] * len(_COLUMNS) + ["0"]
    return [f"{getattr(distribution, column):.1f}" for column in _COLUMNS] + [str(distribution.count)]


def _figures(summary: Summary, slo: Slo) -> Iterator[tuple[str, str]]:
    offered = "all at once" if summary.offered_rate_per_s is None else f"{summary.offered_rate_per_s:.2f} requests/s"
    tokens = "-" if summary.token_attainment is None else f"{summary.token_attainment:.2%}"
    slos = f"TBT {slo.tbt_ms:g} ms" + ("" if slo.ttft_ms is None else f", TTFT {slo.ttft_ms:g} ms")
    yield "", ""
    yield "requests", f"{summary.finished} of {summary.requests} finished in {summary.duration_s:.1f} s, offered {offered}"
    for reason, count in summary.failures.items():
        yield "failed", f"{count}: {reason} ({summary.failure_examples[reason][:200]})"
    yield "throughput", f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s"
    yield "prompt throughput", f"{summary.prompt_tokens_per_s:.1f} tokens/s"
    yield "goodput", f"{summary.goodput_requests_per_s:.2f} requests/s, {summary.goodput_tokens_per_s:.1f} tokens/s ({slos})"
    yield "attainment", f"{tokens} of token gaps, {summary.request_attainment:.2%} of requests ({slos})"
    # Too seldom for the P99 by which the client is judged; yet each request that it kept waiting has a late gap.
    if summary.loop_lag_ms is not None and summary.loop_lag_ms.max > slo.tbt_ms:
        yield "client", f"it woke up {summary.loop_lag_ms.max:.0f} ms late once: requests may have missed the TBT SLO by that alone"


def write_raw(path: Path, run: Mapping[str, Any], recording: Recording, summary: Summary, problem: str | None) -> None:
    """run: how it came about. problem: why the summary must not be trusted, if so."""
    content = {
        "format": RAW_FORMAT,
        "run": run,
        "machine": machine(),
        "started_unix_s": recording.started_unix_s,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(recording.started_unix_s)),
        "not_trusted_because": problem,
        "summary": summary,
        "requests": [_raw(record) for record in recording.records],
        "loop_lags_ms": _rounded(recording.loop_lags_ms),
        "stolen_share": recording.stolen_share,
        "client_niceness": recording.niceness,
    }
    write_in_one_move(path, msgspec.json.encode(content))


def _raw(record: RequestRecord) -> dict[str, Any]:
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__ if name != "token_times_s"}
    times = {name: round(fields[name], 6) for name in ("due_s", "sent_s", "ended_s")}
    return fields | times | {"ttft_ms": record.ttft_ms, "e2e_ms": record.e2e_ms, "gaps_ms": _rounded(record.gaps_ms)}


def _rounded(values_ms: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values_ms]


def machine() -> dict[str, Any]:
    """Of the client; where the server runs on the same one, of both."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "dynaserve": version("dynaserve"),
    }


def command_line(arguments: Sequence[str], command: str = "bench replay") -> str:
    """As typed, but the key: raw data are passed on."""
    return shlex.join(["dynaserve", *command.split(), *without_secrets(arguments, ("--api-key",))])
