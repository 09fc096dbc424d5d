"""One run of the replay client against one server, and what is read from its raw data."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaserve.bench import options
from dynaserve.bench.growth import growth
from dynaserve.bench.replay import plan_requests
from dynaserve.errors import DynaServeError


class RunFailed(DynaServeError):
    """The replay client did not report."""


@dataclass(frozen=True)
class Trace:
    """What is sent: arguments of `dynaserve bench replay` that say which requests, and the seed of their arrivals.

    duration_s: of the arrivals; None: the arguments say how many requests.
    """

    arguments: tuple[str, ...]
    seed: int
    duration_s: float | None
    tbt_slo_ms: float

    def command(self, url: str, rate_per_s: float, output: Path) -> list[str]:
        rate = ["--rate", f"{rate_per_s:.4g}", "--seed", str(self.seed)]
        if self.duration_s is not None:
            rate += ["--duration-s", f"{self.duration_s:g}"]
        # The client shares the machine with whatever else runs on it; its lag is part of the report.
        limits = ["--tbt-slo-ms", f"{self.tbt_slo_ms:g}", "--max-client-lag-ms", "1000"]
        return ["dynaserve", "bench", "replay", "--url", url, *self.arguments, *rate, *limits, "--output", str(output)]

    def check(self) -> None:
        """Raises ConfigError where the client would refuse it: now, rather than when servers have started for it."""
        _, _, _, *arguments = self.command("http://not-asked", 1.0, Path("not-written"))
        plan_requests(options.parse(arguments))


@dataclass(frozen=True)
class Run:
    """Latencies in ms. rate_per_s: of the requests that were sent. attainment: share of token gaps within the SLO.

    ttft_slope: seconds of TTFT that each second of arrivals adds; ttft_grows: that is more than chance (`dynaserve.bench.verdict`).
    client_lag_ms: P99 of how late the client woke up.
    """

    rate_per_s: float
    requests: int
    finished: int
    attainment: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p99_ms: float
    output_tokens_per_s: float
    ttft_slope: float
    ttft_grows: bool
    client_lag_ms: float


def replay(trace: Trace, url: str, rate_per_s: float, output: Path) -> Run:
    """Raises RunFailed with the client's own words."""
    command = trace.command(url, rate_per_s, output)
    done = subprocess.run([sys.executable, "-m", "dynaserve.cli", *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailed(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr[-500:]}")
    return read(output)


def read(output: Path) -> Run:
    """Raises RunFailed for fewer requests than a trend needs, and where no token followed another."""
    raw: dict[str, Any] = json.loads(output.read_bytes())
    summary = raw["summary"]
    answered = [request for request in raw["requests"] if request["ttft_ms"] is not None]
    trend = growth([([request["sent_s"] for request in answered], [request["ttft_ms"] for request in answered])])
    if trend is None:
        raise RunFailed(f"{output}: {len(answered)} requests were answered: too few to say whether their TTFT grows")
    if summary["tbt_ms"] is None:
        raise RunFailed(f"{output}: none of {summary['requests']} answers had a second token: there is no TBT")
    return Run(
        rate_per_s=summary["offered_rate_per_s"],
        requests=summary["requests"],
        finished=summary["finished"],
        attainment=summary["token_attainment"],
        ttft_p50_ms=summary["ttft_ms"]["p50"],
        ttft_p99_ms=summary["ttft_ms"]["p99"],
        tbt_p99_ms=summary["tbt_ms"]["p99"],
        output_tokens_per_s=summary["output_tokens_per_s"],
        ttft_slope=trend.slope,
        ttft_grows=trend.is_queue,
        client_lag_ms=summary["loop_lag_ms"]["p99"],
    )
