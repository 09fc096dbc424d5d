"""What the hand-over costs: KV that leaves after alpha's last step, and the gap between its last token and beta's first.

Real instances of SmolLM2, one core each. Chunked (KV leaves while alpha computes) and unchunked (it leaves at the end) requests
take turns in one run, after six short ones of each kind that are told and not counted; each is cut in the middle. The second part
keeps both instances busy with other streams.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.parsers import parser_of, words
from dynaserve import direct_http
from dynaserve.bench.options import whole
from dynaserve.errors import DynaServeError
from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import smollm2
from dynaserve.machine import StolenTime, fast_dtype

SHAPES = ((55, 370), (219, 1467))
"""Prompt and output tokens: means of the paper's workloads (section 6)."""
ATTEMPTS = 3
RECORD_TIMEOUT_S = 30.0
BUSY_STREAMS = 3
"""Of each instance."""

WARM_UPS, WARM_UP_OUTPUTS = 6, 120
"""Hand-overs of each kind that are told, and not counted: the first ones of a fleet open channels and take longer."""


@dataclass(frozen=True)
class HandOver:
    """One request. gap_ms: between alpha's last and beta's first token, for the client. step_rest_ms: of that, until the step
    ended that beta's instance was in. tbt_ms: median gap of beta's tokens. ordinary_ms: all other gaps of the answer.
    late_blocks: left after alpha's last step. late_share, late_push_share: of the bytes, and of the time spent sending."""

    gap_ms: float
    step_rest_ms: float
    tbt_ms: float
    ordinary_ms: tuple[float, ...]
    late_blocks: int
    late_share: float
    late_push_share: float


def ask(fleet: LocalFleet, prompt: list[int], outputs: int, *, chunked: bool) -> HandOver:
    """Asks again, and says so, where there was no hand-over to measure: it was lifted, or an instance was taken for dead."""
    for _ in range(ATTEMPTS):
        record, times_s = _ask_once(fleet, prompt, outputs, chunked=chunked)
        if was_handed_over(record):
            return _measure(record, times_s)
        print(f"  NOT MEASURED, as it was not handed over: {json.dumps(record)}", flush=True)
    raise SystemExit(f"{ATTEMPTS} requests in a row were not handed over")


def was_handed_over(record: dict[str, Any]) -> bool:
    alpha, beta = record["alpha"], record["beta"]
    return beta is not None and record["lifted"] is None and not (record["lost_attempts"] or alpha["lost"] or beta["lost"])


