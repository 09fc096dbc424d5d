"""The policies that predict, through the scheduler: what they decide, and that they keep their books."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.execution_predictor import InstanceLimits
from dynaserve.global_scheduler import (
    CachedPrefix,
    GlobalScheduler,
    InstanceState,
    Options,
    OtherRequest,
    Placement,
    PlacementReason,
    Policy,
    Progress,
    RequestSpec,
    Slo,
)
from dynaserve.step_latency import BatchShape, ProfileTable, Roofline

A100 = ProfileTable(
    Roofline(overhead_ms=12.0, token_ms=0.105, knee_tokens=160.0, pair_ms=1.1e-6, decode_ms=0.05, context_ms=1.3e-4),
)
SLOW = ProfileTable(
    Roofline(overhead_ms=24.0, token_ms=0.21, knee_tokens=160.0, pair_ms=2.2e-6, decode_ms=0.1, context_ms=2.6e-4),
)
CUTS = {PlacementReason.levels_prefill, PlacementReason.balanced, PlacementReason.forced}


def fleet(
    policy: Policy, num_instances: int = 2, step_ms: float = 47.5, table: ProfileTable | None = A100, gathering: int | None = None
) -> GlobalScheduler:
    scheduler = GlobalScheduler(Options(policy, gathering=gathering), table)
    for number in range(num_instances):
        scheduler.observe(InstanceState(f"i{number}", limits=InstanceLimits(step_ms=step_ms, kv_tokens=200_000)))
    return scheduler


def request(request_id: str, prompt: int = 1000, output: int = 100, **fields: object) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        prompt_tokens=prompt,
        max_output_tokens=max(output, 1),
        expected_output_tokens=output,
        **fields,  # type: ignore[arg-type]
    )


def placed(scheduler: GlobalScheduler, spec: RequestSpec, now_ms: float) -> Placement:
    placement = scheduler.place(spec, now_ms)
    assert placement is not None
    return placement


@pytest.mark.parametrize("policy", [Policy.dynamic, Policy.paper])
def test_a_policy_that_predicts_does_as_colocated_until_it_has_a_table(policy: Policy) -> None:
    scheduler = GlobalScheduler(Options(policy))
    for name in ("a", "b", "gone"):
        scheduler.observe(InstanceState(name))
    scheduler.remove("gone")
    before = placed(scheduler, request("before"), 0.0)
    assert before.reason is PlacementReason.colocated
    assert before.prediction is None
    assert scheduler.predict_end_ms("before", 1.0) is None
    scheduler.learn(A100, 1.0)
    after = placed(scheduler, request("after"), 2.0)
    assert after.prediction is not None
    assert "gone" not in {part.instance_id for part in (after.alpha, after.beta) if part is not None}
    for name in ("before", "after"):
        scheduler.finish(name, 3.0)
    scheduler.check_invariants()


def test_a_hand_off_is_expected_when_its_alpha_has_done_its_part() -> None:
    scheduler = fleet(Policy.dynamic)
    placed(scheduler, request("prompt", 1000, forced_split=1000), 0.0)
    placed(scheduler, request("answer", 1000, 100, forced_split=1050), 0.0)
    placed(scheduler, request("whole", forced_split=0), 0.0)
    (in_prompt_ms, in_answer_ms, whole_ms) = (scheduler.predict_hand_off_ms(name, 0.0) for name in ("prompt", "answer", "whole"))
    assert in_prompt_ms is not None
    assert in_answer_ms is not None
    assert 0.0 < in_prompt_ms < in_answer_ms
    assert whole_ms is None
    assert scheduler.predict_hand_off_ms("unknown", 0.0) is None
    assert scheduler.predict_hand_off_ms("prompt", 0.9 * in_prompt_ms) == pytest.approx(in_prompt_ms), "in its last step"
    alone = fleet(Policy.dynamic)
    placed(alone, request("prompt", 1000, forced_split=1000), 0.0)
    assert alone.predict_hand_off_ms("prompt", in_prompt_ms + 500.0) == in_prompt_ms + 500.0, "it should have come"
    assert fleet(Policy.colocated).predict_hand_off_ms("prompt", 0.0) is None


def test_a_new_table_tells_anew_when_what_was_placed_will_end() -> None:
    scheduler = fleet(Policy.dynamic)
    names = [str(number) for number in range(6)]
    for name in names:
        placed(scheduler, request(name, 2000, 300), 0.0)
    ends_ms = [scheduler.predict_end_ms(name, 0.0) for name in names]
    scheduler.learn(A100, 0.0)
    assert [scheduler.predict_end_ms(name, 0.0) for name in names] == pytest.approx(ends_ms)
    scheduler.learn(SLOW, 0.0)
    for name, end_ms in zip(names, ends_ms, strict=True):
        later_ms = scheduler.predict_end_ms(name, 0.0)
        assert end_ms is not None
        assert later_ms is not None
        assert later_ms > 1.5 * end_ms
    scheduler.check_invariants()


def test_other_limits_keep_what_is_on_the_timeline() -> None:
    scheduler = fleet(Policy.dynamic, step_ms=40.0)
    placed(scheduler, request("r", 2000, 300), 0.0)
    for number in range(2):
        scheduler.observe(InstanceState(f"i{number}", limits=InstanceLimits(step_ms=60.0, kv_tokens=200_000)))
    assert scheduler.predict_end_ms("r", 0.0) is not None


def test_an_idle_fleet_runs_requests_whole_on_different_instances() -> None:
    scheduler = fleet(Policy.dynamic)
    placements = [placed(scheduler, request(str(n)), 0.0) for n in range(2)]
    assert [p.reason for p in placements] == [PlacementReason.whole_is_best] * 2
    assert {p.alpha.instance_id for p in placements} == {"i0", "i1"}


def busy_for_minutes(scheduler: GlobalScheduler, cached_share: float = 0.0) -> tuple[list[PlacementReason], list[str]]:
    """The reason of each placement, and the instances of the betas. cached_share: of each prompt, on either instance."""
    rng = random.Random(1)
    ends: list[tuple[float, str]] = []
    now_ms, kinds, betas = 0.0, [], []
    for number in range(600):
        now_ms += rng.expovariate(1 / 280.0)
        while ends and ends[0][0] <= now_ms:
            scheduler.finish(ends.pop(0)[1], now_ms)
        prompt = rng.randint(1500, 4000)
        cached = [CachedPrefix(f"i{instance}", int(cached_share * prompt)) for instance in range(2)]
        spec = request(str(number), prompt, 200, cached=cached if cached_share else [])
        placement = placed(scheduler, spec, now_ms)
        ends.append((now_ms + 8000.0, spec.request_id))
        kinds.append(placement.reason)
        if placement.beta is not None:
            betas.append(placement.beta.instance_id)
            assert 0 < placement.split_token < spec.prompt_tokens + 199
    scheduler.check_invariants()
    return kinds, betas


def test_a_busy_fleet_whose_kv_moves_too_slowly_cuts_nothing() -> None:
    scheduler = fleet(Policy.dynamic)
    scheduler.set_kv_token_ms(5000.0, work_ms=0.0)
    assert busy_for_minutes(scheduler)[0].count(PlacementReason.levels_prefill) == 0
    for impossible in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^kv_token_ms is "):
            scheduler.set_kv_token_ms(impossible, work_ms=0.0)
        with pytest.raises(ValueError, match=r"^kv_token_work_ms is "):
            scheduler.set_kv_token_ms(0.0, work_ms=impossible)


def test_a_busy_fleet_whose_steps_hand_offs_lengthen_cuts_less() -> None:
    def cuts(work_ms: float) -> int:
        scheduler = fleet(Policy.dynamic)
        scheduler.set_kv_token_ms(0.001, work_ms=work_ms)
        return busy_for_minutes(scheduler)[0].count(PlacementReason.levels_prefill)

    assert 4 * cuts(5.0) < cuts(0.0)


@pytest.mark.parametrize(("kv_token_ms", "gathers"), [(0.03, True), (0.3, False)])
def test_links_that_do_not_carry_the_prompts_end_gathering(kv_token_ms: float, gathers: bool) -> None:
    """Ten tokens a millisecond come; 33 or 3 are carried."""
    scheduler = fleet(Policy.dynamic)
    scheduler.set_kv_token_ms(kv_token_ms, work_ms=0.0)
    _, betas = busy_for_minutes(scheduler)
    most = max(betas[-40:].count(name) for name in ("i0", "i1"))
    assert (most >= 36) == gathers


def test_a_busy_fleet_with_a_tight_slo_gathers_decodes_and_cuts() -> None:
    kinds, betas = busy_for_minutes(fleet(Policy.dynamic))
    assert kinds[300:].count(PlacementReason.levels_prefill) > 100
    assert max(betas[-100:].count(name) for name in ("i0", "i1")) >= 90


@pytest.mark.parametrize(("cached_share", "gathering"), [(0.97, 0), (0.0, 1)])
def test_prompts_that_are_cached_do_not_press(cached_share: float, gathering: int) -> None:
    scheduler = fleet(Policy.dynamic)
    busy_for_minutes(scheduler, cached_share)
    prediction = placed(scheduler, request("next", 2000), 170_000.0).prediction
    assert prediction is not None
    assert prediction.gathering == gathering


def test_a_plan_to_gather_is_not_left_for_a_lull_of_decodes() -> None:
    """Two at a time, each of which is there for 1.6 s: now and then there is none."""
    rng, scheduler, now_ms, plans = random.Random(1), fleet(Policy.dynamic), 0.0, []
    while now_ms < 120_000.0:
        now_ms += rng.expovariate(1 / 800.0)
        prediction = placed(scheduler, request(str(now_ms), 8192, 32), now_ms).prediction
        assert prediction is not None
        plans.append(prediction.gathering)
    assert all(plans[plans.index(1) :])


def test_a_plan_to_gather_is_not_left_for_the_decodes_of_before_it_began() -> None:
    """Answers of five or ten tokens: few run at a time, and from an empty fleet on there were fewer. Later they may all be over."""
    for seed in range(100):
        rng = random.Random(seed)
        scheduler, began_ms = fleet(Policy.dynamic), math.inf
        now_ms = rng.expovariate(1 / 125.0)
        while now_ms < began_ms + 2000.0:
            spec = request(str(now_ms), rng.randint(200, 4000), rng.choice([5, 10]))
            prediction = placed(scheduler, spec, now_ms).prediction
            assert prediction is not None
            if prediction.gathering:
                began_ms = min(began_ms, now_ms)
            assert prediction.gathering or began_ms == math.inf, f"seed {seed}: begun at {began_ms} ms, left at {now_ms} ms"
            now_ms += rng.expovariate(1 / 125.0)


def test_who_comes_back_as_a_gatherer_drains_gathers_at_once() -> None:
    scheduler = fleet(Policy.dynamic, num_instances=3, gathering=1)
    scheduler.observe(InstanceState("i2", accepts_new=False, limits=InstanceLimits(step_ms=47.5, kv_tokens=200_000)))
    placed(scheduler, request("first", 200, 1000), 0.0)
    for number in range(40):
        placed(scheduler, request(str(number), 2000, 1), 10.0 * number)
    gathers = placed(scheduler, request("second", 200, 1000), 500.0)
    gatherer = (gathers.beta or gathers.alpha).instance_id
    assert gatherer in {"i0", "i1"}
    scheduler.observe(InstanceState(gatherer, accepts_new=False, limits=InstanceLimits(step_ms=47.5, kv_tokens=200_000)))
    scheduler.observe(InstanceState("i2", limits=InstanceLimits(step_ms=47.5, kv_tokens=200_000)))
    (free,) = {"i0", "i1"} - {gatherer}
    then = placed(scheduler, request("third", 200, 1000), 510.0)
    assert then.prediction is not None
    assert then.prediction.gathering == 1
    assert then.prediction.objective_ms < 1000.0, "one of the two gathers, and takes it at no price"
    assert (then.beta or then.alpha).instance_id in {free, "i2"}


def test_the_decision_records_what_it_expected() -> None:
    prediction = placed(fleet(Policy.dynamic), request("r"), 0.0).prediction
    assert prediction is not None
    assert 0 < prediction.ttft_ms <= prediction.objective_ms <= prediction.whole_objective_ms
    assert prediction.decode_step_ms > 0


def test_a_queue_sends_the_next_request_elsewhere() -> None:
    scheduler = fleet(Policy.dynamic)
    first = placed(scheduler, request("a", prompt=30_000), 0.0)
    assert placed(scheduler, request("b", prompt=100), 1.0).alpha.instance_id != first.alpha.instance_id


def other(computed: int, prompt: int, end: int, *, waits: bool = False) -> OtherRequest:
    return OtherRequest(computed_tokens=computed, prompt_tokens=prompt, end_token=end, waits=waits)


def test_prompts_of_other_front_ends_stand_in_the_queue_until_they_are_over() -> None:
    scheduler = fleet(Policy.dynamic)
    scheduler.report_others("i0", [other(0, 30_000, 30_100), other(500, 400, 600)], 0.0)
    first = placed(scheduler, request("a", prompt=100), 1.0)
    assert first.alpha.instance_id == "i1"
    scheduler.report_others("i0", [], 2.0)
    scheduler.report_others("i1", [other(0, 30_000, 30_100)], 2.0)
    assert placed(scheduler, request("b", prompt=100), 3.0).alpha.instance_id == "i0"
    scheduler.check_invariants()


def test_a_waiting_half_of_another_front_end_holds_memory_only() -> None:
    def times(*others: OtherRequest) -> list[float]:
        scheduler = fleet(Policy.dynamic, num_instances=1)
        scheduler.report_others("i0", list(others), 0.0)
        prediction = placed(scheduler, request("a"), 1.0).prediction
        assert prediction is not None
        return [prediction.ttft_ms, prediction.decode_step_ms]

    assert times(other(5000, 5000, 5100, waits=True)) == times()
    assert times(other(0, 5000, 5100)) > times()


def test_what_other_front_ends_hold_leaves_less_memory() -> None:
    def objective_ms(*others: OtherRequest) -> float:
        scheduler = fleet(Policy.dynamic, num_instances=1)
        scheduler.report_others("i0", list(others), 0.0)
        prediction = placed(scheduler, request("a"), 1.0).prediction
        assert prediction is not None
        return prediction.objective_ms

    assert objective_ms(other(199_900, 199_900, 199_950, waits=True)) > objective_ms()
    assert objective_ms(other(100_000, 100_000, 100_050, waits=True)) == objective_ms()


def cut_requests(scheduler: GlobalScheduler, prompt: int = 3000) -> tuple[list[str], str, float]:
    """Places some that are cut and wait on the same instance: their names, the instance of their second halves, the time."""
    now_ms = 0.0
    for number in range(120):
        now_ms += 5.0
        scheduler.place(request(f"decode-{number}", prompt=200, output=2000), now_ms)
    now_ms += 8000.0
    cuts = {str(number): placed(scheduler, request(str(number), prompt=prompt), now_ms + number) for number in range(24)}
    alpha, beta = sorted(("i0", "i1"), key=[cut.alpha.instance_id for cut in cuts.values()].count, reverse=True)
    return [name for name, cut in cuts.items() if cut.alpha.instance_id == alpha and cut.beta is not None], beta, now_ms


def test_an_instance_looks_at_few_of_its_hand_offs_at_a_time() -> None:
    scheduler = fleet(Policy.dynamic)
    waiting, beta, now_ms = cut_requests(scheduler)
    scheduler.report_others(beta, [other(0, 60_000, 60_100)] * 3, now_ms + 250.0)

    def revised(at_ms: float) -> list[str]:
        return [name for name in waiting if scheduler.revise(name, at_ms) is not None]

    assert len(waiting) > 8
    assert revised(now_ms + 250.0) == waiting[:4]
    assert revised(now_ms + 449.0) == []
    assert revised(now_ms + 450.0) == waiting[4:8]


def test_a_hand_off_is_looked_at_when_its_turn_is_near() -> None:
    scheduler = fleet(Policy.dynamic)
    waiting, beta, now_ms = cut_requests(scheduler, prompt=9000)
    scheduler.report_others(beta, [other(0, 60_000, 60_100)] * 3, now_ms + 250.0)

    def revised(at_ms: float) -> list[str]:
        return [name for name in waiting if scheduler.revise(name, at_ms) is not None]

    assert revised(now_ms + 250.0) == waiting[:3]
    assert revised(now_ms + 450.0) == [], "more than four steps of prefill come before the next"
    assert revised(now_ms + 2000.0) == waiting[3:4]


def test_no_hand_off_is_looked_at_again_before_all_were() -> None:
    scheduler = fleet(Policy.dynamic)
    waiting, beta, now_ms = cut_requests(scheduler)
    revisions = [scheduler.revise(name, now_ms + 250.0) for name in waiting[:4]]
    assert any(revision is None or revision.split_token is not None for revision in revisions), "their hand-offs still come"
    scheduler.report_others(beta, [other(0, 60_000, 60_100)] * 3, now_ms + 450.0)
    assert [name for name in waiting if scheduler.revise(name, now_ms + 450.0)] == waiting[4:8]


def test_who_goes_on_alone_as_its_beta_s_instance_is_gone_holds_its_memory() -> None:
    limits = InstanceLimits(step_ms=95.0, kv_tokens=23_000)

    def placed_next(*, gone: bool) -> str:
        """Where a prompt goes that fits beside what the other request holds by now, and not beside what it is promised."""
        scheduler = GlobalScheduler(Options(Policy.dynamic), A100)
        for name in ("a", "b"):
            scheduler.observe(InstanceState(name, limits=limits))
        cut = placed(scheduler, request("cut", prompt=10_000, output=12_000, forced_split=9_900), 0.0)
        assert cut.beta is not None
        scheduler.observe(InstanceState("busy", limits=limits))
        if gone:
            scheduler.remove(cut.beta.instance_id)
        scheduler.recut("cut", None, 1.0)
        if not gone:
            scheduler.remove(cut.beta.instance_id)
        decodes = Progress(request_id="cut", computed_tokens=10_001, expected_output_tokens=12_000)
        scheduler.report(cut.alpha.instance_id, [decodes], 60_000.0)
        scheduler.report_others("busy", [other(0, 3000, 3010)], 60_000.0)
        scheduler.check_invariants()
        return placed(scheduler, request("next", prompt=11_500, output=5, may_cut=False), 60_000.0).alpha.instance_id

    assert placed_next(gone=False) == placed_next(gone=True) == "busy"


def test_a_finished_request_leaves_the_timeline() -> None:
    scheduler = fleet(Policy.dynamic, num_instances=1)
    scheduler.place(request("a", prompt=30_000), 0.0)
    waits = placed(scheduler, request("b"), 1.0)
    scheduler.finish("a", 2.0)
    scheduler.finish("b", 2.0)
    alone = placed(scheduler, request("c"), 3.0)
    assert waits.prediction is not None
    assert alone.prediction is not None
    assert alone.prediction.ttft_ms < waits.prediction.ttft_ms


def test_a_forced_split_overrides_the_policies_that_predict() -> None:
    for policy in (Policy.dynamic, Policy.paper):
        placement = placed(fleet(policy), request("r", forced_split=1050), 0.0)
        assert (placement.reason, placement.split_token) == (PlacementReason.forced, 1050)


def test_the_paper_s_policy_takes_pairs_in_turns_and_balances() -> None:
    scheduler = fleet(Policy.paper, num_instances=3)
    placements = [placed(scheduler, request(str(n), prompt=1000, output=1000), 0.0) for n in range(3)]
    assert [p.alpha.instance_id for p in placements] == ["i0", "i1", "i2"]
    assert [p.beta and p.beta.instance_id for p in placements] == ["i1", "i2", "i0"]
    assert placements[0].reason is PlacementReason.balanced
    assert 1000 < placements[0].split_token < 1999


def test_the_cost_scale_follows_the_steps_of_its_instance() -> None:
    scheduler = fleet(Policy.dynamic)
    shape = BatchShape(decodes=10, decode_context_tokens=5000)
    for second in range(200):
        scheduler.observe_step("i0", shape, 1.5 * A100.step_ms(shape), 1000.0 * second)
    assert scheduler.cost_scale("i0") == pytest.approx(1.5, rel=0.02)
    assert scheduler.cost_scale("i1") == 1.0
    assert placed(scheduler, request("r"), 200_000.0).alpha.instance_id == "i1"
    scheduler.observe(InstanceState("i0", limits=InstanceLimits(step_ms=40.0, kv_tokens=200_000)))
    assert scheduler.cost_scale("i0") == pytest.approx(1.5, rel=0.02), "other limits do not make it faster"
    assert placed(scheduler, request("s"), 260_000.0).alpha.instance_id == "i1"


@pytest.mark.parametrize("told", [False, True])
def test_decodes_share_their_time_with_the_prompts_that_come_meanwhile(*, told: bool) -> None:
    """Half of the steps are twice as long, since prompts are computed beside the decodes: of 3 parts of time, those have one."""
    scheduler = fleet(Policy.dynamic, num_instances=1)
    decodes = BatchShape(decodes=10, decode_context_tokens=5000)
    alone_ms = A100.step_ms(decodes)
    mixed = next(
        shape
        for tokens in range(1, 2000)
        if A100.step_ms(shape := BatchShape(prefill_tokens=tokens, prefill_pairs=0.0, decodes=10, decode_context_tokens=5000))
        >= 2 * alone_ms
    )
    for number in range(2000 if told else 0):
        shape = mixed if number % 2 else decodes
        scheduler.observe_step("i0", shape, A100.step_ms(shape), 20.0 * number)
    now_ms = 40_000.0
    prediction = placed(scheduler, request("r", 400, 1000), now_ms).prediction
    assert prediction is not None
    end_ms = scheduler.predict_end_ms("r", now_ms)
    assert end_ms is not None
    expected_ms = 999 * prediction.decode_step_ms * (1.5 if told else 1.0)
    assert end_ms - now_ms - prediction.ttft_ms == pytest.approx(expected_ms, rel=0.05)


@pytest.mark.parametrize("outputs", [1, 10, 1000, 5000])
def test_others_take_the_place_of_those_that_decode_now(outputs: int) -> None:
    """Of late 100 decoded together; now one is alone, and others come by and by."""
    scheduler = fleet(Policy.dynamic, num_instances=1)
    many = BatchShape(decodes=100, decode_context_tokens=200_000)
    for number in range(10_000):
        scheduler.observe_step("i0", many, A100.step_ms(many), A100.step_ms(many) * number)
    now_ms = A100.step_ms(many) * 10_000
    prediction = placed(scheduler, request("r", 400, outputs), now_ms).prediction
    assert prediction is not None
    end_ms = scheduler.predict_end_ms("r", now_ms)
    assert end_ms is not None
    alone_ms, lately_ms = ((outputs - 1) * step_ms for step_ms in (prediction.decode_step_ms, A100.step_ms(many)))
    answer_ms = outputs * A100.step_ms(many)
    like_now = answer_ms / alone_ms * (1 - math.exp(-alone_ms / answer_ms)) if alone_ms else 1.0
    expected_ms = like_now * alone_ms + (1 - like_now) * lately_ms
    assert end_ms - now_ms - prediction.ttft_ms == pytest.approx(expected_ms, rel=0.05, abs=1e-6)


def test_a_new_table_keeps_what_one_instance_takes_longer_than_another() -> None:
    scheduler = fleet(Policy.dynamic)
    shape = BatchShape(decodes=10, decode_context_tokens=5000)
    for second in range(200):
        for name, factor in (("i0", 3.0), ("i1", 2.0)):
            scheduler.observe_step(name, shape, factor * A100.step_ms(shape), 1000.0 * second)
    scheduler.learn(SLOW, 200_000.0)
    assert scheduler.cost_scale("i0") / scheduler.cost_scale("i1") == pytest.approx(1.5, rel=0.03)
    assert scheduler.cost_scale("i0") * scheduler.cost_scale("i1") == pytest.approx(1.0, rel=0.03)


def test_a_new_table_says_nothing_of_an_instance_that_has_told_no_steps() -> None:
    scheduler = fleet(Policy.dynamic)
    shape = BatchShape(decodes=10, decode_context_tokens=5000)
    for second in range(200):
        scheduler.observe_step("i0", shape, 2.0 * A100.step_ms(shape), 1000.0 * second)
    scheduler.learn(SLOW, 200_000.0)
    assert scheduler.cost_scale("i0") == pytest.approx(1.0)
    assert scheduler.cost_scale("i1") == 1.0


def test_a_fleet_slower_than_its_table_does_not_gather_more_decodes_than_the_slo_allows() -> None:
    def gathering(factor: float) -> int:
        scheduler = fleet(Policy.dynamic)
        for name in ("i0", "i1"):
            scheduler.observe(InstanceState(name, limits=InstanceLimits(step_ms=95.0, kv_tokens=200_000)))
        for number in range(60):
            scheduler.place(request(str(number), 900, 4000, forced_split=0), 0.0)
        shape = BatchShape(decodes=10, decode_context_tokens=5000)
        for _ in range(200):
            for name in ("i0", "i1"):
                scheduler.observe_step(name, shape, factor * A100.step_ms(shape), 0.0)
        for number in range(60):
            scheduler.place(request(f"short-{number}", 3000, 1, forced_split=0), 69_000.0)
            scheduler.finish(f"short-{number}", 69_000.0)
        prediction = placed(scheduler, request("r", 2000), 70_000.0).prediction
        assert prediction is not None
        return prediction.gathering

    assert gathering(1.0) == 1
    assert gathering(2.0) == 0


def test_a_fleet_slower_than_its_table_keeps_up_with_fewer_answers() -> None:
    def gathering(factor: float) -> int:
        scheduler = fleet(Policy.dynamic)
        for name in ("i0", "i1"):
            scheduler.observe(InstanceState(name, limits=InstanceLimits(step_ms=95.0, kv_tokens=200_000, max_requests=256)))
        shape = BatchShape(decodes=10, decode_context_tokens=5000)
        for _ in range(200):
            for name in ("i0", "i1"):
                scheduler.observe_step(name, shape, factor * A100.step_ms(shape), 0.0)
        # Two output tokens a millisecond.
        for number in range(150):
            if number >= 60:
                scheduler.finish(str(number - 60), 200.0 * number)
            last = placed(scheduler, request(str(number), 900, 400), 200.0 * number)
        assert last.prediction is not None
        return last.prediction.gathering

    # With all memory taken, 181 decodes, steps of 90 ms generate them.
    assert gathering(1.0) == 1
    assert gathering(2.0) == 0


def test_those_that_gather_keep_up_at_their_own_cost_not_at_the_fleet_s() -> None:
    def goes_on(gatherer: float, other: float) -> bool:
        scheduler = fleet(Policy.dynamic)
        for name in ("i0", "i1"):
            scheduler.observe(InstanceState(name, limits=InstanceLimits(step_ms=95.0, kv_tokens=200_000, max_requests=256)))
        betas: list[str] = []
        shape = BatchShape(decodes=10, decode_context_tokens=5000)
        for number in range(200):
            if number >= 60:
                scheduler.finish(str(number - 60), 200.0 * number)
            last = placed(scheduler, request(str(number), 900, 400), 200.0 * number)
            betas += [last.beta.instance_id] if last.beta is not None else []
            if number == 150:
                assert last.prediction is not None
                assert last.prediction.gathering == 1
                gathers = max(("i0", "i1"), key=betas[-20:].count)
                for _ in range(200):
                    for name in ("i0", "i1"):
                        factor = gatherer if name == gathers else other
                        scheduler.observe_step(name, shape, factor * A100.step_ms(shape), 200.0 * number)
        assert last.prediction is not None
        return last.prediction.gathering == 1

    assert goes_on(1.0, 3.0)
    assert not goes_on(2.0, 2.0)
    assert goes_on(1.2, 0.8), "a plan that would begin again is not left"


@pytest.mark.parametrize(
    ("gap_ms", "expected", "had", "gathers"),
    [(50.0, 200, 50, 1), (50.0, 200, 200, 0), (50.0, 200, 0, 0), (600.0, 800, 1600, 0), (600.0, 800, 800, 1), (600.0, 800, 0, 1)],
)
def test_a_plan_reckons_with_answers_as_they_turn_out(gap_ms: float, expected: int, had: int, gathers: int) -> None:
    """had: output tokens of those that have ended; 0: it is not told. Some two a millisecond can be gathered on one instance."""
    scheduler = fleet(Policy.dynamic)
    for name in ("i0", "i1"):
        scheduler.observe(InstanceState(name, limits=InstanceLimits(step_ms=95.0, kv_tokens=200_000, max_requests=256)))
    for number in range(150):
        if number >= 60:
            scheduler.finish(str(number - 60), gap_ms * number)
            if had:
                scheduler.learn_length(had, expected)
        last = placed(scheduler, request(str(number), 900, expected), gap_ms * number)
    assert last.prediction is not None
    assert last.prediction.gathering == gathers


@pytest.mark.parametrize(("output", "expected", "named"), [(0, 5, "output_tokens is 0"), (5, -1, "expected_tokens is -1")])
def test_an_answer_of_nothing_is_refused(output: int, expected: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fleet(Policy.dynamic).learn_length(output, expected)


@pytest.mark.parametrize(("idle_s", "within_s"), [(0, 0.3), (600, 2.0)])
def test_where_an_overload_begins_decodes_are_gathered_soon(idle_s: int, within_s: float) -> None:
    """Those placed before stay where they are for as long as their answers last. idle_s: with a request each ten seconds."""
    scheduler = fleet(Policy.dynamic)
    for name in ("i0", "i1"):
        scheduler.observe(InstanceState(name, limits=InstanceLimits(step_ms=47.5, kv_tokens=200_000)))
    for second in range(0, idle_s, 10):
        scheduler.place(request(f"before-{second}", 1500, 20), 1e3 * second)
        scheduler.finish(f"before-{second}", 1e3 * second + 2000.0)
    gathering: list[bool] = []
    for number in range(30):
        prediction = placed(scheduler, request(str(number), 1500, 200), 1e3 * idle_s + 120.0 * number).prediction
        assert prediction is not None
        gathering.append(prediction.gathering == 1)
    first = gathering.index(True)
    assert 0.12 * first <= within_s
    assert all(gathering[first:])


@pytest.mark.parametrize("small", ["i0", "i1"])
def test_no_more_decodes_are_gathered_than_the_smallest_instance_holds(small: str) -> None:
    scheduler = fleet(Policy.dynamic)
    scheduler.observe(InstanceState(small, limits=InstanceLimits(step_ms=47.5, kv_tokens=200_000, max_requests=20)))
    for number in range(60):
        scheduler.place(request(str(number), 900, 4000, forced_split=0), 0.0)
    prediction = placed(scheduler, request("r", 2000), 70_000.0).prediction
    assert prediction is not None
    assert prediction.gathering == 0


def test_a_pause_of_the_machine_hardly_moves_the_cost_scale() -> None:
    scheduler = fleet(Policy.dynamic)
    scheduler.observe_step("i0", BatchShape(decodes=1, decode_context_tokens=100), 60_000.0, 0.0)
    assert scheduler.cost_scale("i0") < 1.03


def test_a_request_that_outlives_its_prediction_is_put_back() -> None:
    scheduler = fleet(Policy.dynamic, num_instances=2)
    first = placed(scheduler, request("a", prompt=200, output=2), 0.0)
    name = first.alpha.instance_id
    before = placed(scheduler, request("b", prompt=200, output=2), 10_000.0)
    assert before.prediction is not None
    scheduler.finish("b", 10_000.0)
    scheduler.report(name, [Progress(request_id="a", computed_tokens=900, expected_output_tokens=1000)], 10_001.0)
    after = placed(scheduler, request("c", prompt=200, output=2), 10_001.0)
    assert after.prediction is not None
    assert after.alpha.instance_id != name or after.prediction.decode_step_ms > before.prediction.decode_step_ms


def expected_ttft_ms(scheduler: GlobalScheduler, now_ms: float) -> float:
    """Of a short prompt that comes now."""
    prediction = placed(scheduler, request("probe", 100, 1), now_ms).prediction
    assert prediction is not None
    scheduler.finish("probe", now_ms)
    return prediction.ttft_ms


def test_a_prompt_that_is_slower_than_predicted_keeps_others_waiting() -> None:
    """What the instance tells of a prompt counts: how much is left of it, and that the one behind it has not begun."""
    scheduler = fleet(Policy.dynamic, num_instances=1)
    for name in ("first", "second"):
        placed(scheduler, request(name, 20_000, 1), 0.0)
    now_ms = 3000.0  # both take some 4.5 s
    predicted_ms = expected_ttft_ms(scheduler, now_ms)

    def told(first: int, second: int) -> float:
        progress = [
            Progress(request_id=name, computed_tokens=computed, expected_output_tokens=1, begun=computed > 0)
            for name, computed in (("first", first), ("second", second))
        ]
        scheduler.report("i0", progress, now_ms)
        return expected_ttft_ms(scheduler, now_ms)

    barely_begun_ms = told(100, 0)
    assert barely_begun_ms > predicted_ms + 2500.0
    assert told(100, 0) == pytest.approx(barely_begun_ms)  # said again, it changes nothing
    assert told(0, 0) == pytest.approx(barely_begun_ms, rel=0.02)
    assert told(20_000, 10_000) < predicted_ms
    assert told(20_000, 20_000) < 0.1 * predicted_ms
    scheduler.check_invariants()


def test_a_prompt_of_which_nothing_is_told_is_no_faster_than_its_steps() -> None:
    """Instances with vLLM's own batches tell of answers only: each step of 214.8 ms ends a little late."""
    linear = ProfileTable(Roofline(overhead_ms=10.0, token_ms=0.1, knee_tokens=1.0, pair_ms=0.0, decode_ms=0.0, context_ms=0.0))
    scheduler = GlobalScheduler(Options(Policy.dynamic), linear)
    scheduler.observe(InstanceState("i0", limits=InstanceLimits(max_step_tokens=2048)))
    placed(scheduler, request("answer", 1, 1000), 0.0)
    placed(scheduler, request("prompt", 20_480, 1), 1.0)
    for step in range(1, 6):
        now_ms = 10.1 + 216.0 * step
        scheduler.report("i0", [Progress(request_id="answer", computed_tokens=1 + step, expected_output_tokens=1000)], now_ms)
    assert expected_ttft_ms(scheduler, now_ms) > 4 * 214.8  # of the ten steps five are left


