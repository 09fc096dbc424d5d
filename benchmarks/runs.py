"""One run of the replay client against one server, and what is read from its raw data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from dynaserve.errors import DynaServeError


class RunFailed(DynaServeError):
    """The replay client did not report."""


@dataclass(frozen=True)
class Trace:
    """What is sent: arguments of `dynaserve bench replay` that say which requests, and the seed of their arrivals."""

    arguments: tuple[str, ...]
    seed: int
    duration_s: float
    tbt_slo_ms: float

    def command(self, url: str, rate_per_s: float, output: Path) -> list[str]:
        rate = ["--rate", f"{rate_per_s:.4g}", "--seed", str(self.seed), "--duration-s", f"{self.duration_s:g}"]
        # The client shares the machine with whatever else runs on it; its lag is part of the report.
        limits = ["--tbt-slo-ms", f"{self.tbt_slo_ms:g}", "--max-client-lag-ms", "1000"]
        return ["dynaserve", "bench", "replay", "--url", url, *self.arguments, *rate, *limits, "--output", str(output)]


@dataclass(frozen=True)
class Run:
    """Latencies in ms. attainment: share of token gaps within the SLO. growth: mean TTFT of the last third of the requests over
    that of the first third. client_lag_ms: P99 of how late the client woke up."""

    rate_per_s: float
    requests: int
    finished: int
    attainment: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p99_ms: float
    output_tokens_per_s: float
    growth: float
    client_lag_ms: float


def replay(trace: Trace, url: str, rate_per_s: float, output: Path) -> Run:
    """Raises RunFailed with the client's own words."""
    command = trace.command(url, rate_per_s, output)
    done = subprocess.run([sys.executable, "-m", "dynaserve.cli", *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailed(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr[-500:]}")
    return read(output, rate_per_s)


def read(output: Path, rate_per_s: float) -> Run:
    raw: dict[str, Any] = json.loads(output.read_bytes())
    summary = raw["summary"]
    return Run(
        rate_per_s=rate_per_s,
        requests=summary["requests"],
        finished=summary["finished"],
        attainment=summary["token_attainment"],
        ttft_p50_ms=summary["ttft_ms"]["p50"],
        ttft_p99_ms=summary["ttft_ms"]["p99"],
        tbt_p99_ms=summary["tbt_ms"]["p99"],
        output_tokens_per_s=summary["output_tokens_per_s"],
        growth=growth([request["ttft_ms"] for request in raw["requests"] if request["ttft_ms"] is not None]),
        client_lag_ms=summary["loop_lag_ms"]["p99"],
    )


def growth(ttfts_ms: Sequence[float]) -> float:
    """In order of sending; at least three."""
    third = len(ttfts_ms) // 3
    return mean(ttfts_ms[-third:]) / mean(ttfts_ms[:third])