def _ask_once(fleet: LocalFleet, prompt: list[int], outputs: int, *, chunked: bool) -> tuple[dict[str, Any], list[float]]:
    """The record, and when each token came, by the monotonic clock."""
    split = (len(prompt) + outputs) // 2
    body = {
        "model": str(fleet.model),
        "prompt": prompt,
        "max_tokens": outputs,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "vllm_xargs": {"dynaserve_split": split, "dynaserve_chunked": int(chunked)},
    }
    times_s: list[float] = []
    request_id = ""
    url = f"{fleet.frontend_url}/v1/completions"
    with direct_http.client(timeout_s=300) as http, http.stream("POST", url, json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                answer = json.loads(line.removeprefix("data: "))
                request_id = answer["id"]
                times_s += [time.monotonic()] * sum(len(choice["token_ids"]) for choice in answer["choices"])
    return record_of(fleet, request_id), times_s


def record_of(fleet: LocalFleet, request_id: str) -> dict[str, Any]:
    """Once both instances have said that they are done, where it was handed over."""
    deadline_s = time.monotonic() + RECORD_TIMEOUT_S
    while True:
        answer = direct_http.get(f"{fleet.frontend_url}/dynaserve/requests/{request_id}", timeout_s=5).raise_for_status()
        (record,) = answer.json()["sequences"]
        if not was_handed_over(record) or all(record[side]["computed_tokens"] is not None for side in ("alpha", "beta")):
            return dict(record)
        if time.monotonic() > deadline_s:
            raise SystemExit(f"no instance has told what it did after {RECORD_TIMEOUT_S:g} s: {json.dumps(record)}")
        time.sleep(0.01)


def _measure(record: dict[str, Any], times_s: Sequence[float]) -> HandOver:
    gaps_ms = [1e3 * (b - a) for a, b in pairwise(times_s)]
    first_of_beta = record["alpha"]["output_tokens"]
    kv = record["kv"]
    late_bytes = kv["bytes"] - kv["bytes_before_alpha_end"]
    return HandOver(
        gap_ms=gaps_ms[first_of_beta - 1],
        step_rest_ms=record["step_rest_ms"],
        tbt_ms=median(gaps_ms[first_of_beta:]),
        ordinary_ms=(*gaps_ms[: first_of_beta - 1], *gaps_ms[first_of_beta:]),
        late_blocks=late_bytes // kv["block_bytes"],
        late_share=late_bytes / kv["bytes"],
        late_push_share=1 - kv["push_ms_before_alpha_end"] / kv["push_ms"],
    )


@contextmanager
def busy(fleet: LocalFleet, streams: int) -> Iterator[None]:
    """Both instances serve this many others all the time."""
    over = threading.Event()

    def keep_asking(url: str, seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            body = {"model": str(fleet.model), "prompt": _prompt(rng, 200), "max_tokens": 400, "ignore_eos": True, "stream": True}
            with direct_http.client(timeout_s=300) as http, http.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                for _ in response.iter_lines():
                    if over.is_set():
                        return

    with ThreadPoolExecutor(streams * len(fleet.urls) or 1) as pool:
        tasks = [pool.submit(keep_asking, url, seed) for seed in range(streams) for url in fleet.urls]
        try:
            yield
        finally:
            over.set()
        for task in tasks:
            task.result()


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(tokens)]


def report(name: str, hand_overs: Sequence[HandOver]) -> None:
    def p99(values: Sequence[float]) -> float:
        return quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]

    tbt_ms = median(h.tbt_ms for h in hand_overs)
    gaps = [h.gap_ms for h in hand_overs]
    net = [h.gap_ms - h.step_rest_ms for h in hand_overs]
    late = f"at most {max(h.late_blocks for h in hand_overs)} blocks, {median(h.late_share for h in hand_overs):.1%} of the bytes"
    print(f"{name}: {len(hand_overs)} requests")
    print(f"  after alpha's last step: {late}, {median(h.late_push_share for h in hand_overs):.1%} of the sending time")
    print(f"  gap: p50 {median(gaps):.1f} ms, p99 {p99(gaps):.1f} ms, {p99(gaps) / tbt_ms:.2f} times the median TBT of {tbt_ms:.1f} ms")
    print(f"  less the running step: p50 {median(net):.1f} ms, p99 {p99(net):.1f} ms, {p99(net) / tbt_ms:.2f} times")
    # A machine that pauses makes all gaps long: whether the hand-over does, only the comparison with the others tells.
    ordinary = [gap for h in hand_overs for gap in h.ordinary_ms]
    above, others_above = (share_above(1.5 * tbt_ms, some) for some in (gaps, ordinary))
    print(f"  above 1.5 times the median TBT: {above:.1%} of these gaps, {others_above:.1%} of the {len(ordinary)} others in these answers")
    print(f"  the others: p99 {p99(ordinary):.1f} ms, longest {max(ordinary):.1f} ms", flush=True)


def share_above(limit_ms: float, gaps_ms: Sequence[float]) -> float:
    return sum(gap > limit_ms for gap in gaps_ms) / len(gaps_ms)


def first_tokens_ms(fleet: LocalFleet, rest_s: float) -> tuple[float, float]:
    """Of two equal requests of one token: to an instance that has rested, and again at once. What waking up costs, no hand-over."""
    time.sleep(rest_s)
    return _first_token_ms(fleet), _first_token_ms(fleet)


