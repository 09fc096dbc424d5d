"""The front-end's engine client over real sockets, to gateways without engines: a request outlives its instance."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq.asyncio
from prometheus_client import REGISTRY

pytest.importorskip("vllm")

from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.serial_utils import MsgpackEncoder

from dynaserve import frontend_metrics
from dynaserve.admission import Admission
from dynaserve.errors import BadRequest, ConfigError, NoInstance, Overloaded
from dynaserve.fleet import Instance
from dynaserve.global_scheduler import GlobalScheduler, Options, Policy, Revision, RevisionReason
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.length_predictor import LengthPredictor
from dynaserve.messages import (
    Abort,
    AddLora,
    Announce,
    Bye,
    Continue,
    Cut,
    Ended,
    Expect,
    Granted,
    InstanceDescription,
    Load,
    LoraAdded,
    MeasuredStep,
    Move,
    PromptProgress,
    Run,
    SenderLost,
    Step,
    ToInstance,
    WorkerDescription,
)
from dynaserve.records import RequestRecord
from dynaserve.request_placer import REPORT_EVERY_MS, RequestPlacer, RequestProgress
from dynaserve.step_latency import ProfileTable, Roofline
from tests.test_fleet_links import Gateway, description, until
from vllm_plugin import failover, requests
from vllm_plugin.adapters import LONGEST_NAME
from vllm_plugin.fleet_client import FleetClient
from vllm_plugin.frontend import FleetLLM
from vllm_plugin.orphans import PATIENCE_S

NAMES = ("http://a", "http://b")


def described(name: str, gateway: Gateway) -> InstanceDescription:
    endpoint = WorkerEndpoint(f"worker of {name}", "tcp://127.0.0.1:1", {"torch": ""})
    plain = description(gateway.address, gateway.epoch)
    return InstanceDescription(
        **{field: getattr(plain, field) for field in plain.__struct_fields__} | {"workers": [WorkerDescription(endpoint, "layout", 1)]}
    )


@dataclass
class Fleet:
    client: FleetClient
    gateways: dict[str, Gateway]

    async def start(self, request_id: str, **params: Any) -> str:
        """Returns the instance that it runs on."""
        return await self.start_with(request_id, SamplingParams(max_tokens=20, **params))

    async def start_with(self, request_id: str, params: SamplingParams) -> str:
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(range(10)),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        await self.client.add_request_async(request)
        await until(lambda: any(self.runs(name, request_id) for name in self.gateways))
        return next(name for name in self.gateways if self.runs(name, request_id))

    def runs(self, name: str, request_id: str) -> list[Run]:
        return [m for m in self.gateways[name].heard if isinstance(m, Run) and m.request_id.startswith(f"{request_id}/")]

    async def sample(self, name: str, wire_id: str, tokens: list[int], reason: FinishReason | None = None) -> None:
        outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(wire_id, tokens, finish_reason=reason)])
        await self.gateways[name].say(Step([], None, time.monotonic()), MsgpackEncoder().encode(outputs))

    def unavailable(self) -> list[tuple[str, int]]:
        """Requests that are answered so from now on, and their status."""
        told: list[tuple[str, int]] = []
        self.client.on_unavailable = lambda request_id, _, status: told.append((request_id, status))  # type: ignore[assignment,method-assign]
        return told

    async def output(self) -> EngineCoreOutput:
        async with asyncio.timeout(30):
            while not (outputs := (await self.client.get_output_async()).outputs):
                pass  # of vLLM's gauges
        (output,) = outputs
        return output


def run(
    scenario: Callable[[Fleet], Awaitable[None]],
    most_waiting: float = math.inf,
    timeout_s: float = math.inf,
    placer: RequestPlacer | None = None,
    names: Sequence[str] = NAMES,
    instances_file: Path | None = None,
) -> None:
    async def with_fleet() -> None:
        context = zmq.asyncio.Context()
        gateways = {name: Gateway(f"epoch of {name}") for name in names}
        for gateway in gateways.values():
            gateway.start(context)
        placing = placer or RequestPlacer(GlobalScheduler(Options(Policy.colocated)), LengthPredictor())
        instances = [Instance(name, described(name, gateway)) for name, gateway in gateways.items()]
        client = FleetClient(instances, placing, "torch", timeout_s, Admission(most_waiting))
        try:
            await client.connect()
            client.watch(instances_file)
            await scenario(Fleet(client, gateways))
            placing.scheduler.check_invariants()
        finally:
            client.shutdown()
            for gateway in gateways.values():
                gateway.cut()
            await asyncio.sleep(0)
            context.destroy(linger=0)

    asyncio.run(with_fleet())


def test_a_request_goes_on_elsewhere_with_the_tokens_that_the_client_has() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        (began,) = fleet.runs(first, "r")
        await fleet.sample(first, began.request_id, [7, 8])
        assert (await fleet.output()).new_token_ids == [7, 8]
        fleet.gateways[first].cut()
        await until(lambda: bool(fleet.runs(second, "r")))
        (goes_on,) = fleet.runs(second, "r")
        assert goes_on.output_token_ids == [7, 8]
        await until(lambda: SenderLost([f"worker of {first}"]) in fleet.gateways[second].heard)
        await fleet.sample(second, began.request_id, [99])  # late, of the first attempt
        await fleet.sample(second, goes_on.request_id, [9], FinishReason.LENGTH)
        output = await fleet.output()
        assert (output.request_id, output.new_token_ids, output.finish_reason) == ("r", [9], FinishReason.LENGTH)

    run(scenario)


def test_a_request_that_was_placed_again_does_not_count_as_predicted_wrongly() -> None:
    def observed() -> list[float | None]:
        return [REGISTRY.get_sample_value(f"dynaserve_{what}_over_predicted_count") for what in ("ttft", "end")]

    async def scenario(fleet: Fleet) -> None:
        over: list[RequestRecord] = []
        fleet.client.watchers.append(lambda record, _: over.append(record))
        before = observed()
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        fleet.gateways[first].cut()
        await until(lambda: bool(fleet.runs(second, "r")))
        (goes_on,) = fleet.runs(second, "r")
        await fleet.sample(second, goes_on.request_id, [7], FinishReason.LENGTH)
        await fleet.output()
        await fleet.gateways[second].say(Step([Ended(goes_on.request_id, 11, 0)], None, time.monotonic()))
        await until(lambda: bool(over))
        assert over[0].expected["ttft_ms"] > 0
        assert over[0].expected["end_ms"] > 0
        assert observed() == before

    table = ProfileTable(Roofline(overhead_ms=300.0, token_ms=1.0, knee_tokens=16.0, pair_ms=0.0, decode_ms=1.0, context_ms=0.0))
    run(scenario, placer=RequestPlacer(GlobalScheduler(Options(Policy.dynamic), table), LengthPredictor(), predicts=True))


def test_what_an_instance_tells_of_its_prompts_is_reported_with_what_answers_and_what_waits() -> None:
    told: dict[str, list[RequestProgress]] = {}

    class Told(RequestPlacer):
        def report(self, instance_id: str, requests: Iterable[RequestProgress], now_ms: float) -> None:
            told[instance_id] = list(requests)
            super().report(instance_id, told[instance_id], now_ms)

    async def scenario(fleet: Fleet) -> None:
        started = {name: await fleet.start(name) for name in ("answers", "computes", "waits", "elsewhere")}
        by_instance = {instance: [name for name, where in started.items() if where == instance] for instance in NAMES}
        (instance, names) = next((instance, names) for instance, names in by_instance.items() if "answers" in names)
        assert len(names) == 2  # they go where the fewest tokens are promised
        wire = {name: fleet.runs(instance, name)[0].request_id for name in names}
        await fleet.sample(instance, wire["answers"], [7, 8])
        await fleet.output()
        (other,) = set(names) - {"answers"}
        await asyncio.sleep(2e-3 * REPORT_EVERY_MS)  # who is where is looked up again after that long
        answering = RequestProgress("answers", 11, 2)
        for prompts, expected in (
            ([], RequestProgress(other, 0, 0, begun=False)),
            ([PromptProgress(wire[other], 6), PromptProgress("of nobody", 3)], RequestProgress(other, 6, 0)),
        ):
            told.clear()
            load = Load(2, 0, 0.1, [MeasuredStep(6, 15.0, 1, 10, 5.0)], prompts)
            await fleet.gateways[instance].say(Step([], load, time.monotonic()))
            await until(lambda: instance in told)
            assert [replace(one, request_id=one.request_id.partition("-")[0]) for one in told[instance]] == [answering, expected]

    run(scenario, placer=Told(GlobalScheduler(Options(Policy.colocated)), LengthPredictor(), predicts=True))


def test_a_request_too_large_for_a_gateway_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        monkeypatch.setattr(requests, "LONGEST_FRAME_BYTES", 20)
        with pytest.raises(GracefulHTTPError, match="at most 20 fit") as refusal:
            await fleet.start("large")
        assert refusal.value.http_status == 413
        monkeypatch.undo()
        await fleet.start("small")
        assert not [name for name in NAMES if fleet.runs(name, "large")]

    run(scenario)


def test_what_alerts_watch_begins_at_0() -> None:
    async def scenario(fleet: Fleet) -> None:
        for name in fleet.gateways:
            for counter in ("instance_deaths", "malformed_messages", "failed_messages"):
                assert REGISTRY.get_sample_value(f"dynaserve_{counter}_total", {"url": name}) == 0.0

    run(scenario, names=("http://never-seen", "http://nor-this"))
    assert REGISTRY.get_sample_value("dynaserve_requests_refused_total", {"by": "ttft"}) is not None
    assert REGISTRY.get_sample_value("dynaserve_requests_unavailable_total", {"status": "504"}) is not None


def test_a_request_that_waits_for_an_instance_is_one_decision() -> None:
    def decisions() -> float:
        return REGISTRY.get_sample_value("dynaserve_placement_seconds_count") or 0.0

    async def scenario(fleet: Fleet) -> None:
        for name in NAMES:
            await drains(fleet, name, True)
        before = decisions()
        starting = asyncio.create_task(fleet.start("r"))
        await asyncio.sleep(0.5)
        assert not starting.done()
        assert decisions() == before
        await drains(fleet, NAMES[0], False)
        assert await starting == NAMES[0]
        assert decisions() == before + 1

    run(scenario)


def test_tokens_that_vllm_s_decoder_fails_at_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the answer would have a hole."""

    class Failing:
        def decode(self, _: object) -> None:
            raise AttributeError("module 'torch' has no attribute 'nothing'")

    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        counted = frontend_metrics.MALFORMED.labels(first)
        before = counted._value.get()
        (began,) = fleet.runs(first, "r")
        monkeypatch.setattr(fleet.client, "_decoder", Failing())
        await fleet.sample(first, began.request_id, [7])
        await until(lambda: bool(fleet.runs(second, "r")))
        assert counted._value.get() == before + 1
        monkeypatch.undo()
        await fleet.sample(second, fleet.runs(second, "r")[0].request_id, [7, 8], FinishReason.LENGTH)
        assert (await fleet.output()).new_token_ids == [7, 8]

    run(scenario)


