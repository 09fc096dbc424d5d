"""`make bench-scheduler`: what a decision of the dynamic policy costs, and how far it is from trying every cut.

Decisions are timed from Python, in CPU time of the thread (a machine that pauses processes says nothing by the wall clock), on fleets
that are full of live requests; those whose placement is timed come beside them, and end as predicted. The gap is that of the objective
to the lowest one that an exhaustive search finds: over all whole runs and every cut at each token, inside the prompt, at its end and
inside the answer, on all ordered pairs of instances. Its fleets are random, with running decodes and waiting prompts.
The predictor's error is that to walking every step by the same table and batch rule; against real instances, `make bench-predictor`.
Behind a deep queue the timeline is played again only now and then: what news and a prediction cost there on average, and how far the
prediction is from that of a timeline that is played anew.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.parsers import parser_of
from dynaserve.bench.options import whole
from dynaserve.bench.report import machine
from dynaserve.execution_predictor import ExecutionPredictor, Horizon, InstanceLimits, VirtualRequest
from dynaserve.global_scheduler import GlobalScheduler, InstanceState, Options, Policy, RequestSpec
from dynaserve.placement_search import SplitSearch
from dynaserve.step_latency import ProfileTable, Roofline
from tests.test_placement_search import NOW_MS, exhaustive_ms, random_search
from tests.virtual_instance import SteppingInstance

SIZES = ((2, 64), (8, 128), (64, 256), (1024, 100))
A100_14B = Roofline(overhead_ms=12.0, token_ms=0.105, knee_tokens=160.0, pair_ms=1.1e-6, decode_ms=0.05, context_ms=1.3e-4)
ANSWER_TOKENS = 4_000
"""Of those that fill the fleet: none ends while it lasts."""
LASTS_MS = 40_000.0
"""Of virtual time, by which contexts have grown; then another full fleet takes its place."""
DEEP = (100, 700, 2000)
"""Requests that wait for one instance."""
NEWS = 200
NEWS_EVERY_MS = 50.0
REST_MS = 800.0
"""Between two requests for one instance, on average: some six tenths of what it can prefill beside its decodes."""


def main(arguments: Sequence[str]) -> None:
    args = _parser().parse_args(arguments)
    print(f"machine: {json.dumps(machine())}")
    print(f"{'instances x live':>18s} {'p50 us':>8s} {'p99 us':>8s} {'mean probes':>12s} {'cut':>6s}")
    for instances, live in SIZES:
        _print_size(instances, live, args.decisions, args.seed)
    seeds = [args.seed * 10_000 + n for n in range(args.gap_fleets)]
    print_gaps([_gap(seed) for seed in seeds])
    errors = [_predictor_error(random.Random(seed)) for seed in seeds]
    print(f"predicted end against walking every step, {len(errors)} instances: largest error {max(errors):.1g} of it")
    for waiting in DEEP:
        _print_deep_queue(waiting, random.Random(args.seed))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("placement", __doc__.partition("\n")[0], "--decisions 2000 --gap-fleets 2000")
    parser.add_argument("--decisions", type=whole(1), default=2000, metavar="N", help="per size (default: %(default)s)")
    parser.add_argument(
        "--gap-fleets", type=whole(1), default=2000, metavar="N", help="random fleets to search exhaustively (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole(0), default=1, metavar="N", help="of requests and fleets (default: %(default)s)")
    return parser


def _print_size(instances: int, live: int, decisions: int, seed: int) -> None:
    rng = random.Random(seed)
    until_ms = now_ms = 0.0
    running: list[tuple[float, str]] = []
    taken_us, probes, cuts = [], [], 0
    for number in range(decisions):
        if now_ms >= until_ms:
            scheduler, now_ms = _full_fleet(instances, live, rng)
            until_ms = now_ms + LASTS_MS
            running.clear()
        now_ms += rng.expovariate(instances / REST_MS)
        while running and running[0][0] <= now_ms:
            scheduler.finish(heapq.heappop(running)[1], now_ms)
        spec = _request(f"timed-{number}", rng.randint(50, 4000), rng.randint(10, 400))
        started_s = time.thread_time()
        placement = scheduler.place(spec, now_ms)
        taken_us.append(1e6 * (time.thread_time() - started_s))
        assert placement is not None
        assert placement.prediction is not None
        probes.append(placement.prediction.probes)
        cuts += placement.beta is not None
        took_ms = placement.prediction.ttft_ms + spec.expected_output_tokens * placement.prediction.decode_step_ms
        heapq.heappush(running, (now_ms + took_ms, spec.request_id))
    size = f"{instances} x {live}"
    p50, p99 = _quantile(taken_us, 0.5), _quantile(taken_us, 0.99)
    print(f"{size:>18s} {p50:8.0f} {p99:8.0f} {statistics.mean(probes):12.1f} {cuts / decisions:6.0%}")


def _full_fleet(instances: int, live: int, rng: random.Random) -> tuple[GlobalScheduler, float]:
    scheduler = GlobalScheduler(Options(Policy.dynamic), ProfileTable(A100_14B))
    for number in range(instances):
        scheduler.observe(InstanceState(f"i{number:04d}", limits=InstanceLimits(max_requests=512, step_ms=95.0, kv_tokens=2_000_000)))
    now_ms = 0.0
    for number in range(instances * live):
        now_ms += rng.expovariate(instances / 20.0)
        # Told to run whole: without a search, on the least reserved instance.
        scheduler.place(_request(str(number), 100, ANSWER_TOKENS, forced_split=0), now_ms)
    return scheduler, now_ms + 10_000.0


def _request(request_id: str, prompt_tokens: int, output_tokens: int, forced_split: int | None = None) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        max_output_tokens=output_tokens,
        expected_output_tokens=output_tokens,
        forced_split=forced_split,
    )


def print_gaps(gaps: Sequence[float]) -> None:
    shares = {"mean": statistics.mean(gaps), "p95": _quantile(gaps, 0.95), "p99": _quantile(gaps, 0.99), "worst": max(gaps)}
    told = ", ".join(f"{name} {share:.2%}" for name, share in shares.items())
    print(f"gap to exhaustive search, {len(gaps)} fleets: {told}")


def _gap(seed: int) -> float:
    instances, request, options = random_search(seed)
    choice = SplitSearch().find(instances, request, options, NOW_MS)
    best_ms = exhaustive_ms(instances, request, options, stride=1)
    return max(0.0, choice.objective_ms / best_ms - 1.0)


def _predictor_error(rng: random.Random) -> float:
    """Of when a newcomer ends on an instance that has work, as a share of the time until then."""
    table = ProfileTable(A100_14B)
    limits = InstanceLimits(max_requests=rng.randint(4, 64), step_ms=rng.uniform(30.0, 100.0), kv_tokens=100_000)
    predictor, walking = ExecutionPredictor(table, limits), SteppingInstance(table, limits)
    now_ms = 0.0
    for key in range(rng.randint(1, 40)):
        now_ms += rng.expovariate(1 / 100.0)
        request = VirtualRequest(key=key, prefill_tokens=rng.randint(1, 3000), decode_tokens=rng.randint(1, 300))
        walking.advance(now_ms)
        walking.add(request, now_ms)
        predictor.add(request, now_ms)
    newcomer = VirtualRequest(key=1000, prefill_tokens=rng.randint(1, 3000), decode_tokens=rng.randint(1, 300))
    predicted_ms = predictor.predict(newcomer, now_ms).end_ms
    walked = walking.add(newcomer, now_ms)
    walking.play_out()
    assert walked.end_ms is not None
    return abs(predicted_ms - walked.end_ms) / (walked.end_ms - now_ms)


def _print_deep_queue(waiting: int, rng: random.Random) -> None:
    """News is of an instance whose steps take up to a tenth more or less than was foretold."""
    table, limits = ProfileTable(A100_14B), InstanceLimits(max_requests=128, step_ms=95.0, kv_tokens=2_000_000)
    instance, told = ExecutionPredictor(table, limits), ExecutionPredictor(table, limits)
    live = list(range(waiting + limits.max_requests // 2))
    for key in live:
        request = VirtualRequest(key=key, prefill_tokens=rng.randint(100, 3000), decode_tokens=rng.randint(10, 400))
        instance.add(request, 0.0)
        told.add(request, 0.0)
    newcomer, taken_us, errors = VirtualRequest(key=live[-1] + 1, prefill_tokens=1000, decode_tokens=100), [], []
    for news in range(1, NEWS + 1):
        now_ms = news * NEWS_EVERY_MS
        instance.set_cost_scale(rng.uniform(0.9, 1.1), now_ms)
        standing = [one for key in live if (one := instance.find(key, now_ms)) is not None]
        live = [one.key for one in standing]
        news_of = [r for r in standing if r.context_tokens > 0], [r for r in standing if r.context_tokens == 0]
        started_s = time.thread_time()
        told.replace(*news_of, now_ms)
        predicted_ms = told.predict(newcomer, now_ms, Horizon.prefill_end).prefill_end_ms
        taken_us.append(1e6 * (time.thread_time() - started_s))
        anew = ExecutionPredictor(table, limits)
        anew.replace(*news_of, now_ms)
        exact_ms = anew.predict(newcomer, now_ms, Horizon.prefill_end).prefill_end_ms
        errors.append(abs(predicted_ms - exact_ms) / (exact_ms - now_ms))
    told_us = f"mean {statistics.mean(taken_us):.0f} us, p99 {_quantile(taken_us, 0.99):.0f}"
    print(f"{waiting} waiting, news and a prediction: {told_us}; TTFT to that of a timeline played anew: largest error {max(errors):.1%}")


def _quantile(values: Sequence[float], quantile: float) -> float:
    return sorted(values)[min(len(values) - 1, int(quantile * len(values)))]


if __name__ == "__main__":
    main(sys.argv[1:])
