"""The front-end's questions about a request, over the real scheduler and length predictor."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaserve import length_predictor
from dynaserve.errors import ConfigError
from dynaserve.global_scheduler import GlobalScheduler, Options, PlacementReason, Policy, parse_policy
from dynaserve.latency_profile import ProfileKey, save
from dynaserve.length_predictor import LengthPredictor, LengthQuery
from dynaserve.messages import InstanceDescription, Load, MeasuredStep
from dynaserve.request_placer import Decision, RequestFacts, RequestPlacer, RunningRequest
from dynaserve.serve import make_placer
from dynaserve.step_latency import ProfileTable, Roofline

ROOFLINE = Roofline(overhead_ms=12.0, token_ms=0.1, knee_tokens=128.0, pair_ms=1e-6, decode_ms=0.05, context_ms=1e-4)
DESCRIPTION = InstanceDescription(
    protocol_version=2,
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
    tensor_parallel_size=1,
    cut_obstacle=None,
    workers=[],
)


def placer_of(policy: Policy) -> RequestPlacer:
    predicts = policy is Policy.dynamic
    placer = RequestPlacer(GlobalScheduler(Options(policy), ProfileTable(ROOFLINE)), LengthPredictor(), predicts=predicts)
    for name in ("a", "b"):
        placer.observe(name, DESCRIPTION)
    return placer


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


def test_other_policies_count_with_max_tokens() -> None:
    assert placed(placer_of(Policy.colocated), facts()).placement.alpha.end_token == 500 + 200 - 1


def test_the_record_says_what_was_expected_and_why() -> None:
    expected = placed(placer_of(Policy.dynamic), facts()).to_json()
    assert (expected["expected_tokens"], expected["source"]) == (50, "hint")
    assert expected["ttft_ms"] > 0
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


def test_progress_is_told_now_and_then() -> None:
    placer = placer_of(Policy.dynamic)
    name = placed(placer, facts()).placement.alpha.instance_id
    assert placer.wants_progress(name, 1000.0)
    placer.report(name, [RunningRequest("r", name, 510, 11), RunningRequest("gone", name, 9, 1)], 1000.0)
    assert not placer.wants_progress(name, 1100.0)
    assert placer.wants_progress(name, 1200.0)


# --- what the command line asks for


@pytest.mark.parametrize("policy", ["dynamic", "paper"])
def test_a_policy_that_predicts_needs_a_profile(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"^--policy {policy} needs --latency-profile FILE"):
        make_placer(parse_policy(policy), None, None, 100.0, 1000.0)


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