def test_a_request_without_any_instance_waits_and_is_then_unavailable() -> None:
    async def scenario(fleet: Fleet) -> None:
        counted = frontend_metrics.UNAVAILABLE.labels(503)
        before = counted._value.get()
        told = fleet.unavailable()
        await fleet.start("r")
        for gateway in fleet.gateways.values():
            gateway.cut()
        await until(lambda: bool(told))
        assert told == [("r", 503)]
        assert counted._value.get() == before + 1

    run(scenario)


def test_an_instance_that_is_taken_out_finishes_what_it_runs() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        await fleet.client.remove_instance(first)
        assert fleet.client.health(first) == "draining"
        assert await fleet.start("s") == second
        (began,) = fleet.runs(first, "r")
        await fleet.sample(first, began.request_id, [7], FinishReason.LENGTH)
        await fleet.output()
        await fleet.client.abort_requests_async(["r"])
        assert first in fleet.client.instances, "it has not said yet that it has ended the request"

    run(scenario)


def test_a_client_that_leaves_ends_every_attempt() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        fleet.gateways[first].cut()
        await until(lambda: bool(fleet.runs(second, "r")))
        await fleet.client.abort_requests_async(["r"])
        (goes_on,) = fleet.runs(second, "r")
        await until(lambda: any(isinstance(m, Abort) and goes_on.request_id in m.request_ids for m in fleet.gateways[second].heard))

    run(scenario)


