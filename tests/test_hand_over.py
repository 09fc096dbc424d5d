"""Hand-offs over vLLM's real scheduler, without weights: what alphas and betas do, and what becomes of their blocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from dynaserve.errors import ConfigError
from dynaserve.kv_transfer.agent import PeerLost
from dynaserve.kv_transfer.receiver import Cancel, Complete, Extend
from dynaserve.kv_transfer.results import TransferReport
from dynaserve.kv_transfer.sender import Stop
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.messages import Ended, Event, Granted, Lifted, Moved, Parked, Refused, Resumed, Revoked
from tests.virtual_engine import BLOCK, Engine
from vllm_plugin.micro_requests import EXTRA_ARG, Plan, Reserve
from vllm_plugin.options import PluginOptions
from vllm_plugin.wake import Alarm

TIMEOUT_S = 5.0
SENDER = WorkerEndpoint("worker", "tcp://127.0.0.1:1", {"torch": ""})


class Instance:
    """The engine, with what its scheduler tells the front-end and the workers; `worker` answers as a real one would."""

    def __init__(self, folder: Path, *, blocks: int = 2000, max_parked: int = 64, **engine_args: Any) -> None:
        options = PluginOptions(max_parked=max_parked, park_timeout_ms=1e3 * TIMEOUT_S)
        self.engine = Engine(folder, blocks, options, cuts=True, enable_prefix_caching=False, **engine_args)
        self.scheduler = self.engine.scheduler
        self.scheduler.monotonic = lambda: self.engine.now_s
        self.commands: list[Any] = []
        self.worker_answers = True
        take = self.scheduler.micro.take_commands

        def tell_worker() -> list[tuple[str, Any]]:
            commands: list[tuple[str, Any]] = take()
            for request_id, command in commands:
                self.commands.append(command)
                if not self.worker_answers:
                    continue
                if isinstance(command, Cancel):
                    self.engine.arrived.add(request_id)
                elif isinstance(command, Stop):
                    self.engine.sent_back.add(request_id)
            return commands

        self.scheduler.micro.take_commands = tell_worker

    def add(self, name: str, role: str, prompt: int, hand_off: int | None, outputs: int = 40) -> None:
        senders = [SENDER] if role == "beta" else []
        plan = Plan(role, hand_off, f"t-{name}", "torch", senders)
        self.engine.add(name, prompt, outputs, **{EXTRA_ARG: msgspec.to_builtins(plan)})

    def step(self, times: int = 1) -> dict[str, int]:
        for _ in range(times):
            scheduled = self.engine.step()
        return scheduled

    def steps_until(self, condition: Any) -> None:
        for _ in range(500):
            if condition():
                return
            self.step()
        raise AssertionError("this never happens")

    def events(self, kind: type) -> list[Any]:
        carried = [carrier.kv_transfer_params[EXTRA_ARG] for carrier in self.engine.carriers if EXTRA_ARG in carrier.kv_transfer_params]
        told = [event for carrier in carried for event in msgspec.convert(carrier, list[Event])]
        return [event for event in told if isinstance(event, kind)]

    def landed(self, name: str, blocks: int, rank: int = 0) -> None:
        self.scheduler.micro.landed(f"t-{name}", rank, blocks)

    def parked(self) -> set[str]:
        return set(self.scheduler.micro.parked)

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def finish(self, *names: str) -> None:
        """Ends these, whatever they do, and sees that nothing is held."""
        for name in names:
            self.scheduler.release(name)
        self.engine.run()
        self.step()
        self.engine.check_empty()
        assert not self.scheduler.micro.by_id
        assert not self.scheduler.micro.transfers


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path)


@pytest.mark.parametrize("hand_off", [1, 31, 32, 99, 100, 101, 120])
def test_an_alpha_stops_at_its_hand_off_and_keeps_its_blocks(instance: Instance, hand_off: int) -> None:
    instance.add("a", "alpha", 100, hand_off)
    instance.steps_until(instance.parked)
    assert instance.step() == {}
    assert instance.scheduler.requests["a"].num_computed_tokens == hand_off
    assert instance.scheduler.requests["a"].num_output_tokens == max(0, hand_off - 100 + 1)
    assert instance.events(Parked) == [Parked("a", hand_off, 0)]
    instance.finish("a")
    assert instance.events(Ended) == [Ended("a", hand_off, 0)]


def test_a_model_with_a_sliding_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the model's KV cache is kept by SlidingWindowManager; DynaServe cuts requests of models with"):
        Instance(tmp_path, window=256)


@pytest.mark.parametrize(
    ("engine_args", "sentence"),
    [({"enable_chunked_prefill": False, "max_num_batched_tokens": 4096}, "chunked prefill is off; DynaServe computes prompts in parts")],
    ids=["no chunks"],
)
def test_an_engine_whose_requests_cannot_be_cut_is_refused(tmp_path: Path, engine_args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        Instance(tmp_path, **engine_args)


def test_a_lifted_alpha_finishes_alone(instance: Instance) -> None:
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    assert instance.scheduler.move_hand_off("a", None)
    instance.finish()
    assert len(instance.engine.token_times_s["a"]) == 40


@pytest.mark.parametrize(("to", "stops_at"), [(125, 125), (105, 114), (1, 114)])
def test_a_moved_alpha_stops_there_or_as_soon_as_it_can(instance: Instance, to: int, stops_at: int) -> None:
    instance.add("a", "alpha", 100, 120)
    instance.steps_until(lambda: instance.scheduler.requests["a"].num_computed_tokens == 113)
    assert instance.scheduler.move_hand_off("a", to)
    instance.steps_until(instance.parked)
    assert instance.events(Parked) == [Parked("a", stops_at, 0)]
    instance.finish("a")


def test_an_alpha_that_stands_cannot_be_moved(instance: Instance) -> None:
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    assert not instance.scheduler.move_hand_off("a", 120)
    assert not instance.scheduler.move_hand_off("nobody", 120)
    instance.finish("a")


def test_an_alpha_that_stands_for_too_long_goes_on(instance: Instance) -> None:
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    instance.engine.now_s += TIMEOUT_S + 1
    instance.finish()
    (lifted,) = instance.events(Lifted)
    assert "more than 5 s" in lifted.reason
    assert len(instance.engine.token_times_s["a"]) == 40


def test_the_oldest_of_too_many_parked_alphas_goes_on(tmp_path: Path) -> None:
    instance = Instance(tmp_path, max_parked=2)
    for i in range(3):
        instance.add(f"a{i}", "alpha", 50, 60)
        instance.steps_until(lambda i=i: f"a{i}" in instance.parked())
    instance.step(2)
    assert [event.request_id for event in instance.events(Lifted)] == ["a0"]
    assert instance.parked() == {"a1", "a2"}
    instance.finish("a1", "a2")


def test_only_as_many_alphas_go_on_as_are_too_many_though_no_slot_is_free(tmp_path: Path) -> None:
    instance = Instance(tmp_path, max_parked=3, max_num_seqs=1)
    for i in range(4):
        instance.add(f"a{i}", "alpha", 50, 60)
    instance.steps_until(lambda: len(instance.parked()) == 4)
    instance.engine.add("other", 50, 60)
    instance.step(20)
    assert [event.request_id for event in instance.events(Lifted)] == ["a0"]
    instance.finish("a1", "a2", "a3")


@pytest.fixture
def still_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm whose thread, which knows nothing of the virtual clock, looks at it late."""
    monkeypatch.setattr("vllm_plugin.wake._LONGEST_SLEEP_MS", 5_000)


