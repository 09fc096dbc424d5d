"""What the front-end adds: time to the first token, and CPU for each request and each token.

Against the same two instances when the client asks them directly, in turns, and against vllm-router where that is installed. The
model is small and random, so that the servers are what is measured. Every turn has two parts, with one output token and with many:
the first one tells what a request costs, the difference what a token does. The many are not always as many, or all streams would ask
at the same moment: a prompt's wait for the others would then say more of the time to the first token than what is in front.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import httpx

from benchmarks.parsers import parser_of
from dynaserve.bench.client import Planned, http_client, send
from dynaserve.bench.endpoint import Endpoint
from dynaserve.bench.measures import Distribution
from dynaserve.bench.options import positive, whole
from dynaserve.bench.processes import cpu_s
from dynaserve.bench.report import machine
from dynaserve.bench.systems import System, started
from dynaserve.errors import DynaServeError
from dynaserve.local.fleet import HOST, LocalFleet, free_ports
from dynaserve.local.model import cache_dir, random_model, smollm2
from workloads.trace import TraceRequest

PROMPT_TOKENS = 64
OUTPUT_TOKENS = ((1, 1), (32, 96))
"""Of each request in the two parts: least and most."""
DIRECT, FRONTEND, ROUTER = "directly", "dynaserve serve", "vllm-router"
START_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Part:
    """One part of a turn. output_tokens: of a request, on average. cpu_ms: for one request, by group of processes."""

    output_tokens: float
    ttft_ms: list[float]
    cpu_ms: dict[str, float]


async def ask(http: httpx.AsyncClient, endpoint: Endpoint, rng: random.Random, output_tokens: int) -> float:
    """Time to the first token, ms."""
    prompt = [rng.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]
    request = TraceRequest(None, PROMPT_TOKENS, output_tokens)
    planned = Planned(0, 0.0, request, endpoint.completions_url, endpoint.body(prompt, output_tokens))
    record = await send(http, planned, time.perf_counter(), REQUEST_TIMEOUT_S)
    if record.failure is not None:
        raise SystemExit(f"{endpoint.url}: {record.failure}")
    return 1e3 * (record.token_times_s[0] - record.sent_s)


async def run(
    urls: Sequence[str], model: str, args: argparse.Namespace, output_tokens: tuple[int, int], seed: int
) -> tuple[list[float], float]:
    """Streams with one request after the other, each. Returns times to the first token (ms), and the mean output length."""
    # With token ids, because vllm-router drops the usage of each event, and a token's text may be empty.
    endpoints = [Endpoint(url, model, usage_per_event=True, extra_body={"return_token_ids": True}) for url in urls]
    ttft_ms: list[float] = []
    lengths: list[int] = []
    async with http_client(None) as http, asyncio.TaskGroup() as group:

        async def stream(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            for index in range(args.requests):
                await asyncio.sleep(rng.uniform(0.0, 2.0 * args.pause_s))
                lengths.append(rng.randint(*output_tokens))
                ttft_ms.append(await ask(http, endpoints[(number + index) % len(endpoints)], rng, lengths[-1]))

        for number in range(args.streams):
            group.create_task(stream(number))
    return ttft_ms, mean(lengths)


def measure(urls: Sequence[str], pids: Mapping[str, Sequence[int]], model: str, args: argparse.Namespace, seed: int) -> list[Part]:
    parts = []
    for output_tokens in OUTPUT_TOKENS:
        before = {name: cpu_s(group) for name, group in pids.items()}
        ttft_ms, mean_tokens = asyncio.run(run(urls, model, args, output_tokens, seed))
        spent = {name: 1e3 * (cpu_s(group) - before[name]) / len(ttft_ms) for name, group in pids.items()}
        parts.append(Part(mean_tokens, ttft_ms, spent))
    return parts


@contextmanager
def router(urls: Sequence[str]) -> Iterator[tuple[str, int] | None]:
    """URL and process of vllm-router, which sends to these; None: it is not installed."""
    command = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if command is None:
        yield None
        return
    port, metrics_port = map(str, free_ports(2))
    options = ["--policy", "round_robin", "--worker-urls", *urls, "--prometheus-host", HOST, "--prometheus-port", metrics_port]
    url = f"http://{HOST}:{port}"
    system = System(ROUTER, (url,), [[command, "--host", HOST, "--port", port, *options]], START_TIMEOUT_S)
    with started(system) as (child,):
        yield url, child.pids[0]


def p50(values: Sequence[float]) -> float:
    return _distribution(values).p50


def p99(values: Sequence[float]) -> float:
    return _distribution(values).p99


def _distribution(values: Sequence[float]) -> Distribution:
    distribution = Distribution.of(values)
    assert distribution is not None
    return distribution


def report(turns: Mapping[str, Sequence[Sequence[Part]]]) -> None:
    print("\n| | TTFT p50 (added) | TTFT p99 (added) | CPU a request: in front, API servers | a token: in front, API servers |")
    print("|---|---|---|---|---|")
    costs = {name: _costs(of) for name, of in turns.items()}
    for name, of in turns.items():
        p50_ms, p99_ms = (_over_turns(of, figure) for figure in (p50, p99))
        p50_base, p99_base = (_over_turns(turns[DIRECT], figure) for figure in (p50, p99))
        (front_request, front_token), (api_request, api_token) = costs[name]
        print(
            f"| {name} | {p50_ms:.1f} ms ({p50_ms - p50_base:+.1f}) | {p99_ms:.1f} ms ({p99_ms - p99_base:+.1f}) "
            f"| {front_request:.2f}, {api_request:.2f} ms | {1e3 * front_token:.0f}, {1e3 * api_token:.0f} us |"
        )
    alone = costs[DIRECT][1][1]
    front, gateway = costs[FRONTEND][0][1] / alone, costs[FRONTEND][1][1] / alone
    print(f"\nof an API server's own CPU for a token: front-end {front:.2f}, gateway {gateway:.2f}, together {front + gateway:.2f}")


def _over_turns(turns: Sequence[Sequence[Part]], figure: Callable[[Sequence[float]], float]) -> float:
    """Median over the turns, of answers with many tokens, which keep all streams busy."""
    return median(figure(parts[-1].ttft_ms) for parts in turns)


def _costs(turns: Sequence[Sequence[Part]]) -> list[tuple[float, float]]:
    """CPU in ms (for a request, for a token), of what is in front and of the API servers; medians over the turns."""
    costs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for short, long in turns:
        for name in short.cpu_ms:
            a_token = (long.cpu_ms[name] - short.cpu_ms[name]) / (long.output_tokens - short.output_tokens)
            costs[name].append((short.cpu_ms[name] - a_token * short.output_tokens, a_token))
    return [(median(r for r, _ in costs[name]), median(t for _, t in costs[name])) for name in ("in front", "API servers")]


def main(arguments: Sequence[str]) -> None:
    args = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks.frontend", *arguments])
    print(f"command: {command}; seed {args.seed}\nmachine: {json.dumps(machine())}", flush=True)
    try:
        report(measure_in_turns(args))
    except DynaServeError as error:
        print(f"bench-frontend: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def measure_in_turns(args: argparse.Namespace) -> dict[str, list[list[Part]]]:
    """The turns of each system. Raises DynaServeError."""
    model = random_model(smollm2(), cache_dir() / "random-llama", seed=1)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = stack.enter_context(LocalFleet(model, vllm_args=["--no-enable-prefix-caching"], log_dir=logs))
        servers = [fleet.pids[f"instance-{index}"][0] for index in range(fleet.instances)]
        systems = {DIRECT: (fleet.urls, list[int]()), FRONTEND: ([fleet.frontend_url], [fleet.pids["frontend"][0]])}
        if (found := stack.enter_context(router(fleet.urls))) is None:
            print("vllm-router is not installed (pip install vllm-router): left out", flush=True)
        else:
            systems[ROUTER] = ([found[0]], [found[1]])
        turns: dict[str, list[list[Part]]] = defaultdict(list)
        for turn in range(-1, args.turns):  # the first one warms up
            for name, (urls, front) in systems.items():
                parts = measure(urls, {"in front": front, "API servers": servers}, str(model), args, args.seed + turn)
                if turn >= 0:
                    turns[name].append(parts)
                    ttft_ms = parts[-1].ttft_ms
                    print(f"turn {turn}, {name}: TTFT p50 {p50(ttft_ms):.1f} ms, p99 {p99(ttft_ms):.1f} ms", flush=True)
        return turns


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("frontend", __doc__, "--streams 32 --requests 6 --pause-s 0.5 --turns 5")
    parser.add_argument("--streams", type=whole(1), default=32, metavar="N", help="at the same time (default: %(default)s)")
    each = "of each stream, in each part of a turn (default: %(default)s)"
    parser.add_argument("--requests", type=whole(1), default=6, metavar="N", help=each)
    pause = "of each stream before a request, on average (default: none)"
    parser.add_argument("--pause-s", type=positive, default=0.0, metavar="T", help=pause)
    parser.add_argument("--turns", type=whole(1), default=5, metavar="N", help="after one that warms up (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of prompts and lengths (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