def test_a_full_fleet_refuses_before_a_request_costs_anything() -> None:
    async def scenario(fleet: Fleet) -> None:
        name = await fleet.start("r")
        with pytest.raises(Overloaded, match="1 requests wait for their first token, and at most 1 may"):
            fleet.client.admit(10, SamplingParams(), 20)
        with pytest.raises(Overloaded, match="1 requests wait"):
            fleet.client.check_room(1)
        fleet.client.admit(10, SamplingParams(), 20, follows=True)
        await fleet.sample(name, fleet.runs(name, "r")[0].request_id, [7])
        await fleet.output()
        fleet.client.admit(10, SamplingParams(), 20)
        with pytest.raises(Overloaded, match="0 requests wait for their first token, 2 more would, and at most 1 may"):
            fleet.client.admit(10, SamplingParams(n=2), 20)

    run(scenario, most_waiting=1)


def test_a_request_that_would_miss_its_ttft_slo_is_refused_unless_it_is_served_however_late() -> None:
    async def scenario(fleet: Fleet) -> None:
        admission, now_s = fleet.client._admission, time.monotonic()
        for number in range(40):  # a thousand tokens a second
            admission.arrived(f"r{number}", 1000, now_s + number - 60)
            admission.answered(f"r{number}", now_s + number - 59)
        admission.arrived("waits", 1000, now_s - 2)

        def admit(**extra_args: float) -> None:
            fleet.client.admit(1000, SamplingParams(extra_args=extra_args or None), 20)

        with pytest.raises(Overloaded, match=r"the first token would come after \d+\.\d s, and is asked for within 1000 ms"):
            admit(dynaserve_ttft_ms=1000)
        admit(dynaserve_ttft_ms=1000, dynaserve_best_effort=1)
        admit(dynaserve_ttft_ms=60_000)
        admit()
        admission.left("waits", time.monotonic())
        admit(dynaserve_ttft_ms=1000)

    run(scenario)


def aborted(heard: Sequence[ToInstance]) -> list[str]:
    return [request_id for message in heard if isinstance(message, Abort) for request_id in message.request_ids]


