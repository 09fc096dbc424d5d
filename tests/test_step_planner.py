"""The local scheduler's decision, and the table that it learns while it decides."""

from __future__ import annotations

import math
import random

import pytest

from dynaserve.deadline_margin import LATE_SHARE, MOST_LATE_SHARE, NORMAL_SIGMAS
from dynaserve.live_profile import LEAST_SAMPLES, MOST_SAMPLES, WARM_UP_STEPS, LiveProfile
from dynaserve.step_latency import AdmissionMargin, BatchShape, BudgetReason, PrefillWork, ProfileTable, Roofline, prefill_pairs
from dynaserve.step_planner import NO_DECODES, SPARED_STEPS, RunningDecodes, StepPlan, StepPlanner

MACHINE = Roofline(overhead_ms=8.0, token_ms=0.25, knee_tokens=16.0, pair_ms=2e-5, decode_ms=0.3, context_ms=5e-4)
SLO_S = 0.1


def planner(table: ProfileTable | None = None) -> StepPlanner:
    return StepPlanner(LiveProfile(table), max_tokens=2048, min_prefill_tokens=16, unprofiled_prefill_tokens=64)


def step_shape(plan: StepPlan, decodes: RunningDecodes) -> BatchShape:
    return BatchShape(
        prefill_tokens=plan.prefill_tokens,
        prefill_pairs=prefill_pairs(plan.prefill_tokens, 0),
        decodes=decodes.number,
        decode_context_tokens=decodes.context_tokens,
    )


def running(number: int, due_s: float = SLO_S, context: int = 500) -> RunningDecodes:
    return RunningDecodes(number, number * context, due_s)


def test_prefill_fills_what_the_deadline_leaves() -> None:
    plan = planner(ProfileTable(MACHINE)).plan(running(11, due_s=5.06), [PrefillWork(5000)], now_s=5.0)
    assert plan.limit_ms == pytest.approx(60 * math.exp(-2.65 * 0.1))
    assert plan.predicted_ms is not None
    assert 0 < plan.predicted_ms <= plan.limit_ms
    assert plan.prefill_tokens > 0
    assert not plan.late


def test_what_decodes_speculate_leaves_less_for_prefill_and_for_more_decodes() -> None:
    table = ProfileTable(MACHINE)
    alone = planner(table)
    work = [PrefillWork(5000)]
    drafts = RunningDecodes(11, 5500, SLO_S, draft_tokens=33, draft_pairs=33 * 500.0)
    assert 0 < alone.plan(drafts, work, now_s=0.0).prefill_tokens < alone.plan(running(11), work, now_s=0.0).prefill_tokens
    speculating = StepPlanner(LiveProfile(table), 2048, 16, 64, speculated_tokens=3)
    most = max(number for number in range(1, 500) if alone.fits(number, 500 * number, 100.0))
    assert speculating.fits(1, 500, 100.0)
    assert not speculating.fits(most, 500 * most, 100.0)


def test_a_step_beside_decodes_is_not_far_larger_than_all_that_were_measured() -> None:
    learning = planner()
    for context in range(LEAST_SAMPLES + WARM_UP_STEPS):
        learning.profile.observe(BatchShape(prefill_tokens=2, decodes=1, decode_context_tokens=context), 20.0)
    assert learning.profile.table is not None
    large = BatchShape(prefill_tokens=2000, decodes=1, decode_context_tokens=9)
    assert learning.profile.table.step_ms(large) < 100.0, "it has seen nothing else"
    work = [PrefillWork(2000)]
    assert learning.plan(running(1), work, now_s=0.0).prefill_tokens == 64
    learning.profile.observe(BatchShape(prefill_tokens=64, decodes=1, decode_context_tokens=9), 20.0)
    assert learning.plan(running(1), work, now_s=0.0).prefill_tokens == 2 * 65 - 1
    assert learning.plan(NO_DECODES, work, now_s=0.0).prefill_tokens == 2000
    assert planner(ProfileTable(learning.profile.table.roofline)).plan(running(1), work, now_s=0.0).prefill_tokens == 2000