def test_kv_that_is_on_its_way_is_waited_for_after_its_alpha_stands() -> None:
    scheduler = fleet(Policy.dynamic)
    scheduler.set_kv_token_ms(0.2, work_ms=0.0)
    placement = placed(scheduler, request("r", 8000, 100, forced_split=4096), 0.0)
    assert placement.beta is not None
    stands_ms = 450.0  # about when its steps are over
    scheduler.parked("r", 4096, stands_ms)
    scheduler.observe(InstanceState(placement.alpha.instance_id, False, InstanceLimits(step_ms=47.5, kv_tokens=200_000)))
    # All of it takes 819 ms, in which another prompt finds beta's instance idle.
    assert expected_ttft_ms(scheduler, stands_ms) < 100.0
    assert expected_ttft_ms(scheduler, stands_ms + 825.0) > 300.0


def test_of_a_prompt_that_waits_what_is_cached_is_not_computed() -> None:
    scheduler = fleet(Policy.dynamic, num_instances=1)
    placed(scheduler, request("cached", 20_000, 1, cached=[CachedPrefix("i0", 19_000)]), 0.0)
    before_ms = expected_ttft_ms(scheduler, 0.0)
    not_begun = Progress(request_id="cached", computed_tokens=0, expected_output_tokens=1, begun=False)
    scheduler.report("i0", [not_begun], 50.0)
    assert expected_ttft_ms(scheduler, 50.0) == pytest.approx(before_ms, rel=0.01)


