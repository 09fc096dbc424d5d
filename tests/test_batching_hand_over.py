"""The local scheduler of an instance in a fleet: requests that come from, or leave for, another instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.step_latency import BatchShape
from dynaserve.step_report import BatchReport
from tests.virtual_engine import BLOCK, Engine
from vllm_plugin.batching import REPORT_KEY
from vllm_plugin.heart import REST_S
from vllm_plugin.micro_requests import EXTRA_ARG, Plan
from vllm_plugin.options import PluginOptions
from vllm_plugin.requests import TTFT_ARG

PROMPT, HAND_OFF = 100, 110
SENT = [9] * (HAND_OFF - PROMPT + 1)


def instance(folder: Path, tbt_slo_ms: float = 100.0, min_prefill_tokens: int = 16, *, slo: bool = True, **engine_args: Any) -> Engine:
    options = PluginOptions(tbt_slo_ms=tbt_slo_ms, min_prefill_tokens=min_prefill_tokens)
    engine = Engine(folder, options=options, cuts=True, slo=slo, enable_prefix_caching=False, **engine_args)
    if slo:
        engine.learn()
    return engine


def announce(engine: Engine, name: str, hand_off: int = HAND_OFF, prompt: int = PROMPT, adapter: int | None = None) -> None:
    plan = Plan("beta", hand_off, f"t-{name}", "torch", [WorkerEndpoint("worker", "tcp://127.0.0.1:1", {"torch": ""})])
    engine.add(name, prompt, 40, adapter=adapter, **{EXTRA_ARG: msgspec.to_builtins(plan)})


def decode(engine: Engine, number: int) -> None:
    for i in range(number):
        engine.add(f"decode-{i}", 50, 300)
    while any(request.is_prefill_chunk for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()


def full_instance(folder: Path) -> Engine:
    """With no room for another decode."""
    engine = instance(folder, tbt_slo_ms=20.0)
    for number in range(40):
        engine.add(f"decode-{number}", 30, 300)
    for _ in range(60):
        engine.step()
    assert engine.scheduler.waiting
    return engine


def test_a_beta_runs_as_soon_as_its_kv_is_here_although_no_prefill_is_allowed(tmp_path: Path) -> None:
    engine = instance(tmp_path, tbt_slo_ms=11.0, min_prefill_tokens=0)
    decode(engine, 1)
    engine.add("prompt", 3000, 1)
    announce(engine, "beta")
    for _ in range(3):
        assert not {"beta", "prompt"} & engine.step().keys()
    assert engine.scheduler.continue_request("beta", HAND_OFF, SENT, 0.0)
    engine.arrived.add("beta")
    engine.step()
    assert engine.step()["beta"] == 1


@pytest.mark.parametrize(("hand_off", "begins"), [(None, False), (PROMPT + 1, False), (PROMPT, True), (PROMPT - 20, True)])
def test_an_alpha_that_never_decodes_does_not_wait_for_room_for_a_decode(tmp_path: Path, hand_off: int | None, begins: bool) -> None:
    engine = full_instance(tmp_path)
    while engine.scheduler.waiting:
        engine.scheduler.finish_requests(engine.scheduler.waiting[-1].request_id, RequestStatus.FINISHED_ABORTED)
    plan = Plan("whole" if hand_off is None else "alpha", hand_off, None if hand_off is None else "t", "torch")
    engine.add("r", PROMPT, 40, **{EXTRA_ARG: msgspec.to_builtins(plan)})
    for _ in range(20):
        engine.step()
    assert (engine.scheduler.requests["r"].num_computed_tokens > 0) == begins


def test_an_alpha_has_the_turn_of_its_part_of_the_prompt(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    decode(engine, 3)
    engine.add("under way", 1200, 1)
    engine.step()
    plan = Plan("alpha", 64, "t", "torch")
    engine.add("long", 2000, 1)
    engine.add("middle", 600, 1)
    engine.add("alpha", 2000, 1, **{EXTRA_ARG: msgspec.to_builtins(plan)})
    assert [request.request_id for request in engine.scheduler.waiting] == ["alpha", "middle", "long"]


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("slo", [True, False])
def test_betas_do_not_wait_for_prompts_that_are_running(tmp_path: Path, slo: bool, pipelined: bool) -> None:
    """vLLM would give all of the step to those prompts, until there is none."""
    engine = instance(tmp_path, tbt_slo_ms=40.0, min_prefill_tokens=2, slo=slo, pipelined=pipelined, max_num_batched_tokens=192)
    decode(engine, 3)
    engine.add("prompt-0", 3000, 1)
    engine.add("prompt-1", 3000, 1)
    engine.step()
    assert engine.scheduler.running[-1].is_prefill_chunk
    for name in ("beta-0", "beta-1"):
        announce(engine, name)
        assert engine.scheduler.continue_request(name, HAND_OFF, SENT, 0.0)
        engine.arrived.add(name)
    for _ in range(1 + pipelined):
        engine.step()
    for _ in range(2):
        scheduled = engine.step()
        assert scheduled["beta-0"] == scheduled["beta-1"] == 1
        assert sum(scheduled.values()) == engine.scheduler.max_num_scheduled_tokens, "the prompts take the rest"
    assert engine.scheduler.running[-1].is_prefill_chunk


@pytest.mark.parametrize("slo", [True, False])
def test_a_beta_of_another_adapter_waits_for_a_prompt_that_gets_no_share(tmp_path: Path, slo: bool) -> None:
    """vLLM counts the adapters of a step's requests only, and asserts in the next one that those of both fit."""
    engine = instance(tmp_path, tbt_slo_ms=11.0, min_prefill_tokens=0, slo=slo, enable_lora=True, max_loras=1, max_num_batched_tokens=64)
    engine.add("prompt", 3000, 1, adapter=1)
    engine.step()
    announce(engine, "beta", adapter=2)
    assert engine.scheduler.continue_request("beta", HAND_OFF, SENT, 0.0)
    engine.arrived.add("beta")
    for _ in range(80):
        assert "beta" not in engine.step() or "prompt" not in engine.scheduler.requests
    assert "beta" in engine.token_times_s


