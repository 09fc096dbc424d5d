"""The systems that are compared: two instances each, of one core each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynaserve.bench.systems import Running, System
from dynaserve.local.fleet import LocalFleet
from dynaserve.machine import fast_dtype

START_TIMEOUT_S = 900.0
MOST_TOKENS = 4096
"""Of a request, prompt and answer."""
OURS, STOCK, SLO_COLOCATED, DISAGGREGATED = "dynamic", "stock", "slo-colocated", "disaggregated"
CHUNKS = (256, 384, 512, 1024)


@dataclass(frozen=True)
class Candidate:
    """policy: of our front-end, before our instances; None: stock vLLM servers, to which requests go in turn.

    chunk: `--max-num-batched-tokens`; None: vLLM's own. slo_batches: within the TBT SLO, otherwise vLLM's own. predicts: the policy goes
    by the latencies of steps.
    """

    policy: str | None = None
    chunk: int | None = None
    slo_batches: bool = False
    predicts: bool = False


def fixed(chunk: int) -> str:
    """Its name."""
    return f"{STOCK}-{chunk}"


CANDIDATES = {
    STOCK: Candidate(),
    **{fixed(chunk): Candidate(chunk=chunk) for chunk in CHUNKS},
    "colocated": Candidate("colocated"),
    SLO_COLOCATED: Candidate("colocated", slo_batches=True),
    DISAGGREGATED: Candidate("disaggregated", slo_batches=True),
    "paper": Candidate("paper", slo_batches=True, predicts=True),
    OURS: Candidate("dynamic", slo_batches=True, predicts=True),
}


@dataclass(frozen=True)
class Site:
    """What all systems share. profile: the latencies that instances with SLO-aware batches keep from start to start."""

    model: Path
    profile: Path

    def system(self, name: str, tbt_slo_ms: float, logs: Path) -> System:
        """One of CANDIDATES. logs: gets a folder of its name."""
        candidate = CANDIDATES[name]

        @contextmanager
        def start() -> Iterator[Running]:
            folder = logs / (f"{name}-tbt-{tbt_slo_ms:g}" if candidate.slo_batches else name)
            with self.fleet(candidate, tbt_slo_ms, folder) as fleet:
                front_pids = fleet.pids.get("frontend", [])
                yield Running([fleet.frontend_url] if front_pids else fleet.urls, front_pids)

        return System(name, start=start)

    def fleet(self, candidate: Candidate, tbt_slo_ms: float, logs: Path) -> LocalFleet:
        return LocalFleet(
            self.model,
            vllm_args=("--served-model-name", "model", *self._instance_args(candidate, tbt_slo_ms)),
            frontend_args=self._frontend_args(candidate, tbt_slo_ms),
            plugin=None if candidate.policy is None else "dynaserve",
            dtype=fast_dtype(),
            max_model_len=MOST_TOKENS,
            log_dir=logs.absolute(),
            start_timeout_s=START_TIMEOUT_S,
        )

    def _instance_args(self, candidate: Candidate, tbt_slo_ms: float) -> list[str]:
        if candidate.slo_batches:
            slo = ["--dynaserve-batching", "slo", "--tbt-slo-ms", f"{tbt_slo_ms:g}"]
            return [*slo, "--dynaserve-profile", str(self.profile.absolute())]
        return [] if candidate.chunk is None else ["--max-num-batched-tokens", str(candidate.chunk)]

    def _frontend_args(self, candidate: Candidate, tbt_slo_ms: float) -> list[str]:
        """Before there is a profile, the policy learns one from its instances."""
        slo = ["--fleet-tbt-slo-ms", f"{tbt_slo_ms:g}"] if candidate.slo_batches else []
        chosen = ["--policy", str(candidate.policy), *slo]
        known = candidate.predicts and self.profile.exists()
        return [*chosen, "--latency-profile", str(self.profile.absolute())] if known else chosen