def test_a_hand_off_may_move_to_before_what_is_cached_of_a_prompt_that_waits() -> None:
    scheduler = fleet(Policy.dynamic)
    cached = [CachedPrefix(f"i{number}", 2000) for number in range(2)]
    placement = placed(scheduler, request("r", 4000, 100, forced_split=3000, cached=cached), 0.0)
    scheduler.recut("r", 1000, 1.0)
    not_begun = Progress(request_id="r", computed_tokens=0, expected_output_tokens=100, begun=False)
    scheduler.report(placement.alpha.instance_id, [not_begun], 50.0)
    assert expected_ttft_ms(scheduler, 50.0) > 0
    scheduler.check_invariants()


def test_a_new_table_does_not_end_the_step_under_way() -> None:
    scheduler = fleet(Policy.dynamic, num_instances=1)
    placed(scheduler, request("long", 8000, 1), 0.0)
    before_ms = expected_ttft_ms(scheduler, 10.0)
    scheduler.learn(A100, 10.0)
    assert expected_ttft_ms(scheduler, 10.0) == pytest.approx(before_ms, rel=0.01)


def test_a_beta_that_waits_for_its_kv_stays_where_it_is() -> None:
    scheduler = fleet(Policy.dynamic)
    placement = placed(scheduler, request("r", 4000, 100, forced_split=3000), 0.0)
    assert placement.beta is not None
    end_ms = scheduler.predict_end_ms("r", 1.0)
    not_begun = Progress(request_id="r", computed_tokens=0, expected_output_tokens=100, begun=False)
    scheduler.report(placement.beta.instance_id, [not_begun], 1.0)
    assert scheduler.predict_end_ms("r", 1.0) == end_ms


