"""The systems that are compared: two instances each, of one core each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynaserve.bench import systems
from dynaserve.bench.systems import Running, System
from dynaserve.files import write_in_one_move
from dynaserve.local.fleet import INDEX, FleetFailed, LocalFleet
from dynaserve.machine import fast_dtype

START_TIMEOUT_S = 900.0
TRANSPORT = "same-host"
"""Of our instances: their cores compute the steps, too, and with `torch` the one that receives KV takes time from its decodes."""
MOST_TOKENS = 4096
"""Of a request, prompt and answer."""
OURS, STOCK, SLO_COLOCATED, DISAGGREGATED = "dynamic", "stock", "slo-colocated", "disaggregated"
BEHIND_OURS = "colocated-64"
"""As `stock-64`, but with our front-end before it: what that costs on the cores that it shares with the instances."""
CHUNKS = (32, 64, 96, 128, 256, 384, 512, 1024)
"""The first four are 128, 256, 384 and 512 where lengths are divided by four."""


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
    BEHIND_OURS: Candidate("colocated", chunk=64),
    SLO_COLOCATED: Candidate("colocated", slo_batches=True),
    DISAGGREGATED: Candidate("disaggregated", slo_batches=True),
    "paper": Candidate("paper", slo_batches=True, predicts=True),
    OURS: Candidate("dynamic", slo_batches=True, predicts=True),
}


@dataclass(frozen=True)
class Site:
    """What all systems share. profile: the latencies that every start of an instance with SLO-aware batches begins with."""

    model: Path
    profile: Path

    def learn(self, tbt_slo_ms: float, logs: Path, teach: Callable[[Running], None]) -> None:
        """Makes the profile, unless it is there: that of the first of two instances that are taught. Raises ConfigError, FleetFailed.

        Turns that handed their profile on would each begin with what the one before happened to see.
        """
        if self.profile.exists():
            return
        learning = logs / "learning"
        with systems.running(self.system(SLO_COLOCATED, tbt_slo_ms, learning)) as running:
            teach(running)
            running.check()
        learnt = _own_profile(_folder(learning, SLO_COLOCATED, tbt_slo_ms), "0")
        if not learnt.exists():
            raise FleetFailed(f"an instance was taught, and has not left {learnt}")
        write_in_one_move(self.profile, learnt.read_bytes())

    def system(self, name: str, tbt_slo_ms: float, logs: Path) -> System:
        """One of CANDIDATES. logs: gets a folder of its name."""
        candidate = CANDIDATES[name]

        @contextmanager
        def start() -> Iterator[Running]:
            with self.fleet(candidate, tbt_slo_ms, _folder(logs, name, tbt_slo_ms)) as fleet:
                front_pids = fleet.pids.get("frontend", [])
                yield Running([fleet.frontend_url] if front_pids else fleet.urls, front_pids, whole_fleet(fleet))

        return System(name, start=start)

    def fleet(self, candidate: Candidate, tbt_slo_ms: float, folder: Path) -> LocalFleet:
        """folder: of its logs, and of its instances' profiles, which begin as copies of the shared one."""
        folder.mkdir(parents=True, exist_ok=True)
        fleet = LocalFleet(
            self.model,
            vllm_args=("--served-model-name", "model", *_instance_args(candidate, tbt_slo_ms, folder)),
            frontend_args=self._frontend_args(candidate, tbt_slo_ms),
            plugin=None if candidate.policy is None else "dynaserve",
            dtype=fast_dtype(),
            max_model_len=MOST_TOKENS,
            log_dir=folder.absolute(),
            start_timeout_s=START_TIMEOUT_S,
        )
        for index in range(fleet.instances):
            own = _own_profile(folder, str(index))
            own.unlink(missing_ok=True)
            if self.profile.exists():
                shutil.copyfile(self.profile, own)
        return fleet

    def _frontend_args(self, candidate: Candidate, tbt_slo_ms: float) -> list[str]:
        slo = ["--fleet-tbt-slo-ms", f"{tbt_slo_ms:g}"] if candidate.slo_batches else []
        knows = candidate.predicts and self.profile.exists()
        known = ["--latency-profile", str(self.profile.absolute())] if knows else []
        return ["--policy", str(candidate.policy), *slo, *known]


def whole_fleet(fleet: LocalFleet) -> Callable[[], None]:
    """Raises FleetFailed where an instance has ended, is dead, or was declared dead since it was last asked: a front-end goes on with
    the other one, and what it does then is no figure of two."""
    deaths = 0.0

    def check() -> None:
        nonlocal deaths
        fleet.check_alive()
        told = fleet.health()
        before, deaths = deaths, told.deaths
        if deaths > before or told.dead:
            raise FleetFailed(f"instances were declared dead {deaths - before:.0f} times during a run, and {told.dead:.0f} are so now")

    return check


def _folder(logs: Path, name: str, tbt_slo_ms: float) -> Path:
    return logs / (f"{name}-tbt-{tbt_slo_ms:g}" if CANDIDATES[name].slo_batches else name)


def _own_profile(folder: Path, index: str) -> Path:
    return folder.absolute() / f"profile-{index}.json"


def _instance_args(candidate: Candidate, tbt_slo_ms: float, folder: Path) -> list[str]:
    args = [] if candidate.policy is None else ["--dynaserve-transports", TRANSPORT]
    if candidate.slo_batches:
        args += ["--dynaserve-batching", "slo", "--tbt-slo-ms", f"{tbt_slo_ms:g}"]
        args += ["--dynaserve-profile", str(_own_profile(folder, INDEX))]
    return args if candidate.chunk is None else [*args, "--max-num-batched-tokens", str(candidate.chunk)]
