"""The servers under test: `vllm serve` of one model, each computing on the first core of this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynaserve.local.fleet import LocalFleet

START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class System:
    """What is compared. plugin None: stock vLLM. args: of `vllm serve`, besides those that all have."""

    name: str
    plugin: str | None
    args: tuple[str, ...] = ()


@contextmanager
def running(systems: Sequence[System], model: Path, common: Sequence[str], log_dir: Path) -> Iterator[dict[str, str]]:
    """URLs by name. All run at the same time on the same core; whoever measures sends to one of them at a time."""
    fleets = {
        system.name: LocalFleet(
            model,
            instances=1,
            vllm_args=(*common, *system.args),
            plugin=system.plugin,
            dtype="bfloat16",
            log_dir=log_dir / system.name,
        )
        for system in systems
    }
    try:
        for name, fleet in fleets.items():
            assert fleet.log_dir is not None
            fleet.log_dir.mkdir(parents=True, exist_ok=True)
            fleet.start_instance(0)
            fleet.wait_healthy({"instance-0": fleet.urls[0]}, time.monotonic() + START_TIMEOUT_S)
            print(f"{name}: {' '.join(fleet.instance_command(0)[1:])}", flush=True)
        yield {name: fleet.urls[0] for name, fleet in fleets.items()}
    finally:
        for fleet in fleets.values():
            fleet.stop()
