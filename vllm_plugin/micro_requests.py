"""The micro-requests that an instance's scheduler knows of, and what is to be told about them.

Pure: the scheduler and the connector's scheduler half report what they do; `commands` go to the workers, `events`
to the front-ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynaserve.kv_transfer.agent import TransferReport
from dynaserve.kv_transfer.receiver import Cancel
from dynaserve.kv_transfer.sender import Ready, Stop
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.messages import Ended, Event, Moved, Parked, Resumed

EXTRA_ARG = "dynaserve"
"""Key in `SamplingParams.extra_args` that carries a `Plan` to the engine core and to the workers."""


class Plan(msgspec.Struct, omit_defaults=True):
    """What the gateway asks of the engine for one request.

    role: "whole", "alpha" (stops at `hand_off_at`) or "beta" (starts at `hand_off_at`, with KV from `senders`).
    output_token_ids: of a beta, what the alpha has sampled; None until `Continue`.
    """

    role: str
    hand_off_at: int | None = None
    transfer_id: str | None = None
    transport: str | None = None
    senders: list[WorkerEndpoint] = []
    output_token_ids: list[int] | None = None


def plan_of(extra_args: Mapping[str, Any] | None) -> Plan | None:
    """The plan in a request's extra arguments. A client cannot forge one: vLLM refuses nested values in `vllm_xargs`."""
    value = (extra_args or {}).get(EXTRA_ARG)
    return msgspec.convert(value, Plan) if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Every worker of a beta expects block `first_index + i` in its block `block_ids[i]`, from the sender of its rank."""

    transfer_id: str
    senders: tuple[WorkerEndpoint, ...]
    transport: str
    first_index: int
    block_ids: tuple[int, ...]


Command = Ready | Stop | Reserve | Cancel


@dataclass(slots=True)
class MicroRequest:
    """One request as this instance sees it.

    ready_blocks: of an alpha, how many blocks its workers may send. exposed: the workers know of the transfer.
    complete: of an alpha, its last, partly filled block may be sent: the hand-off cannot move any more.
    received: of a beta, its KV is here. ended: the engine is done with it, a worker may not be.
    """

    request_id: str
    plan: Plan
    computed_tokens: int = 0
    cached_tokens: int = 0
    ready_blocks: int = 0
    exposed: bool = False
    ended: bool = False
    parked: bool = False
    resumed: bool = False
    received: bool = False
    complete: bool = False

    @property
    def is_alpha(self) -> bool:
        return self.plan.role == "alpha"

    @property
    def is_beta(self) -> bool:
        return self.plan.role == "beta"


@dataclass
class MicroRequests:
    """Table of live micro-requests, with the two outboxes."""

    by_id: dict[str, MicroRequest] = field(default_factory=dict)
    commands: list[tuple[str, Command]] = field(default_factory=list)
    """(request id, command) for the workers' agents."""
    events: list[Event] = field(default_factory=list)
    transfers: dict[str, str] = field(default_factory=dict)
    """Request id per transfer id, for transfers whose reports may still come."""

    def add(self, request_id: str, plan: Plan) -> MicroRequest:
        micro = self.by_id[request_id] = MicroRequest(request_id, plan)
        if plan.transfer_id is not None:
            self.transfers[plan.transfer_id] = request_id
        return micro

    def hand_off_of(self, request_id: str) -> int | None:
        """The token at which this request must stop being scheduled; None: nowhere."""
        micro = self.by_id.get(request_id)
        return micro.plan.hand_off_at if micro is not None and micro.is_alpha and not micro.ended else None

    def command(self, request_id: str, command: Command) -> None:
        self.by_id[request_id].exposed = True
        self.commands.append((request_id, command))

    def preempt(self, request_id: str) -> str | None:
        """An alpha lost its blocks and starts again: the transfer whose unsent blocks must be forgotten, if there is one."""
        micro = self.by_id.get(request_id)
        if micro is None or not micro.is_alpha or not micro.exposed:
            return None
        micro.ready_blocks = 0
        micro.complete = False
        return micro.plan.transfer_id

    def park(self, micro: MicroRequest) -> None:
        micro.parked = True
        assert micro.plan.hand_off_at is not None
        self.events.append(Parked(micro.request_id, micro.plan.hand_off_at, micro.cached_tokens))

    def resume(self, micro: MicroRequest) -> None:
        micro.resumed = True
        self.events.append(Resumed(micro.request_id))

    def report(self, report: TransferReport) -> None:
        if request_id := self.transfers.get(report.transfer_id):
            self.events.append(Moved(request_id, report.kind, report.blocks, report.bytes, report.before_end, report.at_s))

    def end(self, request_id: str) -> bool:
        """The engine is done with the request. True: a worker may still touch its blocks; `settle` follows."""
        micro = self.by_id.get(request_id)
        if micro is None:
            return False
        micro.ended = True
        if micro.exposed and not micro.received:
            transfer_id = micro.plan.transfer_id
            assert transfer_id is not None
            self.command(request_id, Stop(transfer_id) if micro.is_alpha else Cancel(transfer_id))
            return True
        self.settle(request_id)
        return False

    def settle(self, request_id: str) -> None:
        """No worker touches the blocks of this ended micro-request any more: forget it and say so."""
        micro = self.forget(request_id)
        self.events.append(Ended(request_id, micro.computed_tokens, micro.cached_tokens))

    def forget(self, request_id: str) -> MicroRequest:
        micro = self.by_id.pop(request_id)
        if micro.plan.transfer_id is not None:
            self.transfers.pop(micro.plan.transfer_id, None)
        return micro

    def take_commands(self) -> list[tuple[str, Command]]:
        commands, self.commands = self.commands, []
        return commands

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events