def _first_token_ms(fleet: LocalFleet) -> float:
    body = {"model": str(fleet.model), "prompt": [1000], "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    began_s = time.monotonic()
    direct_http.post(f"{fleet.urls[-1]}/v1/completions", body, timeout_s=300).raise_for_status()
    return 1e3 * (time.monotonic() - began_s)


def measure(fleet: LocalFleet, shape: tuple[int, int], requests: int, seed: int, streams: int) -> None:
    prompt_tokens, outputs = shape
    rng = random.Random(seed)
    kept: dict[bool, list[HandOver]] = {True: [], False: []}
    stolen = StolenTime()
    with busy(fleet, streams):
        for chunked in (True, False) * WARM_UPS:
            first = ask(fleet, _prompt(rng, SHAPES[0][0]), WARM_UP_OUTPUTS, chunked=chunked)
            print(f"  not counted: gap {first.gap_ms:.1f} ms, median TBT {first.tbt_ms:.1f} ms", flush=True)
        for number in range(requests):
            for chunked in (True, False):
                measured = ask(fleet, _prompt(rng, prompt_tokens), outputs, chunked=chunked)
                kept[chunked].append(measured)
                print(f"  {number}: gap {measured.gap_ms:.1f} ms, median TBT {measured.tbt_ms:.1f} ms", flush=True)
    load = f"{streams} other streams an instance" if streams else "idle"
    print(f"meanwhile taken by the host of this machine: {stolen} of its cores' time")
    for chunked, hand_overs in kept.items():
        report(f"{prompt_tokens}+{outputs}, {'chunked' if chunked else 'unchunked'}, {load}", hand_overs)
    if not streams:
        rest_s = 1e-3 * median(h.tbt_ms for h in kept[True]) * outputs / 2
        waking, awake = map(median, zip(*(first_tokens_ms(fleet, rest_s) for _ in range(requests)), strict=True))
        print(f"one token, uncut, on an instance that has rested for {rest_s:.0f} s: p50 {waking:.1f} ms; again at once: {awake:.1f} ms")


def main(arguments: Sequence[str]) -> None:
    args = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks.handoff", *arguments])
    print(f"command: {command}; seed {args.seed}; {fast_dtype()}; {os.cpu_count()} cores, {os.uname().machine}", flush=True)
    try:
        with tempfile.TemporaryDirectory() as logs, _fleet(args, Path(logs)) as fleet:
            for shape in SHAPES[int(args.long) : 1 if args.short else None]:
                for streams in (0,) * (not args.busy) + (BUSY_STREAMS,) * (not args.idle):
                    measure(fleet, shape, args.requests, args.seed, streams)
    except DynaServeError as error:
        print(f"bench-handoff: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _fleet(args: argparse.Namespace, logs: Path) -> LocalFleet:
    return LocalFleet(
        smollm2(),
        dtype=fast_dtype(),
        vllm_args=["--dynaserve-transports", args.transport, "--no-enable-prefix-caching", *args.vllm_args],
        log_dir=logs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("handoff", __doc__, "--short --idle --requests 10")
    parser.add_argument("--requests", type=whole(1), default=30, metavar="N", help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of the prompts (default: %(default)s)")
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--short", action="store_true", help="only the short answers")
    shapes.add_argument("--long", action="store_true", help="only the long answers")
    loads = parser.add_mutually_exclusive_group()
    loads.add_argument("--idle", action="store_true", help="only with instances that are idle otherwise")
    loads.add_argument("--busy", action="store_true", help="only beside other streams")
    parser.add_argument("--transport", default="torch", metavar="NAME", help="(default: %(default)s)")
    both = 'of both instances, as "--dynaserve-batching slo"'
    parser.add_argument("--vllm-args", type=words, default="", metavar="ARGS", help=both)
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
