"""The servers under test: `vllm serve` of one model, each computing on the first core of this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dynaserve.local.fleet import LocalFleet
from dynaserve.machine import fast_dtype

START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class System:
    """What is compared. plugin None: stock vLLM. args: of `vllm serve`, besides those that all have."""

    name: str
    plugin: str | None
    args: tuple[str, ...] = ()


@dataclass
class Servers:
    """Some systems at the same time, started when the first of them is asked for, and stopped on leaving the context.

    start: of all of them; gives their URLs, and stops them when it is left. warm_up: is called with each name and URL.
    """

    start: Callable[[], AbstractContextManager[dict[str, str]]]
    warm_up: Callable[[str, str], None]
    urls: dict[str, str] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def url(self, name: str) -> str:
        """From then on this process, and the clients that it starts, keep to the last core."""
        if not self.urls:
            cores = os.sched_getaffinity(0)
            self.urls = self._stack.enter_context(self.start())
            self._stack.callback(os.sched_setaffinity, 0, cores)  # servers that follow may use all
            os.sched_setaffinity(0, {max(cores)})
            for each, url in self.urls.items():
                self.warm_up(each, url)
        return self.urls[name]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@contextmanager
def running(systems: Sequence[System], model: Path, common: Sequence[str], log_dir: Path) -> Iterator[dict[str, str]]:
    """URLs by name. All run at the same time on the same core; whoever measures sends to one of them at a time."""
    fleets = {
        system.name: LocalFleet(
            model,
            instances=1,
            vllm_args=(*common, *system.args),
            plugin=system.plugin,
            dtype=fast_dtype(),
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