@pytest.mark.usefixtures("still_alarm")
def test_an_engine_that_falls_asleep_after_parking_is_woken_when_time_is_up(instance: Instance) -> None:
    instance.scheduler._alarm = Alarm([], lambda: None)
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    assert not instance.scheduler.has_requests()
    assert instance.scheduler._alarm.deadline_s == pytest.approx(instance.engine.now_s + TIMEOUT_S)
    instance.scheduler._alarm.close()
    instance.scheduler._alarm = None
    instance.finish("a")


@pytest.mark.usefixtures("still_alarm")
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_is_not_complete_while_a_worker_may_touch_kv(instance: Instance, state: PauseState) -> None:
    """vLLM may then give the cache up: `/sleep`."""
    instance.scheduler._alarm = Alarm([], lambda: None)
    instance.worker_answers = False
    instance.add("a", "alpha", 100, 110)
    instance.add("b", "beta", 100, 110)
    instance.steps_until(instance.parked)
    for name in "ab":
        instance.scheduler.release(name)
    instance.step(2)
    assert not instance.scheduler.has_requests(), "awake, the engine is woken by the news"
    instance.scheduler.set_pause_state(state)
    assert instance.scheduler.has_requests()
    instance.engine.sent_back.add("a")
    instance.step()
    assert instance.scheduler.has_requests()
    instance.engine.arrived.add("b")
    instance.step(2)
    assert not instance.scheduler.has_requests()
    instance.scheduler._alarm.close()
    instance.scheduler._alarm = None
    instance.finish()


