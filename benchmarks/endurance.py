"""`make bench-endurance`: what the processes of a fleet hold while it serves at 80 % of its capacity, from beginning to end.

Two instances of SmolLM2, every other request is cut by hand. After a warm-up, in which what is bounded fills up (the front-end
remembers 4096 requests, the engine's libraries keep shapes and memory), memory, open files, sockets and threads of every
process are sampled; printed are the slope of a line through the memory, and the rest in the first and the last tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import os
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

import httpx
import numpy as np
import psutil

from benchmarks.processes import Held, held
from dynaserve.bench import options, trial
from dynaserve.bench.report import machine
from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import smollm2
from dynaserve.machine import fast_dtype
from dynaserve.metrics_page import total

WORKLOAD, SPLIT = "fixed:128,32", 140
MIB = 2**20
ONEDNN_CACHE = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
"""oneDNN keeps what it compiled for each shape of a batch, up to 1024 of them: a worker, stock vLLM's too, grows by some 200 MiB in half an
hour before it is full, and a leak could hide behind that."""


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


def deaths(fleet: LocalFleet) -> float:
    """How often the front-end has declared an instance dead."""
    page = httpx.get(f"{fleet.frontend_url}/metrics", timeout=60).raise_for_status().text
    return total(page, "dynaserve_instance_deaths_total")


def report(samples: Mapping[str, Sequence[tuple[float, Held]]]) -> None:
    print("| process | memory, MiB: first, last | slope, MiB an hour | open files | sockets | threads |")
    print("|---|---|---|---|---|---|")
    for name, series in samples.items():
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
    """Half of the requests of each kind, by two clients at the same time. Returns how many failed, by reason."""
    common = ["--url", url, "--workload", WORKLOAD, "--rate", f"{rate_per_s / 2:g}", "--duration-s", f"{duration_s:g}"]
    common += ["--max-client-lag-ms", f"{args.max_client_lag_ms:g}"]
    bodies = {"whole": {}, "cut": {"vllm_xargs": {"dynaserve_split": SPLIT}}}

    def replay(kind: str, seed: int) -> Counter[str]:
        chosen = options.parse([*common, "--extra-body", json.dumps(bodies[kind])])
        summary = trial.run(chosen, rate_per_s / 2, seed, lambda _: None).summary
        tbt = summary.tbt_ms
        line = f"{kind}: {summary.finished} of {summary.requests} finished, TBT P99 {tbt.p99 if tbt else 0:.0f} ms"
        sys.stdout.write(f"{line}\n")  # at once: the other client may write at the same time
        return Counter(summary.failures)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return sum(pool.map(replay, bodies, count(args.seed)), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-endurance", description=__doc__)
    parser.add_argument("--rate", type=float, required=True, help="requests per second; 0.8 of the capacity that bench-overload prints")
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)s)")
    parser.add_argument("--warm-up-s", type=float, default=600.0, help="(default: %(default)s)")
    parser.add_argument("--every-s", type=float, default=10.0, help="between samples (default: %(default)s)")
    parser.add_argument("--max-client-lag-ms", type=float, default=1000.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ.update(ONEDNN_CACHE)
    print(f"command: {shlex.join(sys.argv)}; seed {args.seed}; {fast_dtype()}\nmachine: {json.dumps(machine())}", flush=True)
    with (
        tempfile.TemporaryDirectory() as logs,
        LocalFleet(smollm2(), dtype=fast_dtype(), log_dir=Path(logs)) as fleet,
        ThreadPoolExecutor(1) as watcher,
    ):
        serve(fleet.frontend_url, args.rate, args.warm_up_s, args)
        watch = Watch(fleet, args.every_s)
        watching = watcher.submit(watch.run)
        try:
            failures = serve(fleet.frontend_url, args.rate, 60 * args.minutes, args)
        finally:
            watch.over.set()
        watching.result()
        dead = deaths(fleet)
    report(watch.samples)
    print(f"healthy instances declared dead: {dead:.0f} times; requests that failed: {dict(failures)}")
    raise SystemExit(1 if failures or dead else 0)


if __name__ == "__main__":
    main()
