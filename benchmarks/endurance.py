"""`make bench-endurance`: what the processes of a fleet hold while it serves at 80 % of its capacity, from beginning to end.

Two instances of SmolLM2, every other request is cut by hand. After a warm-up, in which what is bounded fills up (the front-end
remembers 4096 requests, the engine's libraries keep shapes and memory), memory, open files, sockets and threads of every
process are sampled; printed are the slope of a line through the memory, and the rest in the first and the last tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.parsers import parser_of
from benchmarks.processes import Held, held
from dynaserve.bench import options, trial
from dynaserve.bench.options import positive, whole
from dynaserve.bench.report import machine
from dynaserve.errors import DynaServeError
from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import smollm2
from dynaserve.machine import fast_dtype

WORKLOAD, SPLIT = "fixed:128,32", 140
MIB = 2**20
ONEDNN_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""oneDNN keeps what it compiled for each shape of a batch, up to 1024 of them: a worker, stock vLLM's too, grows by some 200 MiB in half an
hour before it is full, and a leak could hide behind that."""
LEAST_SAMPLES = 2
"""Of a process that is to have a slope."""


@dataclass
class Watch:
    """Samples until it is told to stop. samples: (seconds, what was held) by process."""

    fleet: LocalFleet
    every_s: float
    samples: dict[str, list[tuple[float, Held]]] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.over.wait(self.every_s):
            for name, pids in self.fleet.pids.items():
                for pid in pids:
                    with suppress(psutil.NoSuchProcess):  # a helper that has ended since
                        self.samples.setdefault(f"{name}, process {pid}", []).append((time.monotonic(), held(pid)))


def report(samples: Mapping[str, Sequence[tuple[float, Held]]]) -> None:
    print("| process | memory, MiB: first, last | slope, MiB an hour | open files | sockets | threads |")
    print("|---|---|---|---|---|---|")
    for name, series in samples.items():
        if len(series) < LEAST_SAMPLES:
            print(f"| {name} | gone after {len(series)} samples | | | | |")
            continue
        times_h = np.array([at_s for at_s, _ in series]) / 3600
        memory = np.array([what.memory_bytes for _, what in series]) / MIB
        slope = float(np.polyfit(times_h - times_h[0], memory, 1)[0])
        tenth = max(1, len(series) // 10)
        first, last = [what for _, what in series[:tenth]], [what for _, what in series[-tenth:]]
        ends = [
            f"{median(getattr(what, kind) for what in first):.0f}, {median(getattr(what, kind) for what in last):.0f}"
            for kind in ("open_files", "sockets", "threads")
        ]
        print(f"| {name} | {np.mean(memory[:tenth]):.1f}, {np.mean(memory[-tenth:]):.1f} | {slope:+.1f} | {' | '.join(ends)} |")


def serve(url: str, rate_per_s: float, duration_s: float, args: argparse.Namespace) -> Counter[str]:
    """Half of the requests of each kind, by two clients at the same time. Returns how many failed, by reason.

    Raises NotTrusted if a client was late: another run of it would be alone, and hide what failed in the first one.
    """
    common = ["--url", url, "--workload", WORKLOAD, "--rate", f"{rate_per_s / 2:g}", "--duration-s", f"{duration_s:g}"]
    common += ["--max-client-lag-ms", f"{args.max_client_lag_ms:g}"]
    bodies = {"whole": {}, "cut": {"vllm_xargs": {"dynaserve_split": SPLIT}}}

    def replay(kind: str, seed: int) -> Counter[str]:
        chosen = options.parse([*common, "--extra-body", json.dumps(bodies[kind])])
        summary = trial.run(chosen, rate_per_s / 2, seed, attempts=1).summary
        tbt = summary.tbt_ms
        line = f"{kind}: {summary.finished} of {summary.requests} finished, TBT P99 {tbt.p99 if tbt else 0:.0f} ms"
        sys.stdout.write(f"{line}\n")  # at once: the other client may write at the same time
        return Counter(summary.failures)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return sum(pool.map(replay, bodies, count(args.seed)), Counter())


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    if 60 * args.minutes < 2 * args.every_s:
        parser.error(f"--minutes {args.minutes:g} is too short for two samples, {args.every_s:g} s (--every-s) apart")
    command = shlex.join(["python", "-m", "benchmarks.endurance", *arguments])
    print(f"command: {command}; seed {args.seed}; {fast_dtype()}\nmachine: {json.dumps(machine())}", flush=True)
    try:
        samples, failures, dead = run(args)
    except DynaServeError as error:
        print(f"bench-endurance: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    report(samples)
    print(f"healthy instances declared dead: {dead:.0f} times; requests that failed: {dict(failures)}")
    raise SystemExit(1 if failures or dead else 0)


def run(args: argparse.Namespace) -> tuple[Mapping[str, Sequence[tuple[float, Held]]], Counter[str], float]:
    """Samples by process, requests that failed by reason, and how often an instance was declared dead. Raises DynaServeError."""
    with (
        tempfile.TemporaryDirectory() as logs,
        LocalFleet(smollm2(), dtype=fast_dtype(), env=ONEDNN_CACHE, log_dir=Path(logs)) as fleet,
        ThreadPoolExecutor(1) as watcher,
    ):
        failures = serve(fleet.frontend_url, args.rate, args.warm_up_s, args)
        watch = Watch(fleet, args.every_s)
        watching = watcher.submit(watch.run)
        try:
            failures += serve(fleet.frontend_url, args.rate, 60 * args.minutes, args)
        finally:
            watch.over.set()
        watching.result()
        return watch.samples, failures, fleet.health().deaths


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("endurance", __doc__, "--rate 8.8 --minutes 30")
    followed = "requests per second; 0.8 of the capacity that bench-overload prints"
    parser.add_argument("--rate", type=positive, required=True, metavar="R", help=followed)
    parser.add_argument("--minutes", type=positive, default=30.0, metavar="T", help="(default: %(default)s)")
    parser.add_argument("--warm-up-s", type=positive, default=600.0, metavar="T", help="(default: %(default)s)")
    parser.add_argument("--every-s", type=positive, default=10.0, metavar="T", help="between samples (default: %(default)s)")
    parser.add_argument("--max-client-lag-ms", type=positive, default=1000.0, metavar="MS", help="at P99 (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of the arrivals (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