def test_a_beta_that_cannot_run_does_not_keep_prompts_waiting(tmp_path: Path) -> None:
    """Its token is overdue all the time."""
    engine = instance(tmp_path, min_prefill_tokens=1, enable_lora=True, max_loras=1)
    engine.add("decode", 50, 300, adapter=1)
    while "decode" not in engine.token_times_s:
        engine.step()
    announce(engine, "beta", adapter=2)
    assert engine.scheduler.continue_request("beta", HAND_OFF, SENT, 0.0)
    engine.arrived.add("beta")
    engine.step()
    engine.add("prompt", 1000, 1, adapter=1)
    for _ in range(20):
        engine.step()
    assert "prompt" in engine.token_times_s
    assert "beta" not in engine.token_times_s


def test_a_beta_whose_kv_has_not_come_makes_no_room_for_a_prompt(tmp_path: Path) -> None:
    """vLLM begins prompts up to so many requests, as long as its step has tokens left."""
    engine = full_instance(tmp_path)
    announce(engine, "beta")
    engine.step()
    assert [request.request_id for request in engine.scheduler.kv_holding_waiting] == ["beta"]
    engine.scheduler.prepare_step(engine.now_s)
    assert engine.scheduler.max_num_active_reqs == len(engine.scheduler.running)


def test_an_alpha_whose_part_is_cached_does_not_wait_for_other_prompts(tmp_path: Path) -> None:
    engine = Engine(tmp_path, options=PluginOptions(), cuts=True, enable_prefix_caching=True)
    engine.learn()
    engine.add("before", 400, 1)
    while engine.scheduler.requests:
        engine.step()
    decode(engine, 3)
    plan = Plan("alpha", 200, "t", "torch")
    engine.add("alpha", 400, 1, like="before", **{EXTRA_ARG: msgspec.to_builtins(plan)})
    for _ in range(3):
        engine.step()
    assert engine.scheduler.requests["alpha"].num_computed_tokens == 200


@pytest.mark.parametrize("slo", [True, False])
def test_betas_do_not_wait_for_prompts_that_come_with_kv(tmp_path: Path, slo: bool) -> None:
    """Each would take all of the step in which it begins."""
    engine = instance(tmp_path, tbt_slo_ms=40.0, min_prefill_tokens=2, slo=slo, max_num_batched_tokens=192)
    decode(engine, 3)
    for number in range(3):
        announce(engine, f"prompt-{number}", 100, prompt=3000)
        assert engine.scheduler.continue_request(f"prompt-{number}", 100, [], 0.0)
    for name in ("beta-0", "beta-1"):
        announce(engine, name)
        assert engine.scheduler.continue_request(name, HAND_OFF, SENT, 0.0)
    engine.arrived |= {"prompt-0", "prompt-1", "prompt-2", "beta-0", "beta-1"}
    engine.step()
    scheduled = engine.step()
    assert scheduled["beta-0"] == scheduled["beta-1"] == 1
    assert scheduled["prompt-0"] > 1
    assert [name for name in scheduled if name.startswith("beta")] == ["beta-0", "beta-1"]


