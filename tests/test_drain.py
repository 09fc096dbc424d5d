"""vLLM's engine core with our scheduler, told to stop while an alpha stands at its hand-off point; without its processes."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from dynaserve.messages import Ended
from tests.test_hand_over import Instance
from vllm_plugin.wake import Alarm

Message = tuple[EngineCoreRequestType, Any]
WAKEUP: Message = (EngineCoreRequestType.WAKEUP, None)
STANDS_AT, SAMPLED, ANSWER = 110, 11, 40
"""Tokens at which the alpha stands, and of its answer: by then, and in all."""


def call(method: str, *args: Any) -> Message:
    return EngineCoreRequestType.UTILITY, (0, 1, method, args)


class Inputs(queue.Queue[Message]):
    """to_come: what is said, one message each time that the engine waits; to wait for more is an error."""

    to_come: tuple[Message, ...] = ()

    def get(self, block: bool = True, timeout: float | None = None) -> Message:
        if block and self.empty():
            self.put(self.to_come[0])
            self.to_come = self.to_come[1:]
        return super().get(block, timeout)


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    """Its alpha stands, and it has nothing else to do."""
    monkeypatch.setattr("vllm_plugin.wake._LONGEST_SLEEP_MS", 5_000)  # the alarm's thread knows nothing of the virtual clock
    instance = Instance(tmp_path)
    alarm = instance.scheduler._alarm = Alarm([], lambda: None)
    instance.add("a", "alpha", 100, STANDS_AT, outputs=ANSWER)
    instance.steps_until(instance.parked)
    assert not instance.scheduler.has_requests()
    yield instance
    instance.scheduler._alarm = None
    alarm.close()
    instance.finish("a")


def told_to_stop(instance: Instance, shutdown_timeout_s: int) -> Any:
    core: Any = EngineCoreProc.__new__(EngineCoreProc)
    core.scheduler, core.vllm_config = instance.scheduler, SimpleNamespace(shutdown_timeout=shutdown_timeout_s)
    core.input_queue, core.output_queue = Inputs(), queue.Queue()
    core.engines_running, core.batch_queue = False, None
    core.shutdown_state = EngineShutdownState.REQUESTED
    return core


def said_by(core: Any) -> EngineCoreOutputs:
    _, outputs = core.output_queue.get_nowait()
    assert core.output_queue.empty()
    return outputs


@pytest.mark.parametrize(
    ("said", "tokens"), [(call("dynaserve_release", "a"), SAMPLED), (call("dynaserve_move", "a", None), ANSWER)], ids=["released", "lifted"]
)
def test_an_engine_that_may_finish_waits_for_what_becomes_of_its_alpha(instance: Instance, said: Message, tokens: int) -> None:
    core = told_to_stop(instance, shutdown_timeout_s=60)
    assert core._handle_shutdown(), "its beta has not taken over"
    core.input_queue.to_come = (WAKEUP, said)
    core._process_input_queue()
    assert core.input_queue.to_come == (), "it waits, rather than turn without a pause"
    assert said_by(core).utility_output.failure_message is None
    instance.steps_until(lambda: not core._handle_shutdown())
    assert [ended.request_id for ended in instance.events(Ended)] == ["a"]
    assert len(instance.engine.token_times_s["a"]) == tokens


def test_an_engine_that_is_told_to_stop_refuses_the_calls_of_others(instance: Instance) -> None:
    core = told_to_stop(instance, shutdown_timeout_s=60)
    core._handle_client_request(*call("reset_prefix_cache"))
    assert said_by(core).utility_output.failure_message == "Server shutting down"


def test_an_engine_that_may_not_finish_waits_for_nobody(instance: Instance) -> None:
    core = told_to_stop(instance, shutdown_timeout_s=0)
    core._process_input_queue()  # the signal came between two turns of the loop
    instance.steps_until(lambda: not core._handle_shutdown())
    (aborted,) = said_by(core).outputs
    assert (aborted.request_id, aborted.finish_reason) == ("a", FinishReason.ABORT)