@pytest.mark.usefixtures("still_alarm")
def test_a_pause_that_waits_for_answers_waits_for_one_that_stands(instance: Instance) -> None:
    instance.scheduler._alarm = Alarm([], lambda: None)
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    instance.step()
    assert not instance.scheduler.has_requests()
    instance.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert instance.scheduler.has_requests()
    instance.engine.now_s += TIMEOUT_S + 1
    instance.steps_until(lambda: not instance.scheduler.has_requests())
    assert len(instance.engine.token_times_s["a"]) == 40
    instance.scheduler._alarm.close()
    instance.scheduler._alarm = None
    instance.finish()


def test_a_preempted_alpha_cannot_stop_before_what_it_has_sampled(instance: Instance) -> None:
    instance.add("a", "alpha", 100, 130)
    instance.steps_until(lambda: instance.scheduler.requests["a"].num_computed_tokens == 120)
    preempt(instance, "a")
    assert instance.scheduler.move_hand_off("a", 105)
    instance.steps_until(instance.parked)
    assert instance.events(Parked) == [Parked("a", 120, 0)]
    assert instance.scheduler.requests["a"].num_output_tokens == 120 - 100 + 1
    instance.finish("a")


def test_parked_alphas_take_no_slots(tmp_path: Path) -> None:
    instance = Instance(tmp_path, max_num_seqs=2)
    for i in range(4):
        instance.add(f"a{i}", "alpha", 50, 60)
    instance.steps_until(lambda: len(instance.parked()) == 4)
    for i in range(4):
        assert instance.scheduler.move_hand_off(f"a{i}", None)
    instance.step()
    assert len(instance.step()) == 2, "lifted, they need slots again"
    instance.finish()
    assert all(len(instance.engine.token_times_s[f"a{i}"]) == 40 for i in range(4))


@pytest.mark.usefixtures("still_alarm")
def test_requests_that_wait_for_another_instance_leave_the_engine_asleep(instance: Instance) -> None:
    instance.scheduler._alarm = Alarm([], lambda: None)
    for i in range(5):
        instance.add(f"a{i}", "alpha", 100, 110)
        instance.add(f"b{i}", "beta", 100, 110)
    instance.steps_until(lambda: len(instance.parked()) == 5)
    instance.step()
    assert not instance.scheduler.has_requests()
    instance.scheduler._alarm.rings.set()
    assert instance.scheduler.has_requests()
    instance.step()
    assert not instance.scheduler.has_requests()
    instance.scheduler._alarm.close()
    instance.scheduler._alarm = None
    instance.finish(*(f"{side}{i}" for side in "ab" for i in range(5)))


def announced(instance: Instance, hand_off: int = 110) -> None:
    instance.add("b", "beta", 100, hand_off)
    instance.step()


def test_a_beta_resumes_when_its_tokens_and_all_its_blocks_are_here(instance: Instance) -> None:
    announced(instance)
    instance.landed("b", 3)
    instance.step()
    assert instance.scheduler.continue_request("b", 110, [9] * 11, 0.0)
    assert instance.step(2) == {}
    instance.landed("b", 1)
    assert instance.step() == {"b": 1}
    assert instance.events(Resumed) == [Resumed("b", 0.0)]
    instance.engine.arrived.add("b")  # the worker's own report comes later, and is not needed
    instance.finish()
    assert len(instance.engine.token_times_s["b"]) == 40 - 11


def test_a_wrong_number_of_tokens_ends_the_beta_and_nothing_else(instance: Instance) -> None:
    announced(instance)
    assert not instance.scheduler.continue_request("b", 110, [9] * 5, 0.0)
    instance.finish()


def test_a_reservation_is_granted_in_part_and_grows(tmp_path: Path) -> None:
    instance = Instance(tmp_path, blocks=24)
    instance.engine.add("other", 300, 100)
    instance.step()
    instance.add("b", "beta", 500, 510, outputs=30)
    (first,) = [command for command in take_all(instance) if isinstance(command, Reserve)]
    assert 0 < len(first.block_ids) < 16
    instance.scheduler.release("other")
    instance.step(2)
    (more,) = [command for command in instance.commands if isinstance(command, Extend)]
    assert len(first.block_ids) + len(more.block_ids) == 16
    assert [grant.granted_tokens for grant in instance.events(Granted)] == [len(first.block_ids) * BLOCK, 510]
    instance.finish("b")


