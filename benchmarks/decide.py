"""`make bench-decide`: what the local scheduler adds to a step, in microseconds. Needs vLLM, but no weights and no engine.

Deciding is everything before vLLM forms the batch; accounting is what follows: the shape of the batch, the table, deadlines of
the tokens and the report. Both beside vLLM's own work for the same step.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.parsers import parser_of
from dynaserve.bench.options import whole
from dynaserve.bench.report import machine
from tests.virtual_engine import Engine


def main(arguments: Sequence[str]) -> None:
    args = _parser().parse_args(arguments)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(Path(folder), args.running, args.waiting, args.steps)
        times = _Times(engine.scheduler)
        for step in range(args.steps):
            _refill(engine, args.running + args.waiting, step)
            engine.step()
    print(f"machine: {json.dumps(machine())}")
    print(f"{args.running} running, {args.waiting} waiting; medians of {args.steps} steps, microseconds")
    for name, microseconds in times.medians().items():
        print(f"  {name:40s} {microseconds:8.1f}")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("decide", __doc__.partition("\n")[0], "--running 256 --waiting 64 --steps 400")
    parser.add_argument("--running", type=whole(1), default=256, metavar="N", help="requests (default: %(default)s)")
    parser.add_argument("--waiting", type=whole(0), default=64, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument("--steps", type=whole(1), default=400, metavar="N", help="(default: %(default)s)")
    return parser


def _refill(engine: Engine, requests: int, step: int) -> None:
    """Prompts that end with their first token, so that every step has to choose, beside as many decodes as before."""
    for missing in range(requests - len(engine.scheduler.requests)):
        engine.add(f"prompt-{step}-{missing}", 4000, 1)


def _engine(folder: Path, running: int, waiting: int, steps: int) -> Engine:
    engine = Engine(folder, blocks=40_000, max_num_seqs=running + waiting, max_num_batched_tokens=8192)
    engine.learn()
    engine.slowness = 0.2
    for i in range(running):
        engine.add(f"decode-{i}", 200 + i, 4 * steps)
    while any(request.is_prefill_chunk for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


class _Times:
    """Wraps methods of the scheduler and of its accounts."""

    def __init__(self, scheduler: Any) -> None:
        self._taken: dict[str, list[float]] = {}
        for name in ("prepare_step", "schedule", "update_from_output"):
            self._wrap(scheduler, name)
        for name in ("begin", "end", "count_tokens", "take_report"):
            self._wrap(scheduler.accounts, name)

    def _wrap(self, owner: Any, name: str) -> None:
        method, taken = getattr(owner, name), self._taken.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                taken.append(1e6 * (time.perf_counter() - began))

        setattr(owner, name, timed)

    def medians(self) -> dict[str, float]:
        us = {name: median(taken) for name, taken in self._taken.items()}
        return {
            "deciding (prepare_step)": us["prepare_step"],
            "accounting: the table and the report": us["begin"] + us["end"] + us["take_report"],
            "accounting: deadlines of the tokens": us["count_tokens"],
            "schedule and update, all of it": us["schedule"] + us["update_from_output"],
        }


if __name__ == "__main__":
    main(sys.argv[1:])