def test_an_alpha_beyond_its_cut_stops_with_its_step_and_hands_over() -> None:
    scheduler = fleet(Policy.dynamic)
    placement = placed(scheduler, request("r", 4000, 30_000, forced_split=3000), 0.0)
    assert placement.beta is not None
    name = placement.alpha.instance_id
    scheduler.recut("r", 1000, 10.0)  # while a step computes up to 2048
    scheduler.report(name, [Progress(request_id="r", computed_tokens=2048, expected_output_tokens=30_000)], 20.0)
    scheduler.check_invariants()
    hand_over_ms = scheduler.predict_hand_off_ms("r", 20.0)
    assert hand_over_ms is not None
    assert hand_over_ms - 20.0 == pytest.approx(A100.step_ms(BatchShape(prefill_tokens=1, prefill_pairs=2048.0)), rel=0.01)
    scheduler.parked("r", 2049, 100.0)
    scheduler.check_invariants()
    decoding = placed(scheduler, request("next", 400, 50), 5001.0)
    assert decoding.alpha.instance_id == name, "the other one has the answer"
    assert decoding.prediction is not None
    assert decoding.prediction.decode_step_ms == pytest.approx(
        A100.step_ms(BatchShape(decodes=1, decode_context_tokens=400)),
    )


@pytest.mark.parametrize(("begun", "behind"), [(True, False), (False, False), (False, True)], ids=["it runs", "it waits", "in a queue"])
def test_a_beta_has_not_begun_while_its_alpha_is_late(*, begun: bool, behind: bool) -> None:
    scheduler = fleet(Policy.dynamic)
    before = {name: placed(scheduler, request(name, 30_000, 1, forced_split=0), 0.0) for name in ("a", "b") if behind}
    placement = placed(scheduler, request("r", 4000, 100, forced_split=3000), 0.0)
    handed_over_ms = scheduler.predict_hand_off_ms("r", 0.0)
    assert handed_over_ms is not None
    late_ms = 2.0 * handed_over_ms
    instance = placement.alpha.instance_id
    ahead = [name for name, other in before.items() if other.alpha.instance_id == instance]
    progress = [Progress(request_id=name, computed_tokens=64, expected_output_tokens=1) for name in ahead]
    progress.append(Progress(request_id="r", computed_tokens=64 if begun else 0, expected_output_tokens=100, begun=begun))
    scheduler.report(instance, progress, late_ms)
    hand_over_ms, end_ms = scheduler.predict_hand_off_ms("r", late_ms), scheduler.predict_end_ms("r", late_ms)
    assert hand_over_ms is not None
    assert end_ms is not None
    assert hand_over_ms > late_ms + 0.5 * handed_over_ms
    answer_ms = 99 * A100.step_ms(BatchShape(decodes=1, decode_context_tokens=4000))
    assert end_ms > hand_over_ms + answer_ms