def take_all(instance: Instance) -> list[Any]:
    instance.step()
    return instance.commands


def test_a_reservation_is_refused_where_others_need_the_blocks(tmp_path: Path) -> None:
    instance = Instance(tmp_path, blocks=24)
    instance.engine.add("other", 300, 400)
    instance.step()
    instance.add("b", "beta", 500, 510)
    assert type(instance.scheduler.reservation("b")).__name__ == "Refused"
    instance.finish("other")


def test_a_reservation_is_taken_back_when_running_requests_need_its_blocks(tmp_path: Path) -> None:
    instance = Instance(tmp_path, blocks=24)
    instance.add("b", "beta", 500, 510)
    instance.engine.add("other", 300, 200)
    instance.steps_until(lambda: instance.events(Revoked))
    assert [event.request_id for event in instance.events(Revoked)] == ["b"]
    assert any(isinstance(command, Cancel) for command in instance.commands)
    instance.finish()
    assert len(instance.engine.token_times_s["other"]) == 200
    assert not instance.scheduler.preemptions, "nobody is preempted for a reservation"


def test_while_revoked_blocks_are_on_their_way_no_other_reservation_is_taken_back(instance: Instance) -> None:
    instance.worker_answers = False
    for name in "bc":
        instance.add(name, "beta", 200, 210)
    for late_s in (0.0, 1.0, 2.0):  # the peer takes its time
        instance.scheduler.revoke_for_running(instance.engine.now_s + late_s, stuck=True)
    instance.step()
    assert [event.request_id for event in instance.events(Revoked)] == ["c"]
    instance.engine.arrived.add("c")
    instance.step()
    instance.scheduler.revoke_for_running(instance.engine.now_s + 3.0, stuck=True)
    instance.worker_answers = True
    instance.finish("b")
    assert [event.request_id for event in instance.events(Revoked)] == ["c", "b"]


def test_the_beta_of_a_lost_alpha_waits_for_what_is_on_its_way(instance: Instance) -> None:
    """KV of tokens beyond those that it goes on from would be written over what it computes."""
    announced(instance)
    assert instance.scheduler.continue_request("b", 110, [9] * 11, 0.0, alpha_lost=True)
    instance.landed("b", 7)
    assert instance.step() == {}
    assert not instance.events(Resumed)
    instance.engine.arrived.add("b")
    instance.steps_until(lambda: instance.events(Resumed))
    instance.finish("b")


def test_a_last_block_that_has_left_in_part_keeps_its_hand_off_where_it_is(instance: Instance) -> None:
    """Its alpha may be preempted in the middle of the step that fills it; the block is not sent again."""
    instance.add("a", "alpha", 100, 130)
    instance.steps_until(lambda: instance.scheduler.requests["a"].num_computed_tokens > 110)
    instance.scheduler.micro.by_id["a"].complete = True
    preempt(instance, "a")
    instance.step()
    assert not instance.parked()
    assert not instance.scheduler.move_hand_off("a", 135)
    instance.finish("a")


def test_blocks_that_land_are_counted_without_a_step(instance: Instance) -> None:
    announced(instance)
    alarm = instance.scheduler._alarm = Alarm([], lambda: None)
    alarm.landed.append(("t-b", 0, 3))
    alarm.landed.append(("t-of-a-request-that-is-over", 0, 1))
    assert not instance.scheduler.has_requests()
    assert instance.scheduler.continue_request("b", 110, [9] * 11, 0.0)
    assert instance.step() == {}
    assert not instance.scheduler.has_requests()
    alarm.landed.append(("t-b", 0, 1))
    assert instance.scheduler.has_requests()
    assert instance.step() == {"b": 1}
    alarm.close()
    instance.scheduler._alarm = None
    instance.engine.arrived.add("b")
    instance.finish()


def test_what_a_beta_has_received_is_told_though_it_ends_in_its_first_step(instance: Instance) -> None:
    announced(instance, hand_off=138)
    assert instance.scheduler.continue_request("b", 138, [9] * 39, 0.0)
    instance.landed("b", 5)
    instance.engine.reports.append(TransferReport("t-b", "received", 0.0, blocks=5, bytes=50))
    assert instance.step() == {"b": 1}
    instance.step()
    assert [(moved.blocks, moved.bytes) for moved in instance.events(Moved)] == [(5, 50)]
    assert instance.events(Ended) == [Ended("b", 1, 0)]
    instance.finish()


