"""The gateway of an instance: front-ends on one side, the engine core on the other.

It runs in the API server's event loop and speaks the engine-core level (`EngineCoreRequest` in, `EngineCoreOutputs`
out), below vLLM's detokenizer: the front-end has the only one.  Everything a front-end sends is checked; what is
malformed is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynaserve.fleet_secret import FleetSecret, secure_client, secure_server
from dynaserve.flow_events import ENGINE_GAVE_UP
from dynaserve.frontend_sessions import FrontendSessions
from dynaserve.instance_link import keep_alive
from dynaserve.messages import (
    LONGEST_FRAME_BYTES,
    MOST_FRAMES,
    PROTOCOL_VERSION,
    Abort,
    AddLora,
    Announce,
    Beat,
    Bye,
    Continue,
    Cut,
    Dropped,
    Ended,
    Event,
    Expect,
    FromInstance,
    Granted,
    Hello,
    InstanceDescription,
    Lifted,
    Load,
    LoraAdded,
    Move,
    Prepare,
    Pulse,
    Refused,
    Release,
    Reserved,
    Resumed,
    Run,
    SenderLost,
    Step,
    ToInstance,
    Welcome,
)
from dynaserve.reservations import Reservations
from dynaserve.step_report import BatchReport
from vllm_plugin import patches, step_metrics
from vllm_plugin.batching import REPORT_CARRIER, REPORT_KEY
from vllm_plugin.gateway_metrics import DROPPED, PARKED, QUARANTINED, RESERVED
from vllm_plugin.micro_requests import EXTRA_ARG, Plan
from vllm_plugin.options import PluginOptions
from vllm_plugin.scheduler import EVENT_CARRIER
from vllm_plugin.wake import LONGEST_SIGN_BYTES

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient

logger = logging.getLogger("vllm.dynaserve.gateway")

BEAT_S = 0.2


@dataclass
class Gateway:
    """engine: vLLM's client of the engine core. routes: ZeroMQ identity of the front-end, per live request id."""

    engine: AsyncMPClient
    description: InstanceDescription
    context: zmq.asyncio.Context
    socket: zmq.asyncio.Socket
    reservations: Reservations
    routes: dict[str, bytes] = field(default_factory=dict)
    transfers: dict[str, str] = field(default_factory=dict)
    """Transfer id per live request id."""
    sessions: FrontendSessions = field(default_factory=FrontendSessions)
    pulse: Pulse | None = None
    """The engine core's newest sign of life."""
    draining: bool = False
    """The server was told to stop; with `--shutdown-timeout` it finishes what it runs."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    load: Load | None = None
    adapters: dict[int, str] = field(default_factory=dict)
    """LoRA adapters that a front-end has had loaded."""
    request_decoder: MsgpackDecoder = field(default_factory=lambda: MsgpackDecoder(EngineCoreRequest))
    encoder: MsgpackEncoder = field(default_factory=MsgpackEncoder)
    header_decoder: msgspec.msgpack.Decoder[ToInstance] = field(default_factory=lambda: msgspec.msgpack.Decoder(ToInstance))

    @classmethod
    async def start(cls, engine_client: AsyncLLM, args: Namespace) -> Gateway:
        options = PluginOptions.from_config(engine_client.vllm_config)
        secret = options.read_secret()
        engine = engine_client.engine_core
        heart = await engine.call_utility_async("dynaserve_listen")
        known = await engine.call_utility_async("dynaserve_describe")
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        # A token that is dropped is worse than memory that is used; a front-end that reconnects keeps its identity.
        socket.set_hwm(0)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # tells of a front-end that has gone, by `keep_alive`
        keep_alive(socket)
        socket.maxmsgsize = LONGEST_FRAME_BYTES
        secure_server(socket, secret)
        port = options.port or socket.bind_to_random_port(f"tcp://{options.host}")
        if options.port:
            socket.bind(f"tcp://{options.host}:{options.port}")
        description = msgspec.convert(
            {
                "protocol_version": PROTOCOL_VERSION,
                "instance_epoch": uuid.uuid4().hex,
                "gateway": f"tcp://{options.host}:{port}",
                "model": args.model,
                "served_model_names": args.served_model_name or [args.model],
                "vllm_version": metadata.version("vllm"),
                "secured": secret is not None,
                "tbt_slo_ms": options.tbt_slo_ms if options.batching == "slo" else None,
                "min_prefill_tokens": options.min_prefill_tokens,
                **known,
            },
            InstanceDescription,
        )
        gateway = cls(engine, description, context, socket, Reservations(description.max_model_len))
        engine.dynaserve_gateway = gateway
        patches.tell_before_shutdown(engine_client, gateway.drain)
        gateway._spawn(gateway._serve())
        gateway._spawn(gateway._feel_pulse(heart, secret))
        gateway._spawn(gateway._beat())
        logger.info("DynaServe gateway at %s", description.gateway)
        return gateway

    def drain(self) -> None:
        """Front-ends are told to send nothing new, at once. Called in another thread."""
        if self.draining or self.loop.is_closed():
            return
        self.draining = True
        self.loop.call_soon_threadsafe(lambda: self._spawn(self._tell_all()))

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.context.destroy(linger=0)

    # -- signs of life -------------------------------------------------------------------------------------------------

    async def _feel_pulse(self, address: str, secret: FleetSecret | None) -> None:
        socket = self.context.socket(zmq.PULL)
        socket.maxmsgsize = LONGEST_SIGN_BYTES
        secure_client(socket, secret)
        socket.connect(address)
        decoder = msgspec.msgpack.Decoder(Pulse)
        while True:
            try:
                self.pulse = decoder.decode(await socket.recv())
            except msgspec.MsgspecError as error:
                logger.warning("dropped a pulse of the engine core: %s", error)
                continue
            holding = self.pulse.holding
            for gauge, value in ((PARKED, holding.parked), (RESERVED, holding.reserved_blocks), (QUARANTINED, holding.quarantined_blocks)):
                gauge.set(value)

    async def _beat(self) -> None:
        """Tells every front-end that this instance lives; it finds out who has gone."""
        while True:
            await self._tell_all()
            await asyncio.sleep(BEAT_S)

    async def _tell_all(self) -> None:
        for identity in self.sessions.identities:
            await self._send(identity, Beat(self.pulse, self.draining, self._of_others(identity)))

    def _of_others(self, identity: bytes) -> list[Reserved]:
        return self.reservations.of(request_id for request_id, owner in self.routes.items() if owner != identity)

    async def _drop(self, identity: bytes) -> None:
        """The word comes before whatever the abort causes: the front-end takes its requests elsewhere."""
        await self._send(identity, Dropped())
        await self._leave(identity)

    async def _leave(self, identity: bytes) -> None:
        self.sessions.bye(identity)
        await self._abort([request_id for request_id, owner in self.routes.items() if owner == identity])

    # -- from front-ends -----------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            identity, *frames = await self.socket.recv_multipart()
            try:
                if len(frames) > MOST_FRAMES:
                    raise msgspec.ValidationError(f"it has {len(frames)} frames, at most {MOST_FRAMES} are read")
                message = self.header_decoder.decode(frames[0])
                await self._handle(identity, message, frames[1:])
            except (ValueError, msgspec.MsgspecError, RecursionError, IndexError, NotImplementedError) as error:
                DROPPED.labels("malformed").inc()
                logger.warning("dropped a malformed message of %d bytes: %s", sum(map(len, frames)), error)
            except Exception:  # one message must not end the gateway for all others
                DROPPED.labels("failed").inc()
                logger.exception("a message of %d bytes failed", sum(map(len, frames)))

    async def _handle(self, identity: bytes, message: ToInstance, frames: Sequence[bytes]) -> None:
        if identity not in self.sessions and not isinstance(message, Hello):
            DROPPED.labels("no hello").inc()
            await self._send(identity, Dropped())
            return
        match message:
            case Hello():
                await self._hello(identity, message)
            case SenderLost(worker_ids=worker_ids):
                self._call("dynaserve_peers_lost", worker_ids, self._transfers_of(identity))
            case Run(hand_off_at=hand_off_at, transfer_id=transfer_id, chunked=chunked):
                role = "whole" if hand_off_at is None else "alpha"
                plan = Plan(role, hand_off_at, transfer_id, output_token_ids=message.output_token_ids or None, chunked=chunked)
                await self._add(identity, message, plan, frames)
            case Announce():
                plan = Plan("beta", message.hand_off_at, message.transfer_id, message.transport, message.senders)
                if await self._add(identity, message, plan, frames):
                    self._spawn(self._answer_announce(identity, message.request_id))
            case Continue() if self._owns(identity, message.request_id):
                self.reservations.moved(message.request_id, message.hand_off_at)
                known = message.hand_off_at, message.output_token_ids
                self._call("dynaserve_continue", message.request_id, *known, time.monotonic(), message.alpha_lost)
            case Prepare() if self._owns(identity, message.request_id):
                self._call("dynaserve_prepare")
            case Expect(in_ms=in_ms) if self._owns(identity, message.request_id):
                self._call("dynaserve_expect", message.request_id, time.monotonic() + 1e-3 * in_ms)
            case Move() if self._owns(identity, message.request_id):
                self._spawn(self._move(message))
            case Cut() if self._owns(identity, message.request_id):
                self._spawn(self._cut(message))
            case Release() if self._owns(identity, message.request_id):
                self._call("dynaserve_release", message.request_id)
            case Abort(request_ids=request_ids):
                await self._abort([request_id for request_id in request_ids if self._owns(identity, request_id)])
            case AddLora():
                self._spawn(self._add_lora(identity, message))
            case Bye():
                await self._leave(identity)

    async def _hello(self, identity: bytes, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            DROPPED.labels("protocol version").inc()
            return
        for replaced in self.sessions.hello(identity, hello):
            await self._drop(replaced)
        await self._send(identity, Welcome(self.description.instance_epoch))

    async def _add_lora(self, identity: bytes, message: AddLora) -> None:
        error = None
        try:
            # Another front-end, or this one before it was started anew, may have loaded something else in place of what this one names.
            anew = message.load_inplace or self.adapters.get(message.lora_int_id, message.lora_path) != message.lora_path
            kind = {"load_inplace": anew, "is_3d_lora_weight": message.is_3d_lora_weight}
            await self.engine.add_lora_async(LoRARequest(message.lora_name, message.lora_int_id, message.lora_path, **kind))
            self.adapters[message.lora_int_id] = message.lora_path
        except Exception as fault:  # of any kind, from loading somebody's file: it is the front-end's answer
            logger.warning("LoRA adapter %s is not loaded", message.lora_name, exc_info=True)
            error = str(fault) or type(fault).__name__
        await self._send(identity, LoraAdded(message.lora_int_id, error))

    def _transfers_of(self, identity: bytes) -> list[str]:
        """Those of this front-end, and of front-ends that have gone: nobody else will tell of their peers."""
        owners = ((transfer_id, self.routes[request_id]) for request_id, transfer_id in self.transfers.items())
        return [transfer_id for transfer_id, owner in owners if owner == identity or owner not in self.sessions]

    def _owns(self, identity: bytes, request_id: str) -> bool:
        """Late messages for a request that is over are normal; those for somebody else's are not obeyed."""
        return self.routes.get(request_id) == identity

    async def _add(self, identity: bytes, message: Run | Announce, plan: Plan, frames: Sequence[bytes]) -> bool:
        request_id = message.request_id
        obstacle = self._obstacle(request_id, plan)
        if obstacle is None:
            try:
                request: EngineCoreRequest = self.request_decoder.decode(frames)
            except (ValueError, msgspec.MsgspecError, RecursionError, IndexError, NotImplementedError) as error:
                await self._send(identity, Step([Refused(request_id, f"its payload is malformed: {error}")], self.load, time.monotonic()))
                raise
            obstacle = self._unfit(request, plan.output_token_ids or [])
        if obstacle is not None:
            await self._send(identity, Step([Refused(request_id, obstacle)], self.load, time.monotonic()))
            return False
        assert request.sampling_params is not None
        request.request_id = request_id
        extra_args = {key: value for key, value in (request.sampling_params.extra_args or {}).items() if key != EXTRA_ARG}
        request.sampling_params.extra_args = extra_args | {EXTRA_ARG: msgspec.to_builtins(plan)}
        self.routes[request_id] = identity
        prompt_tokens = len(request.prompt_token_ids or ()) + len(plan.output_token_ids or ())
        self.reservations.add(request_id, prompt_tokens, message.end_token, plan.hand_off_at, is_beta=plan.role == "beta")
        if plan.transfer_id is not None:
            self.transfers[request_id] = plan.transfer_id
        await self.engine.add_request_async(request)
        return True

    def _obstacle(self, request_id: str, plan: Plan) -> str | None:
        if request_id in self.routes:
            return f"request id {request_id} is in use"
        if obstacle := self._no_transfer(plan.transfer_id, plan.hand_off_at):
            return obstacle
        if plan.role == "alpha" and plan.transfer_id is None:
            return "an alpha needs a transfer id"
        if plan.role == "beta" and len(plan.senders) != len(self.description.workers):
            return f"{len(plan.senders)} sending workers for {len(self.description.workers)} receiving ones"
        offered = self.description.workers[0].endpoint.transports
        if plan.role == "beta" and plan.transport not in offered:
            return f"transport {plan.transport} is not one of {', '.join(offered)}"
        return None

    def _no_transfer(self, transfer_id: str | None, hand_off_at: int | None) -> str | None:
        """Why there cannot be such a one."""
        if transfer_id is not None and transfer_id in self.transfers.values():
            return f"transfer id {transfer_id} is in use"
        if hand_off_at is not None and not 0 < hand_off_at < self.description.max_model_len:
            return f"hand-off point {hand_off_at} is outside (0, {self.description.max_model_len})"
        return None

    def _unfit(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> str | None:
        if request.sampling_params is None or not request.prompt_token_ids:
            return "only generation from token ids runs through the gateway"
        if len(request.prompt_token_ids) >= self.description.max_model_len:
            return f"prompt of {len(request.prompt_token_ids)} tokens, at most {self.description.max_model_len - 1} fit"
        most = min(self.description.max_model_len - len(request.prompt_token_ids), request.sampling_params.max_tokens or math.inf)
        if len(output_token_ids) >= most:
            return f"{len(output_token_ids)} tokens of the answer are there, which ends with {most}"
        if request.lora_request is not None and request.lora_request.lora_int_id not in self.adapters:
            return f"LoRA adapter {request.lora_request.lora_name} is not loaded"
        return None

    async def _answer_announce(self, identity: bytes, request_id: str) -> None:
        answer = await self.engine.call_utility_async("dynaserve_reservation", request_id)
        event = msgspec.convert(answer, Granted | Refused)
        if isinstance(event, Refused):
            self._forget(request_id)
        await self._send(identity, Step([event], self.load, time.monotonic()))

    async def _move(self, message: Move) -> None:
        """Only the engine knows whether the hand-off can still move there."""
        if await self.engine.call_utility_async("dynaserve_move", message.request_id, message.hand_off_at):
            self.reservations.moved(message.request_id, message.hand_off_at)

    async def _cut(self, message: Cut) -> None:
        """Of a request that is not over meanwhile, and has no transfer."""
        if message.request_id not in self.routes or message.request_id in self.transfers:
            return
        if obstacle := self._no_transfer(message.transfer_id, message.hand_off_at):
            DROPPED.labels("malformed").inc()
            logger.warning("dropped a cut: %s", obstacle)
            return
        self.transfers[message.request_id] = message.transfer_id
        if await self.engine.call_utility_async("dynaserve_cut", message.request_id, message.hand_off_at, message.transfer_id):
            self.reservations.cut(message.request_id, message.hand_off_at)
        elif self.transfers.get(message.request_id) == message.transfer_id:
            del self.transfers[message.request_id]

    def _forget(self, request_id: str) -> None:
        self.routes.pop(request_id, None)
        self.reservations.forget(request_id)
        self.transfers.pop(request_id, None)

    async def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            await self.engine.abort_requests_async(request_ids)

    def _call(self, method: str, *args: Any) -> None:
        async def call() -> None:
            await self.engine.call_utility_async(method, *args)

        self._spawn(call())

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a gateway task failed", exc_info=error)

    # -- to front-ends -------------------------------------------------------------------------------------------------

    async def take(self, outputs: EngineCoreOutputs) -> None:
        """Sends each front-end its part of a step as one message, and leaves the rest to the API server."""
        if (stats := outputs.scheduler_stats) is not None:
            self.load = Load(stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage)
        reports = self._without_step_reports(outputs)
        tokens: dict[bytes, list[EngineCoreOutput]] = defaultdict(list)
        events: dict[bytes, list[Event]] = defaultdict(list)
        rest: list[EngineCoreOutput] = []
        for output in outputs.outputs:
            if output.request_id == EVENT_CARRIER:
                for event in msgspec.convert((output.kv_transfer_params or {})[EXTRA_ARG], list[Event]):
                    if owner := self.routes.get(event.request_id):
                        events[owner].append(event)
            elif owner := self.routes.get(output.request_id):
                tokens[owner].append(output)
            else:
                rest.append(output)
        outputs.outputs = rest
        for identity in tokens.keys() | events.keys():
            frames = (
                self.encoder.encode(EngineCoreOutputs(outputs=tokens[identity], timestamp=outputs.timestamp)) if tokens[identity] else ()
            )
            await self._send(identity, Step(events[identity], self.load, time.monotonic()), frames)
        for event in (event for batch in events.values() for event in batch):
            self._account(event)
        for output in (output for batch in tokens.values() for output in batch):
            self.reservations.tokens(output.request_id, len(output.new_token_ids))
            if output.finish_reason is not None and str(output.finish_reason) in ENGINE_GAVE_UP:
                self._forget(output.request_id)
        for report in reports:
            await self._tell_steps(report)

    def _account(self, event: Event) -> None:
        match event:
            case Ended(request_id=request_id):
                self._forget(request_id)
            case Resumed(request_id=request_id):
                self.reservations.resumed(request_id)
            case Lifted(request_id=request_id):
                self.reservations.moved(request_id, None)

    @staticmethod
    def _without_step_reports(outputs: EngineCoreOutputs) -> list[BatchReport]:
        """Takes out what the local scheduler tells about its steps. One that cannot be read is dropped: here an error would end vLLM's task
        that hands outputs on, and the server with it."""
        reports = []
        for carrier in [output for output in outputs.outputs if output.request_id == REPORT_CARRIER]:
            outputs.outputs.remove(carrier)
            try:
                reports.append(msgspec.convert((carrier.kv_transfer_params or {})[REPORT_KEY], BatchReport))
            except msgspec.ValidationError:
                DROPPED.labels("report").inc()
                logger.exception("dropped a report of steps")
        return reports

    async def _tell_steps(self, report: BatchReport) -> None:
        """Each front-end gets the measurements, once, and how far its prompts are: after its tokens, as those end prompts."""
        step_metrics.observe(report)
        for prompt in report.prompts:
            self.reservations.computed(prompt.request_id, prompt.computed_tokens)
        if self.load is None:
            return
        load = msgspec.structs.replace(
            self.load,
            steps=[step.measured for step in report.steps],
            step_share=report.step_share,
            admitting_share=report.admitting_share,
        )
        for identity in self.sessions.identities:
            own = [prompt for prompt in report.prompts if self.routes.get(prompt.request_id) == identity]
            await self._send(identity, Step([], msgspec.structs.replace(load, prompts=own), time.monotonic()))

    async def _send(self, identity: bytes, message: FromInstance, frames: Sequence[Any] = ()) -> None:
        """To a front-end that has gone: what it has asked for is aborted."""
        try:
            await self.socket.send_multipart([identity, msgspec.msgpack.encode(message), *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if identity in self.sessions:
                logger.warning("a front-end has gone: its requests are aborted")
                await self._leave(identity)