@pytest.mark.parametrize("slo", [True, False])
def test_a_prompt_that_holds_the_last_slot_is_computed_while_a_late_beta_is_ready(tmp_path: Path, slo: bool) -> None:
    engine = instance(tmp_path, tbt_slo_ms=1.0, min_prefill_tokens=0, slo=slo, max_num_seqs=1, max_num_batched_tokens=64)
    engine.add("prompt", 300, 1)
    engine.step()
    announce(engine, "beta")
    assert engine.scheduler.continue_request("beta", HAND_OFF, SENT, 0.0)
    engine.arrived.add("beta")
    scheduled = [engine.step().keys() for _ in range(240)]
    first = next(number for number, names in enumerate(scheduled) if "beta" in names)
    assert all("prompt" in names for names in scheduled[:first])


def test_an_instance_is_at_rest_from_the_end_of_its_last_step_on(tmp_path: Path) -> None:
    """A step may take longer than what counts as rest."""
    engine = instance(tmp_path)
    engine.scheduler.monotonic = lambda: engine.now_s
    engine.add("prompt", 1000, 1)
    while engine.scheduler.requests:
        engine.step()
    assert engine.steps_ms[-1] > 0
    assert engine.scheduler.steps.active_s == engine.now_s > 0
    assert not engine.scheduler.steps.at_rest(engine.now_s + 0.9 * REST_S)
    assert engine.scheduler.steps.at_rest(engine.now_s + 1.1 * REST_S)