def test_a_beta_that_was_continued_is_not_taken_back(tmp_path: Path) -> None:
    instance = Instance(tmp_path, blocks=24)
    instance.add("b", "beta", 500, 510)
    instance.step()
    assert instance.scheduler.continue_request("b", 510, [9] * 11, 0.0)
    instance.engine.add("other", 200, 200)
    instance.step(30)
    assert not instance.events(Revoked)
    instance.landed("b", 16)
    instance.finish()
    assert len(instance.engine.token_times_s["b"]) == 40 - 11


def test_betas_that_take_all_blocks_begin_all_the_same(tmp_path: Path) -> None:
    """Each ends with a full block, and nothing runs that could be preempted for the next one."""
    blocks, prompt = 11, 11 * BLOCK
    instance = Instance(tmp_path, blocks=1 + 2 * blocks)
    names = ("b1", "b2")
    for name in names:
        instance.add(name, "beta", prompt, prompt, outputs=4)
    instance.step()
    continued = [name for name in names if instance.scheduler.continue_request(name, prompt, [9], 0.0)]
    for name in continued:
        instance.landed(name, blocks)
        instance.engine.arrived.add(name)
    instance.steps_until(lambda: all(name in instance.engine.token_times_s for name in continued))
    assert continued[:1] == ["b1"]
    assert [event.request_id for event in instance.events(Revoked)] == [name for name in names if name not in continued]
    instance.finish()


def test_a_beta_without_blocks_for_all_that_alpha_computed_gives_itself_up(tmp_path: Path) -> None:
    instance = Instance(tmp_path, blocks=24)
    instance.engine.add("other", 400, 100)
    instance.step()
    instance.add("b", "beta", 500, 510)
    instance.step()
    free = instance.free_blocks()
    assert not instance.scheduler.continue_request("b", 510, [9] * 11, 0.0)
    instance.step(2)
    (revoked,) = instance.events(Revoked)
    assert "510 tokens" in revoked.reason
    assert instance.free_blocks() > free
    instance.finish("other")


@pytest.mark.parametrize(("hand_off", "blocks"), [(120, 4), (64, 2), (1, 1)])
def test_a_beta_starts_where_alpha_stopped_although_something_else_was_announced(instance: Instance, hand_off: int, blocks: int) -> None:
    announced(instance, hand_off=100)
    assert instance.scheduler.move_hand_off("b", hand_off)
    assert instance.scheduler.continue_request("b", hand_off, [9] * max(0, hand_off - 99), 0.0)
    instance.step()
    assert Complete("t-b", blocks) in instance.commands
    instance.landed("b", blocks)
    assert instance.step() == {"b": max(1, 100 - hand_off)}
    instance.finish()


def test_a_beta_waits_for_the_worker_that_has_least(instance: Instance) -> None:
    """Tensor parallel: the end was moved back, and blocks of one worker beyond it say nothing of the other's before it."""
    instance.scheduler.micro.num_workers = 2
    announced(instance)
    instance.landed("b", 4, rank=0)
    instance.landed("b", 1, rank=1)
    assert instance.scheduler.move_hand_off("b", 64)
    assert instance.scheduler.continue_request("b", 64, [], 0.0)
    assert instance.step(2) == {}
    assert not instance.events(Resumed)
    instance.landed("b", 1, rank=1)
    assert instance.step() == {"b": 36}
    instance.finish()


def test_a_transfer_that_fails_gives_the_reservation_up(instance: Instance) -> None:
    announced(instance)
    instance.engine.reports.append(TransferReport("t-b", "failed", 0.0))
    instance.step(2)
    (revoked,) = instance.events(Revoked)
    assert "failed" in revoked.reason
    instance.finish()


def preempt(instance: Instance, name: str) -> None:
    """As vLLM does when it has no blocks."""
    request = instance.scheduler.requests[name]
    instance.scheduler.running.remove(request)
    instance.scheduler._preempt_request(request, 0.0)


def test_an_alpha_whose_kv_is_delivered_is_finished_when_it_is_preempted(instance: Instance) -> None:
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    instance.engine.reports.append(TransferReport("t-a", "delivered", 0.0))
    instance.step()
    preempt(instance, "a")
    assert instance.step() == {}
    instance.finish()
    assert instance.events(Ended) == [Ended("a", 110, 0)], "nothing was computed again"