def test_without_decodes_a_step_is_as_large_as_pays_off() -> None:
    plan = planner(ProfileTable(MACHINE)).plan(NO_DECODES, [PrefillWork(5000)], now_s=0.0)
    assert plan.prefill_tokens > 256
    assert not plan.late


def test_without_decodes_a_step_ends_before_one_that_is_about_to_come_is_due() -> None:
    alone = planner(ProfileTable(MACHINE))
    arriving = RunningDecodes(0, 0, due_s=5.06)
    plan = alone.plan(arriving, [PrefillWork(5000)], now_s=5.0)
    assert plan.limit_ms == alone.plan(running(11, due_s=5.06), [PrefillWork(5000)], now_s=5.0).limit_ms
    assert plan.predicted_ms is not None
    assert 0.9 * plan.limit_ms < plan.predicted_ms <= plan.limit_ms
    assert math.isinf(alone.plan(NO_DECODES, [PrefillWork(5000)], now_s=5.0).limit_ms)


def test_a_late_step_is_caught_up_by_the_next() -> None:
    table = ProfileTable(MACHINE)
    on_time = planner(table).plan(running(10, due_s=1.1), [PrefillWork(5000)], now_s=1.0)
    behind = planner(table).plan(running(10, due_s=1.1), [PrefillWork(5000)], now_s=1.04)
    assert 16 <= behind.prefill_tokens < on_time.prefill_tokens


def test_a_missed_deadline_still_lets_prefill_progress_and_is_told() -> None:
    plan = planner(ProfileTable(MACHINE)).plan(running(10, due_s=1.0), [PrefillWork(5000)], now_s=2.0)
    assert (plan.prefill_tokens, plan.reason, plan.late) == (16, BudgetReason.minimum_share, True)


def test_decodes_that_alone_are_in_time_are_made_late_by_a_tenth_of_the_steps_only() -> None:
    table = ProfileTable(MACHINE)
    each, decodes, work = planner(table), running(10), [PrefillWork(5000)]
    alone_ms = table.step_ms(decodes.shape)
    due_s = 1e-3 * (alone_ms + 0.1)
    plans = [each.plan(running(10, due_s=due_s), work, now_s=0.0) for _ in range(2 * (SPARED_STEPS + 1))]
    assert [plan.prefill_tokens for plan in plans] == 2 * (SPARED_STEPS * [0] + [16])
    assert {(plan.predicted_ms, plan.reason) for plan in plans if not plan.prefill_tokens} == {(alone_ms, BudgetReason.minimum_share)}
    # A step with time for some prefill ends the row.
    each.plan(running(10, due_s=due_s), work, now_s=0.0)
    assert each.plan(decodes, work, now_s=0.0).prefill_tokens > 16
    plans = [each.plan(running(10, due_s=due_s), work, now_s=0.0) for _ in range(SPARED_STEPS + 1)]
    assert [plan.prefill_tokens for plan in plans] == SPARED_STEPS * [0] + [16]


def test_a_margin_that_errors_have_widened_does_not_keep_the_least_prefill_from_decodes_that_are_admitted() -> None:
    table = ProfileTable(MACHINE)
    each, decodes = planner(table), running(10)
    with_least_ms = table.step_ms(
        BatchShape(prefill_tokens=16, prefill_pairs=prefill_pairs(16, 0), decodes=10, decode_context_tokens=decodes.context_tokens)
    )
    due_s = 1e-3 * with_least_ms / math.exp(-NORMAL_SIGMAS * table.sigma) + 1e-6
    each.margin.sigmas = 5.0
    plans = [each.plan(running(10, due_s=due_s), [PrefillWork(5000)], now_s=0.0) for _ in range(SPARED_STEPS)]
    assert {(plan.prefill_tokens, plan.reason, plan.late) for plan in plans} == {(16, BudgetReason.minimum_share, True)}


