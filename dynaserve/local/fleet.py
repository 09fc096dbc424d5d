"""A fleet on this machine: instances of one core each and a front-end, as child processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

from dynaserve import direct_http
from dynaserve.environment import NO_BUSY_WAIT
from dynaserve.errors import DynaServeError
from dynaserve.local.children import Child, start_child, stop_children
from dynaserve.metrics_page import samples, total

HOST = "127.0.0.1"
POLL_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 1.0
FIXED_PORTS = range(20_000, 32_768)
"""Below those that Linux gives to outgoing connections."""
INDEX = "INDEX"


class FleetFailed(DynaServeError):
    """A process of the local fleet ended, or does not become healthy."""


@dataclass(frozen=True)
class Health:
    """deaths: how often an instance was declared dead. dead: instances that are so now."""

    deaths: float
    dead: float


def health_in(page: str) -> Health:
    """From a front-end's `/metrics`."""
    told = samples(page, "dynaserve_instance_health")
    dead = sum(sample.value for sample in told if sample.labels["health"] == "dead")
    return Health(total(page, "dynaserve_instance_deaths_total"), dead)


@dataclass
class LocalFleet:
    """Instances of `vllm serve` and a front-end, started on entering the context and stopped on leaving it.

    vllm_args: INDEX in them is the instance's number. plugin: for `--plugin`; None starts stock vLLM servers, and then no
    front-end. ports: of the instances, then of the front-end; empty takes free ones. log_dir: gets a file per process; None
    makes a temporary folder. progress: called with one line about each second of the start. Nothing is left of any process,
    also if this one is killed.
    """

    model: Path | str
    instances: int = 2
    vllm_args: Sequence[str] = ()
    frontend_args: Sequence[str] = ("--policy", "colocated")
    plugin: str | None = "dynaserve"
    dtype: str = "float32"
    max_model_len: int = 4096
    kv_cache_gib: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None
    ports: Sequence[int] = ()
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 15.0
    progress: Callable[[str], None] | None = None
    children: dict[str, Child] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.ports = self.ports or free_ports(self.instances + 1)
        if len(self.ports) != self.instances + 1:
            raise ValueError(f"{self.instances} instances and a front-end need {self.instances + 1} ports, got {list(self.ports)}")

    @property
    def urls(self) -> list[str]:
        """Of the instances."""
        return [f"http://{HOST}:{port}" for port in self.ports[:-1]]

    @property
    def frontend_url(self) -> str:
        return f"http://{HOST}:{self.ports[-1]}"

    @property
    def pids(self) -> dict[str, list[int]]:
        """Of every process by name (`instance-0`, `frontend`): the command itself, then its descendants."""
        return {name: child.pids for name, child in self.children.items()}

    def __enter__(self) -> LocalFleet:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when all processes are healthy. Raises FleetFailed, with the log's end, if one is not."""
        deadline = time.monotonic() + self.start_timeout_s
        self.log_dir = self.log_dir or Path(tempfile.mkdtemp(prefix="dynaserve-fleet-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for index in range(self.instances):
            self.start_instance(index)
        self.wait_healthy({f"instance-{index}": url for index, url in enumerate(self.urls)}, deadline)
        if self.plugin is not None:
            self.start_frontend(deadline)

    def stop(self) -> None:
        """Ends every process. Idempotent."""
        stop_children(self.children.values())
        self.children.clear()

    def start_instance(self, index: int) -> None:
        """Starts one instance, for instance again after it was killed; `wait_healthy` tells when it serves."""
        cores = sorted(os.sched_getaffinity(0))
        self._start(f"instance-{index}", self.instance_command(index), {"VLLM_CPU_OMP_THREADS_BIND": str(cores[index % len(cores)])})

    def start_frontend(self, deadline: float | None = None) -> None:
        """Starts the front-end, for instance again after it was killed, and returns when it serves.

        deadline: by time.monotonic(); None: `start_timeout_s` from now. Raises FleetFailed.
        """
        self._start("frontend", self.frontend_command(), {})
        self.wait_healthy({"frontend": self.frontend_url}, deadline or time.monotonic() + self.start_timeout_s)

    def place_by(self, frontend_args: Sequence[str]) -> None:
        """Replaces the front-end by one with these arguments. Raises FleetFailed."""
        self.frontend_args = frontend_args
        self.start_frontend()

    def check_alive(self) -> None:
        """Raises FleetFailed, with the log's end, if a process has ended."""
        for name in self.children:
            self._check_alive(name)

    def health(self) -> Health:
        """By the front-end, without which nobody is declared dead. Raises FleetFailed if it does not tell."""
        if "frontend" not in self.children:
            return Health(deaths=0.0, dead=0.0)
        try:
            page = direct_http.get(f"{self.frontend_url}/metrics", timeout_s=60).raise_for_status().text
        except httpx.HTTPError as error:
            raise FleetFailed(f"{self.frontend_url}/metrics: {type(error).__name__}: {error}") from error
        return health_in(page)

    def instance_command(self, index: int) -> list[str]:
        plugin = [] if self.plugin is None else ["--plugin", self.plugin]
        limits = ["--dtype", self.dtype, "--block-size", "32", "--max-model-len", str(self.max_model_len), "--enforce-eager"]
        address = ["--host", HOST, "--port", str(self.ports[index])]
        own = [part.replace(INDEX, str(index)) for part in self.vllm_args]
        return [_script("vllm"), "serve", str(self.model), *plugin, *address, *limits, *own]

    def frontend_command(self) -> list[str]:
        address = ["--host", HOST, "--port", str(self.ports[-1])]
        return [_script("dynaserve"), "serve", str(self.model), "--instances", *self.urls, *address, *self.frontend_args]

    def wait_healthy(self, urls: Mapping[str, str], deadline: float) -> None:
        """Waits for `/health` of the named processes until `deadline` (time.monotonic). Raises FleetFailed."""
        started = last_told = time.monotonic()
        waiting = dict(urls)
        while waiting:
            for name in list(waiting):
                self._check_alive(name)
                if _is_healthy(waiting[name]):
                    del waiting[name]
            now = time.monotonic()
            if waiting and now > deadline:
                child = self.children[min(waiting)]
                raise FleetFailed(f"{child.name} is not healthy after {now - started:.0f} s; {_log_end(child)}")
            if waiting:
                if self.progress is not None and now - last_told >= PROGRESS_INTERVAL_S:
                    last_told = now
                    self.progress(f"waiting for {', '.join(waiting)}: {now - started:.0f} s")
                time.sleep(POLL_INTERVAL_S)

    def _start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        assert self.log_dir is not None
        stop_children([self.children[name]] if name in self.children else [])
        # NO_BUSY_WAIT for stock instances as well, so that a comparison is one.
        quiet = {"VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", NO_BUSY_WAIT: "1"}
        self.children[name] = start_child(name, command, self.log_dir / f"{name}.log", {**quiet, **env, **self.env}, self.stop_timeout_s)

    def _check_alive(self, name: str) -> None:
        child = self.children[name]
        if child.exit_status is not None:
            raise FleetFailed(f"{name} ended with status {child.exit_status}; {_log_end(child)}")


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now, all different.

    None of those that the system gives to outgoing connections: one could take it in the minute before its server starts.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(FIXED_PORTS, len(FIXED_PORTS)):
        if len(ports) == count:
            return ports
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((HOST, port))
            ports.append(port)
    raise FleetFailed(f"{count} free ports are needed, {len(ports)} of {FIXED_PORTS.start} to {FIXED_PORTS.stop - 1} are")


def _script(name: str) -> str:
    """The command of this environment, whether it is activated or not."""
    return str(Path(sys.executable).parent / name)


def _is_healthy(url: str) -> bool:
    try:
        return direct_http.get(f"{url}/health", timeout_s=2.0).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _log_end(child: Child) -> str:
    errors = "".join(f"\n  {line}" for line in child.errors())
    return f"the end of {child.log}:\n{child.last_lines()}" + (f"\nIts first errors:{errors}" if errors else "")
