"""vLLM's engine-core client, with a fleet of instances where vLLM has one engine.

AsyncLLM above it sees one engine that answers every request with one stream of tokens; below it, each request is a
`RequestFlow` whose instructions become messages to the instances' gateways.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder

from dynaserve import fleet, fleet_view, frontend_metrics
from dynaserve.admission import Admission
from dynaserve.errors import BadRequest, NoInstance, Overloaded
from dynaserve.fleet import Instance
from dynaserve.fleet_links import FleetLinks
from dynaserve.fleet_secret import FleetSecret
from dynaserve.flow_events import (
    ClientGone,
    Event,
    Fail,
    Forward,
    Instruction,
    PlaceAgain,
    SendAnnounce,
    Side,
    StopString,
    Tokens,
    Unavailable,
)
from dynaserve.global_scheduler import PlacementReason
from dynaserve.instance_file import InstanceFile
from dynaserve.length_predictor import LengthQuery
from dynaserve.liveness import Health
from dynaserve.messages import Beat, Dropped, FromInstance, Lifted, LoraAdded, Parked, PromptProgress, Step
from dynaserve.messages import Event as InstanceEvent
from dynaserve.records import RecordBook, RequestRecord, TokenGaps, answer_id
from dynaserve.request_flow import State, new_flow
from dynaserve.request_log import of_request
from dynaserve.request_placer import REPORT_EVERY_MS, Decision, RequestFacts, RequestPlacer
from vllm_plugin import progress
from vllm_plugin.adapters import AdapterLoader
from vllm_plugin.failover import Failover
from vllm_plugin.live import Live
from vllm_plugin.orphans import PATIENCE_S, Orphans
from vllm_plugin.outbox import Outbox
from vllm_plugin.outputs import translated
from vllm_plugin.requests import BEST_EFFORT_ARG, TTFT_ARG, CutRequest, cache_key, check_extra_args, check_speculation, why_whole
from vllm_plugin.stock_link import StockLink, carries

logger = logging.getLogger("vllm.dynaserve.frontend")

LOOK_AGAIN_S = 0.1
_LOOKED_AT_AGAIN = 0.25
"""When to predict a hand-off again: after this share of the time until it comes."""
LEAVING = "this front-end is shutting down"


class FleetClient(Failover):
    """Implements the part of vLLM's `EngineCoreClient` that AsyncLLM and the OpenAI server use (core_client.py).

    All methods run in one event loop. timeout_s: most time for a request, from its arrival to its end.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        placer: RequestPlacer,
        transport: str,
        timeout_s: float = math.inf,
        admission: Admission | None = None,
        secret: FleetSecret | None = None,
        also_check: Callable[[Instance], None] = fleet.suits_any_policy,
        *,
        allow_stock: bool = False,
    ) -> None:
        self.book = RecordBook()
        self.watchers: list[Callable[[RequestRecord, Mapping[str, str] | None], None]] = []
        """They are told of each request that is over, with the headers that trace it."""
        self.frontend_id = uuid.uuid4().hex
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._placer = placer
        self._admission = admission or Admission()
        self._transport = transport
        self._live = {}
        self._by_instance: dict[str, list[Live]] = {}
        self._grouped_ms = -math.inf
        self._outputs: asyncio.Queue[EngineCoreOutputs | BaseException] = asyncio.Queue()
        self._links = FleetLinks(
            self.frontend_id,
            self._on_message,
            self._on_change,
            self._on_tick,
            self._on_fault,
            secret=secret,
            describe=partial(fleet.describe, allow_stock=allow_stock),
            link_to_stock=StockLink,
            also_check=partial(self._check_joining, also_check),
        )
        self._links.instances |= {instance.instance_id: instance for instance in instances}
        self._orphans = Orphans()
        self._draining = set()
        self._loading = {}
        self._stopping = set()
        self._file: InstanceFile | None = None
        self._timeout_s = timeout_s
        self._grammar_library: str | None = None
        self._leaving = False
        self._told_load = SchedulerStats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None
        self._outbox = Outbox(self.frontend_id, self._links)
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._adapters = AdapterLoader(self._links.send)
        self._header_decoder: msgspec.msgpack.Decoder[FromInstance] = msgspec.msgpack.Decoder(FromInstance)

    async def connect(self, timeout_s: float = 10.0, *, may_lack: bool = False) -> None:
        """Says hello to every gateway: see `FleetLinks.connect`. Raises ConfigError."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        await self._links.connect(list(self.instances.values()), timeout_s, may_lack=may_lack)

    def watch(self, instances_file: Path | None = None) -> None:
        """The server is up: see `FleetLinks.watch`. instances_file: names the fleet from now on."""
        self._links.watch()
        if instances_file is not None:
            self._file = InstanceFile(instances_file, self._staying, self.add_instance, self.remove_instance)
            self._links.spawn(self._file.follow())

    def _staying(self) -> set[str]:
        return self.instances.keys() - self._draining

    async def take_out(self, url: str) -> None:
        """As `remove_instance`, for who asks over HTTP. Raises ConfigError."""
        if self._file is not None:
            self._file.check_not_named(url.rstrip("/"))
        await self.remove_instance(url)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs it until the client is shut down; what it raises ends the front-end."""
        self._links.spawn(coroutine)

    def _check_joining(self, also_check: Callable[[Instance], None], instance: Instance) -> None:
        """Also one that comes back: it may offer other transports than before. Raises ConfigError."""
        also_check(instance)
        others = [other for other in self.instances.values() if other.instance_id != instance.instance_id]
        fleet.choose_transport([*others, instance], self._transport)

    # -- what vLLM calls -----------------------------------------------------------------------------------------------

    def admit(self, prompt_tokens: int | None, params: SamplingParams, max_tokens: int, *, follows: bool = False) -> None:
        """follows: on what was admitted for the same client's request, which is not refused for want of room once it runs. Raises
        BadRequest, NoInstance or Overloaded before the request costs anything."""
        now_s = time.monotonic()
        self._check_available(now_s)
        extra_args = params.extra_args or {}
        check_extra_args(extra_args, prompt_tokens, max_tokens, self._reference.description.workers[0].endpoint.transports)
        check_speculation(params, [instance.description.cut_obstacle for instance in self.instances.values()])
        if follows:
            return
        slo_ms = math.inf if extra_args.get(BEST_EFFORT_ARG) else extra_args.get(TTFT_ARG, self._placer.ttft_slo_ms)
        self._check_admitted(prompt_tokens or 0, slo_ms, now_s, params.n)

    def check_room(self, sequences: int) -> None:
        """As far as it can be told before anything is known of a request but for how many answers it asks. Raises NoInstance or
        Overloaded."""
        now_s = time.monotonic()
        self._check_available(now_s)
        self._check_admitted(0, math.inf, now_s, sequences)

    def _check_available(self, now_s: float) -> None:
        if reason := self.why_unavailable(now_s):
            frontend_metrics.UNAVAILABLE.labels(NoInstance.status).inc()
            raise NoInstance(reason)

    def _check_admitted(self, prompt_tokens: int, ttft_slo_ms: float, now_s: float, sequences: int) -> None:
        if refusal := self._admission.why_not(prompt_tokens, ttft_slo_ms, now_s, sequences):
            frontend_metrics.REFUSED.labels(refusal.kind).inc()
            raise Overloaded(refusal.reason)

    def why_unavailable(self, now_s: float) -> str | None:
        """Why no request is taken at all; None: requests are."""
        if self._leaving:
            return LEAVING
        if self._links.deserted_s(now_s) > PATIENCE_S:
            return "no instance of the fleet is alive"
        if self._nobody_takes_since_s is not None and now_s - self._nobody_takes_since_s > PATIENCE_S:
            return "no instance of the fleet takes requests"
        return None

    @property
    def _reference(self) -> Instance:
        """One with the plugin: what it says of itself holds for the fleet."""
        return fleet.reference_of(self.instances.values())

    def snapshot(self) -> fleet_view.Snapshot:
        """What is known now, for those who look."""
        return fleet_view.snapshot(
            self.frontend_id,
            list(self.instances.values()),
            self.health,
            self.book.recent(fleet_view.MOST_REQUESTS),
            running=len(self._live),
            waiting=self._admission.waiting,
            now_s=time.time(),
        )

    @property
    def retry_after_s(self) -> float:
        """When who is refused now should ask again."""
        return self._admission.drained_s(time.monotonic())

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        arrived_s = time.monotonic()
        if self._leaving:
            raise self._unavailable(LEAVING, HTTPStatus.SERVICE_UNAVAILABLE)
        cut = CutRequest.of(request)
        if request.lora_request is not None:
            request.lora_request = self._adapters.with_fleet_id(request.lora_request)
        self._use_one_grammar_library(request)
        self._admission.arrived(request.request_id, cut.prompt_tokens, arrived_s)
        try:
            await self._begin(request, cut, arrived_s)
        except BaseException:
            self._admission.left(request.request_id, time.monotonic())
            raise

    async def _begin(self, request: EngineCoreRequest, cut: CutRequest, arrived_s: float) -> None:
        arrived_at_s = time.time()
        obstacle = why_whole(request, [i.description.cut_obstacle for i in self.instances.values() if not i.description.stock])
        decision = await self._place(self._facts(request, cut, may_cut=obstacle is None), arrived_s)
        try:
            live = self._live_of(request, cut, decision, obstacle, arrived_s, arrived_at_s)
            self._live[request.request_id] = live
            await self._carry_out(live, live.flow.start())
        except BaseException:
            if (failed := self._live.pop(request.request_id, None)) is not None:
                failed.flow.record.finish_reason = "error"
            self._placer.finish(request.request_id, None, 1e3 * time.monotonic())
            raise

    def _use_one_grammar_library(self, request: EngineCoreRequest) -> None:
        """That of the first constrained request, as each engine does (v1/structured_output/__init__.py:138): by themselves two engines may
        keep to different ones, and one library does not go on where the other has stopped."""
        outputs = request.sampling_params and request.sampling_params.structured_outputs
        if outputs is None or outputs._backend is None:
            return
        if self._grammar_library is None:
            self._grammar_library = outputs._backend
        outputs._backend = self._grammar_library

    def _facts(self, request: EngineCoreRequest, cut: CutRequest, *, may_cut: bool) -> RequestFacts:
        model = self._reference.description.model
        return RequestFacts(
            request.request_id,
            LengthQuery(model, cut.request_class, cut.prompt_tokens, cut.max_tokens, cut.expected_tokens),
            cut.forced_split,
            may_cut,
            cut.tbt_ms,
            cut.ttft_ms,
            token_ids=request.prompt_token_ids or (),
            cache_key=cache_key(request),
            fits_stock=carries(request),
        )

    def _live_of(
        self, request: EngineCoreRequest, cut: CutRequest, decision: Decision, obstacle: str | None, arrived_s: float, arrived_at_s: float
    ) -> Live:
        placement = decision.placement
        reason = obstacle if obstacle is not None and placement.reason is PlacementReason.not_cuttable else placement.reason.name
        frontend_metrics.REQUESTS.labels("no" if placement.beta is None else "yes", decision.kind, reason).inc()
        transport = cut.transport or self._transport
        block_bytes = sum(w.block_bytes for w in self.instances[placement.alpha.instance_id].description.workers)
        external_id = request.external_req_id or request.request_id
        flow = new_flow(external_id, cut.prompt_tokens, placement, reason, transport, block_bytes)
        flow.record.expected = decision.to_json()
        if (end_ms := self._placer.predict_end_ms(request.request_id, 1e3 * time.monotonic())) is not None:
            flow.record.expected["end_ms"] = end_ms
        ttft_slo_ms = cut.ttft_ms or self._placer.ttft_slo_ms
        flow.record.arrived_s = arrived_at_s
        flow.record.ttft_slo_ms = ttft_slo_ms if ttft_slo_ms < math.inf else None
        flow.record.gaps = TokenGaps(cut.tbt_ms or self._placer.tbt_slo_ms)
        self.book.add(flow.record)
        return Live(flow, request, transport, secrets.token_hex(16), arrived_s, cut.chunked, may_cut=obstacle is None)

    async def _place(self, facts: RequestFacts, arrived_s: float) -> Decision:
        """Waits for an instance while none takes new requests, for a while."""
        while True:
            began_s = time.monotonic()
            decision = self._placer.place(facts, 1e3 * began_s)
            if decision is not None:
                frontend_metrics.PLACING.observe(time.monotonic() - began_s)
                return decision
            if self._leaving:
                raise self._unavailable(LEAVING, HTTPStatus.SERVICE_UNAVAILABLE)
            waited_s = time.monotonic() - arrived_s
            if waited_s > self._timeout_s:
                raise self._unavailable(self._too_late, HTTPStatus.GATEWAY_TIMEOUT)
            if waited_s > PATIENCE_S:
                raise self._unavailable("no instance of the fleet takes new requests", HTTPStatus.SERVICE_UNAVAILABLE)
            await asyncio.sleep(LOOK_AGAIN_S)

    @staticmethod
    def _unavailable(reason: str, status: HTTPStatus) -> GracefulHTTPError:
        frontend_metrics.UNAVAILABLE.labels(status.value).inc()
        return GracefulHTTPError(reason, status)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Raises what ended a listener: AsyncLLM then fails every request and its health check, loudly."""
        outputs = await self._outputs.get()
        if isinstance(outputs, BaseException):
            raise outputs
        return outputs

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """AsyncLLM's output handler: of answers that a stop string has ended."""
        await self._end(request_ids, StopString())

    async def clients_gone(self, request_ids: list[str]) -> None:
        await self._end(request_ids, ClientGone())

    def abort_soon(self, request_ids: list[str]) -> None:
        """For who cannot wait."""
        self._links.spawn(self.clients_gone(request_ids))

    async def _end(self, request_ids: list[str], why: ClientGone | StopString) -> None:
        for request_id in request_ids:
            if live := self._live.get(request_id):
                await self._handle(live, Side.ALPHA, why)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """Raises ValueError if an instance cannot load the adapter."""
        with_plugin = [name for name in self._links.alive if not self.instances[name].description.stock]
        await self._adapters.load(lora_request, with_plugin)
        return True

    def know_adapters(self, offered: Callable[[], Iterable[LoRARequest]]) -> None:
        """What the server offers, once it has started."""
        self._adapters.offered = offered

    async def cut_whole(self, request_id: str, hand_off_at: int, beta: str) -> int | None:
        """Hands every sequence of this request that runs whole over to this instance.

        Returns how many it was asked for; None: no such request runs. Raises BadRequest, naming the instance, if it takes none.
        """
        beta = beta.rstrip("/")
        if beta not in self.instances or self.instances[beta].description.stock:
            raise BadRequest(f"{beta} is no instance of this fleet that requests can be handed over to")
        if (obstacle := self.instances[beta].description.cut_obstacle) is not None:
            raise BadRequest(f"requests cannot be handed over to instance {beta}: {obstacle}")
        if (health := self.health(beta)) != Health.UP.value:
            raise BadRequest(f"instance {beta} is {health}, and takes no requests")
        if hand_off_at >= (most := self.instances[beta].description.max_model_len):
            raise BadRequest(f"hand_off_at is {hand_off_at}; instance {beta} computes {most} tokens of a request at most")
        lives = self._lives_of(request_id)
        asked = 0
        for live in lives:
            alpha = self.instances.get(live.flow.placement.alpha.instance_id)
            can = live.may_cut and alpha is not None and not alpha.description.stock
            if can and (instructions := live.flow.cut(beta, hand_off_at)):
                self._placer.cut(live.internal_id, beta, hand_off_at, 1e3 * time.monotonic())
                asked += 1
                await self._carry_out(live, instructions)
        return asked if lives else None

    def _lives_of(self, request_id: str) -> list[Live]:
        """All sequences of the answer with this id, else the sequence with it."""
        ids = {live: live.flow.record.request_id for live in self._live.values()}
        of_answer = [live for live, name in ids.items() if answer_id(name) == request_id]
        return of_answer or [live for live, name in ids.items() if name == request_id]

    async def move_hand_off(self, request_id: str, hand_off_at: int | None) -> int | None:
        """Moves the hand-off point of every sequence of this request, or lifts it (None).

        Returns how many sequences it was asked for; None: no such request runs. `RequestRecord` says where each was cut. Raises
        BadRequest for a token that no request reaches.
        """
        if hand_off_at is not None and hand_off_at >= (most := self._reference.description.max_model_len):
            raise BadRequest(f"hand_off_at is {hand_off_at}; the fleet computes {most} tokens of a request at most")
        lives = self._lives_of(request_id)
        asked = 0
        for live in lives:
            now_ms = (time.monotonic() - live.arrived_s) * 1000
            instructions = live.flow.lift(now_ms) if hand_off_at is None else live.flow.move(hand_off_at)
            if instructions:
                self._placer.recut(live.internal_id, hand_off_at, 1e3 * time.monotonic())
                asked += 1
            await self._carry_out(live, instructions)
        return asked if lives else None

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Multimodal inputs are cached by the instances."""

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """timeout: seconds that requests may take to finish; new ones are refused meanwhile.

        vLLM's server calls it in another thread when it is told to stop (launcher.py:274), and we once more in the end.
        """
        if self._loop is not None and self._loop.is_running() and threading.get_ident() != self._thread:
            asyncio.run_coroutine_threadsafe(self._leave(timeout or 0.0), self._loop).result()
        else:
            self._links.close()

    async def _leave(self, timeout_s: float) -> None:
        self._leaving = True
        until_s = time.monotonic() + timeout_s
        while self._live and time.monotonic() < until_s:  # noqa: ASYNC110 - of several tasks at once
            await asyncio.sleep(LOOK_AGAIN_S)
        now_s = time.monotonic()
        for live in list(self._live.values()):  # the server waits for their answers to end
            await self._give_up(live, LEAVING, HTTPStatus.SERVICE_UNAVAILABLE, now_s)
        self._links.close()

    # -- from instances ------------------------------------------------------------------------------------------------

    async def _on_message(self, instance: str, frames: Sequence[bytes]) -> None:
        try:
            message = self._header_decoder.decode(frames[0])
            outputs = self._decoder.decode(frames[1:]) if len(frames) > 1 else None
        except Exception as error:  # noqa: BLE001 - vLLM's decoder raises anything for what is no message of it
            frontend_metrics.MALFORMED.labels(instance).inc()
            logger.warning("dropped a malformed message from %s: %s", instance, error)
            if len(frames) > 1:  # without these tokens answers would have a hole
                await self._links.lost(instance, "tokens of it cannot be read")
            return
        try:
            await self._on_decoded(instance, message, outputs)
        except Exception:  # one message must not end the front-end for all; what it was part of is not known, so it ends as a whole
            frontend_metrics.FAILED.labels(instance).inc()
            logger.exception("a message from %s failed", instance)
            await self._links.lost(instance, "a message of it failed here")

    async def _on_decoded(self, instance: str, message: FromInstance, outputs: EngineCoreOutputs | None) -> None:
        match message:
            case Step():
                await self._on_step(instance, message, outputs)
            case Beat(pulse=pulse, draining=draining):
                await self._links.heard(instance, pulse)
                self._placer.hear_of_others(instance, message.others, 1e3 * time.monotonic())
                await self._on_stopping(instance, is_stopping=draining)
            case Dropped():
                await self._links.lost(instance, "it does not know this front-end any more")
            case LoraAdded():
                self._adapters.answered(instance, message)

    async def _on_tick(self, now_s: float) -> None:
        await super()._on_tick(now_s)
        self._tell_load()

    def _tell_load(self) -> None:
        """Keeps vLLM's own gauges (`vllm:num_requests_running`, ...), by which servers are scaled, those of the fleet."""
        waiting = self._admission.waiting  # also those that no instance has yet
        usages = [load.kv_cache_usage for name in self._links.alive if (load := self.instances[name].load) is not None]
        stats = SchedulerStats(
            num_running_reqs=sum(not self._admission.is_waiting(request_id) for request_id in self._live),
            num_waiting_reqs=waiting,
            kv_cache_usage=sum(usages) / len(usages) if usages else 0.0,
        )
        if stats != self._told_load:
            self._told_load = stats
            self._outputs.put_nowait(EngineCoreOutputs(scheduler_stats=stats))

    def _on_fault(self, error: BaseException) -> None:
        self.resources.engine_dead = True
        self._outputs.put_nowait(error)

    async def _on_step(self, instance: str, step: Step, outputs: EngineCoreOutputs | None) -> None:
        """Tokens before events: `Parked` means that the alpha's tokens are complete.

        `Lifted` goes first: an alpha that its instance lifts may sample in the same step, and those tokens count.
        """
        if step.load is not None:
            self.instances[instance].take_load(step.load)
            now_ms = 1e3 * time.monotonic()
            self._placer.learn_steps(instance, step.load, now_ms)
            told = step.load.prompts
            if self._placer.wants_progress(instance, now_ms, told=told is not None):
                lives = self._on_instance(instance, now_ms)
                begun = None if told is None else self._begun(told)
                self._placer.report(instance, progress.of_instance(lives, instance, begun), now_ms)
                await self._revise(lives, instance, now_ms)
                for live in lives:
                    await self._expect(live, instance, now_ms)
        await self._on_events(event for event in step.events if isinstance(event, Lifted))
        if outputs is not None:
            await self._on_outputs(instance, outputs.outputs, time.monotonic() - step.sent_at_s)
        await self._on_events(event for event in step.events if not isinstance(event, Lifted))

    async def _on_outputs(self, instance: str, outputs: Sequence[EngineCoreOutput], clock_offset_s: float) -> None:
        forwarded: list[EngineCoreOutput] = []
        description = self.instances[instance].description
        cached_block_tokens = description.block_size if description.prefix_caching else 0
        try:
            for output in outputs:
                if found := self._outbox.find(output.request_id, self._live):
                    live, side = found
                    reason = None if output.finish_reason is None else str(output.finish_reason)
                    if reason == "abort" and live.flow.needs(side):
                        await self._on_stopping(instance, is_stopping=True)  # its beats say so, or not, in a moment
                    if await self._handle(live, side, Tokens(output.new_token_ids, reason)):
                        forwarded.append(translated(output, live.flow.record, side, clock_offset_s, cached_block_tokens))
        finally:  # whatever happens to the next one: these count as told
            if forwarded:
                self._outputs.put_nowait(EngineCoreOutputs(outputs=forwarded, timestamp=time.monotonic()))

    async def _on_events(self, events: Iterable[InstanceEvent]) -> None:
        for event in events:
            if found := self._outbox.find(event.request_id, self._live):
                await self._handle(found[0], found[1], event)

    async def _handle(self, live: Live, side: Side, event: Event) -> bool:
        """True: the output that carried this event goes to the client."""
        was_whole = live.flow.state is State.WHOLE
        instructions = live.flow.handle(side, event, (time.monotonic() - live.arrived_s) * 1000)
        if isinstance(event, Parked):
            self._placer.parked(live.internal_id, event.computed_tokens, 1e3 * time.monotonic())
        if live.flow.state is State.WHOLE and not was_whole:
            self._placer.recut(live.internal_id, None, 1e3 * time.monotonic())
        forward = await self._carry_out(live, instructions)
        if forward and isinstance(event, Tokens):
            if event.token_ids:
                self._admission.answered(live.internal_id, time.monotonic())
            if (gaps := live.flow.record.gaps) is not None:
                gaps.add(len(event.token_ids), 1e3 * (time.monotonic() - live.arrived_s))
        self._close_if_over(live)
        return forward

    def _close_if_over(self, live: Live) -> None:
        if live.flow.over and self._live.pop(live.internal_id, None) is not None:
            self._account(live)

    def _account(self, live: Live) -> None:
        """Of a request that is over. One whose client left teaches no length."""
        self._admission.left(live.internal_id, time.monotonic())
        record = live.flow.record
        frontend_metrics.observe_end(record)
        for watch in self.watchers:
            watch(record, live.request.trace_headers)
        ended = record.output_tokens if record.finish_reason in ("stop", "length") else None
        self._placer.finish(live.internal_id, ended, 1e3 * time.monotonic())
        sequence = [*(live.request.prompt_token_ids or ()), *live.flow.output_token_ids]
        self._placer.learn_prefix(sequence, cache_key(live.request), live.flow.holders())
        self._learn_transfer(record)

    def _learn_transfer(self, record: RequestRecord) -> None:
        """Its workers send their parts of each block at the same time."""
        if (kv := record.kv) is not None and kv.push_ms and "beta_resumed" in record.timeline_ms:
            description = self._reference.description
            tokens = kv.bytes * description.block_size // kv.block_bytes
            each_ms = kv.push_ms / len(description.workers)
            self._placer.learn_transfer(tokens, each_ms, on_host=description.computes_on_host)

    def _begun(self, told: Sequence[PromptProgress]) -> dict[str, int]:
        """Computed tokens by internal id."""
        found = ((self._outbox.find(prompt.request_id, self._live), prompt.computed_tokens) for prompt in told)
        return {one[0].internal_id: computed for one, computed in found if one is not None}

    def _on_instance(self, instance: str, now_ms: float) -> list[Live]:
        """Requests with a part there, as of some time ago: who uses them looks at each. Going through all for each instance would
        cost as many times more as there are instances."""
        if now_ms - self._grouped_ms >= REPORT_EVERY_MS:
            self._grouped_ms, self._by_instance = now_ms, {}
            for live in self._live.values():
                for name in live.flow.instances:
                    self._by_instance.setdefault(name, []).append(live)
        return self._by_instance.get(instance, [])

    async def _revise(self, lives: Iterable[Live], instance: str, now_ms: float) -> None:
        """Asks again about the hand-offs that this instance has a part in, and what decodes whole there, now that its progress is known."""
        for live in lives:
            if not (live.flow.pending_on(instance) or live.flow.may_cut_on(instance)):
                continue
            if revision := self._placer.revise(live.internal_id, now_ms):
                if revision.beta is not None and not self._takes_over(revision.beta):
                    self._placer.recut(live.internal_id, None, now_ms)
                    continue
                frontend_metrics.REVISED.labels(revision.reason.name).inc()
                await self._carry_out(live, live.flow.revise(revision, now_ms - 1e3 * live.arrived_s))

    def _takes_over(self, instance: str) -> bool:
        """Whether requests can be handed over to this one now; it may have joined after they came."""
        return self.health(instance) == Health.UP.value and self.instances[instance].description.cut_obstacle is None

    async def _expect(self, live: Live, alpha: str, now_ms: float) -> None:
        """Tells the beta's instance when the alpha of a hand-off that shows is going to stop there."""
        if now_ms < live.expect_again_ms or not live.flow.shows_from(alpha):
            return
        in_ms = self._placer.predict_hand_off_ms(live.internal_id, now_ms)
        beta = live.flow.placement.beta
        if in_ms is None or beta is None:
            return
        # A prediction over a long queue takes a millisecond, and says little of what is far ahead.
        live.expect_again_ms = now_ms + _LOOKED_AT_AGAIN * in_ms
        await self._outbox.expect(live, beta.instance_id, in_ms)

    # -- to instances --------------------------------------------------------------------------------------------------

    async def _carry_out(self, live: Live, instructions: Sequence[Instruction]) -> bool:
        forward = False
        for instruction in instructions:
            match instruction:
                case Forward():
                    forward = True
                case Fail(reason=reason):
                    logger.error("request %s: %s", live.internal_id, reason, extra=of_request(live.flow.record.request_id))
                    failed = EngineCoreOutput(live.internal_id, [], finish_reason=FinishReason.ERROR)
                    self._outputs.put_nowait(EngineCoreOutputs(outputs=[failed]))
                case PlaceAgain():
                    await self._place_again(live)
                case Unavailable(reason=reason, status=status):
                    frontend_metrics.UNAVAILABLE.labels(int(status)).inc()
                    self.on_unavailable(live.internal_id, reason, status)
                case SendAnnounce():
                    await self._outbox.carry_out(live, instruction)
                    await self._expect(live, live.flow.placement.alpha.instance_id, 1e3 * time.monotonic())
                case _:
                    await self._outbox.carry_out(live, instruction)
        return forward
