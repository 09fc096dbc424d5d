"""The micro-requests that an instance's scheduler knows of, and what is to be told about them.

Pure: the scheduler and the connector's scheduler half report what they do; `commands` go to the workers, `events`
to the front-ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynaserve.kv_transfer.agent import PeerLost
from dynaserve.kv_transfer.receiver import Cancel, Complete, Extend
from dynaserve.kv_transfer.results import TransferReport
from dynaserve.kv_transfer.sender import Ready, Stop
from dynaserve.kv_transfer.transport import WorkerEndpoint
from dynaserve.messages import Ended, Event, Granted, Holding, Lifted, Moved, Parked, Resumed, Revoked

EXTRA_ARG = "dynaserve"
"""Key in `SamplingParams.extra_args` that carries a `Plan` to the engine core and to the workers."""


class Plan(msgspec.Struct, omit_defaults=True):
    """What the gateway asks of the engine for one request.

    role: "whole", "alpha" (stops at `hand_off_at`; None: lifted) or "beta" (starts there, with KV from `senders`).
    output_token_ids: of a beta, what the alpha has sampled; None until `Continue`; of a whole request, what a lost instance has
    sampled. chunked: of an alpha, KV leaves while it computes.
    """

    role: str
    hand_off_at: int | None = None
    transfer_id: str | None = None
    transport: str | None = None
    senders: list[WorkerEndpoint] = []
    output_token_ids: list[int] | None = None
    chunked: bool = True


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


Command = Ready | Stop | Reserve | Extend | Complete | Cancel | PeerLost


@dataclass(slots=True)
class MicroRequest:
    """One request as this instance sees it.

    exposed: the workers know of the transfer. ended: the engine is done with it, a worker may not be.

    Of an alpha: ready_blocks, how many blocks its workers may send; complete, its last, partly filled block may be sent: the
    hand-off cannot move any more; parked_at, the token at which it stands (None: it runs), since parked_s; told_parked, the
    front-end knows where; delivered: how many workers' peers have all that they need.

    Of a beta: first_index, the first block that is transferred; granted_blocks, all blocks that it holds; landed_blocks, by the
    worker's rank, in order from first_index on; end_index, the block before which the transfer ends, None until `Continue`;
    alpha_lost: KV beyond that may be on its way; received: its KV is here; resumed: it runs, or may; expected_s: about when its alpha
    will stop, None: not told.
    """

    request_id: str
    plan: Plan
    computed_tokens: int = 0
    cached_tokens: int = 0
    exposed: bool = False
    ended: bool = False

    ready_blocks: int = 0
    complete: bool = False
    parked_at: int | None = None
    parked_s: float = 0.0
    told_parked: bool = False
    delivered: int = 0

    first_index: int = 0
    granted_blocks: int = 0
    landed_blocks: Counter[int] = field(default_factory=Counter)
    end_index: int | None = None
    step_rest_ms: float = 0.0
    alpha_lost: bool = False
    received: bool = False
    resumed: bool = False
    expected_s: float | None = None

    @property
    def is_alpha(self) -> bool:
        return self.plan.role == "alpha"

    @property
    def is_beta(self) -> bool:
        return self.plan.role == "beta"

    @property
    def parked(self) -> bool:
        return self.parked_at is not None

    @property
    def revocable(self) -> bool:
        """A beta's reservation that may be taken back: nothing has been promised yet."""
        return self.is_beta and self.exposed and not self.ended and self.end_index is None