def test_what_a_beta_computes_again_is_seen() -> None:
    scheduler = fleet(Policy.dynamic)
    placement = placed(scheduler, request("r", 8000, 100, forced_split=7000), 0.0)
    assert placement.beta is not None
    scheduler.parked("r", 7000, 1000.0)
    before_ms = scheduler.predict_end_ms("r", 1000.0)
    again = Progress(request_id="r", computed_tokens=500, expected_output_tokens=100)
    scheduler.report(placement.beta.instance_id, [again], 1000.0)
    after_ms = scheduler.predict_end_ms("r", 1000.0)
    assert before_ms is not None
    assert after_ms is not None
    assert after_ms > before_ms + 0.1 * 6500, "some 0.1 ms for each token"


def test_progress_and_cuts_that_cannot_be_are_refused() -> None:
    scheduler = fleet(Policy.dynamic)
    placement = placed(scheduler, request("r", 400, 100, forced_split=300), 0.0)
    with pytest.raises(ValueError, match=r"^split_token is 0; alpha computes at least one token$"):
        scheduler.recut("r", 0, 1.0)
    bad = Progress(request_id="r", computed_tokens=-1, expected_output_tokens=100)
    with pytest.raises(ValueError, match=r"^computed_tokens is -1, outside"):
        scheduler.report(placement.alpha.instance_id, [bad], 1.0)