def test_a_prompt_alone_takes_what_the_table_says() -> None:
    table = ProfileTable(MACHINE)
    shape = BatchShape(prefill_tokens=700, prefill_pairs=prefill_pairs(700, 300))
    assert planner(table).prefill_ms(PrefillWork(700, 300)) == table.step_ms(shape) > 100
    assert planner().prefill_ms(PrefillWork(700, 300)) == 0


def test_before_anything_was_measured_the_budget_is_the_one_given() -> None:
    fresh = planner()
    assert fresh.plan(running(3), [PrefillWork(5000)], now_s=0.0).prefill_tokens == 64
    assert fresh.plan(NO_DECODES, [PrefillWork(5000)], now_s=0.0).prefill_tokens == 2048
    assert fresh.plan(running(3), [PrefillWork(20), PrefillWork(9)], now_s=0.0).prefill_tokens == 29


def test_a_server_that_began_with_nothing_keeps_its_deadlines_after_some_hundred_steps() -> None:
    rng = random.Random(4)
    fresh = planner()
    late = 0
    for step in range(1500):
        decodes = running(rng.choice([1, 5, 20]), context=rng.randrange(50, 1500))
        plan = fresh.plan(decodes, [PrefillWork(rng.choice([30, 5000]))], now_s=0.0)
        shape = step_shape(plan, decodes)
        took_ms = MACHINE.step_ms(shape) * rng.lognormvariate(0, 0.04)
        fresh.profile.observe(shape, took_ms)
        if step >= 500:
            late += took_ms > 1e3 * SLO_S
    assert late <= 10, "a hundredth of the steps may be late"


def test_a_step_of_which_the_table_predicts_nothing_is_learnt() -> None:
    """Decodes that took as long as their contexts are long say nothing about a prompt of one token, whose step has no context."""
    live = planner()
    for context in range(31, 31 + WARM_UP_STEPS + LEAST_SAMPLES):
        live.profile.observe(BatchShape(decodes=1, decode_context_tokens=context), context / 4)
    one_token = BatchShape(decodes=1)
    plan = live.plan(NO_DECODES, [PrefillWork(1)], now_s=0.0)
    assert live.profile.table is not None
    predicted_ms = live.profile.table.step_ms(one_token)
    assert (plan.prefill_tokens, predicted_ms) == (1, 0.0)
    live.observe(one_token, plan, predicted_ms, measured_ms=8.0)


def test_steps_may_be_late_more_often_where_few_use_up_their_time() -> None:
    table = ProfileTable(MACHINE)
    busy, resting = planner(table), planner(table)
    decodes = running(10)
    for each, work in ((busy, [PrefillWork(5000)]), (resting, [])):
        for _ in range(500):
            plan = each.plan(decodes, work, now_s=0.0)
            each.observe(step_shape(plan, decodes), plan, 50.0, 50.0)
    assert busy.margin.late_share == pytest.approx(LATE_SHARE, rel=0.1)
    assert resting.margin.late_share == MOST_LATE_SHARE


def test_errors_of_mixed_steps_do_not_keep_prompts_from_beginning() -> None:
    each = planner(ProfileTable(MACHINE))

    def most(limit_ms: float) -> int:
        return max(number for number in range(1, 500) if each.decodes_ms(number, 500 * number) <= limit_ms)

    def admitted() -> int:
        return max(number for number in range(1, 500) if each.fits(number, 500 * number, 100.0))

    assert each.profile.table is not None
    usual = most(100 * math.exp(-NORMAL_SIGMAS * each.profile.table.sigma))
    assert admitted() == usual
    each.margin.sigmas = 5.0
    assert admitted() == usual
    each.margin.sigmas = 1.0
    assert admitted() == usual
    assert planner().admitting_share is None