@pytest.mark.parametrize("transport", ["torch", "same-host"])
def test_a_beta_goes_on_without_its_alpha_only_where_nothing_can_be_written_any_more(transport: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.client._transport = transport
        first = await fleet.start("r", extra_args={"dynaserve_split": 5})
        (second,) = set(NAMES) - {first}
        heard = fleet.gateways[second].heard
        await until(lambda: any(isinstance(message, Announce) for message in heard))
        (announced,) = (message for message in heard if isinstance(message, Announce))
        await fleet.gateways[second].say(Step([Granted(announced.request_id, 0)], None, time.monotonic()))
        await until(lambda: fleet.client.book.find("r")[0].timeline_ms.get("granted") is not None)
        fleet.gateways[first].cut()
        if transport == "torch":
            await until(lambda: Continue(announced.request_id, 5, [], alpha_lost=True) in heard)
            assert not fleet.runs(second, "r")
        else:
            await until(lambda: bool(fleet.runs(second, "r")))
            await until(lambda: announced.request_id in aborted(heard))
            assert not [message for message in heard if isinstance(message, Continue)]

    run(scenario)


def test_all_constrained_requests_of_a_fleet_have_one_grammar_library() -> None:
    def constrained(library: str) -> SamplingParams:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
        assert params.structured_outputs is not None
        params.structured_outputs._backend = library
        return params

    async def scenario(fleet: Fleet) -> None:
        await fleet.start("free")
        asked = [constrained("guidance"), constrained("xgrammar")]
        for number, params in enumerate(asked):
            name = await fleet.start_with(f"r{number}", params)
            assert fleet.runs(name, f"r{number}")
        assert [params.structured_outputs._backend for params in asked if params.structured_outputs] == ["guidance", "guidance"]

    run(scenario)


def test_a_request_that_runs_for_too_long_is_answered_504_and_aborted() -> None:
    async def scenario(fleet: Fleet) -> None:
        told = fleet.unavailable()
        name = await fleet.start("r")
        (began,) = fleet.runs(name, "r")
        await until(lambda: told == [("r", 504)])
        await until(lambda: began.request_id in aborted(fleet.gateways[name].heard))

    run(scenario, timeout_s=0.5)


@pytest.mark.parametrize("first_answer", [None, "its file is not there yet"])
def test_an_instance_that_comes_back_has_the_adapters_of_the_fleet_before_it_takes_requests(
    monkeypatch: pytest.MonkeyPatch, first_answer: str | None
) -> None:
    def asked(gateway: Gateway) -> list[AddLora]:
        return [message for message in gateway.heard if isinstance(message, AddLora)]

    async def answers(gateway: Gateway, times: int = 1, error: str | None = None) -> None:
        await until(lambda: len(asked(gateway)) == times)
        await gateway.say(LoraAdded(asked(gateway)[-1].lora_int_id, error))

    async def scenario(fleet: Fleet) -> None:
        first, second = NAMES
        loading = asyncio.create_task(fleet.client.add_lora_async(LoRARequest("adapter", 1, "/adapter")))
        for name in NAMES:
            await answers(fleet.gateways[name])
        assert await loading
        fleet.gateways[first].cut()
        await until(lambda: fleet.client.health(first) == "dead")
        anew = fleet.gateways[first] = Gateway("anew")
        anew.start(zmq.asyncio.Context.instance())
        monkeypatch.setattr(fleet.client._links, "describe", lambda *_: described(first, anew))
        await until(lambda: len(asked(anew)) == 1)
        assert fleet.client.health(first) == "loading"
        assert {await fleet.start(name) for name in ("r", "s", "t")} == {second}
        await answers(anew, error=first_answer)
        if first_answer is not None:
            await until(lambda: len(asked(anew)) == 2)
            assert await fleet.start("u") == second
            await answers(anew, times=2)
        await until(lambda: not fleet.client._loading)
        assert fleet.client.health(first) == "up"
        assert await fleet.start("v") == first

    monkeypatch.setattr(failover, "LOAD_AGAIN_S", 0.1)
    run(scenario)


def test_those_who_look_see_a_request_from_its_start_to_its_end() -> None:
    async def scenario(fleet: Fleet) -> None:
        over: list[tuple[str, object]] = []
        fleet.client.watchers.append(lambda record, headers: over.append((record.request_id, headers)))
        name = await fleet.start("r", extra_args={"dynaserve_tbt_ms": 60_000.0, "dynaserve_ttft_ms": 90_000.0})
        wire_id = fleet.runs(name, "r")[0].request_id
        for tokens in ([7], [8, 9]):
            await fleet.sample(name, wire_id, tokens)
            await fleet.output()
        load = Load(1, 0, 0.5, [MeasuredStep(10, 55.0, 0, 0, 12.0)])
        await fleet.gateways[name].say(Step([], load, time.monotonic()))
        await until(lambda: fleet.client.instances[name].load == load)
        now = fleet.client.snapshot()
        assert (now.running_requests, now.waiting_requests) == (1, 0)
        (busy,) = (instance for instance in now.instances if instance.name == name)
        assert (busy.health, busy.running_requests, busy.kv_usage, busy.recent_steps[-1].measured_ms) == ("up", 1, 0.5, 12.0)
        (request,) = now.requests
        (record,) = fleet.client.book.find("r")
        assert record.gaps is not None
        assert (record.gaps.slo_ms, record.ttft_slo_ms) == (60_000.0, 90_000.0)
        assert request.gaps is not None
        assert (request.state, request.output_tokens, request.gaps.count, request.gaps.in_slo) == ("whole", 3, 2, 2)
        assert abs(time.time() - now.at_s) < 60
        assert 0 < request.marks_ms["first_token"] <= request.age_ms
        await fleet.sample(name, wire_id, [10], FinishReason.LENGTH)
        await fleet.output()
        await fleet.gateways[name].say(Step([Ended(wire_id, 13, 0)], None, time.monotonic()))
        await until(lambda: bool(over))
        assert over == [("r", None)]
        assert fleet.client.snapshot().running_requests == 0
        assert fleet.client.snapshot().requests[0].finish_reason == "length"

    run(scenario)


def test_vllm_is_told_how_busy_the_fleet_is() -> None:
    async def scenario(fleet: Fleet) -> None:
        told: list[tuple[int, int, float]] = []

        async def listen() -> None:
            while True:
                if (stats := (await fleet.client.get_output_async()).scheduler_stats) is not None:
                    told.append((stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage))

        listening = asyncio.create_task(listen())
        name = await fleet.start("r")
        await until(lambda: told[-1:] == [(0, 1, 0.0)])
        wire_id = fleet.runs(name, "r")[0].request_id
        await fleet.sample(name, wire_id, [7])
        await fleet.gateways[name].say(Step([], Load(1, 0, 0.5), time.monotonic()))
        await until(lambda: told[-1:] == [(1, 0, 0.5)])
        await fleet.sample(name, wire_id, [8], FinishReason.LENGTH)
        await fleet.gateways[name].say(Step([Ended(wire_id, 11, 0)], None, time.monotonic()))
        await until(lambda: told[-1:] == [(0, 0, 0.5)])
        listening.cancel()

    run(scenario)


def test_a_request_that_has_lost_too_many_instances_is_not_given_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        monkeypatch.setattr(failover, "MOST_LOST", 1)
        told = fleet.unavailable()
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        fleet.gateways[first].cut()
        await until(lambda: bool(told))
        assert told == [("r", 500)]
        assert not fleet.runs(second, "r")

    run(scenario)


FIVE = tuple(f"http://{name}" for name in "abcde")


def test_instances_that_are_restarted_one_by_one_cost_a_request_no_life() -> None:
    async def scenario(fleet: Fleet) -> None:
        told = fleet.unavailable()
        await fleet.start("r")
        for _ in range(failover.MOST_LOST + 1):
            (name,) = [one for one in FIVE if fleet.runs(one, "r") and fleet.client.health(one) == "up"]
            await drains(fleet, name, True)
            await fleet.sample(name, fleet.runs(name, "r")[0].request_id, [], FinishReason.ABORT)
            await until(lambda: any(fleet.runs(one, "r") for one in FIVE if fleet.client.health(one) == "up"))
        assert not told
        (record,) = fleet.client.book.recent(1)
        assert (len(record.lost_attempts), record.lost_lives) == (failover.MOST_LOST + 1, 0)

    run(scenario, names=FIVE)


def test_a_fleet_that_only_drains_says_that_it_takes_nothing() -> None:
    async def scenario(fleet: Fleet) -> None:
        for name in NAMES:
            await drains(fleet, name, True)
        now_s = time.monotonic()
        assert fleet.client.why_unavailable(now_s) is None
        assert fleet.client.why_unavailable(now_s + PATIENCE_S + 1.0) == "no instance of the fleet takes requests"
        with pytest.raises(ConfigError, match="the last one of the fleet that takes requests"):
            await fleet.client.remove_instance(NAMES[0])
        await drains(fleet, NAMES[0], False)
        assert fleet.client.why_unavailable(now_s + PATIENCE_S + 1.0) is None

    run(scenario)


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_what_ends_all_instances_at_once_costs_a_request_no_more_lives_than_it_has(how: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        told: list[int] = []
        fleet.client.on_unavailable = lambda _, __, status: told.append(status)  # type: ignore[assignment,method-assign]
        for number in range(10):
            await fleet.start(f"r{number}")
        for gateway in fleet.gateways.values():
            if how == "cut":
                gateway.cut()
            else:
                gateway.core = False
        await until(lambda: not fleet.client._links.alive)
        lives = [len(record.lost_attempts) for record in fleet.client.book.recent(10)]
        assert max(lives) < failover.MOST_LOST
        assert not told

    run(scenario, names=FIVE)


def test_a_request_that_lost_two_instances_at_once_goes_on_once_the_others_are_known_to_live() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (other, third) = [name for name in FIVE[:3] if name != first]
        fleet.gateways[first].cut()
        fleet.gateways[other].cut()
        await until(lambda: bool(fleet.runs(third, "r")))
        assert fleet.client._links.alive == [third]

    run(scenario, names=FIVE[:3])


def test_a_suspected_instance_takes_requests_where_the_others_are_leaving() -> None:
    async def scenario(fleet: Fleet) -> None:
        leaving = await fleet.start("r")
        (second,) = set(NAMES) - {leaving}
        await fleet.client.remove_instance(leaving)
        fleet.gateways[second].api = False  # its ZeroMQ socket answers: it is busy
        await until(lambda: fleet.client.health(second) == "suspect")
        assert fleet.client.health(leaving) == "draining"
        assert await fleet.start("s") == second

    run(scenario)


def test_a_request_that_its_instance_aborts_still_waits_for_its_first_token() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        await fleet.sample(first, fleet.runs(first, "r")[0].request_id, [], FinishReason.ABORT)
        await until(lambda: bool(fleet.runs(second, "r")))
        assert fleet.client.snapshot().waiting_requests == 1
        await fleet.sample(second, fleet.runs(second, "r")[0].request_id, [7])
        await fleet.output()
        assert fleet.client.snapshot().waiting_requests == 0

    run(scenario)


def test_requests_are_found_by_the_ids_of_their_answers() -> None:
    async def scenario(fleet: Fleet) -> None:
        for name in ("chatcmpl-1", "chatcmpl-2", "cmpl-foo-0", "cmpl-foo-1", "cmpl-foo-1-0"):
            await fleet.start(name)
        found = {
            name: [live.internal_id for live in fleet.client._lives_of(name)]
            for name in ("chatcmpl", "chatcmpl-1", "cmpl-foo", "cmpl-foo-0", "cmpl-foo-1")
        }
        assert found == {
            "chatcmpl": [],
            "chatcmpl-1": ["chatcmpl-1"],
            "cmpl-foo": ["cmpl-foo-0", "cmpl-foo-1"],
            "cmpl-foo-0": ["cmpl-foo-0"],
            "cmpl-foo-1": ["cmpl-foo-1-0"],
        }
        assert {name: [record.request_id for record in fleet.client.book.find(name)] for name in found} == found

    run(scenario)


def test_an_instance_that_is_taken_out_ends_no_transfers_of_other_front_ends() -> None:
    async def scenario(fleet: Fleet) -> None:
        first, second = NAMES
        await fleet.client.remove_instance(first)
        await until(lambda: first not in fleet.client.instances)
        await until(lambda: any(isinstance(message, Bye) for message in fleet.gateways[first].heard))
        await fleet.start("r")
        assert not any(isinstance(message, SenderLost) for message in fleet.gateways[second].heard)

    run(scenario)


@pytest.mark.parametrize("params", [SamplingParams(min_p=0.1), SamplingParams(logit_bias={5: 1.0})])
def test_what_an_engine_that_speculates_would_leave_out_is_refused(params: SamplingParams) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.client.admit(10, params, 20)
        for name, instance in fleet.client.instances.items():
            described = msgspec.structs.replace(instance.description, cut_obstacle=requests.SPECULATION)
            fleet.client.instances[name] = replace(instance, description=described)
        with pytest.raises(BadRequest, match=r"^min_p and logit_bias are not supported with speculative decoding"):
            fleet.client.admit(10, params, 20)
        fleet.client.admit(10, SamplingParams(), 20)

    run(scenario)


def test_the_name_of_a_class_is_bounded() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.client.admit(10, SamplingParams(extra_args={"dynaserve_class": "c" * 256}), 20)
        with pytest.raises(BadRequest, match=r"^dynaserve_class has 257 characters, more than 256$"):
            fleet.client.admit(10, SamplingParams(extra_args={"dynaserve_class": "c" * 257}), 20)

    run(scenario)


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("dynaserve_expected_tokens", 2**70, "tokens above 0 and up to 2147483647"),
        ("dynaserve_expected_tokens", 2**31, "tokens above 0 and up to 2147483647"),
        ("dynaserve_ttft_ms", 10**400, r"milliseconds above 0 and up to 1e\+12"),
        ("dynaserve_tbt_ms", math.inf, r"milliseconds above 0 and up to 1e\+12"),
    ],
    ids=["tokens beyond msgpack", "tokens", "milliseconds beyond a float", "infinity"],
)
def test_a_number_that_is_too_large_to_be_counted_with_is_refused(name: str, value: float, most: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name} is {value}, not a number of {most}$"):
        requests.check_extra_args({name: value}, 10, 20, ["torch"])


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63)])
@pytest.mark.parametrize("name", ["dynaserve_class", "somebody_elses"])
def test_a_number_that_no_message_holds_is_refused(name: str, value: int) -> None:
    with pytest.raises(BadRequest, match=f"^{name} is {value}, not a whole number of 64 bits$"):
        requests.check_extra_args({name: value}, 10, 20, ["torch"])


