"""CPU that two instances use while ten alphas stand at their hand-off points on one and ten betas are reserved on the other.

The front-end's event loop is held after it has sent the requests, so that no `Continue` comes; its connections stand, as ZeroMQ's own
thread answers for them. It goes on afterwards, and every request must still be answered. Compared with the same instances without any
request, in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.parsers import parser_of
from dynaserve import direct_http
from dynaserve.bench.options import positive, whole
from dynaserve.bench.processes import cpu_s
from dynaserve.bench.report import machine
from dynaserve.errors import DynaServeError
from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import smollm2
from dynaserve.machine import fast_dtype

PROMPT_TOKENS, OUTPUT_TOKENS, SPLIT = 600, 240, 800
"""The alphas run for long enough that all requests are there before the first of them stands."""
DEADLINE_S = 120.0
HOLD, GO_ON = signal.SIGUSR1, signal.SIGUSR2
_HOLDABLE = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [{int(GO_ON)}])
from dynaserve.cli import main
signal.signal({int(HOLD)}, lambda *_: signal.sigwait([{int(GO_ON)}]))
main()
"""


class HoldableFleet(LocalFleet):
    """Its front-end does nothing from the signal HOLD to the signal GO_ON."""

    def frontend_command(self) -> list[str]:
        _, *arguments = super().frontend_command()
        return [sys.executable, "-c", _HOLDABLE, *arguments]


def spent_s(fleet: LocalFleet) -> list[float]:
    """CPU seconds of each instance so far, all its processes together."""
    return [cpu_s(fleet.pids[f"instance-{index}"]) for index in range(fleet.instances)]


def idle_cores(fleet: LocalFleet, duration_s: float) -> list[float]:
    """Cores that each instance keeps busy, on average."""
    before, began_s = spent_s(fleet), time.monotonic()
    time.sleep(duration_s)
    after, took_s = spent_s(fleet), time.monotonic() - began_s
    return [(b - a) / took_s for a, b in zip(before, after, strict=True)]


def held(fleet: LocalFleet) -> list[dict[str, int]]:
    return [direct_http.get(f"{url}/dynaserve/instance/state", timeout_s=60).raise_for_status().json() for url in fleet.urls]


def wait_until_all_wait(fleet: LocalFleet, requests: int) -> None:
    """Until every alpha is parked and every beta announced. Both directions are used in turns."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        states = held(fleet)
        if sum(state["parked"] for state in states) == requests and sum(state["requests"] for state in states) == 2 * requests:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"not all wait after {DEADLINE_S:g} s: {states}")
        time.sleep(0.2)


def ask(fleet: LocalFleet, number: int) -> int:
    body = {
        "model": str(fleet.model),
        "prompt": [1000 + (7 * number + i) % 30000 for i in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "vllm_xargs": {"dynaserve_split": SPLIT},
    }
    answer = direct_http.post(f"{fleet.frontend_url}/v1/completions", body, timeout_s=600).raise_for_status().json()
    return int(answer["usage"]["completion_tokens"])


def main(arguments: Sequence[str]) -> None:
    args = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks.idle", *arguments])
    print(f"command: {command}\nmachine: {json.dumps(machine())}; {fast_dtype()}", flush=True)
    try:
        alone, waiting = measure(args.requests, args.duration_s)
    except DynaServeError as error:
        print(f"bench-idle: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    for index, (without, among) in enumerate(zip(alone, waiting, strict=True)):
        print(
            f"instance {index}: {without:.1%} of a core without requests, {among:.1%} with {args.requests // 2} parked alphas and "
            f"{args.requests // 2} reserved betas"
        )


def measure(requests: int, duration_s: float) -> tuple[list[float], list[float]]:
    """Cores that each instance keeps busy without requests, and with those that all wait. Raises DynaServeError."""
    vllm_args = ["--dynaserve-park-timeout-ms", "600000", "--no-enable-prefix-caching"]
    with (
        tempfile.TemporaryDirectory() as logs,
        HoldableFleet(smollm2(), dtype=fast_dtype(), vllm_args=vllm_args, log_dir=Path(logs)) as fleet,
        ThreadPoolExecutor(requests) as pool,
    ):
        ask(fleet, 0)
        alone = idle_cores(fleet, duration_s)
        frontend = fleet.pids["frontend"][0]
        tasks = [pool.submit(ask, fleet, number) for number in range(requests)]
        while sum(state["requests"] for state in held(fleet)) < 2 * requests:
            if any(task.done() for task in tasks):
                raise SystemExit("a request ended before all of them were there")
            time.sleep(0.05)
        os.kill(frontend, HOLD)
        try:
            wait_until_all_wait(fleet, requests)
            waiting = idle_cores(fleet, duration_s)
        finally:
            os.kill(frontend, GO_ON)
        assert all(task.result() == OUTPUT_TOKENS for task in tasks)
    return alone, waiting


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("idle", __doc__, "--requests 20 --duration-s 20")
    parser.add_argument("--requests", type=whole(2), default=20, metavar="N", help="half of them in each direction (default: %(default)s)")
    parser.add_argument("--duration-s", type=positive, default=20.0, metavar="T", help="of each measurement (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