def test_a_lifted_alpha_is_not_finished_by_its_preemption(instance: Instance) -> None:
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    instance.engine.reports.append(TransferReport("t-a", "delivered", 0.0))
    instance.step()
    preempt(instance, "a")
    instance.scheduler.move_hand_off("a", None)
    instance.finish()
    assert len(instance.engine.token_times_s["a"]) == 40


def test_an_alpha_that_is_preempted_before_computes_again_and_stops_again(instance: Instance) -> None:
    instance.add("a", "alpha", 100, 110)
    instance.steps_until(instance.parked)
    preempt(instance, "a")
    instance.scheduler.micro.preempt("a")
    instance.steps_until(instance.parked)
    assert len(instance.events(Parked)) == 2
    instance.finish("a")


def test_a_request_of_a_lost_instance_goes_on_after_its_tokens(instance: Instance) -> None:
    plan = Plan("whole", output_token_ids=[7] * 25)
    instance.engine.add("w", 100, 40, **{EXTRA_ARG: msgspec.to_builtins(plan)})
    request = instance.scheduler.requests["w"]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_computed_tokens) == (100, 25, 0)
    instance.finish()
    assert len(instance.engine.token_times_s["w"]) == 15
    assert instance.events(Ended) == [Ended("w", 100 + 40 - 1, 0)]


def test_a_grammar_goes_on_where_a_lost_instance_has_left_it_though_its_adapter_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance(tmp_path, enable_lora=True, max_loras=1)
    accepted: list[tuple[str, list[int]]] = []

    def accept(request: Request, micro: Any) -> None:
        accepted.append((request.request_id, micro.plan.output_token_ids))
        request.structured_output_request = None  # nothing here can compile one

    monkeypatch.setattr(instance.scheduler, "_accept_outputs", accept)
    instance.engine.add("other", 100, 60, adapter=1)
    instance.step()
    plan = Plan("whole", output_token_ids=[7] * 25)
    instance.engine.add("w", 100, 40, adapter=2, **{EXTRA_ARG: msgspec.to_builtins(plan)})
    request = instance.scheduler.requests["w"]
    request.structured_output_request = SimpleNamespace(grammar=None)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    instance.step()
    assert not accepted
    request.structured_output_request.grammar = object()
    instance.engine.add("behind it", 100, 5, adapter=1)
    instance.step(2)
    assert accepted
    assert "w" not in instance.engine.token_times_s, "the other adapter has its only place"
    instance.finish()
    assert accepted == [("w", [7] * 25)]


def test_a_request_whose_grammar_rejects_the_tokens_of_another_instance_ends_with_an_error(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = instance.scheduler
    plan = Plan("whole", output_token_ids=[7] * 25)
    instance.engine.add("w", 100, 40, **{EXTRA_ARG: msgspec.to_builtins(plan)})
    request = scheduler.requests["w"]
    instance.step()
    request.structured_output_request = SimpleNamespace(grammar=object())
    monkeypatch.setattr(scheduler.structured_output_manager, "accept_tokens", lambda *_: False)
    scheduler._accept_outputs(request, scheduler.micro.by_id["w"])
    monkeypatch.undo()  # what is sampled here is not what is rejected
    request.structured_output_request = None  # nothing here can compile one
    instance.step()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert "w" not in scheduler.requests


def test_a_lost_peer_is_told_to_every_worker(instance: Instance) -> None:
    instance.scheduler.peers_lost(["x", "y"], ["t1", "t2"])
    assert instance.scheduler.micro.has_messages
    instance.step()
    assert instance.commands == [PeerLost(name, frozenset({"t1", "t2"})) for name in ("x", "y")]


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_paused_engine_takes_no_kv(tmp_path: Path, state: PauseState) -> None:
    """One that sleeps has given its cache up."""
    instance = Instance(tmp_path)
    instance.scheduler.set_pause_state(state)
    instance.add("b", "beta", 100, 110)
    assert instance.scheduler.reservation("b") == Refused(
        "b", "no KV blocks to reserve: 0% of the cache is in use, and the engine is paused"
    )
    assert "b" not in instance.scheduler.requests
    instance.scheduler.set_pause_state(PauseState.UNPAUSED)
    instance.add("b", "beta", 100, 110)
    assert instance.scheduler.reservation("b") == Granted("b", 0, 110)