@pytest.mark.parametrize("value", [[1, [1 << 63]], {"deep": {"down": [-(1 << 64)]}}], ids=["list", "table"])
def test_a_number_inside_that_no_message_holds_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match=r"^somebody_elses has -?[0-9]+, not a whole number of 64 bits$"):
        requests.check_extra_args({"somebody_elses": value}, 10, 20, ["torch"])


def test_prompt_embeddings_without_token_ids_are_refused_before_the_answer_begins() -> None:
    llm: Any = FleetLLM.__new__(FleetLLM)
    llm.engine_core = SimpleNamespace(shutdown=lambda **_: None)
    with pytest.raises(VLLMValidationError, match=r"^prompt embeddings without token ids are not supported"):
        llm.generate({"type": "embeds", "prompt_embeds": object()}, SamplingParams(max_tokens=1), "r")


def test_the_largest_numbers_of_a_request_are_told_to_an_instance() -> None:
    largest = {"dynaserve_expected_tokens": 2**31 - 1, "dynaserve_ttft_ms": 10**12, "dynaserve_tbt_ms": 1e12}
    requests.check_extra_args(largest, 10, 20, ["torch"])

    async def scenario(fleet: Fleet) -> None:
        fleet.client.admit(10, SamplingParams(extra_args=largest), 20)
        await fleet.start("r", extra_args=largest)

    run(scenario)