@pytest.mark.parametrize("policy", [Policy.dynamic, Policy.colocated])
def test_impossible_limits_are_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"^max_requests is 0; it must lie between 1 and 2\^40$"):
        GlobalScheduler(Options(policy), A100).observe(InstanceState("a", limits=InstanceLimits(max_requests=0)))
    with pytest.raises(ValueError, match=r"^admit_ms is -1.000000; it must not be negative$"):
        GlobalScheduler(Options(policy), A100).observe(InstanceState("a", limits=InstanceLimits(admit_ms=-1.0)))


@settings(max_examples=150, deadline=None)
@given(policy=st.sampled_from([Policy.dynamic, Policy.paper]), data=st.data())
def test_any_calls_in_any_order_keep_the_books(policy: Policy, data: st.DataObject) -> None:
    scheduler = fleet(policy, num_instances=3, table=data.draw(st.sampled_from([A100, None])))
    live: dict[str, RequestSpec] = {}
    now_ms, names = 0.0, [f"i{n}" for n in range(4)]
    for number in range(data.draw(st.integers(1, 25))):
        now_ms += data.draw(st.floats(-10.0, 2000.0))
        match data.draw(st.sampled_from(["place"] * 3 + ["finish", "report", "others", "observe", "remove", "learn", "revise", "parked"])):
            case "place":
                spec = request(
                    str(number),
                    data.draw(st.integers(0, 3000)),
                    data.draw(st.integers(0, 300)),
                    may_cut=data.draw(st.booleans()),
                    slo=Slo(ttft_ms=data.draw(st.floats(1.0, 1e4)), tbt_ms=50.0),
                )
                if (placement := scheduler.place(spec, now_ms)) is not None:
                    live[spec.request_id] = spec
                    check_legal(placement, spec)
            case "finish" if live:
                scheduler.finish(live.pop(data.draw(st.sampled_from(sorted(live)))).request_id, now_ms)
            case "report":
                progress = [
                    Progress(
                        request_id=r,
                        computed_tokens=data.draw(st.integers(0, spec.prompt_tokens + spec.max_output_tokens)),
                        expected_output_tokens=spec.expected_output_tokens,
                    )
                    for r, spec in live.items()
                ]
                scheduler.report(data.draw(st.sampled_from(names)), progress, now_ms)
            case "others":
                counts = st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
                others = [other(*tokens, waits=number % 2 == 0) for tokens in data.draw(st.lists(counts, max_size=4))]
                scheduler.report_others(data.draw(st.sampled_from(names)), others, now_ms)
            case "observe":
                limits = InstanceLimits(step_ms=data.draw(st.sampled_from([47.5, 95.0])), kv_tokens=200_000)
                scheduler.observe(InstanceState(data.draw(st.sampled_from(names)), data.draw(st.booleans()), limits))
            case "remove":
                scheduler.remove(data.draw(st.sampled_from(names)))
            case "learn":
                scheduler.learn(data.draw(st.sampled_from([A100, SLOW])), now_ms)
            case "revise" if live:
                scheduler.revise(data.draw(st.sampled_from(sorted(live))), now_ms)
            case "parked" if live:
                scheduler.parked(data.draw(st.sampled_from(sorted(live))), data.draw(st.integers(0, 3000)), now_ms)
        scheduler.check_invariants()


def check_legal(placement: Placement, spec: RequestSpec) -> None:
    assert (placement.beta is not None) == (placement.reason in CUTS)
    if placement.beta is not None:
        assert placement.beta.instance_id != placement.alpha.instance_id
        assert 0 < placement.split_token < spec.prompt_tokens + max(spec.max_output_tokens - 1, 0)
        assert placement.beta.start_token == placement.split_token < placement.beta.end_token
