"""What is predicted once all arrivals are known, and what the arrivals that are not make of a prediction."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from benchmarks.hindsight import Shape, by_chance, with_all_known
from dynaserve.execution_predictor import InstanceLimits
from dynaserve.global_scheduler import Options, Policy
from dynaserve.simulation import Batching, EngineOptions, SimulationOptions
from dynaserve.step_latency import ProfileTable, Roofline

STEP_MS, TOKEN_MS = 10.0, 0.5
TABLE = ProfileTable(Roofline(overhead_ms=STEP_MS, token_ms=TOKEN_MS, knee_tokens=1.0, pair_ms=0.0, decode_ms=0.0, context_ms=0.0))
LIMITS = InstanceLimits(max_step_tokens=100, step_ms=1000.0)


def record(arrived_s: float, prompt: int, outputs: int, split: int | None = None, resumed_ms: float = 0.0) -> dict[str, Any]:
    return {
        "arrived_s": 1000.0 + arrived_s,
        "prompt_tokens": prompt,
        "output_tokens": outputs,
        "split_token": split,
        "lifted": None,
        "alpha": {"instance": "a"},
        "beta": None if split is None else {"instance": "b"},
        "timeline_ms": {} if split is None else {"alpha_parked": resumed_ms - 7.0, "beta_resumed": resumed_ms},
    }


def step_ms(tokens: int) -> float:
    return STEP_MS + TOKEN_MS * tokens


def test_a_request_alone_takes_its_own_steps() -> None:
    (times,) = with_all_known([record(0.0, 150, 3)], TABLE, LIMITS)
    assert times.ttft_ms == pytest.approx(step_ms(100) + step_ms(50))
    assert times.end_ms == pytest.approx(times.ttft_ms + 2 * step_ms(1))


def test_one_that_came_later_is_part_of_what_is_known() -> None:
    alone, _ = with_all_known([record(0.0, 10, 30), record(10.0, 90, 1)], TABLE, LIMITS)
    beside, _ = with_all_known([record(0.0, 10, 30), record(0.1, 90, 1)], TABLE, LIMITS)
    assert beside.end_ms == pytest.approx(alone.end_ms + 90 * TOKEN_MS)


@pytest.mark.parametrize("split", [100, 150, 152])
def test_a_beta_waits_for_its_alpha_as_predicted_and_for_the_hand_over_as_measured(split: int) -> None:
    (times,) = with_all_known([record(0.0, 150, 4, split, resumed_ms=5000.0)], TABLE, LIMITS)
    (whole,) = with_all_known([record(0.0, 150, 4)], TABLE, LIMITS)
    assert times.end_ms == pytest.approx(whole.end_ms + 7.0)
    assert times.ttft_ms == pytest.approx(whole.ttft_ms + (7.0 if split < 150 else 0.0))


def fleet(seed: int) -> SimulationOptions:
    engine = EngineOptions(
        batching=Batching.slo, max_step_tokens=100, max_running=8, kv_tokens=100_000, min_prefill_tokens=16, slo_ms=100.0, margin=1.0
    )
    return SimulationOptions(
        instances=1,
        round_robin=False,
        placement=Options(Policy.colocated),
        engine=engine,
        hand_off_ms=5.0,
        step_sigma=0.0,
        tbt_slo_ms=math.inf,
        seed=seed,
    )


def far_apart(rng: random.Random) -> tuple[float, Shape]:
    return 1e6, (rng.randint(1, 500), 10)


def at_random(rng: random.Random) -> tuple[float, Shape]:
    return rng.expovariate(1 / 200), (300, 10)


def test_nothing_is_chance_where_nobody_comes_meanwhile() -> None:
    assert by_chance([(0.0, (50, 20)), (1e6, (50, 20))], far_apart, TABLE, fleet, 1) == pytest.approx([0.0] * 32)


def test_what_comes_meanwhile_by_chance_is_an_error() -> None:
    errors = by_chance([(0.0, (50, 20)), (100.0, (50, 20))], at_random, TABLE, fleet, 1)
    assert max(errors) > 0.1
    assert errors == by_chance([(0.0, (50, 20)), (100.0, (50, 20))], at_random, TABLE, fleet, 1)
