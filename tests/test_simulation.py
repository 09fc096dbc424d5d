"""The simulator against what can be worked out by hand, and its command."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve import latency_profile
from dynaserve.bench import latency_tables, simulate, simulated, trial
from dynaserve.bench.capacity import SEARCH_OPTIONS
from dynaserve.bench.measures import Slo
from dynaserve.errors import ConfigError
from dynaserve.global_scheduler import Options, Policy
from dynaserve.latency_profile import ProfileKey
from dynaserve.simulation import Batching, EngineOptions, SimulatedRequest, SimulationOptions, SimulationResult, gap_bin_ms
from dynaserve.simulation import simulate as play
from dynaserve.step_latency import ProfileTable
from workloads.trace import TraceRequest

EVERY_STEP_10_MS = "10,0,1,0,0,0"
GRID_HEADER = "model,system,tp,prefill_new,prefill_cached,decode_n,decode_ctx,ms"


def table(roofline: str = EVERY_STEP_10_MS) -> ProfileTable:
    return latency_tables.from_coefficients(roofline)


def engine(
    batching: Batching = Batching.fixed_chunk,
    chunk: int = 2048,
    running: int = 256,
    kv: int = 1 << 30,
    slo_ms: float = math.inf,
    margin: float = 1.0,
) -> EngineOptions:
    return EngineOptions(
        batching=batching, max_step_tokens=chunk, max_running=running, kv_tokens=kv, min_prefill_tokens=16, slo_ms=slo_ms, margin=margin
    )


def run(
    requests: list[tuple[float, int, int]],
    instance: EngineOptions | None = None,
    placement: Options | None = None,
    *,
    instances: int = 1,
    roofline: str = EVERY_STEP_10_MS,
    sigma: float = 0.0,
    drift_sigma: float = 0.0,
    drift_ms: float = 5000.0,
    seed: int = 1,
    tbt_slo_ms: float = math.inf,
    ttft_slo_ms: float = math.inf,
    kv_token_ms: float = 0.0,
    kv_token_work_ms: float = 0.0,
    streams_kv: bool = True,
    expected: int | None = None,
    revises: bool = True,
) -> SimulationResult:
    """requests: arrival in ms, prompt and output tokens. placement None: in turns, whole."""
    rows = [SimulatedRequest(at_ms, prompt, output, expected or output) for at_ms, prompt, output in requests]
    options = SimulationOptions(
        instances=instances,
        round_robin=placement is None,
        placement=placement or Options(Policy.colocated),
        engine=instance or engine(),
        hand_off_ms=2.0,
        kv_token_ms=kv_token_ms,
        kv_token_work_ms=kv_token_work_ms,
        streams_kv=streams_kv,
        revises=revises,
        step_sigma=sigma,
        drift_sigma=drift_sigma,
        drift_ms=drift_ms,
        tbt_slo_ms=tbt_slo_ms,
        ttft_slo_ms=ttft_slo_ms,
        seed=seed,
    )
    return play([table(roofline)], rows, options)


def test_a_prompt_takes_its_chunks_and_each_further_token_a_step() -> None:
    (outcome,) = run([(5.0, 250, 3)], engine(chunk=100)).outcomes
    assert (outcome.first_token_ms, outcome.end_ms, outcome.longest_gap_ms) == pytest.approx((35.0, 55.0, 10.0))


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    first, second = run([(0.0, 100, 1), (4.0, 100, 1)]).outcomes
    assert (first.end_ms, second.end_ms) == pytest.approx((10.0, 20.0))


def test_mfu_and_kv_share_are_those_worked_out_by_hand() -> None:
    # The first prompt takes a step of 60 tokens and one of 40, which gives the first token; the other two take a step each, until 55.2 ms.
    # Then nothing runs until the second prompt comes, whose only token ends the run at 105 ms.
    requests = [(5.0, 100, 3), (90.0, 50, 1)]
    result = run(requests, engine(chunk=60, kv=1000), roofline="10,0.1,1,0,0,0")
    rows = [TraceRequest(at_ms / 1e3, prompt, output) for at_ms, prompt, output in requests]
    size = simulated.ModelSize(parameters=1e6, layers=10, hidden=1000, peak_tflops=0.1)
    summary = simulated.summarize(rows, result, Slo(tbt_ms=math.inf), 1000, size)

    duration_s = 0.1
    step_tokens = [60, 40, 1, 1, 50]
    step_ms = [10 + 0.1 * tokens for tokens in step_tokens]
    # A token attends to all before it, and to itself.
    pairs = [sum(range(1, 61)), sum(range(61, 101)), 101, 102, sum(range(1, 51))]
    flop = 2 * 1e6 * sum(step_tokens) + 4 * 10 * 1000 * sum(pairs)
    assert summary.mfu == pytest.approx([flop / (0.1e12 * duration_s)])
    # While it is computed a token has its place already; what ended has none.
    held = [60, 100, 101, 102, 50]
    held_token_ms = sum(tokens * ms for tokens, ms in zip(held, step_ms, strict=True))
    assert summary.kv_share == pytest.approx([held_token_ms / sum(step_ms) / 1000])
    assert summary.busy == pytest.approx([sum(step_ms) / 1e3 / duration_s])


def test_a_prefill_beside_it_delays_a_decode() -> None:
    result = run([(0.0, 10, 100), (55.0, 1000, 1)], roofline="10,0.1,1,0,0,0", tbt_slo_ms=100.0)
    assert result.outcomes[0].longest_gap_ms == pytest.approx(10 + 0.1 * 1001)
    assert result.outcomes[0].late_gaps == 1


def test_a_cut_request_goes_on_elsewhere_after_the_hand_off() -> None:
    result = run([(0.0, 100, 101)], placement=Options(Policy.fixed, 0.5), instances=2)
    (outcome,) = result.outcomes
    assert outcome.split_token == 100
    assert (outcome.first_token_ms, outcome.longest_gap_ms, outcome.end_ms) == pytest.approx((10.0, 12.0, 1012.0))
    assert [use.tokens for use in result.uses] == [100, 100]


def test_a_cut_inside_the_prompt_leaves_the_first_token_to_the_second_instance() -> None:
    result = run([(0.0, 100, 101)], placement=Options(Policy.fixed, 0.25), instances=2)
    (outcome,) = result.outcomes
    assert (outcome.split_token, outcome.first_token_ms) == (50, pytest.approx(22.0))
    assert [use.tokens for use in result.uses] == [50, 150]


A100_14B = "14.9,0.126,192,1.3e-6,0.06,1.56e-4"


def at_rate(policy: Policy, rate: float, prompt: int, output: int, slo_ms: float) -> tuple[float, float, int]:
    """800 requests of one shape, on two instances: mean TTFT in ms, share of late gaps, preemptions."""
    rng, now_ms, requests = random.Random(1), 0.0, []
    for _ in range(800):
        now_ms += rng.expovariate(rate / 1000.0)
        requests.append((now_ms, prompt, output))
    instance = engine(Batching.slo, 8192, 128, 219_168, slo_ms)
    result = run(requests, instance, Options(policy), instances=2, roofline=A100_14B, tbt_slo_ms=slo_ms)
    waits_ms = [outcome.first_token_ms - at_ms for outcome, (at_ms, _, _) in zip(result.outcomes, requests, strict=True)]
    late = sum(outcome.late_gaps for outcome in result.outcomes) / (len(requests) * (output - 1))
    return float(np.mean(waits_ms)), late, sum(use.preemptions for use in result.uses)


def test_decodes_that_gathering_instances_have_no_memory_for_run_on_the_others() -> None:
    ttft_ms, late, preemptions = at_rate(Policy.dynamic, 2.4, 2048, 512, 100.0)
    assert (late < 0.01, preemptions) == (True, 0)
    assert ttft_ms < 1.5 * at_rate(Policy.colocated, 2.4, 2048, 512, 100.0)[0]


def test_decodes_of_one_length_do_not_grow_old_together_on_one_instance() -> None:
    _, late, _ = at_rate(Policy.dynamic, 1.2, 219, 1467, 50.0)
    assert late < 0.01


def test_lengths_that_are_very_wrong_cost_nothing_where_queues_are_long() -> None:
    def mean_ttft_ms(policy: str) -> float:
        fleet = ("--roofline", "12,0.105,160,0.0000011,0.05,0.00013", "--max-running", "32", "--batching", "slo", "--policy", policy)
        offered = ("--workload", "fixed:100,300", "--rate", "30", "--requests", "1500", "--expect", "lognormal:1")
        found = simulate.one_run([*fleet, *offered]).summary.ttft_ms
        assert found is not None
        return found.mean

    assert mean_ttft_ms("dynamic") < 1.02 * mean_ttft_ms("colocated")


HALF = Options(Policy.fixed, 0.5)
HALF_AT_PROMPT = Options(Policy.disaggregated, prefill_instances=1)


@pytest.mark.parametrize(("streams_kv", "wait_ms"), [(True, 90.0), (False, 100.0)])
def test_full_blocks_leave_while_alpha_computes_and_the_last_one_is_waited_for(streams_kv: bool, wait_ms: float) -> None:
    # 48 of 50 tokens leave after the first step of 10 ms, and arrive at 58 ms; the other 52 follow until 110 ms.
    result = run([(0.0, 100, 101)], engine(chunk=50), HALF, instances=2, kv_token_ms=1.0, streams_kv=streams_kv)
    (outcome,) = result.outcomes
    assert outcome.hand_off_wait_ms == pytest.approx(wait_ms)
    assert outcome.longest_gap_ms == pytest.approx(wait_ms + 2 + 10)


def test_two_transfers_share_the_link_into_an_instance() -> None:
    # Both alphas run on the first two instances, in one step; both betas on the third.
    result = run([(0.0, 100, 2), (0.0, 100, 2)], placement=Options(Policy.disaggregated, prefill_instances=2), instances=3, kv_token_ms=1.0)
    assert [outcome.hand_off_wait_ms for outcome in result.outcomes] == pytest.approx([100.0, 200.0])


def test_moving_kv_on_the_host_lengthens_the_next_step_of_both_instances() -> None:
    # The prompts' steps end at 10 and, with the 10 ms of 100 tokens that leave meanwhile, at 30 ms; beta's step begins at 12 ms, and has
    # eight of them beside it.
    first, second = run([(0.0, 100, 2), (1.0, 100, 2)], placement=HALF_AT_PROMPT, instances=2, kv_token_work_ms=0.1).outcomes
    assert (first.first_token_ms, second.first_token_ms) == pytest.approx((10.0, 30.0))
    assert first.end_ms == pytest.approx(12.0 + 8.0 + 10.0)


def test_kv_that_has_moved_beside_nothing_lengthens_no_step() -> None:
    # The KV of the first prompt comes from 10 to 110 ms to an instance that is idle; the second one is a second later.
    first, second = run(
        [(0.0, 100, 2), (1000.0, 100, 2)], placement=HALF_AT_PROMPT, instances=2, kv_token_ms=1.0, kv_token_work_ms=1.0
    ).outcomes
    assert first.end_ms == pytest.approx(112.0 + 10.0)
    assert second.first_token_ms == pytest.approx(1010.0)


def test_kv_that_waits_for_a_seat_is_held_where_it_comes_from() -> None:
    # One decode at a time: the first one's begins at 12 ms and ends at 112. One prompt fits beside nothing that is kept.
    requests = [(0.0, 100, 11), (1.0, 100, 11), (2.0, 100, 11)]
    placement = Options(Policy.disaggregated, prefill_instances=1)
    outcomes = run(requests, engine(kv=150, running=1), placement, instances=2).outcomes
    assert [outcome.first_token_ms for outcome in outcomes] == pytest.approx([10.0, 22.0, 122.0])


def test_who_comes_while_kv_waits_for_a_seat_does_not_free_it() -> None:
    requests = [(0.0, 100, 11), (1.0, 100, 11), (2.0, 100, 11), (50.0, 100, 11)]
    placement = Options(Policy.disaggregated, prefill_instances=1)
    outcomes = run(requests, engine(kv=150, running=1), placement, instances=2).outcomes
    assert [outcome.first_token_ms for outcome in outcomes[:3]] == pytest.approx([10.0, 22.0, 122.0])


def test_two_instances_full_of_what_they_keep_for_each_other_go_on() -> None:
    # Each has computed a prompt for the other, and has no room for the other's beside it.
    requests = [(0.0, 100, 30), (0.1, 100, 30)]
    placement = Options(Policy.fixed, 100 / 129)
    result = run(requests, engine(kv=150), placement, instances=2)
    assert all(outcome.end_ms > 0 for outcome in result.outcomes)
    assert sum(result.gap_counts) == 2 * 29


def test_alpha_keeps_its_memory_until_its_kv_has_arrived() -> None:
    # The second prompt does not fit beside the first one, which is there until 110 ms.
    first, second = run([(0.0, 100, 10), (1.0, 100, 10)], engine(kv=150), HALF_AT_PROMPT, instances=2, kv_token_ms=1.0).outcomes
    assert first.first_token_ms == pytest.approx(10.0)
    assert second.first_token_ms == pytest.approx(112.0 + 10.0)


def test_kv_that_waits_for_its_transfer_is_held() -> None:
    # The prompts' steps end at 10 and 20 ms; the KV of the first one leaves until 110 ms.
    result = run([(0.0, 100, 10), (1.0, 100, 10)], placement=HALF_AT_PROMPT, instances=2, kv_token_ms=1.0)
    assert result.uses[0].kv_token_ms == pytest.approx(100 * 10.0 + 200 * 10.0)


def test_an_answer_longer_than_expected_goes_on_where_it_is() -> None:
    (outcome,) = run([(0.0, 100, 50)], placement=Options(Policy.dynamic), instances=2, expected=5).outcomes
    assert outcome.end_ms == pytest.approx(10.0 * 50)


def test_hand_offs_are_revised_unless_they_are_to_stay() -> None:
    rng = random.Random(1)
    at_ms = np.cumsum([rng.expovariate(1 / 300.0) for _ in range(600)])
    prompts = [20_000 if rng.random() < 0.05 else rng.randint(1500, 4000) for _ in at_ms]
    requests = [(float(at), prompt, rng.randint(1, 400)) for at, prompt in zip(at_ms, prompts, strict=True)]
    instance = engine(Batching.slo, chunk=8192, slo_ms=50.0)

    def fleet(**options: bool) -> SimulationResult:
        return run(
            requests, instance, Options(Policy.dynamic), instances=2, roofline="12,0.105,160,1.1e-6,0.05,1.3e-4", expected=200, **options
        )

    revised, fixed = fleet(), fleet(revises=False)
    assert revised.moved > 0
    assert fixed.moved == fixed.lifted == 0
    assert sum(revised.gap_counts) == sum(fixed.gap_counts) == sum(output - 1 for _, _, output in requests)
    assert sum(use.tokens for use in revised.uses) == sum(use.tokens for use in fixed.uses)


def test_what_decodes_already_leaves_the_instance_that_is_to_prefill() -> None:
    rng = random.Random(1)
    at_ms = 2000.0 + np.cumsum([rng.expovariate(1 / 270.0) for _ in range(300)])
    requests = [(100.0 * number, 500, 3000) for number in range(6)]  # nothing is gathered yet
    requests += [(float(at), rng.randint(1500, 4000), 100) for at in at_ms]
    instance = engine(Batching.slo, chunk=8192, slo_ms=50.0)

    def fleet(**options: bool) -> SimulationResult:
        roofline = "12,0.105,160,1.1e-6,0.05,1.3e-4"
        return run(requests, instance, Options(Policy.dynamic), instances=2, roofline=roofline, kv_token_ms=0.01, **options)

    revised, fixed = fleet(), fleet(revises=False)
    assert revised.cut_late > 0
    assert fixed.cut_late == 0
    assert sum(revised.gap_counts) == sum(output - 1 for _, _, output in requests)
    assert sum(use.tokens for use in revised.uses) == sum(prompt + output - 1 for _, prompt, output in requests)


def test_hand_offs_stay_while_others_wait_though_nobody_comes_any_more() -> None:
    # All of them within 15 s, in which a sixth is done.
    fleet = ("--roofline", "12,0.105,160,0.0000011,0.05,0.00013", "--policy", "dynamic:gather=1", "--batching", "slo", "--tbt-slo-ms", "50")
    offered = ("--workload", "fixed:2000,150", "--rate", "20", "--requests", "300")
    done, fixed = simulate.one_run([*fleet, *offered]), simulate.one_run([*fleet, *offered, "--fixed-hand-offs"])
    assert done.result.moved > 0
    assert done.result.lifted <= 3
    assert done.summary.ttft_ms is not None
    assert fixed.summary.ttft_ms is not None
    assert done.summary.ttft_ms.mean < 1.15 * fixed.summary.ttft_ms.mean


def test_hand_offs_inside_the_answer_are_not_revised() -> None:
    rng, requests = random.Random(1), []
    for number in range(60):
        requests.append((90.0 * number, rng.randint(20, 4000), rng.randint(20, 400)))
    instance = engine(Batching.slo, 2048, 16, 60_000, 50.0)
    result = run(requests, instance, Options(Policy.exhaustive), instances=2, roofline=A100_14B)
    cuts = [outcome.split_token for outcome in result.outcomes]
    assert any(cut is not None and cut >= prompt for cut, (_, prompt, _) in zip(cuts, requests, strict=True))


def test_requests_that_only_prefill_on_an_instance_need_no_room_for_their_decodes() -> None:
    requests = [(0.0, 50, 2)] * 10
    instance = engine(Batching.slo, slo_ms=30.0)
    roofline = "5,0.1,8,0,8,0"  # three decodes in a step of 30 ms

    def first_tokens_ms(policy: Policy) -> set[float]:
        outcomes = run(requests, instance, Options(policy), instances=2, roofline=roofline).outcomes
        return {round(outcome.first_token_ms, 6) for outcome in outcomes}

    assert len(first_tokens_ms(Policy.disaggregated)) <= 3, "the first one, and all that came while it ran"
    assert len(first_tokens_ms(Policy.colocated)) > 3


def test_the_policy_knows_the_ttft_slo() -> None:
    rng = random.Random(2)
    at_ms = np.cumsum([rng.expovariate(1 / 300.0) for _ in range(300)])
    requests = [(float(at), rng.randint(1500, 4000), rng.randint(1, 400)) for at in at_ms]
    instance = engine(Batching.slo, chunk=8192, slo_ms=50.0)

    def splits(ttft_slo_ms: float) -> list[int]:
        roofline = "12,0.105,160,1.1e-6,0.05,1.3e-4"
        result = run(requests, instance, Options(Policy.dynamic), instances=3, roofline=roofline, ttft_slo_ms=ttft_slo_ms)
        return [outcome.split_token for outcome in result.outcomes]

    assert splits(math.inf) == splits(1e9)
    assert splits(math.inf) != splits(500.0)


def test_disaggregation_prefills_here_and_decodes_there() -> None:
    requests = [(7.0 * number, 50 + number, 20) for number in range(40)]
    result = run(requests, placement=Options(Policy.disaggregated), instances=2)
    assert [use.tokens for use in result.uses] == [sum(prompt for _, prompt, _ in requests), 40 * 19]


def test_a_plain_balancer_takes_turns() -> None:
    result = run([(0.0, 10 * (number + 1), 1) for number in range(4)], instances=2)
    assert [use.tokens for use in result.uses] == [10 + 30, 20 + 40]


@pytest.mark.parametrize("seed", range(3))
def test_waiting_is_what_queueing_theory_says(seed: int) -> None:
    load, service_ms = 0.6, 10.0
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(service_ms / load, 60_000))
    result = run([(at_ms, 50, 1) for at_ms in arrivals], engine(running=1, chunk=50))
    waited = np.mean([outcome.first_token_ms for outcome in result.outcomes] - arrivals) - service_ms
    assert waited == pytest.approx(load * service_ms / 2 / (1 - load), rel=0.06)  # Pollaczek and Khinchine, M/D/1


requests_of = st.lists(st.tuples(st.floats(0, 500), st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    drawn=requests_of,
    policy=st.sampled_from(
        [
            None,
            *map(Options, (Policy.colocated, Policy.disaggregated, Policy.dynamic, Policy.exhaustive, Policy.paper)),
            Options(Policy.fixed, 0.7),
        ]
    ),
    batching=st.sampled_from([Batching.fixed_chunk, Batching.slo]),
    instances=st.integers(1, 4),
    kv_token_ms=st.sampled_from([0.0, 0.1, 2.0]),
    expected=st.sampled_from([None, 1, 20]),
    revises=st.booleans(),
)
def test_every_token_is_computed_once_where_memory_is_plenty(
    drawn: list[tuple[float, int, int]],
    policy: Options | None,
    batching: Batching,
    instances: int,
    kv_token_ms: float,
    expected: int | None,
    revises: bool,
) -> None:
    requests = sorted(drawn)
    setting = engine(batching, chunk=128, slo_ms=40.0)
    roofline = "5,0.1,8,0,0.1,0"
    result = run(
        requests, setting, policy, instances=instances, roofline=roofline, kv_token_ms=kv_token_ms, expected=expected, revises=revises
    )
    computed = [prompt + output - 1 for _, prompt, output in requests]
    assert sum(use.tokens for use in result.uses) == sum(computed)
    assert sum(use.attention_pairs for use in result.uses) == sum(tokens * (tokens + 1) / 2 for tokens in computed)
    assert sum(result.gap_counts) == sum(output - 1 for _, _, output in requests)
    for (at_ms, _, _), outcome in zip(requests, result.outcomes, strict=True):
        assert at_ms < outcome.first_token_ms <= outcome.end_ms <= result.end_ms


@settings(max_examples=60, deadline=None)
@given(
    drawn=requests_of,
    batching=st.sampled_from([Batching.fixed_chunk, Batching.slo]),
    policy=st.sampled_from([None, Options(Policy.disaggregated), Options(Policy.fixed, 0.7)]),
)
def test_memory_is_never_exceeded_and_everyone_finishes(
    drawn: list[tuple[float, int, int]], batching: Batching, policy: Options | None
) -> None:
    requests = sorted(drawn)
    setting = engine(batching, chunk=64, kv=400, slo_ms=40.0)
    result = run(requests, setting, policy, instances=2, roofline="5,0.1,8,0,0.1,0", kv_token_ms=0.5)
    assert all(use.most_kv_tokens <= 400 for use in result.uses)
    assert sum(result.gap_counts) == sum(output - 1 for _, _, output in requests)


def test_a_request_without_memory_is_computed_again() -> None:
    result = run([(0.0, 50, 60), (0.0, 50, 60)], engine(kv=150))
    (use,) = result.uses
    assert use.preemptions > 0
    assert use.tokens > 2 * 109


def test_slo_aware_batches_keep_the_slo_that_fixed_chunks_break() -> None:
    requests = [(40.0 * number, 400, 30) for number in range(100)]
    roofline = "5,0.1,8,0,0.05,0"
    for batching, keeps in ((Batching.fixed_chunk, False), (Batching.slo, True)):
        result = run(requests, engine(batching, slo_ms=30.0), roofline=roofline)
        assert all(outcome.longest_gap_ms <= 30.0 + 1e-9 for outcome in result.outcomes) == keeps


def test_the_same_seed_gives_the_same_run() -> None:
    requests = [(3.0 * number, 100, 10) for number in range(50)]
    one, again, other = (run(requests, sigma=0.1, seed=seed).end_ms for seed in (1, 1, 2))
    assert one == again != other


def test_the_speed_of_an_instance_wanders_as_far_as_it_is_told_to() -> None:
    result = run([(0.0, 10, 60_000)], sigma=0.05, drift_sigma=0.2, drift_ms=500.0)
    logs = np.log([gap_bin_ms(bin_) for bin_ in range(1, 4000)])
    counts = np.array(result.gap_counts[1:])
    mean = np.average(logs, weights=counts)
    assert math.exp(mean) == pytest.approx(10.0, rel=0.1)
    assert math.sqrt(np.average((logs - mean) ** 2, weights=counts)) == pytest.approx(math.hypot(0.05, 0.2), rel=0.15)


@pytest.mark.parametrize("drift_ms", [1.0, 5000.0])
def test_an_instance_follows_its_speed_and_keeps_further_from_deadlines_where_it_cannot(drift_ms: float) -> None:
    requests = [(60.0 * number, 400, 30) for number in range(1000)]
    instance = engine(Batching.slo, slo_ms=30.0, margin=math.exp(-2.65 * 0.05))
    found = run(requests, instance, roofline="5,0.1,8,0,0.05,0", sigma=0.05, drift_sigma=0.3, drift_ms=drift_ms, tbt_slo_ms=30.0)
    assert sum(outcome.late_gaps for outcome in found.outcomes) / sum(found.gap_counts) < 0.02


def test_decodes_begin_while_few_tokens_are_late() -> None:
    """Of steps that are always within the margin that all begin with, 4 in 1000 were late."""
    requests = [(50.0 * number, 10, 100) for number in range(3000)]
    instance = engine(Batching.slo, slo_ms=50.0, margin=math.exp(-2.65 * 0.2))
    found = run(requests, instance, roofline="20,0.1,8,0,0.5,0", sigma=0.2, tbt_slo_ms=50.0)
    assert 0.005 < sum(outcome.late_gaps for outcome in found.outcomes) / sum(found.gap_counts) < 0.01


@pytest.mark.parametrize(
    ("sigma", "drift_sigma", "drift_ms", "named"),
    [(0.1, -1.0, 1.0, "drift_sigma is -1"), (0.1, 0.1, 0.0, "drift_ms is 0"), (0.0, 0.1, 1.0, "and step_sigma is 0")],
)
def test_impossible_speeds_are_refused(sigma: float, drift_sigma: float, drift_ms: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run([(0.0, 1, 1)], sigma=sigma, drift_sigma=drift_sigma, drift_ms=drift_ms)


@pytest.mark.parametrize(
    ("requests", "named"),
    [
        ([(0.0, 0, 1)], "0 prompt, 1 output"),
        ([(2.0, 1, 1), (1.0, 1, 1)], "in order of arrival"),
        ([(0.0, 1 << 31, 1)], "never fits into 1073741824"),
    ],
)
def test_impossible_requests_are_refused(requests: list[tuple[float, int, int]], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run(requests)


@given(gaps=st.lists(st.floats(0.2, 1e5), min_size=1, max_size=300))
def test_percentiles_of_bins_are_those_of_the_gaps(gaps: list[float]) -> None:
    edges = np.array([gap_bin_ms(bin_) for bin_ in range(4001)])
    counts, _ = np.histogram(gaps, edges)
    found = simulated.gap_percentiles(counts.tolist())
    for quantile, value in ((0.5, found.p50), (0.99, found.p99)):
        assert value == pytest.approx(float(np.quantile(gaps, quantile, method="inverted_cdf")), rel=0.006)


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        simulate.main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


SAMPLE = ("--roofline", "10,0.2,16,0.00002,0.2,0.0005", "--workload", "sample", "--rate", "4", "--requests", "200")


def test_the_sample_is_simulated_without_any_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SAMPLE, "--batching", "slo", "--output", str(tmp_path / "out.json")) == 0
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert summary["requests"] == 200
    assert summary["tbt_ms"]["p99"] <= 100
    assert "goodput_tokens_per_s" in capsys.readouterr().out


def test_a_capacity_is_searched(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert command(*SAMPLE, "--batching", "slo", "--capacity", "--repetitions", "2", "--output", str(out)) == 0
    found = json.loads(out.read_text())
    assert all(rate > 1 for rate in found["capacities_per_s"])
    assert found["at_least"] == [False, False]


def test_runs_of_one_rate_are_judged_together() -> None:
    few, many = (simulate.one_run([*SAMPLE[:-3], rate, "--requests", number]) for rate, number in (("100", "5"), ("1", "300")))
    assert few.summary.tbt_ms.p99 is not None
    assert many.summary.tbt_ms.p99 is not None
    slo = Slo(tbt_ms=0.5 * (few.summary.tbt_ms.p99 + many.summary.tbt_ms.p99))
    both = [(run.requests, run.result) for run in (few, many)]
    assert few.summary.tbt_ms.p99 > slo.tbt_ms > many.summary.tbt_ms.p99
    assert (simulated.why_not_sustained(both[:1], slo) or "").startswith("P99 TBT")
    assert simulated.why_not_sustained(both[1:], slo) is None
    assert simulated.why_not_sustained(both, slo) is None, "late are few of all gaps"

    searched = (*SAMPLE, "--batching", "slo", "--repetitions", "1", "--resolution", "0.02")
    (of_one,), (of_three,) = simulate.capacities(searched), simulate.capacities((*searched, "--most-runs", "3"))
    assert of_one != of_three
    others = [simulate.capacities((*searched, "--seed", str(seed)))[0] or 0.0 for seed in trial.seeds(1, 3)]
    assert min(others) <= (of_three or 0.0) <= max(others)


def test_a_rate_above_which_none_was_tried_is_told_as_the_least_and_is_no_capacity_of_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    searched = (*SAMPLE, "--batching", "slo", "--most-rate", "4", "--repetitions", "1")
    assert command(*searched, "--capacity", "--output", str(out)) == 0
    found = json.loads(out.read_text())
    assert (found["capacities_per_s"], found["at_least"]) == ([4.0], [True])
    assert capsys.readouterr().out == "capacity at least 4 requests/s (least 4, most 4)\n"
    with pytest.raises(ConfigError, match="even 4 requests/s passed, the highest rate tried"):
        simulate.capacities(searched)


def test_each_instance_may_have_a_profile_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ProfileKey(model="m", dtype="float32", device="d", parallelism="tp1", vllm_version="0.32.0")
    files = [str(tmp_path / name) for name in ("quick.json", "slow.json")]
    for file, roofline in zip(files, ("10,0,1,0,0,0", "20,0,1,0,0,0"), strict=True):
        latency_profile.save(Path(file), table(roofline), key, "made up")
    run = ("--workload", "sample", "--requests", "40", "--rate", "1")

    def p99_ms(*profiles: str) -> float:
        found = simulate.one_run(["--profile", *profiles, *run]).summary.tbt_ms.p99
        assert found is not None
        return found

    assert p99_ms(files[0]) == pytest.approx(10.0, rel=0.1)
    assert p99_ms(*files) == pytest.approx(20.0, rel=0.1)
    assert command("--profile", *files, *run, "--instances", "3") == 2
    assert capsys.readouterr().err.endswith("--profile names 2 files for 3 instances: it must be one, or one of each\n")


def test_a_refused_simulation_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*SAMPLE, "--kv-tokens", "10", "--output", str(tmp_path / "out.json")) == 2
    assert list(tmp_path.iterdir()) == []
    assert command(*SAMPLE, "--output", str(tmp_path)) == 2
    assert f"{tmp_path}: cannot be written: it is a folder" in capsys.readouterr().err


def test_a_search_that_is_interrupted_says_so() -> None:
    # A shell that starts the tests in the background has them ignore the signal.
    heed = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from dynaserve.bench import simulate; simulate.main(sys.argv[1:])"
    endless = [sys.executable, "-c", code, *SAMPLE, "--capacity", "--repetitions", "100000"]
    with subprocess.Popen(endless, stderr=subprocess.PIPE, text=True) as searching:
        assert searching.stderr is not None
        searching.stderr.readline()
        searching.send_signal(signal.SIGINT)
        told = searching.stderr.read().splitlines()
    assert searching.returncode == 130
    assert told[-1] == "dynaserve simulate: interrupted, nothing is reported"


def test_a_grid_of_measured_steps_is_learnt(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv"
    rows = [f"m,g,1,{new},0,{number},512,{8 + 0.1 * (new + number)}" for new in (0, 64, 256, 1024) for number in (1, 8, 64)]
    path.write_text("\n".join([GRID_HEADER, *rows]) + "\n")
    learnt = latency_tables.from_grid(path, "m", "g", overhead_ms=2.0, cost_scale=1.5)
    (sample,) = [one for one in latency_tables.samples(path, "m", "g") if one.shape.tokens == 256 + 8]
    assert learnt.step_ms(sample.shape) == pytest.approx(1.5 * (8 + 26.4) + 2.0, rel=0.05)
    with pytest.raises(ConfigError, match="has no m on h100; there is m on g"):
        latency_tables.from_grid(path, "m", "h100", 1.0, 1.0)
    path.write_text("\n".join([GRID_HEADER, *rows, rows[0].replace("m,g,1,", "m,g,2,")]) + "\n")
    with pytest.raises(ConfigError, match="steps of several tp: 1, 2"):
        latency_tables.from_grid(path, "m", "g", 1.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["m,g,1,64,0,0,512,nan"], "line 2: ms: 'nan' is not a number above 0"),
        (["m,g,1,64,0,0,512,8.5", "m,g,1,64,0,0,512,0"], "line 3: ms: '0' is not"),
        (["m,g,1,-5,0,8,512,8.5"], "line 2: prefill_new: '-5' is not a whole number"),
        (["m,g,1,64,0,1.5,512,8.5"], "line 2: decode_n: '1.5' is not a whole number"),
        (["m,g,1,64,0,8,9999999999,8.5"], "line 2: decode_ctx: '9999999999' is not a whole number of at most 9 digits"),
        (["m,g,1,64,0,8"], "line 2: not 8 values"),
        (["m,g,1,0,0,0,512,8.5"], "no step of m on g has a token"),
        (["m,g,1,64,0,0,512,1e308"], "the steps of m on g cannot be learnt: a step of 64 tokens took inf ms"),
        ([], "has no m on g; there is nothing"),
    ],
)
def test_a_bad_grid_is_refused_with_line_and_value(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[str], named: str) -> None:
    path = tmp_path / "grid.csv"
    path.write_text("\n".join([GRID_HEADER, *rows]) + "\n")
    fleet = ("--gpu-grid", str(path), "--gpu-model", "m", "--gpu", "g", "--cost-scale", "10")
    assert command(*fleet, *SAMPLE[2:]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"dynaserve simulate: {path}: {named}")
    assert len(told.splitlines()) == 1


def test_a_grid_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.csv.gz"
    path.write_text(f"{GRID_HEADER}\n")
    with pytest.raises(ConfigError, match=r"grid\.csv\.gz: cannot be read: Not a gzipped file"):
        latency_tables.from_grid(path, "m", "g", 1.0, 1.0)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--gpu-grid", "nosuch.csv"), "not 2 of them"),
        (("--policy", "best"), "policy is 'best'"),
        (("--policy", "dynamic:gather=2"), "at most 1 can gather"),
        (("--policy", "dynamic:stride=16"), "only exhaustive tries cuts at a stride"),
        (("--policy", "exhaustive:stride=0"), "one token apart or more"),
        (("--policy", "colocated", "--expect", "lognormal"), "--expect is 'lognormal'"),
        (("--layers", "4"), "are needed together"),
        (("--policy", "fixed:0.5", "--kv-on-host"), "--kv-on-host needs --kv-gbytes-per-s"),
        (("--roofline", "1,2"), "--roofline '1,2' is not"),
        (("--kv-tokens", "10"), "never fits into 10 tokens"),
        (("--kv-tokens", "4000", "--workload", "fixed:5000,10", "--policy", "fixed:0.5"), "5000 tokens never fits into 4000 tokens"),
        (("--roofline", "0,0,1,0,1,0"), "by this table one token of prefill takes no time"),
        (("--seed", "18446744073709551616"), "argument --seed: '18446744073709551616' is more than 18446744073709551615"),
        (("--capacity", "--seed", "18446744073709551614"), "--seed 18446744073709551614 with 3 --repetitions of 1 --most-runs goes beyond"),
        (("--instances", "9" * 20), f"argument --instances: '{'9' * 20}' is more than 9223372036854775807"),
        *[
            ((option, "1099511627777"), f"argument {option}: '1099511627777' is more than 1099511627776")
            for option in ("--chunk", "--kv-tokens", "--max-running", "--min-prefill-tokens")
        ],
        (("--workload", f"fixed:{'9' * 20},1"), f"{'9' * 20} tokens are more than 1099511627776"),
        (("--scale", "1e30"), "tokens, which times 1e+30 is more than 1099511627776"),
        (("--scale", "1e308"), "tokens, which times 1e+308 is more than 1099511627776"),
        (("--policy", "colocated", "--expect", f"fixed:{'9' * 20}"), "fixed:N with N from 1 to 1099511627776"),
        (("--policy", "colocated", "--expect", "fixed:1e30"), "--expect is 'fixed:1e30'"),
    ],
)
def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str], more: tuple[str, ...], named: str) -> None:
    assert command(*SAMPLE, *more) == 2
    told = capsys.readouterr().err
    assert named in told
    assert len(told.splitlines()) == 1


IDLE: dict[tuple[str, ...], str] = {
    ("--cost-scale", "1"): "--gpu-grid",
    ("--overhead-ms", "2.5"): "--gpu-grid",
    ("--gpu-model", "m"): "--gpu-grid",
    ("--gpu", "g"): "--gpu-grid",
    ("--drift-s", "5"): "--drift-sigma",
    ("--kv-transfer", "blocks"): "--kv-gbytes-per-s",
    ("--kv-transfer", "end"): "--kv-gbytes-per-s",
    ("--kv-token-bytes", "196608"): "--kv-gbytes-per-s",
    ("--min-prefill-tokens", "16"): "--batching slo",
    ("--hand-off-ms", "2"): "a --policy that hands requests over",
    ("--kv-gbytes-per-s", "1"): "a --policy that hands requests over",
    ("--kv-on-host",): "a --policy that hands requests over",
    ("--fixed-hand-offs",): "a --policy that hands requests over",
    ("--expect", "mean"): "a --policy that reads it",
    **{(option, "4"): "--capacity" for option in SEARCH_OPTIONS},
}
"""Options, each with the usual value where it has one, and what they do nothing without."""


@pytest.mark.parametrize(("given", "needed"), IDLE.items())
def test_options_that_do_nothing_are_refused(capsys: pytest.CaptureFixture[str], given: tuple[str, ...], needed: str) -> None:
    assert command(*SAMPLE, *given) == 2
    assert capsys.readouterr().err == f"dynaserve simulate: {given[0]} does nothing without {needed}\n"


FLEET = ("--batching", "slo", "--policy", "fixed:0.5", "--drift-sigma", "0.1", "--kv-gbytes-per-s", "0.5")


def test_options_that_do_something_are_taken_and_have_their_usual_values_otherwise() -> None:
    asked = [value for option in IDLE if option[0] in ("--drift-s", "--kv-token-bytes", "--min-prefill-tokens") for value in option]
    usual = simulate.one_run([*SAMPLE, *FLEET]).result.end_ms
    assert usual == simulate.one_run([*SAMPLE, *FLEET, *asked, "--kv-transfer", "blocks"]).result.end_ms
    for other in (("--drift-s", "1"), ("--kv-token-bytes", "1000000"), ("--kv-transfer", "end")):
        assert simulate.one_run([*SAMPLE, *FLEET, *other]).result.end_ms != usual, other


def test_what_compares_fleets_or_searches_may_give_options_that_some_have_no_use_for() -> None:
    searched = (*SAMPLE, "--tbt-slo-ms", "1000", "--repetitions", "2", "--resolution", "0.7", "--min-prefill-tokens", "32")
    first, second = simulate.capacities(searched)
    assert first
    assert second


def test_the_largest_seed_is_one() -> None:
    assert simulate.one_run([*SAMPLE, "--drawn", "--seed", "18446744073709551615"]).summary.requests == 200


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == 0
    told = capsys.readouterr().out
    assert "example:\n  dynaserve simulate --roofline" in told
    assert "first come, first served, with a margin by" in told