def test_more_decodes_begin_while_few_tokens_are_late_and_fewer_once_many_are() -> None:
    each = planner(ProfileTable(MACHINE))
    assert each.profile.table is not None
    sigma = each.profile.table.sigma

    def admitted() -> int:
        return max(number for number in range(1, 500) if each.fits(number, 500 * number, 100.0))

    usual = admitted()
    for step in range(20_000):
        each.admission.observe(5, 0, step % 20 == 0)
    assert each.admitting_share == pytest.approx(math.exp(-AdmissionMargin.LEAST_SIGMAS * sigma))
    assert each.step_share == pytest.approx(math.exp(-NORMAL_SIGMAS * sigma)), "steps that prefill, too, have their own margin"
    assert admitted() > usual
    for step in range(100):
        each.admission.observe(5, 5, step % 20 == 0)
    assert admitted() == usual
    assert each.admission.sigmas == AdmissionMargin.MOST_SIGMAS == NORMAL_SIGMAS


@pytest.mark.parametrize("every", [50, 200])
def test_the_margin_for_admission_follows_as_fast_as_decodes_are_replaced(every: int) -> None:
    margin = AdmissionMargin()
    for step in range(20_000):
        margin.observe(10, 10, step % every == 0)
    for step in range(10 * every):  # in which all ten are replaced
        margin.observe(10, 0, step % every == 0)
    assert AdmissionMargin.MOST_SIGMAS - margin.sigmas == pytest.approx(60.0 * 0.005, rel=0.2)


@pytest.mark.parametrize("sigma", [0.05, 0.2])
@pytest.mark.parametrize("answer_tokens", [20, 200, 1000])
def test_requests_begin_as_long_as_few_tokens_are_late(sigma: float, answer_tokens: int) -> None:
    """Decodes come and go, and there is always one that waits; each takes an equal part of a step."""
    rng = random.Random(7)
    margin, running, tokens, late, most = AdmissionMargin(), 0, 0, 0, 40
    for _ in range(60 * answer_tokens + 20_000):
        ended = sum(rng.random() < 1 / answer_tokens for _ in range(running))
        running -= ended
        while (running + 1) / most <= margin.share(sigma):
            running += 1
        is_late = running / most * rng.lognormvariate(0, sigma) > 1
        margin.observe(running, running * is_late, ended)
        tokens, late = tokens + running, late + running * is_late
    assert 0.0045 <= late / tokens <= 0.01


@pytest.mark.parametrize(("gaps", "late", "left"), [(3, 4, 0), (3, -1, 0), (-1, 0, 0), (3, 1, -2)])
def test_more_late_gaps_than_there_are_are_refused(gaps: int, late: int, left: int) -> None:
    with pytest.raises(ValueError, match=rf"^{late} late gaps of {gaps}, and {left} decodes that left$"):
        AdmissionMargin().observe(gaps, late, left)


def test_the_first_steps_of_an_engine_are_not_learnt() -> None:
    profile = LiveProfile()
    for _ in range(WARM_UP_STEPS):
        profile.observe(BatchShape(prefill_tokens=10), 9000.0)
    for _ in range(LEAST_SAMPLES):
        assert profile.table is None
        profile.observe(BatchShape(prefill_tokens=10), 9.0)
    assert profile.table is not None
    assert profile.table.step_ms(BatchShape(prefill_tokens=10)) == pytest.approx(9.0, rel=0.05)


def test_a_profile_goes_on_learning_after_its_last_fit() -> None:
    profile = LiveProfile()
    for _ in range(WARM_UP_STEPS + MOST_SAMPLES):
        profile.observe(BatchShape(prefill_tokens=10), 9.0)
    for _ in range(200):
        profile.observe(BatchShape(prefill_tokens=10), 18.0)
    assert profile.table is not None
    assert profile.table.step_ms(BatchShape(prefill_tokens=10)) == pytest.approx(18.0, rel=0.1)
