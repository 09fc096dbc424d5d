"""One comparison after the other, each kept on disk: a campaign that was stopped goes on where it was."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.compare.candidates import CANDIDATES, MOST_TOKENS
from benchmarks.compare.outcome import LEAST_SHARE, Compared, is_measured, read, unfinished
from dynaserve.bench import compare, compare_plots, options, replay
from dynaserve.bench.capacity import SearchOptions
from dynaserve.bench.compare import CompareOptions
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.systems import System
from dynaserve.errors import ConfigError, DynaServeError
from dynaserve.machine import fast_dtype

FIRST_SHARE, MOST_SHARE = 0.4, 4.0
"""Of a system's saturation rate: what its search tries first, and at most."""
REQUEST_TIMEOUT_S = 3600.0

SystemOf = Callable[[str, float, Path], System]
"""By name, TBT SLO and folder of its logs."""


@dataclass(frozen=True)
class Campaign:
    """What is compared, and how thoroughly. output: gets a folder for each comparison."""

    workloads: Sequence[str]
    systems: Sequence[str]
    tbt_slos_ms: Sequence[float]
    scale: float
    traces: Path | None
    requests: int
    repetitions: int
    resolution: float
    seed: int
    max_client_lag_ms: float
    output: Path

    def check(self) -> None:
        """Raises ConfigError where a workload cannot be sent, nothing can draw, or something else was measured into the same folder:
        now, rather than when systems have started."""
        compare_plots.check_installed()
        for workload, tbt_slo_ms in self._comparisons():
            replay.plan_requests(replace(self._replay(workload, tbt_slo_ms), rate_per_s=1.0))
            if is_measured(folder := self.folder(workload, tbt_slo_ms)) and self._read(workload, tbt_slo_ms) is None:
                raise ConfigError(f"{folder} holds a comparison with other options: take another --output, or delete it")

    def run(self, system_of: SystemOf, provenance: Mapping[str, Any]) -> None:
        """Measures what is not there yet. A comparison that fails is told, and left out. provenance: for each results.json."""
        for workload, tbt_slo_ms in self._comparisons():
            told = f"{workload}, P99 TBT within {tbt_slo_ms:g} ms"
            if self._read(workload, tbt_slo_ms) is not None:
                print(f"\n{told}: measured before, in {self.folder(workload, tbt_slo_ms)}", flush=True)
                continue
            print(f"\n{told}", flush=True)
            compared, commits = self._compare_options(workload, tbt_slo_ms, system_of), provenance["commit"]
            if there := unfinished(compared.output, self._options(workload, tbt_slo_ms), provenance["machine"]):
                print(f"turns measured before: {sum(map(len, there.kept.turns.values()))}, at {there.commits}", flush=True)
                compared = replace(compared, kept=there.kept)
                commits = ", ".join(sorted({*there.commits.split(", "), commits}))
            try:
                compare.run(compared, {**provenance, "commit": commits, "options": self._options(workload, tbt_slo_ms)})
            except DynaServeError as error:
                print(f"bench-compare: {told}: not measured: {error}", file=sys.stderr, flush=True)

    def found(self) -> tuple[list[list[Compared]], list[str]]:
        """What is there, by SLO, and the names of comparisons that are not."""
        there: dict[float, list[Compared]] = {}
        missing = []
        for workload, tbt_slo_ms in self._comparisons():
            compared = self._read(workload, tbt_slo_ms)
            if compared is None:
                missing.append(f"{workload} at {tbt_slo_ms:g} ms")
            else:
                there.setdefault(tbt_slo_ms, []).append(compared)
        return list(there.values()), missing

    def folder(self, workload: str, tbt_slo_ms: float) -> Path:
        return self.output / f"{re.sub(r'[^a-zA-Z0-9.]+', '-', workload)}-tbt-{tbt_slo_ms:g}"

    def _comparisons(self) -> Iterator[tuple[str, float]]:
        """All workloads at the first SLO come first."""
        return ((workload, tbt_slo_ms) for tbt_slo_ms, workload in product(self.tbt_slos_ms, self.workloads))

    def _read(self, workload: str, tbt_slo_ms: float) -> Compared | None:
        return read(self.folder(workload, tbt_slo_ms), self._options(workload, tbt_slo_ms))

    def _options(self, workload: str, tbt_slo_ms: float) -> dict[str, Any]:
        """All that decides what a comparison measures, as JSON gives it back."""
        common = {name: getattr(self, name) for name in ("scale", "requests", "repetitions", "resolution", "seed", "max_client_lag_ms")}
        systems = {name: asdict(CANDIDATES[name]) for name in self.systems}
        traces = None if self.traces is None else str(self.traces.resolve())
        own = {"workload": workload, "tbt_slo_ms": tbt_slo_ms, "systems": systems, "traces": traces, "dtype": fast_dtype()}
        return {**common, **own}

    def _compare_options(self, workload: str, tbt_slo_ms: float, system_of: SystemOf) -> CompareOptions:
        folder = self.folder(workload, tbt_slo_ms)
        return CompareOptions(
            systems=[system_of(name, tbt_slo_ms, folder / "logs") for name in self.systems],
            replay=self._replay(workload, tbt_slo_ms),
            search=SearchOptions(FIRST_SHARE, LEAST_SHARE, MOST_SHARE, self.resolution, self.repetitions),
            output=folder,
            side_by_side=False,
            saturates=True,
            gives_up=True,
        )

    def _replay(self, workload: str, tbt_slo_ms: float) -> ReplayOptions:
        requests = ["--workload", workload, "--scale", f"{self.scale:g}", "--max-total-tokens", str(MOST_TOKENS), "--drawn"]
        traces = [] if self.traces is None else ["--traces", str(self.traces)]
        length = ["--requests", str(self.requests), "--seed", str(self.seed)]
        limits = ["--max-client-lag-ms", f"{self.max_client_lag_ms:g}", "--timeout-s", f"{REQUEST_TIMEOUT_S:g}"]
        return options.parse(["--url", "http://not-started", *requests, *traces, *length, "--tbt-slo-ms", f"{tbt_slo_ms:g}", *limits])
