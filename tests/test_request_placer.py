"""The front-end's questions about a request, over the real scheduler and length predictor."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynaserve import fleet, length_predictor
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance, must_tell_steps, profile_check, profile_key, should_tell_steps
from dynaserve.global_scheduler import GlobalScheduler, Options, Placement, PlacementReason, Policy, RequestSpec, Slo, parse_policy
from dynaserve.latency_profile import ProfileKey, save
from dynaserve.length_predictor import LengthPredictor, LengthQuery
from dynaserve.live_profile import KNOWN_STEPS
from dynaserve.messages import PROTOCOL_VERSION, InstanceDescription, Load, MeasuredStep
from dynaserve.request_placer import Decision, Held, RequestFacts, RequestPlacer, RequestProgress
from dynaserve.serve import check_for, configure, make_placer
from dynaserve.step_latency import BatchShape, ProfileTable, Roofline

ROOFLINE = Roofline(overhead_ms=12.0, token_ms=0.1, knee_tokens=128.0, pair_ms=1e-6, decode_ms=0.05, context_ms=1e-4)
DESCRIPTION = InstanceDescription(
    protocol_version=PROTOCOL_VERSION,
    instance_epoch="e",
    gateway="tcp://127.0.0.1:1",
    model="m",
    served_model_names=["m"],
    vllm_version="0.32.0",
    dtype="float32",
    block_size=32,
    max_model_len=8192,
    max_num_seqs=16,
    max_num_batched_tokens=2048,
    num_blocks=1000,
    prefix_caching=True,
    device="cpu",
    parallelism="tp1pp1",
    tensor_parallel_size=1,
    tbt_slo_ms=100.0,
    min_prefill_tokens=16,
    cut_obstacle=None,
    workers=[],
)


def placer_of(policy: Policy) -> RequestPlacer:
    predicts = policy is Policy.dynamic
    placer = RequestPlacer(GlobalScheduler(Options(policy), ProfileTable(ROOFLINE)), LengthPredictor(), predicts=predicts)
    for name in ("a", "b"):
        placer.observe(name, DESCRIPTION)
    return placer


class Spy:
    """The scheduler itself, of which it is kept which lengths it was told."""

    def __init__(self, scheduler: GlobalScheduler, told: list[tuple[int, int]]) -> None:
        self._scheduler = scheduler
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def learn_length(self, output_tokens: int, expected_tokens: int) -> None:
        self._told.append((output_tokens, expected_tokens))
        self._scheduler.learn_length(output_tokens, expected_tokens)


def facts(request_id: str = "r", hint: int | None = 30) -> RequestFacts:
    return RequestFacts(request_id, LengthQuery("m", "", 500, 200, hint))


def placed(placer: RequestPlacer, what: RequestFacts, now_ms: float = 0.0) -> Decision:
    decision = placer.place(what, now_ms)
    assert decision is not None
    return decision


def test_a_policy_that_predicts_works_with_the_expected_length() -> None:
    decision = placed(placer_of(Policy.dynamic), facts())
    assert decision.placement.reason is PlacementReason.whole_is_best
    assert decision.placement.alpha.end_token == 500 + 30 + 20 - 1


def test_a_request_is_placed_by_its_own_slos_and_otherwise_by_those_of_the_fleet() -> None:
    class Told:
        """Keeps what a scheduler is asked to place."""

        def __init__(self, scheduler: GlobalScheduler) -> None:
            self._scheduler = scheduler
            self.slos: list[Slo] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._scheduler, name)

        def place(self, spec: RequestSpec, now_ms: float) -> Placement | None:
            self.slos.append(spec.slo)
            return self._scheduler.place(spec, now_ms)

    placer = placer_of(Policy.dynamic)
    told: Any = Told(placer.scheduler)
    placer.scheduler = told
    placed(placer, facts())
    placed(placer, replace(facts("own"), tbt_ms=30.0, ttft_ms=700.0))
    assert [(slo.tbt_ms, slo.ttft_ms) for slo in told.slos] == [(placer.tbt_slo_ms, placer.ttft_slo_ms), (30.0, 700.0)]


def test_the_end_of_a_request_is_expected_after_its_first_token() -> None:
    placer = placer_of(Policy.dynamic)
    prediction = placed(placer, facts()).placement.prediction
    end_ms = placer.predict_end_ms("r", 0.0)
    assert prediction is not None
    assert end_ms is not None
    assert end_ms == pytest.approx(prediction.ttft_ms + 49 * prediction.decode_step_ms, rel=0.01)
    assert placer.predict_end_ms("another", 0.0) is None
    other = placer_of(Policy.colocated)
    placed(other, facts())
    assert other.predict_end_ms("r", 0.0) is None


@pytest.mark.parametrize(
    ("split", "kind"), [(None, "whole"), (0, "whole"), (1, "in_prompt"), (499, "in_prompt"), (500, "at_prompt_end"), (501, "in_answer")]
)
def test_a_cut_is_counted_by_where_it_lies(split: int | None, kind: str) -> None:
    assert placed(placer_of(Policy.colocated), replace(facts(), forced_split=split)).kind == kind


def test_other_policies_count_with_max_tokens() -> None:
    assert placed(placer_of(Policy.colocated), facts()).placement.alpha.end_token == 500 + 200 - 1


def test_the_record_says_what_was_expected_and_why() -> None:
    expected = placed(placer_of(Policy.dynamic), facts()).to_json()
    assert (expected["expected_tokens"], expected["source"]) == (50, "hint")
    assert expected["ttft_ms"] > 0
    assert {one["alpha"] for one in expected["candidates"]} == {"a", "b"}
    assert min(one["objective_ms"] for one in expected["candidates"]) == expected["objective_ms"]
    assert "ttft_ms" not in placed(placer_of(Policy.colocated), facts()).to_json()


def test_finished_requests_teach_their_length_and_aborted_ones_do_not() -> None:
    placer = placer_of(Policy.dynamic)
    for number in range(40):
        placed(placer, facts(str(number), hint=None))
        placer.finish(str(number), 7 if number % 2 else None, 0.0)
    forecast = placed(placer, facts("next", hint=None)).lengths
    assert (forecast.source, forecast.finished) == ("history", 20)
    assert forecast.expected_tokens == 27


def test_measured_steps_move_the_cost_scale_of_their_instance() -> None:
    placer = placer_of(Policy.dynamic)
    for _ in range(100):
        placer.learn_steps("a", Load(1, 0, 0.1, [MeasuredStep(0, 0.0, 4, 400, 50.0)]), 0.0)
    assert placer.scheduler.cost_scale("a") > 1.5
    assert placer.scheduler.cost_scale("b") == 1.0


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    placer = placer_of(Policy.dynamic)
    prompt = list(range(500))
    placer.learn_prefix([*prompt, 1, 2], None, [Held("b", 501)])
    for number in range(3):
        decision = placed(placer, replace(facts(str(number)), token_ids=prompt))
        placer.finish(str(number), None, 0.0)
        assert decision.placement.alpha.instance_id == "b"
    cached, other = (
        placed(placer, replace(facts(str(key)), token_ids=prompt, cache_key=key)).placement.prediction for key in (None, "salt")
    )
    assert cached is not None
    assert other is not None
    assert cached.ttft_ms < 0.6 * other.ttft_ms


def test_what_an_instance_did_not_have_any_more_is_not_counted_on_again() -> None:
    placer = placer_of(Policy.dynamic)
    prompt = list(range(500))
    placer.learn_prefix(prompt, None, [Held("b", 500)])
    before = placed(placer, replace(facts("1"), token_ids=prompt)).placement.prediction
    placer.finish("1", None, 0.0)
    placer.learn_prefix(prompt, None, [Held("b", 0, cached_tokens=0)])
    after = placed(placer, replace(facts("2"), token_ids=prompt)).placement.prediction
    assert before is not None
    assert after is not None
    assert before.ttft_ms < after.ttft_ms


def test_progress_is_told_now_and_then_of_instances_that_do_not_tell_it() -> None:
    placer = placer_of(Policy.dynamic)
    for name in ("a", "b"):
        placer.observe(name, msgspec.structs.replace(DESCRIPTION, tbt_slo_ms=None))
    name = placed(placer, facts()).placement.alpha.instance_id
    assert placer.wants_progress(name, 1000.0)
    placer.report(name, [RequestProgress("r", 510, 11), RequestProgress("gone", 9, 1)], 1000.0)
    assert not placer.wants_progress(name, 1100.0)
    assert placer.wants_progress(name, 1200.0)


def test_what_was_told_of_an_instance_that_was_removed_is_forgotten() -> None:
    placer = placer_of(Policy.dynamic)
    silent = msgspec.structs.replace(DESCRIPTION, tbt_slo_ms=None)
    placer.observe("a", silent)
    placer.report("a", [], 1000.0)
    assert not placer.wants_progress("a", 1100.0)
    placer.remove("a")
    placer.observe("a", silent)
    assert placer.wants_progress("a", 1100.0)


def test_progress_of_an_instance_that_tells_it_is_reported_whenever_it_does() -> None:
    placer = placer_of(Policy.dynamic)
    assert not placer.wants_progress("a", 1000.0)
    assert placer.wants_progress("a", 1000.0, told=True)
    placer.report("a", [], 1000.0)
    assert placer.wants_progress("a", 1001.0, told=True)


def test_policies_that_do_not_predict_want_no_progress() -> None:
    placer = placer_of(Policy.colocated)
    assert not placer.wants_progress("a", 1000.0)
    assert not placer.wants_progress("a", 1000.0, told=True)


def test_what_a_request_emitted_before_it_was_placed_again_is_not_expected_again() -> None:
    placer = placer_of(Policy.dynamic)
    placed(placer, facts(hint=100))
    again = placer.place_again("r", 60, 1000.0)
    assert again is not None
    name = again.alpha.instance_id
    placer.report(name, [RequestProgress("r", 500 + 80 - 1, 80)], 2000.0)
    left_ms = placer.predict_end_ms("r", 2000.0)
    assert left_ms is not None
    assert left_ms == pytest.approx(40 * ROOFLINE.step_ms(BatchShape(decodes=1, decode_context_tokens=600)), rel=0.03)


def test_prompts_are_predicted_by_the_steps_that_the_instance_says_it_takes() -> None:
    placer = placer_of(Policy.dynamic)
    placer.remove("b")

    def ttft_ms(share: float | None) -> float:
        for _ in range(100):
            placer.learn_steps("a", Load(1, 0, 0.0, step_share=share), 1000.0)
        prediction = placed(placer, replace(facts("probe"), lengths=LengthQuery("m", "", 6000, 200, 30)), 1000.0).placement.prediction
        placer.finish("probe", None, 1000.0)
        assert prediction is not None
        return prediction.ttft_ms

    for number in range(8):
        placed(placer, replace(facts(f"decodes {number}"), lengths=LengthQuery("m", "", 10, 2000, 2000)), 0.0)
    untold_ms = ttft_ms(None)
    assert ttft_ms(1.0) == untold_ms
    assert ttft_ms(0.4) > 1.2 * untold_ms
    assert ttft_ms(1.0) == pytest.approx(untold_ms, rel=0.02)
    placer.learn_steps("unknown", Load(1, 0, 0.0, step_share=0.5), 1000.0)


def test_prompts_are_predicted_to_begin_where_the_instance_says_it_admits_them() -> None:
    placer = placer_of(Policy.dynamic)
    placer.remove("b")
    assert DESCRIPTION.tbt_slo_ms is not None
    waits_from = ROOFLINE.step_ms(BatchShape(decodes=8, decode_context_tokens=80)) / DESCRIPTION.tbt_slo_ms
    mixed = 0.9 * waits_from

    def ttft_ms(admitting: float | None) -> float:
        for _ in range(100):
            placer.learn_steps("a", Load(1, 0, 0.0, step_share=mixed, admitting_share=admitting), 1000.0)
        prediction = placed(placer, replace(facts("probe"), lengths=LengthQuery("m", "", 60, 200, 30)), 1000.0).placement.prediction
        placer.finish("probe", None, 1000.0)
        assert prediction is not None
        return prediction.ttft_ms

    for number in range(8):
        placed(placer, replace(facts(f"decodes {number}"), lengths=LengthQuery("m", "", 10, 2000, 2000)), 0.0)
    waits_ms = ttft_ms(None)
    assert waits_ms > 1000.0
    assert ttft_ms(1.0) < 0.1 * waits_ms
    assert ttft_ms(mixed) == pytest.approx(waits_ms, rel=0.02)
    mixed = 1.0
    assert ttft_ms(0.9 * waits_from) == pytest.approx(waits_ms, rel=0.1), "also where it is the smaller one"


def test_prompts_are_predicted_by_the_slo_of_the_instance_not_by_that_of_the_requests() -> None:
    def ttft_ms(tbt_slo_ms: float | None) -> float:
        placer = RequestPlacer(GlobalScheduler(Options(Policy.dynamic), ProfileTable(ROOFLINE)), LengthPredictor(), predicts=True)
        placer.observe("a", msgspec.structs.replace(DESCRIPTION, tbt_slo_ms=tbt_slo_ms))
        placed(placer, facts("decodes"))
        prediction = placed(placer, facts(), 500.0).placement.prediction
        assert prediction is not None
        return prediction.ttft_ms

    assert ttft_ms(20.0) > 1.5 * ttft_ms(500.0)
    assert ttft_ms(None) == ttft_ms(500.0)


def test_what_moving_kv_takes_is_told_by_large_transfers_and_followed() -> None:
    told: list[tuple[float, float]] = []

    class Scheduler(GlobalScheduler):
        def set_kv_token_ms(self, kv_token_ms: float, *, work_ms: float) -> None:
            told.append((kv_token_ms, work_ms))

    placer = RequestPlacer(Scheduler(Options(Policy.dynamic), ProfileTable(ROOFLINE)), LengthPredictor(), predicts=True)
    placer.learn_transfer(10, 5.0, on_host=False)
    placer.learn_transfer(10_000, 100.0, on_host=False)
    assert told[-1] == pytest.approx((105.0 / 10_010, 0.0), rel=0.01)
    for _ in range(400):
        placer.learn_transfer(1000, 50.0, on_host=True)
    assert told[-1] == pytest.approx((0.05, 0.05), rel=0.02)


# --- what the command line asks for


def test_without_a_profile_requests_are_placed_by_the_steps_that_instances_report() -> None:
    placer = make_placer(parse_policy("dynamic"), None, None, 100.0, 1000.0)
    for name in ("a", "b"):
        placer.observe(name, DESCRIPTION)
    early = placed(placer, facts("early"))
    assert early.placement.prediction is None
    assert {early.placement.alpha.instance_id, placed(placer, facts("next")).placement.alpha.instance_id} == {"a", "b"}
    rng = random.Random(1)
    for count in range(2 * KNOWN_STEPS):
        placer.learn_steps("ab"[count % 2], Load(0, 0, 0.0, [measured_step(rng)]), 10.0 * count)
    late = placed(placer, facts("late"), 10_000.0).placement.prediction
    assert late is not None
    known = placed(placer_of(Policy.dynamic), facts("late"), 10_000.0).placement.prediction
    assert known is not None
    assert late.ttft_ms == pytest.approx(known.ttft_ms, rel=0.2)
    assert placer.step_share < 1.0
    for name in ("early", "next", "late"):
        placer.finish(name, None, 11_000.0)
    placer.scheduler.check_invariants()


def measured_step(rng: random.Random) -> MeasuredStep:
    tokens, decodes = rng.choice([0, 0, 60, 200, 500]), rng.randrange(1, 12)
    shape = BatchShape(prefill_tokens=tokens, prefill_pairs=tokens * tokens / 2, decodes=decodes, decode_context_tokens=300 * decodes)
    return MeasuredStep(tokens, tokens * tokens / 2, decodes, 300 * decodes, measured_ms=ROOFLINE.step_ms(shape))


def test_what_an_instance_must_be_depends_on_the_policy(tmp_path: Path) -> None:
    save(tmp_path / "p.json", ProfileTable(ROOFLINE), ProfileKey("m", "float32", "cpu", "tp1pp1", "other"), "made up")
    silent = Instance("http://a", msgspec.structs.replace(DESCRIPTION, tbt_slo_ms=None))
    check_for(parse_policy("colocated"), None)(silent)
    check_for(parse_policy("dynamic"), None)(silent)
    with pytest.raises(ConfigError, match="tell nothing of their steps"):
        check_for(parse_policy("paper"), None)(silent)
    with pytest.raises(ConfigError, match="measured with vllm_version 'other'"):
        check_for(parse_policy("paper"), tmp_path / "p.json")(silent)


def test_an_instance_that_tells_nothing_of_its_steps_is_refused_where_a_profile_is_learnt() -> None:
    must_tell_steps(Instance("http://a", DESCRIPTION))
    silent = msgspec.structs.replace(DESCRIPTION, tbt_slo_ms=None)
    must_tell_steps(Instance("http://a", msgspec.structs.replace(silent, stock=True)))
    with pytest.raises(ConfigError, match=r"^instance http://a runs with vLLM's own batches, which tell nothing of their steps: "):
        must_tell_steps(Instance("http://a", silent))


def test_a_policy_that_does_without_steps_warns_of_an_instance_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(fleet.logger, "warning", lambda text, *args: told.append(text % args))
    silent = msgspec.structs.replace(DESCRIPTION, tbt_slo_ms=None)
    for description in (DESCRIPTION, msgspec.structs.replace(silent, stock=True), silent):
        should_tell_steps(Instance("http://a", description))
    (warning,) = told
    assert warning.startswith("instance http://a runs with vLLM's own batches")
    assert warning.endswith("requests are placed as by --policy colocated while no instance tells")


def test_a_profile_and_a_history_are_read(tmp_path: Path) -> None:
    save(tmp_path / "p.json", ProfileTable(ROOFLINE), ProfileKey("m", "float32", "cpu", "tp1", "0.32.0"), "made up")
    learnt = LengthPredictor()
    for _ in range(20):
        learnt.learn(facts().lengths, 9)
    length_predictor.save(tmp_path / "h.json", learnt)
    placer = make_placer(parse_policy("dynamic"), tmp_path / "p.json", tmp_path / "h.json", 100.0, 1000.0)
    placer.observe("a", DESCRIPTION)
    assert placer.step_share < 1.0
    assert placed(placer, facts(hint=None)).lengths.source == "history"


@pytest.mark.parametrize(
    ("field", "value"), [("model", "other"), ("dtype", "bfloat16"), ("device", "a GPU"), ("parallelism", "tp2pp1"), ("vllm_version", "0.1")]
)
def test_a_profile_of_something_else_is_refused_with_the_field(field: str, value: str, tmp_path: Path) -> None:
    key = profile_key(DESCRIPTION)
    save(tmp_path / "p.json", ProfileTable(ROOFLINE), key, "made up")
    profile_check(tmp_path / "p.json")(Instance("http://a", DESCRIPTION))
    save(tmp_path / "p.json", ProfileTable(ROOFLINE), msgspec.structs.replace(key, **{field: value}), "made up")
    wanted = getattr(key, field)
    check = profile_check(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=rf"p\.json: measured with {field} '{value}', not '{wanted}' \(instance http://a\)$"):
        check(Instance("http://a", DESCRIPTION))


@pytest.mark.parametrize(
    ("slo_ms", "sentence"),
    [("inf", "is inf, not a finite number of milliseconds above 0"), ("nan", "is nan, not a number of milliseconds above 0")],
)
def test_a_tbt_slo_that_no_snapshot_could_tell_is_refused(slo_ms: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^--fleet-tbt-slo-ms {sentence}$"):
        configure(["--instances", "http://127.0.0.1:9", "--fleet-tbt-slo-ms", slo_ms])


def test_a_history_that_is_not_there_yet_is_begun(tmp_path: Path) -> None:
    placer = make_placer(parse_policy("colocated"), None, tmp_path / "new.json", 100.0, 1000.0)
    assert placer.lengths.groups == {}


@pytest.mark.parametrize("policy", [Policy.colocated, Policy.dynamic])
def test_a_request_that_has_lost_its_instance_runs_whole_elsewhere_as_what_is_left_of_it(policy: Policy) -> None:
    placer = placer_of(policy)
    lost = placed(placer, facts()).placement.alpha.instance_id
    placer.remove(lost)
    again = placer.place_again("r", 20, 10.0)
    assert again is not None
    assert again.beta is None
    assert again.alpha.instance_id != lost
    assert again.alpha.end_token <= 500 + 200
    placer.finish("r", 40, 20.0)
    placer.scheduler.check_invariants()
    assert sum(placer.scheduler.reserved_tokens(name) for name in ("a", "b")) == 0


def test_what_answers_had_over_what_would_be_expected_of_them_is_told_to_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    placer = placer_of(Policy.dynamic)
    monkeypatch.setattr(placer, "scheduler", Spy(placer.scheduler, told))
    margin = placer.lengths.margin_tokens
    for name, output_tokens in (("ended", 40), ("aborted", None), ("empty", 0), ("lost", 60)):
        placed(placer, facts(name))
        if name == "lost":
            placer.place_again(name, 20, 10.0)  # of the whole answer, whatever was left of it
        placer.finish(name, output_tokens, 20.0)
    assert told == [(40, 30 + margin), (60, 30 + margin)]


def test_a_history_that_has_only_begun_corrects_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    placer = placer_of(Policy.dynamic)
    monkeypatch.setattr(placer, "scheduler", Spy(placer.scheduler, told))
    for number in range(60):
        placed(placer, facts(str(number), hint=None))  # all by the prior
    for number in range(60):
        placer.finish(str(number), 50, 20.0)
    assert {expected for _, expected in told[20:]} == {50 + placer.lengths.margin_tokens}


def test_a_request_that_nobody_takes_may_be_placed_later() -> None:
    placer = placer_of(Policy.colocated)
    placed(placer, facts())
    for name in ("a", "b"):
        placer.remove(name)
    assert placer.place_again("r", 5, 10.0) is None
    placer.observe("b", DESCRIPTION)
    again = placer.place_again("r", 5, 20.0)
    assert again is not None
    assert again.alpha.instance_id == "b"


def test_an_instance_that_takes_nothing_new_gets_nothing() -> None:
    placer = placer_of(Policy.colocated)
    placer.observe("a", DESCRIPTION, accepts_new=False)
    assert {placed(placer, facts(str(n))).placement.alpha.instance_id for n in range(4)} == {"b"}