def test_a_dead_instance_that_was_to_leave_is_gone_at_once() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        await fleet.client.remove_instance(first)
        fleet.gateways[first].cut()
        await until(lambda: bool(fleet.runs(second, "r")))
        await until(lambda: first not in fleet.client.instances)
        await until(lambda: REGISTRY.get_sample_value("dynaserve_instance_deaths_total", {"url": first}) is None)
        with pytest.raises(ConfigError, match="last one of the fleet that takes requests"):
            await fleet.client.remove_instance(second)

    run(scenario)


def test_what_the_file_names_is_not_taken_out_over_http(tmp_path: Path) -> None:
    path = tmp_path / "instances"
    path.write_text("\n".join(NAMES))

    async def scenario(fleet: Fleet) -> None:
        first, second = NAMES
        file = fleet.client._file
        assert file is not None
        await until(lambda: file._wanted == set(NAMES))
        with pytest.raises(ConfigError, match=rf"^instance {first} is named by --instances-file"):
            await fleet.client.take_out(f"{first}/")
        path.write_text(second)
        await until(lambda: list(fleet.client.instances) == [second])

    run(scenario, instances_file=path)


def test_an_instance_that_is_added_twice_at_the_same_time_joins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        new, name = Gateway("new"), "http://new"
        new.start(zmq.asyncio.Context.instance())
        monkeypatch.setattr(fleet.client._links, "describe", lambda *_: described(name, new))
        results = await asyncio.gather(*(fleet.client.add_instance(name) for _ in range(3)), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["ConfigError", "ConfigError", "NoneType"]
        pulses = new.pulses
        await until(lambda: new.pulses > pulses + 30)
        assert fleet.client.health(name) == "up"
        assert len(new.identities) == 1, "one session, which lasts"
        new.cut()

    run(scenario)


def test_what_an_instance_aborts_unasked_goes_elsewhere_though_its_beats_are_late() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        assert await fleet.start("s") == second, "now the first is the emptier one without r"
        (began,) = fleet.runs(first, "r")
        fleet.gateways[first].draining = True
        await fleet.sample(first, began.request_id, [], FinishReason.ABORT)
        await until(lambda: bool(fleet.runs(second, "r")))
        assert len(fleet.runs(first, "r")) == 1
        assert fleet.client.health(first) == "draining"
        assert [await fleet.start(f"later {number}") for number in range(4)] == [second] * 4
        fleet.gateways[first].draining = False
        await until(lambda: fleet.client.health(first) == "up")

    run(scenario)


@pytest.mark.parametrize(("split", "shows"), [(5, False), (10, True), (15, True)])
def test_an_instance_is_told_when_an_answer_will_come_and_again_as_that_comes_nearer(split: int, shows: bool) -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r", extra_args={"dynaserve_split": split})
        (second,) = set(NAMES) - {first}
        heard = fleet.gateways[second].heard

        def told() -> list[Expect]:
            return [message for message in heard if isinstance(message, Expect)]

        await until(lambda: any(isinstance(message, Announce) for message in heard))
        if shows:
            await until(lambda: bool(told()))
            (announced,) = (message for message in heard if isinstance(message, Announce))
            assert told()[0].request_id == announced.request_id
            assert told()[0].in_ms > 0
        a_quarter_ms = 0.3 * told()[0].in_ms if shows else 0.0
        await asyncio.sleep(1e-3 * max(2 * REPORT_EVERY_MS, a_quarter_ms))
        await fleet.gateways[first].say(Step([], Load(1, 0, 0.1, [], []), time.monotonic()))
        if shows:
            await until(lambda: len(told()) == 2)
        else:
            await asyncio.sleep(0.1)
            assert not told()

    table = ProfileTable(Roofline(overhead_ms=300.0, token_ms=1.0, knee_tokens=16.0, pair_ms=0.0, decode_ms=1.0, context_ms=0.0))
    run(scenario, placer=RequestPlacer(GlobalScheduler(Options(Policy.dynamic), table), LengthPredictor(), predicts=True))


def test_a_hand_off_is_not_moved_beyond_what_instances_compute() -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start("r", extra_args={"dynaserve_split": 15})
        most = fleet.client.instances[NAMES[0]].description.max_model_len
        with pytest.raises(BadRequest, match=f"hand_off_at is {most}; the fleet computes {most} tokens of a request at most"):
            await fleet.client.move_hand_off("r", most)
        (record,) = fleet.client.book.find("r")
        assert (record.split_token, record.moves) == (15, 0)
        assert await fleet.client.move_hand_off("r", 16) == 1

    run(scenario)


def test_a_whole_request_is_handed_over_by_hand() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r", extra_args={"dynaserve_split": 0})
        (second,) = set(NAMES) - {first}
        assert await fleet.client.cut_whole("nobody's", 15, second) is None
        await drains(fleet, second, True)
        for name, why in (("http://c", "is no instance of this fleet"), (second, "is draining, and takes no requests")):
            with pytest.raises(BadRequest, match=f"{name} {why}"):
                await fleet.client.cut_whole("r", 15, name)
        await drains(fleet, second, False)
        most = fleet.client.instances[second].description.max_model_len
        with pytest.raises(BadRequest, match=f"hand_off_at is {most}; instance {second} computes {most} tokens of a request at most"):
            await fleet.client.cut_whole("r", most, second)
        assert await fleet.client.cut_whole("r", 15, first) == 0
        assert await fleet.client.cut_whole("r", 15, second) == 1
        (began,) = fleet.runs(first, "r")
        await until(lambda: any(isinstance(message, Announce) for message in fleet.gateways[second].heard))
        (announced,) = (message for message in fleet.gateways[second].heard if isinstance(message, Announce))
        await until(lambda: Cut(began.request_id, 15, announced.transfer_id) in fleet.gateways[first].heard)
        assert announced.hand_off_at == 15
        assert await fleet.client.cut_whole("r", 16, second) == 0, "it is cut"

    run(scenario)


def test_a_decode_on_an_instance_that_is_kept_free_goes_to_where_decodes_are_gathered() -> None:
    """Each instance has told of its progress; the scheduler has entered a cut, and the flow follows unless beta's instance is not well."""

    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r", extra_args={"dynaserve_split": 0})
        (second,) = set(NAMES) - {first}
        (began,) = fleet.runs(first, "r")
        placer, asked = fleet.client._placer, []

        def revise(request_id: str, now_ms: float) -> Revision:
            asked.append(request_id)
            placer.scheduler.cut_whole(request_id, second, 18, now_ms)
            return Revision(18, RevisionReason.gathers_decodes, objective_ms=1.0, kept_objective_ms=90.0, beta=second)

        placer.revise = revise  # type: ignore[method-assign]
        await tell_load(fleet, first)
        assert not asked, "it has no token"
        await fleet.sample(first, began.request_id, [7])
        await fleet.output()
        await tell_load(fleet, first)
        await until(lambda: any(isinstance(message, Cut) for message in fleet.gateways[first].heard))
        assert asked == ["r"]
        assert frontend_metrics.REVISED.labels("gathers_decodes")._value.get() >= 1

    async def ill(fleet: Fleet) -> None:
        first = await fleet.start("r", extra_args={"dynaserve_split": 0})
        (second,) = set(NAMES) - {first}
        (began,) = fleet.runs(first, "r")
        await fleet.sample(first, began.request_id, [7])
        await fleet.output()
        await drains(fleet, second, True)
        placer = fleet.client._placer

        def revise(request_id: str, now_ms: float) -> Revision:
            placer.scheduler.cut_whole(request_id, second, 18, now_ms)
            return Revision(18, RevisionReason.gathers_decodes, objective_ms=1.0, kept_objective_ms=90.0, beta=second)

        placer.revise = revise  # type: ignore[method-assign]
        await tell_load(fleet, first)
        await fleet.sample(first, began.request_id, [8])
        await fleet.output()
        assert not any(isinstance(message, Cut) for message in fleet.gateways[first].heard)
        assert placer.scheduler.predict_hand_off_ms("r", 1e3 * time.monotonic()) is None, "the scheduler knows"

    for what in (scenario, ill):
        table = ProfileTable(Roofline(overhead_ms=300.0, token_ms=1.0, knee_tokens=16.0, pair_ms=0.0, decode_ms=1.0, context_ms=0.0))
        run(what, placer=RequestPlacer(GlobalScheduler(Options(Policy.dynamic), table), LengthPredictor(), predicts=True))


async def drains(fleet: Fleet, name: str, does: bool) -> None:
    fleet.gateways[name].draining = does
    await until(lambda: (fleet.client.health(name) == "draining") is does)


async def tell_load(fleet: Fleet, name: str) -> None:
    await asyncio.sleep(1e-3 * 1.5 * REPORT_EVERY_MS)
    await fleet.gateways[name].say(Step([], Load(1, 0, 0.1, [], []), time.monotonic()))
    await asyncio.sleep(0.1)


def test_an_alpha_whose_beta_s_instance_is_told_to_stop_goes_on_alone() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r", extra_args={"dynaserve_split": 15})
        (second,) = set(NAMES) - {first}
        await until(lambda: any(isinstance(message, Announce) for message in fleet.gateways[second].heard))
        fleet.gateways[second].draining = True
        (began,) = fleet.runs(first, "r")
        await until(lambda: Move(began.request_id, None) in fleet.gateways[first].heard)
        await until(lambda: any(isinstance(message, Abort) for message in fleet.gateways[second].heard))

    run(scenario)


def test_a_message_that_the_front_end_fails_at_ends_its_instance_s_link_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        failed = frontend_metrics.FAILED.labels(first)._value.get()
        placer = fleet.client._placer
        monkeypatch.setattr(placer, "learn_steps", lambda *_: 1 // 0)  # a defect
        await fleet.gateways[first].say(Step([], Load(1, 0, 0.5), time.monotonic()))
        await until(lambda: bool(fleet.runs(second, "r")))
        assert frontend_metrics.FAILED.labels(first)._value.get() == failed + 1
        assert not fleet.client.resources.engine_dead

    run(scenario)


def test_a_front_end_that_is_told_to_stop_lets_its_requests_finish_and_takes_no_others() -> None:
    async def scenario(fleet: Fleet) -> None:
        name = await fleet.start("r")
        wire_id = fleet.runs(name, "r")[0].request_id
        stopping = asyncio.create_task(asyncio.to_thread(fleet.client.shutdown, timeout=60.0))
        await until(lambda: fleet.client.why_unavailable(time.monotonic()) is not None)
        with pytest.raises(NoInstance, match="shutting down"):
            fleet.client.admit(10, SamplingParams(), 20)
        assert not any(isinstance(message, Bye) for message in fleet.gateways[name].heard)
        await fleet.sample(name, wire_id, [7], FinishReason.LENGTH)
        assert (await fleet.output()).finish_reason == FinishReason.LENGTH
        await fleet.gateways[name].say(Step([Ended(wire_id, 11, 0)], None, time.monotonic()))
        await stopping
        await until(lambda: any(isinstance(message, Bye) for message in fleet.gateways[name].heard))

    run(scenario)


def test_a_front_end_that_may_not_wait_ends_its_requests_and_says_goodbye() -> None:
    async def scenario(fleet: Fleet) -> None:
        told = fleet.unavailable()
        name = await fleet.start("r")
        await asyncio.to_thread(fleet.client.shutdown, timeout=0)
        assert told == [("r", 503)]
        await until(lambda: any(isinstance(message, Bye) for message in fleet.gateways[name].heard))
        with pytest.raises(GracefulHTTPError, match="shutting down"):
            await fleet.start("too late")

    run(scenario)


def test_a_request_that_nobody_takes_counts_as_waiting_and_ends_at_its_deadline() -> None:
    async def scenario(fleet: Fleet) -> None:
        for gateway in fleet.gateways.values():
            gateway.draining = True
        await until(lambda: all(fleet.client.health(name) == "draining" for name in NAMES))
        starting = asyncio.create_task(fleet.start("r"))
        await until(lambda: fleet.client.snapshot().waiting_requests == 1)
        with pytest.raises(GracefulHTTPError, match=r"^not finished after 0.5 s$") as refusal:
            await starting
        assert refusal.value.http_status == HTTPStatus.GATEWAY_TIMEOUT
        assert fleet.client.snapshot().waiting_requests == 0

    run(scenario, timeout_s=0.5)


def test_an_instance_that_was_to_leave_and_stays_takes_requests_again() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        (second,) = set(NAMES) - {first}
        await fleet.client.remove_instance(first)
        assert await fleet.start("s") == second
        await fleet.client.add_instance(first)
        assert fleet.client.health(first) == "up"
        assert first in {await fleet.start(name) for name in ("t", "u", "v")}

    run(scenario)


def test_a_request_that_nobody_took_goes_to_an_instance_that_stays_after_all() -> None:
    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("r")
        second = await fleet.start("s")
        assert {first, second} == set(NAMES)
        await fleet.client.remove_instance(second)
        fleet.gateways[first].cut()
        await until(lambda: bool(fleet.client._orphans.waiting))
        await fleet.client.add_instance(second)
        await until(lambda: bool(fleet.runs(second, "r")))

    run(scenario)


@pytest.mark.parametrize(
    ("what", "adapter"),
    [("name", LoRARequest("n" * (LONGEST_NAME + 1), 1, "/p")), ("path", LoRARequest("n", 1, "/" * (LONGEST_NAME + 1)))],
    ids=["name", "path"],
)
def test_an_adapter_that_no_instance_would_hear_of_is_refused_at_once(what: str, adapter: LoRARequest) -> None:
    async def scenario(fleet: Fleet) -> None:
        async with asyncio.timeout(30):
            with pytest.raises(ValueError, match=f"^the {what} of a LoRA adapter has 4097 characters, at most 4096 are taken$"):
                await fleet.client.add_lora_async(adapter)
            await fleet.start("r")
        assert not any(isinstance(message, AddLora) for gateway in fleet.gateways.values() for message in gateway.heard)

    run(scenario)


def test_the_longest_name_and_path_of_an_adapter_are_heard() -> None:
    longest = AddLora("n" * LONGEST_NAME, 1, "ä" * LONGEST_NAME)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(longest), type=ToInstance) == longest
    longer = AddLora("n", 1, "p" * (LONGEST_NAME + 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=ToInstance)


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full"), 429), (NoInstance("nobody"), 503)])
def test_what_is_refused_is_refused_before_a_stream_begins(error: Exception, status: int) -> None:
    """Responses begin theirs before they ask the engine."""

    def no_room(_: int) -> None:
        raise error

    llm: Any = FleetLLM.__new__(FleetLLM)
    llm.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
    llm.engine_core = SimpleNamespace(check_room=no_room, shutdown=lambda **_: None)
    llm.output_processor = None
    with pytest.raises(GracefulHTTPError, match=str(error)) as refusal:
        llm.check_admission(1)
    assert refusal.value.http_status == status
    llm.check_admission(1, "r")  # of what was admitted


def test_a_request_that_cannot_be_sent_leaves_nothing_in_vllms_output_processor() -> None:
    async def nobody_takes_it(_: EngineCoreRequest) -> None:
        raise GracefulHTTPError("nobody", HTTPStatus.SERVICE_UNAVAILABLE)

    async def scenario() -> None:
        llm: Any = FleetLLM.__new__(FleetLLM)
        llm.output_processor = OutputProcessor(None, log_stats=False)
        llm.engine_core = SimpleNamespace(add_request_async=nobody_takes_it, shutdown=lambda **_: None)
        llm.check_admission = lambda **_: None
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=SamplingParams(detokenize=False),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id="of the client",
        )
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        with pytest.raises(GracefulHTTPError, match="nobody"):
            await llm._add_request(request, None, None, 0, queue)
        assert not llm.output_processor.request_states
        assert not llm.output_processor.external_req_ids

    asyncio.run(scenario())
