"""The dynamic policy's parts, against exhaustive searches."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.execution_predictor import ExecutionPredictor, InstanceLimits, VirtualRequest
from dynaserve.global_scheduler import Slo
from dynaserve.placement_search import (
    FleetDemand,
    FleetPlan,
    Outcome,
    SearchInstance,
    SearchOptions,
    SearchRequest,
    SplitSearch,
    find_balanced_split,
    objective_ms,
    others_wait_ms,
    plan_fleet,
    prefill_rate,
)
from dynaserve.step_latency import BatchShape, ProfileTable, Roofline

A100 = Roofline(overhead_ms=12.0, token_ms=0.105, knee_tokens=160.0, pair_ms=1.1e-6, decode_ms=0.05, context_ms=1.3e-4)
NOW_MS = 1000.0
finite = st.floats(0.0, 1e4)


def random_fleet(rng: random.Random, num_instances: int, table: ProfileTable) -> list[ExecutionPredictor]:
    """Instances with decodes under way and prompts that wait."""
    predictors = []
    for _ in range(num_instances):
        limits = InstanceLimits(kv_tokens=rng.choice([40_000, 200_000]), step_ms=rng.choice([45.0, 90.0]), max_step_tokens=4096)
        predictor = ExecutionPredictor(table, limits)
        decodes = [
            VirtualRequest(key=key, context_tokens=rng.randint(50, 3000), decode_tokens=rng.randint(1, 400))
            for key in range(rng.choice([0, 0, 3, 12, 40]))
        ]
        prompts = [
            VirtualRequest(key=1000 + key, prefill_tokens=rng.randint(20, 4000), decode_tokens=rng.randint(0, 200))
            for key in range(rng.choice([0, 0, 1, 3]))
        ]
        predictor.replace(decodes, prompts, NOW_MS)
        predictors.append(predictor)
    return predictors


def random_search(seed: int) -> tuple[list[SearchInstance], SearchRequest, SearchOptions]:
    rng = random.Random(seed)
    predictors = random_fleet(rng, rng.randint(1, 4), ProfileTable(A100))
    gathers = rng.random() < 0.6
    instances = [
        SearchInstance(p, keeps_free=gathers and n > 0, promised_tokens=rng.choice([0, 20_000, 39_500])) for n, p in enumerate(predictors)
    ]
    output = rng.randint(1, 300)
    request = SearchRequest(
        prompt_tokens=rng.choice([rng.randint(1, 200), rng.randint(200, 2500)]),
        expected_output_tokens=output,
        likely_output_tokens=2 * output,
        slo=rng.choice([Slo(), Slo(ttft_ms=400.0, tbt_ms=50.0)]),
    )
    options = SearchOptions(
        hand_off_ms=rng.choice([1.0, 8.0]),
        kv_token_ms=rng.choice([0.0, 0.01, 0.05]),
        kv_token_work_ms=rng.choice([0.0, 0.0, 0.02]),
        hand_off_price_ms=rng.choice([0.0, 20.0]),
        arrivals_per_ms=rng.choice([0.0, 0.001, 0.004]),
        lost_share=0.15,
        prefill_pressure=rng.choice([0.0, 0.5, 1.0]),
        mean_context_tokens=1500.0,
        level_step_ms=math.inf if gathers else rng.choice([25.0, 35.0, math.inf]),
    )
    return instances, request, options


def exhaustive_ms(instances: Sequence[SearchInstance], request: SearchRequest, options: SearchOptions, stride: int) -> float:
    """The lowest objective over whole runs and all cuts, inside the prompt, at its end and inside the answer, on all ordered pairs."""
    end = request.prompt_tokens + request.expected_output_tokens - 1
    search = SplitSearch()
    everyone = range(len(instances))
    best = min(search.try_whole(list(instances), i, request, options, NOW_MS).objective_ms for i in everyone)
    for alpha in everyone:
        for beta in everyone:
            for split in range(1, end, stride) if alpha != beta else ():
                best = min(best, search.try_cut(list(instances), alpha, beta, split, request, options, NOW_MS).objective_ms)
    return best


def test_the_search_is_close_to_the_exhaustive_optimum() -> None:
    gaps = []
    for seed in range(60):
        instances, request, options = random_search(seed)
        choice = SplitSearch().find(instances, request, options, NOW_MS)
        best_ms = exhaustive_ms(instances, request, options, 7)
        gaps.append(max(0.0, choice.objective_ms / best_ms - 1.0))
    print(f"gap: mean {statistics.mean(gaps):.4f}, worst {max(gaps):.4f}, {sum(g > 0.01 for g in gaps)} above 1 %")
    assert statistics.mean(gaps) <= 0.01
    assert sorted(gaps)[int(0.98 * len(gaps))] <= 0.05


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_is_what_it_is_predicted_to_cost(seed: int) -> None:
    instances, request, options = random_search(seed)
    search = SplitSearch()
    choice = search.find(instances, request, options, NOW_MS)
    if choice.beta is None:
        again = search.try_whole(instances, choice.alpha, request, options, NOW_MS)
    else:
        again = search.try_cut(instances, choice.alpha, choice.beta, choice.split_token, request, options, NOW_MS)
    assert again.objective_ms == pytest.approx(choice.objective_ms)
    assert choice.objective_ms == objective_ms(choice.outcome, request.slo)
    assert choice.objective_ms <= choice.whole_objective_ms
    assert choice.probes <= 6


def two(decodes: int) -> list[SearchInstance]:
    """The first gathers decodes and has some; the second is kept free of them."""
    table = ProfileTable(A100)
    gathering, free = (ExecutionPredictor(table, InstanceLimits(step_ms=50.0)) for _ in range(2))
    running = [VirtualRequest(key=key, context_tokens=800, decode_tokens=500) for key in range(decodes)]
    gathering.replace(running, [], NOW_MS)
    return [SearchInstance(gathering), SearchInstance(free, keeps_free=True)]


def decoding(decodes: int, step_ms: float = 50.0, prompt: int = 0) -> ExecutionPredictor:
    predictor = ExecutionPredictor(ProfileTable(A100), InstanceLimits(step_ms=step_ms))
    running = [VirtualRequest(key=key, context_tokens=800, decode_tokens=500) for key in range(decodes)]
    waiting = [VirtualRequest(key=1000, prefill_tokens=prompt, decode_tokens=0)] if prompt else []
    predictor.replace(running, waiting, NOW_MS)
    return predictor


BUSY = SearchOptions(arrivals_per_ms=0.001, lost_share=0.15, prefill_pressure=1.0)


def request_of(prompt: int, output: int = 200, **fields: Any) -> SearchRequest:
    return SearchRequest(prompt_tokens=prompt, expected_output_tokens=output, likely_output_tokens=output, **fields)


def test_gathered_decodes_take_prefill_from_the_free_instance() -> None:
    choice = SplitSearch().find(two(decodes=60), request_of(3000), BUSY, NOW_MS)
    assert (choice.alpha, choice.beta) == (1, 0)
    assert 1500 <= choice.split_token < 3000


@pytest.mark.parametrize("split", [2000, 2999, 3000])
def test_what_a_hand_off_takes_of_steps_others_wait_for(split: int) -> None:
    """Those that come to either instance; it is not in the TTFT."""

    def outcome(work_ms: float) -> Outcome:
        options = SearchOptions(arrivals_per_ms=0.001, kv_token_work_ms=work_ms)
        return SplitSearch().try_cut(two(decodes=10), 1, 0, split, request_of(3000), options, NOW_MS).outcome

    free, dear = outcome(0.0), outcome(0.05)
    assert dear.ttft_ms == free.ttft_ms
    # No queue is there: arrivals x work x work / 2, on each, of which the moving is a part.
    assert dear.others_wait_ms - free.others_wait_ms >= 2 * 0.001 * (0.05 * split) ** 2 / 2


def test_a_hand_off_that_takes_too_much_of_steps_is_not_made() -> None:
    dear = SearchOptions(arrivals_per_ms=0.001, lost_share=0.15, prefill_pressure=1.0, kv_token_work_ms=0.5)
    assert SplitSearch().find(two(decodes=60), request_of(3000), dear, NOW_MS).beta is None


@pytest.mark.parametrize(("step_tokens", "waited_for"), [(8192, 1000), (256, 232)])
def test_the_kv_of_the_last_step_of_an_alpha_is_waited_for(step_tokens: int, waited_for: int) -> None:
    """That of the steps before it has moved while they ran."""
    table = ProfileTable(A100)
    instances = [SearchInstance(ExecutionPredictor(table, InstanceLimits(max_step_tokens=step_tokens))) for _ in range(2)]

    def hand_off_ms(kv_token_ms: float) -> float:
        options = SearchOptions(hand_off_ms=3.0, kv_token_ms=kv_token_ms)
        return SplitSearch().try_cut(instances, 0, 1, 1000, request_of(1500), options, NOW_MS).hand_off_ms

    assert hand_off_ms(0.04) - hand_off_ms(0.0) == pytest.approx(0.04 * waited_for)
    in_answer = SearchOptions(hand_off_ms=3.0, kv_token_ms=0.04)
    late = SplitSearch().try_cut(instances, 0, 1, 1600, request_of(1500), in_answer, NOW_MS)
    without = SplitSearch().try_cut(instances, 0, 1, 1600, request_of(1500), SearchOptions(hand_off_ms=3.0), NOW_MS)
    assert late.hand_off_ms - without.hand_off_ms == pytest.approx(0.04)


def test_an_idle_fleet_cuts_nothing() -> None:
    instances = [SearchInstance(ExecutionPredictor(ProfileTable(A100), InstanceLimits(step_ms=50.0))) for _ in range(3)]
    for prompt in (10, 500, 4000):
        assert SplitSearch().find(instances, request_of(prompt), SearchOptions(), NOW_MS).beta is None


@pytest.mark.parametrize("prompt", [20, 300])
def test_what_resumes_does_not_wait_for_prompts(prompt: int) -> None:
    instances = [SearchInstance(decoding(60, prompt=20_000)), SearchInstance(decoding(0), keeps_free=True)]
    choice = SplitSearch().find(instances, request_of(prompt), BUSY, NOW_MS)
    assert (choice.alpha, choice.beta, choice.split_token) == (1, 0, prompt - 1)
    assert choice.outcome.ttft_ms < 3 * 50.0
    assert choice.outcome.gap_ms < 3 * 50.0
    behind = SplitSearch().try_cut(instances, 1, 0, 10, request_of(prompt), BUSY, NOW_MS)
    assert behind.outcome.ttft_ms > 1000.0


@pytest.mark.parametrize(("output", "handed_over"), [(1, False), (2, True)])
def test_an_answer_of_one_token_is_not_handed_over(output: int, handed_over: bool) -> None:
    instances = [SearchInstance(decoding(60, prompt=3000)), SearchInstance(decoding(0), keeps_free=True)]
    request = request_of(20, output=output, slo=Slo(ttft_ms=50.0))
    choice = SplitSearch().find(instances, request, SearchOptions(lost_share=9.0, prefill_pressure=1.0), NOW_MS)
    assert (choice.beta is not None and choice.split_token >= 20) == handed_over


def test_alpha_goes_on_until_beta_gets_a_seat() -> None:
    full = ExecutionPredictor(ProfileTable(A100), InstanceLimits(step_ms=50.0, max_requests=20))
    full.replace([VirtualRequest(key=key, context_tokens=800, decode_tokens=12 + key) for key in range(20)], [], NOW_MS)
    instances = [SearchInstance(full), SearchInstance(decoding(0), keeps_free=True)]
    request = request_of(300, slo=Slo(ttft_ms=100.0, tbt_ms=50.0))
    choice = SplitSearch().find(instances, request, BUSY, NOW_MS)
    assert (choice.alpha, choice.beta) == (1, 0)
    assert 300 < choice.split_token < 320
    at_once = SplitSearch().try_cut(instances, 1, 0, 300, request, BUSY, NOW_MS)
    assert at_once.outcome.gap_ms > choice.outcome.gap_ms + 50.0


def test_what_alpha_decodes_has_the_price_of_its_instance() -> None:
    instances = [SearchInstance(decoding(60)), SearchInstance(decoding(0), keeps_free=True)]
    request = request_of(300, output=200)

    def lost_ms(split_token: int) -> float:
        return SplitSearch().try_cut(instances, 1, 0, split_token, request, BUSY, NOW_MS).outcome.lost_prefill_ms

    half = request_of(300, output=101)  # the first token is no decode's
    assert lost_ms(300) == 0.0
    assert lost_ms(400) == pytest.approx(SplitSearch().try_whole(instances, 1, half, BUSY, NOW_MS).outcome.lost_prefill_ms)


def test_an_answer_of_one_token_has_no_decode_to_be_kept_elsewhere() -> None:
    request = request_of(3000, output=1)
    assert SplitSearch().try_whole(two(decodes=60), 1, request, BUSY, NOW_MS).outcome.lost_prefill_ms == 0.0
    gathering = SearchOptions(arrivals_per_ms=0.001, lost_share=0.9, prefill_pressure=1.0)
    assert SplitSearch().find(two(decodes=60), request, gathering, NOW_MS).beta is None


def test_tiny_prompts_are_not_cut() -> None:
    assert SplitSearch().find(two(decodes=60), request_of(40), BUSY, NOW_MS).beta is None


def test_a_request_that_may_not_be_cut_is_not() -> None:
    assert SplitSearch().find(two(decodes=60), request_of(3000, may_cut=False), BUSY, NOW_MS).beta is None


def test_in_a_large_fleet_the_instance_that_has_the_prompt_is_found_behind_a_short_queue() -> None:
    table = ProfileTable(A100)
    instances = [SearchInstance(ExecutionPredictor(table, InstanceLimits(step_ms=50.0))) for _ in range(40)]
    holder = ExecutionPredictor(table, InstanceLimits(step_ms=50.0))
    holder.replace([], [VirtualRequest(key=1, prefill_tokens=500)], NOW_MS)
    instances[29] = SearchInstance(holder, cached_tokens=3900)
    choice = SplitSearch().find(instances, request_of(4000), SearchOptions(), NOW_MS)
    assert (choice.alpha, choice.beta) == (29, None)


# --- the objective


@given(outcome=st.builds(Outcome, ttft_ms=finite, others_wait_ms=finite, lost_prefill_ms=finite, hand_off_ms=finite))
def test_without_slo_the_objective_is_what_everyone_waits(outcome: Outcome) -> None:
    waits = outcome.ttft_ms + outcome.others_wait_ms + outcome.lost_prefill_ms + outcome.hand_off_ms
    assert objective_ms(outcome, Slo()) == pytest.approx(waits)


def test_what_breaks_an_slo_costs_more() -> None:
    slo = Slo(ttft_ms=100.0, tbt_ms=50.0)
    assert objective_ms(Outcome(ttft_ms=110.0), slo) == pytest.approx(110.0 + 10 * 10.0)
    assert objective_ms(Outcome(decode_step_ms=60.0, decode_tokens=7.0), slo) == pytest.approx(70.0)
    assert objective_ms(Outcome(decodes_late_ms=4.0, decode_tokens=7.0), slo) == pytest.approx(28.0)
    assert objective_ms(Outcome(gap_ms=80.0, decode_tokens=70.0, alpha_decode_tokens=30.0), slo) == pytest.approx(80.0 + 10 * 30.0)
    assert objective_ms(Outcome(gap_ms=80.0, decode_tokens=25.0), slo) == pytest.approx(80.0 + 4 * 10 * 30.0), "one in 25 is late"
    assert objective_ms(Outcome(gap_ms=40.0, decode_tokens=25.0), slo) == pytest.approx(40.0)
    assert objective_ms(Outcome(alpha_decode_step_ms=60.0, alpha_decode_tokens=7.0), slo) == pytest.approx(70.0)
    assert objective_ms(Outcome(alpha_decodes_late_ms=4.0, alpha_decode_tokens=7.0), slo) == pytest.approx(28.0)
    assert objective_ms(Outcome(overflow_tokens=100.0, token_ms=0.1), slo) == pytest.approx(10.0)


def test_later_requests_wait_for_work_as_long_as_there_is_a_queue() -> None:
    assert others_wait_ms(300.0, 100.0, 0.01) == pytest.approx(0.01 * 100.0 * 350.0)


# --- decodes that others make late


def late_ms(decodes: int, options: SearchOptions, step_ms: float = 50.0, own_key: int | None = None, cost_scale: float = 1.0) -> float:
    predictor = decoding(decodes, step_ms)
    predictor.set_cost_scale(cost_scale, NOW_MS)
    instance = SearchInstance(predictor, own_key=own_key)
    found = SplitSearch().try_whole([instance], 0, request_of(300), options, NOW_MS)
    return found.outcome.decodes_late_ms


def test_a_decode_above_the_level_of_the_fleet_makes_all_of_its_instance_late() -> None:
    table = ProfileTable(A100)
    level_ms = _decodes_ms(table, 20, 1000.0)
    options = SearchOptions(mean_context_tokens=1000.0, level_step_ms=level_ms)
    assert late_ms(19, options) == 0.0
    thirty_ms = 30 * (_decodes_ms(table, 30, 1000.0) - level_ms)
    assert late_ms(29, options) == pytest.approx(thirty_ms)
    assert late_ms(30, options, own_key=7) == pytest.approx(thirty_ms)  # it is one of these
    assert late_ms(29, options, own_key=1_000_000) == pytest.approx(thirty_ms)  # it is not among them yet


@pytest.mark.parametrize(("seats", "counted"), [(40, 30), (24, 24)])
def test_what_waits_counts_as_far_as_there_are_seats_where_decodes_are_kept_level(seats: int, counted: int) -> None:
    options = SearchOptions(mean_context_tokens=1000.0, level_step_ms=_decodes_ms(ProfileTable(A100), 20, 1000.0))
    full = ExecutionPredictor(ProfileTable(A100), InstanceLimits(step_ms=50.0, max_requests=seats))
    running = [VirtualRequest(key=key, context_tokens=800, decode_tokens=3) for key in range(24)]
    waiting = [VirtualRequest(key=100 + key, prefill_tokens=50, decode_tokens=400) for key in range(6)]
    full.replace(running, [*waiting, VirtualRequest(key=200, prefill_tokens=50)], NOW_MS)  # the last one decodes elsewhere
    found = SplitSearch().try_whole([SearchInstance(full)], 0, request_of(300), options, NOW_MS)
    assert found.outcome.decodes_late_ms == late_ms(counted, options)


def test_no_step_is_longer_than_its_limit_where_decodes_are_kept_level() -> None:
    table = ProfileTable(A100)
    limit_ms = _decodes_ms(table, 25, 1000.0)
    level_ms = _decodes_ms(table, 20, 1000.0)
    assert late_ms(59, SearchOptions(mean_context_tokens=1000.0, level_step_ms=level_ms), limit_ms) == pytest.approx(
        60 * (limit_ms - level_ms)
    )
    assert late_ms(59, SearchOptions(mean_context_tokens=1000.0, level_step_ms=_decodes_ms(table, 40, 1000.0)), limit_ms) == 0.0


def test_a_beta_that_takes_a_seat_keeps_others_waiting_until_an_answer_ends() -> None:
    def others_wait_ms(waiting: int, seats: int) -> float:
        full = ExecutionPredictor(ProfileTable(A100), InstanceLimits(step_ms=50.0, max_requests=seats))
        running = [VirtualRequest(key=key, context_tokens=800, decode_tokens=40 + key) for key in range(20)]
        prompts = [VirtualRequest(key=100 + key, prefill_tokens=50, decode_tokens=400) for key in range(waiting)]
        full.replace(running, prompts, NOW_MS)
        instances = [SearchInstance(decoding(0)), SearchInstance(full)]
        options = SearchOptions(arrivals_per_ms=0.001)
        return SplitSearch().try_cut(instances, 0, 1, 299, request_of(300, output=200), options, NOW_MS).outcome.others_wait_ms

    seat_ms = 200 * _decodes_ms(ProfileTable(A100), 20, 800.0) / 20
    assert others_wait_ms(3, 20) - others_wait_ms(0, 20) == pytest.approx(3 * seat_ms, rel=0.05)
    assert others_wait_ms(3, 30) - others_wait_ms(0, 30) < 3 * 20.0


def test_a_slow_instance_has_its_share_of_the_decodes() -> None:
    options = SearchOptions(mean_context_tokens=1000.0, level_step_ms=_decodes_ms(ProfileTable(A100), 20, 1000.0))
    assert late_ms(19, options, cost_scale=1.2) == 0.0
    assert late_ms(29, options, cost_scale=1.2) == pytest.approx(1.2 * late_ms(29, options))


def test_a_decode_that_takes_a_step_beyond_its_limit_makes_the_others_late() -> None:
    table = ProfileTable(A100)
    options = SearchOptions(mean_context_tokens=1000.0)
    limit_ms = _decodes_ms(table, 20, 1000.0)
    assert late_ms(19, options, limit_ms) == 0.0
    assert late_ms(20, options, limit_ms) == pytest.approx(20 * (_decodes_ms(table, 21, 1000.0) - limit_ms))
    assert late_ms(30, options, limit_ms) == pytest.approx(30 * (_decodes_ms(table, 31, 1000.0) - _decodes_ms(table, 30, 1000.0)))


def test_decodes_are_kept_level_where_nothing_is_gathered() -> None:
    # The first has the more decodes, and is free at once.
    instances = [SearchInstance(decoding(24)), SearchInstance(decoding(20, prompt=400))]
    request = SearchRequest(prompt_tokens=30, expected_output_tokens=400, likely_output_tokens=400)
    level = SearchOptions(mean_context_tokens=1000.0, level_step_ms=_decodes_ms(ProfileTable(A100), 22, 1000.0))
    assert SplitSearch().find(instances, request, SearchOptions(mean_context_tokens=1000.0), NOW_MS).alpha == 0
    assert SplitSearch().find(instances, request, level, NOW_MS).alpha == 1


# --- the fleet plan


@settings(max_examples=300, deadline=None)
@given(
    instances=st.integers(1, 12),
    decodes=st.floats(0.0, 900.0),
    context=st.floats(10.0, 4000.0),
    prompt=st.integers(1, 8000),
    step_ms=st.floats(20.0, 200.0),
    kv_tokens=st.integers(1000, 500_000),
    current=st.integers(0, 12),
    pressure=st.sampled_from([0.0, 0.04, 0.06, 0.5, 1.5]),
    outputs=st.sampled_from([0.0, 0.05, 0.2, 0.35, 1.0]),
    to_come=st.floats(10.0, 4000.0),
    kv_token_ms=st.sampled_from([0.0, 0.01, 0.06, 0.3]),
    gathering_cost=st.sampled_from([1.0, 0.7]),
)
def test_the_plan_has_the_highest_rate_of_all_but_for_what_a_change_has_to_gain(
    instances: int,
    decodes: float,
    context: float,
    prompt: int,
    step_ms: float,
    kv_tokens: int,
    current: int,
    pressure: float,
    outputs: float,
    to_come: float,
    kv_token_ms: float,
    gathering_cost: float,
) -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=step_ms, kv_tokens=kv_tokens)

    def beside(mean: float, most_ms: float = step_ms) -> float:
        shorter = InstanceLimits(step_ms=most_ms, kv_tokens=kv_tokens)
        without = math.exp(-mean)
        free = prefill_rate(table, limits, 0, context, prompt)
        if without > 1 - 1e-9:
            return free
        # As std::llround does.
        with_some = prefill_rate(table, shorter, max(1, math.floor(mean / (1 - without) + 0.5)), context, prompt)
        return without * free + (1 - without) * with_some

    colocated, unit = instances * beside(decodes / instances), instances * beside(0)
    arriving = pressure * unit
    demand = FleetDemand(
        instances=instances,
        decodes=decodes,
        mean_context_tokens=context,
        prompt_tokens=prompt,
        prefill_rate=arriving,
        output_rate=outputs * arriving,
        answer_context_tokens=to_come,
        kv_token_ms=kv_token_ms,
        gathering_cost=gathering_cost,
    )
    plan = plan_fleet(table, limits, demand, current)
    gathering_ms = step_ms / gathering_cost

    def most_within(kv_tokens: float, context: float, step_ms: float) -> int:
        return max((n for n in range(1, 257) if n * context <= kv_tokens and _decodes_ms(table, n, context) <= step_ms), default=0)

    def generated(decodes: int) -> float:
        return decodes / _decodes_ms(table, decodes, to_come) / gathering_cost if decodes else 0.0

    most = most_within(1.2 * kv_tokens, context, math.inf)
    while most and _decodes_ms(table, most, max(context, to_come)) > gathering_ms:
        most -= 1
    in_steps = generated(most_within(math.inf, to_come, gathering_ms))

    def gathered(gathering: int, slack: float = 1.0) -> float:
        if most == 0:
            return 0.0
        held = min(int(slack * most), decodes / gathering)
        others = max(0.0, decodes - gathering * held) / (instances - gathering)
        moved = min(gathering, instances - gathering) * 0.9 / kv_token_ms if kv_token_ms else math.inf
        share = gathering * held / decodes if decodes else 1.0
        prefilled = (instances - gathering) * beside(others)
        each = outputs * min(arriving, colocated) / gathering
        all_seats_ms = min(int(kv_tokens / to_come), limits.max_requests) / each if each else math.inf
        return gathering * beside(held, min(step_ms, all_seats_ms)) + (moved / share if prefilled * share > moved else prefilled)

    def rate(gathering: int, slack: float = 1.0) -> float:
        found = gathered(gathering, slack)
        brought = outputs * min(arriving, found)
        is_full = brought > 0.9 * gathering * in_steps
        if gathering + 1 < instances and is_full and gathered(gathering + 1) >= arriving:
            return 0.0
        return found if brought <= 1.5 * gathering * in_steps * slack else 0.0

    assert plan.colocated_rate == pytest.approx(colocated)
    if plan.gathering:
        brought = outputs * min(arriving, plan.prefill_rate)
        assert plan.is_short_of_room == (brought > plan.gathering * generated(most_within(kv_tokens, to_come, math.inf)))
        assert plan.is_short_of_steps == (arriving <= colocated and outputs * arriving > plan.gathering * in_steps)
    if decodes == 0:
        assert plan.prefill_rate == pytest.approx(colocated)  # no decodes cost nothing wherever they are
        return
    gathers = 0 < current < instances
    presses = arriving == 0 or pressure >= (0.05 if gathers else 0.08)
    rates = {k: rate(k) for k in range(1, instances)} if presses else {}
    kept = rate(current, 1.25) if presses and gathers else 0.0
    if plan.gathering:
        possible = (rates[plan.gathering], kept) if plan.gathering == current else (rates[plan.gathering],)
        assert any(plan.prefill_rate == pytest.approx(found) for found in possible)
        assert plan.prefill_rate > colocated + (0.005 if plan.gathering == current else 0.03) * unit - 1e-9
    else:
        assert plan.prefill_rate == pytest.approx(colocated)
    there_is = kept if kept > colocated + 0.005 * unit else colocated
    assert plan.prefill_rate >= max([there_is, *(found - 0.03 * unit for found in rates.values())]) - 1e-9


def _decodes_ms(table: ProfileTable, decodes: int, context: float) -> float:
    return table.step_ms(BatchShape(decodes=decodes, decode_context_tokens=round(decodes * context)))


def planned(
    decodes: int,
    current: int,
    limits: InstanceLimits,
    prefill_rate: float = 0.0,
    output_rate: float = 0.0,
    output_rate_error: float = 0.0,
    kv_token_ms: float = 0.0,
    forced: int | None = None,
) -> FleetPlan:
    demand = FleetDemand(
        instances=2,
        decodes=decodes,
        mean_context_tokens=1000.0,
        prompt_tokens=2000,
        prefill_rate=prefill_rate,
        output_rate=output_rate,
        output_rate_error=output_rate_error,
        answer_context_tokens=1000.0,
        kv_token_ms=kv_token_ms,
    )
    return plan_fleet(ProfileTable(A100), limits, demand, current, forced=forced)


def gathering(
    decodes: int, current: int, limits: InstanceLimits, prefill_rate: float = 0.0, output_rate: float = 0.0, output_rate_error: float = 0.0
) -> int:
    return planned(decodes, current, limits, prefill_rate, output_rate, output_rate_error).gathering


def test_nothing_is_gathered_over_links_that_do_not_carry_the_prompts() -> None:
    """192 KiB a token over links that do not matter, that the gain is worth nonetheless, and that leave none."""
    limits = InstanceLimits(step_ms=50.0, kv_tokens=200_000)
    links_ms = [196608 / gbytes_per_s / 1e6 for gbytes_per_s in (25, 2, 0.5)]
    plans = [planned(40, 0, limits, prefill_rate=9.0, output_rate=0.5, kv_token_ms=link_ms) for link_ms in links_ms]
    assert [plan.gathering for plan in plans] == [1, 1, 0]
    assert plans[0].prefill_rate > plans[1].prefill_rate > plans[2].prefill_rate == plans[2].colocated_rate


def test_more_decodes_than_an_instance_has_memory_for_are_gathered_until_they_are_far_more() -> None:
    limits = InstanceLimits(step_ms=50.0, kv_tokens=90_000)
    # 1.2 times what memory holds: gathered, they are fewer at a time than beside prefill. A plan that there is takes a quarter more.
    assert [gathering(decodes, 0, limits) for decodes in (8, 90, 108, 113, 130)] == [1, 1, 1, 0, 0]
    assert [gathering(decodes, 1, limits) for decodes in (8, 90, 113, 135, 150)] == [1, 1, 1, 1, 0]


def test_decodes_are_gathered_where_prompts_press_and_for_a_while_longer() -> None:
    limits = InstanceLimits(step_ms=50.0, kv_tokens=1_000_000)
    free = 2 * prefill_rate(ProfileTable(A100), limits, 0, 0.0, 2000)
    assert [gathering(60, 0, limits, share * free) for share in (0.01, 0.079, 0.081, 0.9)] == [0, 0, 1, 1]
    assert [gathering(60, 1, limits, share * free) for share in (0.01, 0.049, 0.051, 0.9)] == [0, 0, 1, 1]


def test_nothing_stays_gathered_where_answers_are_what_a_fleet_lacks() -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=50.0, kv_tokens=1_000_000, max_requests=128)
    most = max(n for n in range(1, 129) if _decodes_ms(table, n, 1000.0) <= 50.0)
    most_rate = 1.25 * 1.5 * most / _decodes_ms(table, most, 1000.0)
    assert gathering(120, 1, limits, 8.0, 0.99 * most_rate) == 1
    assert gathering(120, 1, limits, 8.0, 1.01 * most_rate) == 0
    # Answers do not come faster than their prompts are prefilled.
    assert gathering(120, 1, limits, 100.0, 1.01 * most_rate) == 1
    # What is seen once in ten times by chance, 1.28 standard errors, is not what a fleet lacks.
    assert gathering(120, 1, limits, 8.0, 1.5 * most_rate, 0.51 / 1.28 * most_rate) == 1
    assert gathering(120, 1, limits, 8.0, 1.5 * most_rate, 0.49 / 1.28 * most_rate) == 0


def test_gathering_instances_generate_what_arrives_with_the_seats_they_have() -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=100.0, kv_tokens=1_000_000, max_requests=128)

    def rate(output_rate: float) -> float:
        return planned(60, 0, limits, 10.0, output_rate, forced=1).prefill_rate

    def in_steps_of(step_ms: float) -> float:
        shorter = InstanceLimits(step_ms=step_ms, kv_tokens=1_000_000, max_requests=128)
        return prefill_rate(table, shorter, 60, 1000.0, 2000) + prefill_rate(table, limits, 0, 1000.0, 2000)

    assert rate(1.27) == pytest.approx(in_steps_of(100.0))
    assert rate(1.6) == pytest.approx(in_steps_of(80.0))
    assert rate(2.56) == pytest.approx(in_steps_of(50.0))
    assert in_steps_of(100.0) > in_steps_of(80.0) > in_steps_of(50.0)
    assert [gathering(60, 0, limits, 10.0, output_rate) for output_rate in (1.0, 2.56)] == [1, 0]


def test_gathering_instances_are_short_of_room_where_memory_does_not_hold_the_answers_that_come() -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=100.0, kv_tokens=60_000)

    def is_short(output_rate: float) -> bool:
        rates = {"prefill_rate": 10.0, "output_rate": output_rate}
        demand = FleetDemand(instances=2, decodes=30, mean_context_tokens=1000.0, prompt_tokens=2000, answer_context_tokens=1000.0, **rates)
        return plan_fleet(table, limits, demand, 1, forced=1).is_short_of_room

    most_rate = 60 / _decodes_ms(table, 60, 1000.0)
    assert [is_short(share * most_rate) for share in (0.5, 0.99, 1.01)] == [False, False, True]


def test_gathering_instances_are_short_of_steps_where_answers_are_what_the_fleet_lacks() -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=50.0)
    most = max(n for n in range(1, 257) if _decodes_ms(table, n, 1000.0) <= 50.0)
    most_rate = most / _decodes_ms(table, most, 1000.0)
    colocated_rate = planned(60, 0, limits, 1.0, 0.0).colocated_rate

    def is_short(prefill_rate: float, output_rate: float) -> bool:
        return planned(60, 1, limits, prefill_rate, output_rate, forced=1).is_short_of_steps

    assert [is_short(0.5 * colocated_rate, share * most_rate) for share in (0.99, 1.01)] == [False, True]
    assert not is_short(1.01 * colocated_rate, 1.01 * most_rate)


def test_more_gather_where_those_that_do_are_full_and_the_rest_prefills_what_arrives() -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=50.0)
    most = max(n for n in range(1, 257) if _decodes_ms(table, n, 1000.0) <= 50.0)
    most_rate = most / _decodes_ms(table, most, 1000.0)
    free = prefill_rate(table, limits, 0, 1000.0, 2000)

    def gathering(prefill: float, share: float) -> int:
        rates = {"prefill_rate": prefill, "output_rate": share * most_rate}
        demand = FleetDemand(instances=4, decodes=40, mean_context_tokens=1000.0, prompt_tokens=2000, answer_context_tokens=1000.0, **rates)
        return plan_fleet(table, limits, demand, 1).gathering

    assert [gathering(1.5 * free, share) for share in (0.8, 1.1)] == [1, 2]
    assert gathering(3.5 * free, 1.1) == 1, "two would not prefill what arrives"


def test_who_gathers_holds_what_it_admits_not_what_leaves_room_for_prefill() -> None:
    table = ProfileTable(A100)
    mixed_ms = _decodes_ms(table, 20, 1000.0)
    demand = FleetDemand(
        instances=2,
        decodes=60,
        mean_context_tokens=1000.0,
        prompt_tokens=2000,
        prefill_rate=8.0,
        output_rate=60 / _decodes_ms(table, 60, 1000.0) / 2,
        answer_context_tokens=1000.0,
    )

    def plan(admit_ms: float) -> FleetPlan:
        return plan_fleet(table, InstanceLimits(step_ms=mixed_ms, admit_ms=admit_ms), demand, 0, forced=1)

    alike, more = plan(0.0), plan(_decodes_ms(table, 80, 1000.0))
    assert plan(mixed_ms) == alike
    assert more.prefill_rate > alike.prefill_rate, "of more decodes the other one is free"


def test_a_plan_stays_while_another_is_hardly_better() -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=50.0)
    chosen = {
        plan_fleet(table, limits, FleetDemand(instances=8, decodes=d, mean_context_tokens=900.0, prompt_tokens=2000), 3).gathering
        for d in range(300, 330)
    }
    assert len(chosen) == 1


def test_a_forced_plan_has_its_own_rate_and_room_whatever_it_gains() -> None:
    table, limits = ProfileTable(A100), InstanceLimits(step_ms=100.0, kv_tokens=60_000)
    demand = FleetDemand(
        instances=4,
        decodes=200,
        mean_context_tokens=1000.0,
        prompt_tokens=2000,
        prefill_rate=10.0,
        output_rate=8.0,
        answer_context_tokens=1000.0,
    )
    assert plan_fleet(table, limits, demand, 0).gathering == 0  # it would not keep up
    forced = plan_fleet(table, limits, demand, 0, forced=1)
    assert (forced.gathering, forced.is_short_of_room) == (1, True)
    most = 72  # 1.2 times the memory
    rest = prefill_rate(table, limits, math.ceil((200 - most) / 3), 1000.0, 2000)
    shorter = InstanceLimits(step_ms=60 / 8.0, kv_tokens=60_000)  # all memory taken, these steps generate what arrives
    assert forced.prefill_rate == pytest.approx(prefill_rate(table, shorter, most, 1000.0, 2000) + 3 * rest)


@pytest.mark.parametrize("forced", [0, 4, 9])
def test_a_forced_plan_of_none_or_all_is_colocation(forced: int) -> None:
    demand = FleetDemand(instances=4, decodes=60, mean_context_tokens=1000.0, prompt_tokens=2000)
    limits = InstanceLimits(step_ms=50.0)
    assert plan_fleet(ProfileTable(A100), limits, demand, 1).gathering > 0
    plan = plan_fleet(ProfileTable(A100), limits, demand, 1, forced=forced)
    assert (plan.gathering, plan.is_short_of_room) == (0, False)
    assert plan.prefill_rate == plan.colocated_rate


def test_an_instance_that_holds_no_decode_within_a_step_gathers_none() -> None:
    table = ProfileTable(A100)
    limits = InstanceLimits(step_ms=0.9 * _decodes_ms(table, 1, 10_000.0))
    demand = FleetDemand(instances=4, decodes=4, mean_context_tokens=10_000.0, prompt_tokens=1000, answer_context_tokens=1000.0)
    assert plan_fleet(table, limits, demand, 0).gathering == 0


# --- the paper's Algorithm 1


def test_algorithm_1_starts_at_disaggregation() -> None:
    alpha, beta = (ExecutionPredictor(ProfileTable(A100), InstanceLimits()) for _ in range(2))
    split = find_balanced_split(alpha, beta, 1000, 1500, math.inf, 0.0)
    assert (split.split_token, split.probes) == (1000, 1)


@pytest.mark.parametrize(("prompt", "output"), [(1024, 1024), (219, 1467), (4000, 50), (10, 500)])
def test_algorithm_1_balances_within_its_probes(prompt: int, output: int) -> None:
    alpha, beta = (ExecutionPredictor(ProfileTable(A100), InstanceLimits()) for _ in range(2))
    end = prompt + output - 1
    at_start = find_balanced_split(alpha, beta, prompt, end, math.inf, 0.0)
    split = find_balanced_split(alpha, beta, prompt, end, 1.0, 0.0)
    assert split.probes <= 6
    assert 0 <= split.split_token <= end
    assert split.imbalance_ms <= max(0.25 * at_start.imbalance_ms, 100.0)