@dataclass
class MicroRequests:
    """Table of live micro-requests, with the two outboxes. num_workers: of this instance."""

    num_workers: int = 1
    by_id: dict[str, MicroRequest] = field(default_factory=dict)
    betas: dict[str, MicroRequest] = field(default_factory=dict)
    """Those that have not resumed, oldest first."""
    parked: dict[str, MicroRequest] = field(default_factory=dict)
    """Alphas at their hand-off point, the longest there first."""
    commands: list[tuple[str, Command]] = field(default_factory=list)
    """(request id, command) for the workers' agents; the id is empty where a command is about a whole peer."""
    events: list[Event] = field(default_factory=list)
    transfers: dict[str, str] = field(default_factory=dict)
    """Request id per transfer id, for transfers whose reports may still come."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each turn of a hand-off was taken."""

    @property
    def has_messages(self) -> bool:
        """A step is needed to carry them out of the scheduler."""
        return bool(self.commands or self.events)

    def add(self, request_id: str, plan: Plan) -> MicroRequest:
        micro = self.by_id[request_id] = MicroRequest(request_id, plan)
        if plan.transfer_id is not None:
            self.transfers[plan.transfer_id] = request_id
        if micro.is_beta:
            self.betas[request_id] = micro
        return micro

    @property
    def holding(self) -> Holding:
        reserved, quarantined = (sum(beta.granted_blocks for beta in self.betas.values() if beta.ended is ended) for ended in (False, True))
        return Holding(len(self.parked), reserved, quarantined)

    def hand_off_of(self, request_id: str) -> int | None:
        """The token at which this request must stop being scheduled; None: nowhere."""
        micro = self.by_id.get(request_id)
        if micro is None or not micro.is_alpha or micro.ended:
            return None
        return micro.parked_at if micro.parked else micro.plan.hand_off_at

    def command(self, request_id: str, command: Command) -> None:
        self.by_id[request_id].exposed = True
        self.commands.append((request_id, command))

    # -- alpha ---------------------------------------------------------------------------------------------------------

    def preempt(self, request_id: str) -> str | None:
        """An alpha lost its blocks and starts again: the transfer whose unsent blocks must be forgotten, if there is one."""
        micro = self.by_id.get(request_id)
        if micro is None or not micro.is_alpha:
            return None
        self.unpark(micro)
        micro.ready_blocks = 0
        # What has left in part stays as it was sent: the hand-off cannot move later on either.
        return micro.plan.transfer_id if micro.exposed else None

    def park(self, micro: MicroRequest, now_s: float) -> None:
        assert micro.plan.hand_off_at is not None
        micro.parked_at, micro.parked_s = micro.plan.hand_off_at, now_s
        micro.told_parked = True
        self.parked[micro.request_id] = micro
        self.counts["parked"] += 1
        self.events.append(Parked(micro.request_id, micro.parked_at, micro.cached_tokens))

    def cut(self, micro: MicroRequest, hand_off_at: int, transfer_id: str) -> bool:
        """A whole request becomes an alpha, of which nothing has left yet. False: it is a beta, or was an alpha before."""
        if micro.plan.role != "whole":
            return False
        micro.plan.role, micro.plan.hand_off_at, micro.plan.transfer_id = "alpha", hand_off_at, transfer_id
        self.transfers[transfer_id] = micro.request_id
        self.counts["cut"] += 1
        return True

    def unpark(self, micro: MicroRequest) -> None:
        micro.parked_at = None
        self.parked.pop(micro.request_id, None)

    def lift(self, micro: MicroRequest, reason: str) -> None:
        """The instance itself decides that this alpha goes on."""
        micro.plan.hand_off_at = None
        self.counts["lifted"] += 1
        self.events.append(Lifted(micro.request_id, reason))

    def is_delivered(self, micro: MicroRequest) -> bool:
        """Whether the beta has all that it needs, on every worker."""
        return micro.plan.hand_off_at is not None and micro.delivered >= self.num_workers

    # -- beta ----------------------------------------------------------------------------------------------------------

    def granted(self, micro: MicroRequest, blocks: int, tokens: int) -> None:
        """The beta holds this many blocks, good for this many tokens."""
        self.counts["granted" if not micro.granted_blocks else "grown"] += 1
        micro.granted_blocks = blocks
        self.events.append(Granted(micro.request_id, micro.cached_tokens, tokens))

    def revoked(self, micro: MicroRequest, reason: str) -> None:
        self.counts["revoked"] += 1
        self.events.append(Revoked(micro.request_id, reason))

    def complete(self, micro: MicroRequest, end_index: int) -> None:
        """The alpha has stopped: these are all the blocks that will come."""
        assert micro.plan.transfer_id is not None
        micro.end_index = end_index
        self.command(micro.request_id, Complete(micro.plan.transfer_id, end_index))

    def landed(self, transfer_id: str, rank: int, blocks: int) -> None:
        """So many more blocks of a beta, none missing before them, are on its worker of this rank."""
        if micro := self.by_id.get(self.transfers.get(transfer_id, "")):
            micro.landed_blocks[rank] += blocks

    def all_landed(self, micro: MicroRequest) -> bool:
        """Every worker has every block of the beta, as far as they have told.

        By worker: where the end was moved back, one may have blocks beyond it, which another lacks before it. Of a lost alpha's beta only a
        worker's report of the whole transfer counts: a block beyond the end may be on its way into what the beta would write.
        """
        if micro.end_index is None or micro.alpha_lost:
            return False
        return min(micro.landed_blocks[rank] for rank in range(self.num_workers)) >= micro.end_index - micro.first_index

    def resume(self, micro: MicroRequest) -> None:
        micro.resumed = micro.received = True
        del self.betas[micro.request_id]
        self.events.append(Resumed(micro.request_id, micro.step_rest_ms))

    # -- both ----------------------------------------------------------------------------------------------------------

    def report(self, report: TransferReport) -> MicroRequest | None:
        """A worker's news. Returns a beta whose transfer has failed while its reservation can be taken back."""
        micro = self.by_id.get(self.transfers.get(report.transfer_id, ""))
        if micro is None:
            return None
        match report.kind:
            case "delivered":
                micro.delivered += 1
            case "failed":
                self.counts["failed"] += 1
                return micro if micro.revocable else None
            case kind:
                self.events.append(
                    Moved(micro.request_id, kind, report.blocks, report.bytes, report.before_end, report.age_ms, report.took_ms)
                )
        return None

    def peers_lost(self, worker_ids: Iterable[str], transfer_ids: Iterable[str]) -> None:
        """Of another instance, which is dead for the front-end of these transfers. What this means for them, the workers report."""
        self.counts["peers_lost"] += 1
        its = frozenset(transfer_ids)
        self.commands += [("", PeerLost(worker_id, its)) for worker_id in worker_ids]

    def awaits_workers(self, request_id: str) -> bool:
        """Whether a beta's blocks are not the request's alone before its workers say so."""
        micro = self.by_id.get(request_id)
        return micro is not None and not micro.received

    def end(self, request_id: str, in_flight_tokens: int) -> bool:
        """The engine is done with the request. True: a worker may still touch its blocks; `settle` follows.

        in_flight_tokens: scheduled in steps that are not over; nobody asks for them any more, and they do not count as computed.
        """
        micro = self.by_id.get(request_id)
        if micro is None:
            return False
        micro.ended = True
        micro.computed_tokens -= in_flight_tokens
        self.parked.pop(request_id, None)
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
        self.betas.pop(request_id, None)
        if micro.plan.transfer_id is not None:
            self.transfers.pop(micro.plan.transfer_id, None)
        return micro

    def take_commands(self) -> list[tuple[str, Command]]:
        commands, self.commands = self.commands, []
        return commands

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events
