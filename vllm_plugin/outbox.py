"""What the front-end sends to instances: instructions of request flows, as messages to their gateways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from dynaserve.fleet_links import FleetLinks
from dynaserve.flow_events import SendAbort, SendAnnounce, SendContinue, SendCut, SendMove, SendPrepare, SendRelease, SendRun, Side, ToSend
from dynaserve.messages import Abort, Announce, Continue, Cut, Expect, Move, Prepare, Release, Run, ToInstance
from vllm_plugin.live import Live
from vllm_plugin.outputs import resumed
from vllm_plugin.requests import check_frames


class Outbox:
    """One front-end's. Names requests to instances by wire ids, which are unique over front-ends, their restarts, and the attempts at a
    request."""

    def __init__(self, frontend_id: str, links: FleetLinks) -> None:
        self._frontend_id = frontend_id
        self._links = links
        self._encoder = MsgpackEncoder()

    async def carry_out(self, live: Live, instruction: ToSend) -> None:
        """Raises GracefulHTTPError, and sends nothing, where a request is too large for an instance."""
        name = instruction.instance_id
        match instruction:
            case SendRun(hand_off_at=hand_off_at, output_token_ids=tokens):
                await self._send(name, self._run(live, hand_off_at, tokens), resumed(live.request) if tokens else live.request)
            case SendAnnounce(hand_off_at=hand_off_at):
                await self._send(name, self._announce(live, hand_off_at), live.request)
            case SendContinue(hand_off_at=hand_off_at, output_token_ids=known, alpha_lost=lost):
                await self._send(name, Continue(self._wire_id(live, Side.BETA), hand_off_at, known, lost))
            case SendPrepare():
                await self._send(name, Prepare(self._wire_id(live, Side.BETA)))
            case SendMove(side=side, hand_off_at=hand_off_at):
                await self._send(name, Move(self._wire_id(live, side), hand_off_at))
            case SendCut(hand_off_at=hand_off_at):
                await self._send(name, Cut(self._wire_id(live, Side.ALPHA), hand_off_at, live.transfer_id))
            case SendRelease():
                await self._send(name, Release(self._wire_id(live, Side.ALPHA)))
            case SendAbort():
                attempts = range(live.flow.attempt + 1)
                await self._send(name, Abort([self._wire_id(live, side, attempt) for side in Side for attempt in attempts]))

    async def expect(self, live: Live, beta: str, in_ms: float) -> None:
        """Tells the instance of the beta when its hand-off is predicted to come."""
        await self._send(beta, Expect(self._wire_id(live, Side.BETA), in_ms))

    def find(self, wire_id: str, lives: Mapping[str, Live]) -> tuple[Live, Side] | None:
        """None: of a request that is over, of an earlier attempt at it, or of a half that it does not have. lives: by internal id."""
        request_id, _, micro = wire_id.removesuffix(f"@{self._frontend_id}").rpartition("/")
        side, _, attempt = micro.partition(".")
        live = lives.get(request_id)
        if live is None or attempt != str(live.flow.attempt) or side not in live.flow.sides:
            return None
        return live, Side(side)

    def _run(self, live: Live, hand_off_at: int | None, output_token_ids: Sequence[int]) -> Run:
        transfer_id = None if hand_off_at is None else live.transfer_id
        wire_id, end_token = self._wire_id(live, Side.ALPHA), live.flow.placement.end_token
        return Run(wire_id, hand_off_at, transfer_id, live.chunked, list(output_token_ids), end_token)

    def _announce(self, live: Live, hand_off_at: int) -> Announce:
        senders = self._links.instances[live.flow.placement.alpha.instance_id].description.workers
        endpoints = [worker.endpoint for worker in senders]
        wire_id, end_token = self._wire_id(live, Side.BETA), live.flow.placement.end_token
        return Announce(wire_id, hand_off_at, live.transfer_id, live.transport, endpoints, end_token)

    def _wire_id(self, live: Live, side: Side, attempt: int | None = None) -> str:
        """attempt: None is the present one."""
        return f"{live.internal_id}/{side.value}.{live.flow.attempt if attempt is None else attempt}@{self._frontend_id}"

    async def _send(self, instance: str, message: ToInstance, request: EngineCoreRequest | None = None) -> None:
        frames: Sequence[Any] = ()
        if request is not None:
            check_frames(frames := self._encoder.encode(request))
        await self._links.send(instance, message, frames)