def test_several_betas_that_become_ready_together_run_together(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    decode(engine, 4)
    for i in range(5):
        announce(engine, f"beta-{i}")
        assert engine.scheduler.continue_request(f"beta-{i}", HAND_OFF, SENT, 0.0)
        engine.arrived.add(f"beta-{i}")
    engine.step()
    assert sum(name.startswith("beta") for name in engine.step()) == 5


def prefill_beside_resuming(folder: Path, *, known_for_ms: float = 0.0, steps_until_kv: int = 1) -> int:
    """Tokens of a prompt in the step that resumes a beta. known_for_ms: its tokens, when the engine learnt of them."""
    engine = instance(folder)
    decode(engine, 4)
    announce(engine, "beta")
    assert engine.scheduler.continue_request("beta", HAND_OFF, SENT, known_for_ms)
    for _ in range(steps_until_kv - 1):
        engine.step()
    engine.arrived.add("beta")
    engine.step()
    engine.add("prompt", 3000, 1)
    scheduled = engine.step()
    assert scheduled["beta"] == 1
    return scheduled["prompt"]


def test_the_step_that_resumes_a_beta_is_short_if_its_tokens_came_long_before_its_kv(tmp_path: Path) -> None:
    assert prefill_beside_resuming(tmp_path, steps_until_kv=4) < 0.8 * prefill_beside_resuming(tmp_path)


@pytest.mark.parametrize("hand_off", [PROMPT, HAND_OFF])
def test_an_instance_without_decodes_has_short_steps_while_an_answer_is_about_to_come(tmp_path: Path, hand_off: int) -> None:
    engine = instance(tmp_path)
    announce(engine, "beta", hand_off)
    engine.scheduler.expect("beta", engine.now_s)
    engine.add("prompt", 3000, 1)
    own_ms = engine.machine.step_ms(BatchShape(decodes=1, decode_context_tokens=PROMPT))
    for _ in range(3):
        assert engine.step()["prompt"] > 100
        assert engine.steps_ms[-1] < 100.0 - own_ms
    known_s = engine.now_s
    engine.step()  # it had begun when the answer came
    assert engine.scheduler.continue_request("beta", hand_off, [9] * (hand_off - PROMPT + 1), 1e3 * (engine.now_s - known_s))
    engine.scheduler.finished_recving_kv_req_ids.add("beta")  # its KV was here before
    while "beta" not in engine.token_times_s:
        engine.step()
    assert engine.token_times_s["beta"][0] - known_s < 0.1


def test_steps_end_in_time_for_an_answer_that_is_told_to_come_and_are_long_before(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    announce(engine, "beta")
    engine.add("prompt", 3000, 1)
    engine.add("another", 3000, 1)
    comes_s = engine.now_s + 0.6
    engine.scheduler.expect("beta", comes_s)
    scheduled = []
    while engine.now_s < comes_s:
        scheduled.append(sum(engine.step().values()))
    assert scheduled[0] > 500
    assert engine.now_s < comes_s + 0.1, "its own step takes the rest of the SLO"


def test_what_is_expected_of_a_request_that_is_over_is_nothing(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    engine.scheduler.expect("nobody", 0.0)
    engine.add("prompt", 1500, 1)
    assert engine.step()["prompt"] > 500


@pytest.mark.parametrize("rest", [20, 1])
def test_a_prompt_that_comes_with_kv_waits_for_room_for_its_decode_and_holds_nothing_up(tmp_path: Path, rest: int) -> None:
    engine = full_instance(tmp_path)
    announce(engine, "beta", PROMPT - rest)
    assert engine.scheduler.continue_request("beta", PROMPT - rest, [], 0.0)
    engine.arrived.add("beta")
    engine.step()
    for _ in range(10):
        scheduled = engine.step()
        assert scheduled
        assert "beta" not in scheduled
    assert engine.scheduler.micro.by_id["beta"].resumed, "its alpha is released all the same"
    for request in list(engine.scheduler.running)[:10]:
        engine.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert "beta" in engine.step(), "before those that wait without KV"


def test_a_prompt_whose_first_token_is_due_begins_though_one_with_kv_waits_for_room(tmp_path: Path) -> None:
    engine = full_instance(tmp_path)
    announce(engine, "beta", PROMPT - 20)
    assert engine.scheduler.continue_request("beta", PROMPT - 20, [], 0.0)
    engine.arrived.add("beta")
    engine.step()
    engine.add("prompt", 64, 1, dynaserve_ttft_ms=400)
    until_s = engine.now_s + 3.0  # by sixteen tokens in each tenth step
    while engine.now_s < until_s and "prompt" not in engine.token_times_s:
        engine.step()
    assert "prompt" in engine.token_times_s
    assert "beta" not in engine.token_times_s, "its turn has not come"


def test_of_those_that_come_with_kv_the_first_that_is_due_begins(tmp_path: Path) -> None:
    engine = full_instance(tmp_path)
    for name, ttft_ms in (("late", 8000), ("soon", 400)):
        plan = Plan("beta", PROMPT - 20, f"t-{name}", "torch", [WorkerEndpoint("worker", "tcp://127.0.0.1:1", {"torch": ""})])
        extra: dict[str, Any] = {EXTRA_ARG: msgspec.to_builtins(plan), TTFT_ARG: ttft_ms}
        engine.add(name, PROMPT, 40, **extra)
        assert engine.scheduler.continue_request(name, PROMPT - 20, [], 0.0)
        engine.arrived.add(name)
    until_s = engine.now_s + 1.0
    while engine.now_s < until_s and "soon" not in engine.token_times_s:
        engine.step()
    assert "soon" in engine.token_times_s
    assert "late" not in engine.token_times_s


def test_one_that_is_due_and_cannot_run_opens_no_door_for_those_behind_it(tmp_path: Path) -> None:
    engine = instance(tmp_path, tbt_slo_ms=20.0, enable_lora=True, max_loras=1)
    for number in range(40):
        engine.add(f"decode-{number}", 30, 300, adapter=1)
    for _ in range(60):
        engine.step()
    assert engine.scheduler.waiting
    running = len(engine.scheduler.running)
    engine.add("other", 50, 40, adapter=2, dynaserve_ttft_ms=1)
    for _ in range(100):
        engine.step()
    assert len(engine.scheduler.running) <= running
    assert "other" not in engine.token_times_s, "its adapter has no room"


def test_a_session_that_waits_for_its_next_input_is_no_decode(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    params.update_from_generation_config({}, 2)
    session = Request("session", list(range(3, 53)), params, None, resumable=True, block_hasher=engine.hasher)
    engine.scheduler.add_request(session)
    while session.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        engine.step()
    assert not engine.scheduler._has_runnable(), "nothing keeps the core from sleeping"
    engine.now_s += 1.0
    engine.add("prompt", 1500, 1)
    assert engine.step()["prompt"] > 500


def come_with_one_token_left(engine: Engine, *names: str) -> None:
    for name in names:
        announce(engine, name, PROMPT - 1)
        assert engine.scheduler.continue_request(name, PROMPT - 1, [], 0.0)
        engine.arrived.add(name)
    engine.step()


@pytest.mark.parametrize("others", [0, 5])
def test_betas_that_wait_for_room_take_nothing_from_a_prompt_that_runs(tmp_path: Path, others: int) -> None:
    engine = full_instance(tmp_path)
    engine.add("alpha", 3000, 40, **{EXTRA_ARG: msgspec.to_builtins(Plan("alpha", 2900, "t", "torch"))})
    while "alpha" not in engine.step():
        pass
    names = [f"beta-{number}" for number in range(others)]
    come_with_one_token_left(engine, *names)
    for _ in range(5):
        scheduled = engine.step()
        assert not scheduled.keys() & set(names)
        assert scheduled["alpha"] == engine.scheduler.max_num_scheduled_tokens - (len(scheduled) - 1)


def test_betas_with_one_token_left_have_it_at_once_beside_a_prompt_in_steps_of_decodes(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    engine.add("prompt", 3000, 1)
    assert engine.step()["prompt"] > 500
    come_with_one_token_left(engine, "one", "two", "three")
    scheduled = engine.step()
    assert [scheduled[name] for name in ("one", "two", "three")] == [1, 1, 1]
    assert scheduled["prompt"] > 0
    assert engine.steps_ms[-1] < 100.0


def test_an_instance_without_decodes_has_long_steps_while_a_prompt_is_about_to_come(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    announce(engine, "beta", PROMPT - 1)
    engine.add("prompt", 3000, 1)
    assert engine.step()["prompt"] > 500


def test_a_beta_is_due_since_its_tokens_were_known_here(tmp_path: Path) -> None:
    assert prefill_beside_resuming(tmp_path, known_for_ms=60.0) < 0.6 * prefill_beside_resuming(tmp_path)


def test_blocks_are_taken_back_for_whole_chunks_however_small_the_last_one_was(tmp_path: Path) -> None:
    engine = instance(tmp_path, tbt_slo_ms=40.0)
    decode(engine, 1)
    engine.add("prompt", 3000, 1)
    engine.step()
    assert engine.step()["prompt"] < 200
    assert engine.scheduler._blocks_of_this_step() >= 2048 // BLOCK


def test_a_parked_alpha_neither_counts_as_a_decode_nor_shortens_steps(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    plan = Plan("alpha", HAND_OFF, "t", "torch")
    engine.add("alpha", PROMPT, 40, **{EXTRA_ARG: msgspec.to_builtins(plan)})
    while not engine.scheduler.micro.by_id["alpha"].parked:
        engine.step()
    for _ in range(5):
        assert engine.step() == {}
    engine.now_s += 10.0
    engine.add("prompt", 1500, 1)
    assert engine.step()["prompt"] > 500
    plan_of_step = engine.scheduler.prepare_step(engine.now_s)
    assert not plan_of_step.late


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_step_that_was_scheduled_before_the_answer_ended_does_not_count(tmp_path: Path, pipelined: bool) -> None:
    engine = instance(tmp_path, slo=False, pipelined=pipelined)
    engine.add("r", PROMPT, 40, **{EXTRA_ARG: msgspec.to_builtins(Plan("alpha", PROMPT + 20, "t", "torch"))})
    params = engine.scheduler.requests["r"].sampling_params
    params.stop_token_ids = [7]  # what the virtual machine samples
    scheduled = sum(engine.step().get("r", 0) for _ in range(3))
    assert scheduled == PROMPT + pipelined
    engine.sent_back.add("r")
    while not engine.carriers:
        engine.step()
    (carrier,) = engine.carriers
    assert [event["computed_tokens"] for event in carrier.kv_transfer_params[EXTRA_ARG]] == [PROMPT]


def test_front_ends_hear_of_their_own_prompts_and_of_no_other(tmp_path: Path) -> None:
    engine = instance(tmp_path)
    engine.add("fleet's", 3000, 1, **{EXTRA_ARG: msgspec.to_builtins(Plan("whole"))})
    engine.add("x" * 600, 3000, 1)  # of a client of this server, whose ids may have any length
    engine.carriers.clear()
    told: set[str] = set()
    while len(engine.token_times_s.get("x" * 600, [])) < 1:
        engine.step()
        told_of_steps = [carrier.kv_transfer_params for carrier in engine.carriers if REPORT_KEY in carrier.kv_transfer_params]
        reports = [msgspec.convert(params[REPORT_KEY], BatchReport) for params in told_of_steps]
        told |= {prompt.request_id for report in reports for prompt in report.prompts}
    assert told == {"fleet's"}
