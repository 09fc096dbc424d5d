"""The life of one request in the front-end: events in, instructions out.

    WHOLE ------------------------------------------------------------> FINISHED
    ALPHA --Parked--> HANDING_OVER --Resumed--> BETA -----------------> FINISHED
      |                    |
      +--------------------+--Refused, Revoked, Lifted, lift()--> WHOLE (the alpha finishes alone)

    WHOLE --cut()--> ALPHA, once, of a request that was placed whole

    any, when the instance that it needs has died --> ORPHANED --place_again()--> WHOLE, elsewhere

An orphaned request goes on with the tokens that the client has: another instance computes prompt and tokens anew.  A beta
whose alpha has died goes on with the KV that has arrived. What dies when is tabulated in docs/failures.md.

`Parked` says where the alpha stopped: the hand-off point may have been moved up to then.

Pure: no sockets, no clock, no engine.  `vllm_plugin.fleet_client` carries the instructions out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dynaserve.flow_events import (
    ENGINE_GAVE_UP,
    ClientGone,
    Event,
    Fail,
    Forward,
    InstanceDied,
    InstanceStopping,
    Instruction,
    PlaceAgain,
    SendAbort,
    SendAnnounce,
    SendContinue,
    SendCut,
    SendMove,
    SendPrepare,
    SendRelease,
    SendRun,
    Side,
    StopString,
    Tokens,
    Unavailable,
)
from dynaserve.global_scheduler import MicroRequest, Placement, Revision
from dynaserve.messages import Ended, Granted, Lifted, Moved, Parked, Refused, Resumed, Revoked
from dynaserve.records import KvRecord, MicroRecord, RequestRecord
from dynaserve.request_placer import Held

PREPARE_TOKENS = (4, 2)
"""So many steps before an alpha stops in its answer, its beta's instance is told to wake up, and to stay awake (docs/kv_transfer.md)."""


class State(enum.Enum):
    WHOLE = "whole"
    ALPHA = "alpha"
    HANDING_OVER = "handing_over"
    BETA = "beta"
    ORPHANED = "orphaned"
    FINISHED = "finished"


@dataclass
class RequestFlow:
    """One request; `record` is kept up to date. Times are milliseconds since the request arrived."""

    placement: Placement
    record: RequestRecord
    kv: KvRecord
    """The record's, once it is cut."""
    state: State = State.WHOLE
    output_token_ids: list[int] = field(default_factory=list)
    granted: bool = False
    hand_off_at: int | None = None
    """Where the alpha was told to stop."""
    earliest_hand_off_at: int | None = None
    """The earliest point that it was ever told: where it may have stopped, if it is lost before it hears of another one."""
    parked_at: int | None = None
    released: bool = False
    live: set[Side] = field(default_factory=set)
    """Micro-requests that an instance still knows of."""
    attempt: int = 0
    """Grows when the request is placed again; what is said of an earlier attempt is not meant."""

    def start(self) -> list[Instruction]:
        alpha, beta = self.placement.alpha, self.placement.beta
        self.live.add(Side.ALPHA)
        self.record.alpha = MicroRecord(alpha.instance_id)
        if beta is None:
            return [SendRun(alpha.instance_id, None)]
        split = self.placement.split_token
        self.hand_off_at = self.earliest_hand_off_at = split
        self.live.add(Side.BETA)
        self.record.beta = MicroRecord(beta.instance_id)
        self.state = State.ALPHA
        return [SendRun(alpha.instance_id, split), SendAnnounce(beta.instance_id, split)]

    @property
    def over(self) -> bool:
        """Nobody needs this flow any more."""
        return self.state is State.FINISHED and not self.live

    @property
    def sides(self) -> set[str]:
        """The halves that this attempt has."""
        return {side.value for side in self._micros()}

    @property
    def instances(self) -> set[str]:
        """Those that still know of it."""
        return {self._micro(side).instance for side in self.live}

    def handle(self, side: Side, event: Event, now_ms: float) -> list[Instruction]:
        match event:
            case Tokens():
                return self._on_tokens(side, event, now_ms)
            case Granted(cached_tokens=cached):
                self.granted = True
                self._micro(side).cached_tokens = cached
                self.record.mark("granted", now_ms)
                return self._continue_if_ready(now_ms)
            case Refused(reason=reason):
                return self._on_refused(side, reason, now_ms)
            case Revoked(reason=reason):
                return self._lift(reason, now_ms)
            case Lifted(reason=reason):
                return self._on_lifted(reason, now_ms)
            case Parked(computed_tokens=computed, cached_tokens=cached):
                self._micro(side).cached_tokens = cached
                self.record.mark("alpha_parked", now_ms)
                self.parked_at = computed
                return self._continue_if_ready(now_ms)
            case Resumed(step_rest_ms=step_rest_ms):
                self.record.step_rest_ms = step_rest_ms
                return self._on_resumed(now_ms)
            case Moved():
                self._on_moved(event, now_ms)
                return []
            case Ended():
                return self._on_ended(side, event, now_ms)
            case ClientGone():
                return self._finish(None, now_ms)
            case StopString():
                return self._finish("stop", now_ms)
            case InstanceDied():
                return self._on_died(event, now_ms)
            case InstanceStopping(instance_id=name):
                beta = self.placement.beta
                return self._lift(f"instance {name} is stopping", now_ms) if beta is not None and beta.instance_id == name else []

    def _on_tokens(self, side: Side, tokens: Tokens, now_ms: float) -> list[Instruction]:
        if tokens.finish_reason in ENGINE_GAVE_UP:
            self.live.discard(side)
        if tokens.finish_reason == "abort":
            return self._on_aborted(side, now_ms)
        expected = Side.BETA if self.state in (State.HANDING_OVER, State.BETA) else Side.ALPHA
        if self.state is State.FINISHED or side is not expected:
            return []  # late tokens of a micro-request that was released or aborted
        if not self.output_token_ids and tokens.token_ids:
            self.record.mark("first_token", now_ms)
        self.output_token_ids += tokens.token_ids
        self.record.output_tokens = len(self.output_token_ids)
        self._micro(side).output_tokens += len(tokens.token_ids)
        resumed = self._on_resumed(now_ms) if side is Side.BETA else []
        if tokens.finish_reason is None:
            return [Forward(), *resumed, *self._prepare_beta()]
        return [Forward(), *resumed, *self._finish(tokens.finish_reason, now_ms, finished=side)]

    def _on_resumed(self, now_ms: float) -> list[Instruction]:
        """Its tokens come before its `Resumed`: from the first of either on, the alpha cannot take over any more."""
        if self.state is not State.HANDING_OVER:
            return []
        self.state = State.BETA
        self.record.mark("beta_resumed", now_ms)
        return self._release()

    def _prepare_beta(self) -> list[Instruction]:
        if self.state is not State.ALPHA or not self.granted or self.hand_off_at is None:
            return []
        computed = self.record.prompt_tokens + len(self.output_token_ids) - 1
        if self.hand_off_at - computed not in PREPARE_TOKENS:
            return []
        return [SendPrepare(self._micro(Side.BETA).instance)]

    def _continue_if_ready(self, now_ms: float) -> list[Instruction]:
        if self.state is not State.ALPHA or self.parked_at is None or not self.granted:
            return []
        assert self.placement.beta is not None
        self.state = State.HANDING_OVER
        self.record.split_token = self.parked_at
        self.record.mark("continue_sent", now_ms)
        lost = Side.ALPHA not in self.live
        return [SendContinue(self.placement.beta.instance_id, self.parked_at, list(self.output_token_ids), lost)]

    def _on_refused(self, side: Side, reason: str, now_ms: float) -> list[Instruction]:
        self.live.discard(side)
        if side is Side.BETA and self.state is State.ALPHA:
            return self._lift(reason, now_ms)
        if self.state is State.FINISHED or side is Side.BETA:
            return []
        return [*self._finish("error", now_ms, finished=side), Fail(f"{self._micro(side).instance}: {reason}")]

    def holders(self) -> list[Held]:
        """What the instances keep of the sequence once they are done, as far as they have told."""
        held = []
        alpha, beta = self.record.alpha, self.record.beta
        if alpha is not None and alpha.computed_tokens is not None:
            held.append(Held(alpha.instance, alpha.cached_tokens + alpha.computed_tokens, alpha.cached_tokens))
        if beta is not None and beta.computed_tokens and self.parked_at is not None:
            held.append(Held(beta.instance, self.parked_at + beta.computed_tokens))
        return held

    def pending_on(self, instance_id: str) -> bool:
        """Whether this instance has a part in a hand-off that can still be changed."""
        beta = self.placement.beta
        if self.state is not State.ALPHA or self.parked_at is not None or beta is None:
            return False
        return instance_id in (self.placement.alpha.instance_id, beta.instance_id)

    def may_cut_on(self, instance_id: str) -> bool:
        """Whether it decodes there, whole as it was placed."""
        return self._is_uncut and bool(self.output_token_ids) and self.placement.alpha.instance_id == instance_id

    @property
    def _is_uncut(self) -> bool:
        return self.state is State.WHOLE and self.record.beta is None and not self.attempt

    def shows_from(self, instance_id: str) -> bool:
        """Whether a hand-off in the answer is still to come from this instance: then the client waits for the beta's first token."""
        pending = self.placement.alpha.instance_id == instance_id and self.pending_on(instance_id)
        return pending and self.hand_off_at is not None and self.hand_off_at >= self.record.prompt_tokens

    def needs(self, side: Side) -> bool:
        """Whether this half still has a part in what becomes of the request."""
        match self.state:
            case State.ALPHA | State.HANDING_OVER:
                return True
            case State.WHOLE:
                return side is Side.ALPHA
            case State.BETA:
                return side is Side.BETA
            case _:
                return False

    def revise(self, revision: Revision, now_ms: float) -> list[Instruction]:
        """The scheduler's second thoughts about the hand-off, or about running whole."""
        self.record.revisions.append(
            {
                "at_ms": round(now_ms, 3),
                "hand_off_at": revision.split_token,
                "reason": revision.reason.name,
                "objective_ms": revision.objective_ms,
                "kept_objective_ms": revision.kept_objective_ms,
            }
        )
        if revision.split_token is None:
            return self._lift(f"revised: {revision.reason.name}", now_ms)
        if revision.beta is not None:
            return self.cut(revision.beta, revision.split_token)
        return self.move(revision.split_token)

    def move(self, hand_off_at: int) -> list[Instruction]:
        """Asks for another hand-off point; too late once the alpha stands or is lifted: then nothing is sent."""
        if self.state is not State.ALPHA or self.parked_at is not None:
            return []
        assert self.placement.beta is not None
        assert self.earliest_hand_off_at is not None
        self.record.moves += 1
        self.hand_off_at = self.record.split_token = hand_off_at
        self.earliest_hand_off_at = min(self.earliest_hand_off_at, hand_off_at)
        return [
            SendMove(Side.ALPHA, self.placement.alpha.instance_id, hand_off_at),
            SendMove(Side.BETA, self.placement.beta.instance_id, hand_off_at),
        ]

    def cut(self, beta: str, hand_off_at: int) -> list[Instruction]:
        """Hands a request that was placed whole over to this instance; too late once it is over: then nothing is sent. One that has been
        cut, or placed again, is not cut any more."""
        if not self._is_uncut or beta == self.placement.alpha.instance_id:
            return []
        whole = self.placement
        alpha = MicroRequest(whole.alpha.instance_id, 0, hand_off_at)
        rest = MicroRequest(beta, hand_off_at, max(whole.end_token, hand_off_at + 1))
        self.placement = Placement(alpha, rest, whole.reason, whole.prediction)
        self.state = State.ALPHA
        self.hand_off_at = self.earliest_hand_off_at = self.record.split_token = hand_off_at
        self.live.add(Side.BETA)
        self.record.beta, self.record.kv = MicroRecord(beta), self.kv
        return [SendAnnounce(beta, hand_off_at), SendCut(alpha.instance_id, hand_off_at)]

    def lift(self, now_ms: float) -> list[Instruction]:
        """Lets the alpha finish alone, if the beta does not run yet; too late once the alpha is gone: then nothing is sent."""
        return self._lift("lifted by the front-end", now_ms) if Side.ALPHA in self.live else []

    def _lift(self, reason: str, now_ms: float) -> list[Instruction]:
        """Whatever the beta has done since its `Continue` is not used: the alpha computes the same tokens."""
        if self.state not in (State.ALPHA, State.HANDING_OVER):
            return []
        if Side.ALPHA not in self.live:  # it died, or ended because the beta had everything; and now the beta is gone
            return self._orphan(reason, now_ms)
        self._to_whole(reason, now_ms)
        return [SendMove(Side.ALPHA, self.placement.alpha.instance_id, None), *self._abort_beta()]

    def _on_lifted(self, reason: str, now_ms: float) -> list[Instruction]:
        if self.state not in (State.ALPHA, State.HANDING_OVER):
            return []
        self._to_whole(reason, now_ms)
        return self._abort_beta()

    def _to_whole(self, reason: str, now_ms: float) -> None:
        self.state = State.WHOLE
        self.record.lifted = reason
        self.record.mark("lifted", now_ms)

    def _abort_beta(self) -> list[Instruction]:
        return [SendAbort(self._micro(Side.BETA).instance)] if Side.BETA in self.live else []

    # -- instances that die --------------------------------------------------------------------------------------------

    def _on_died(self, died: InstanceDied, now_ms: float) -> list[Instruction]:
        lost = {side for side, micro in self._micros().items() if micro.instance == died.instance_id and side in self.live}
        for side in lost:
            self._micro(side).lost = True
        self.live -= lost
        reason = f"instance {died.instance_id} was lost: {died.reason}"
        match self.state:
            case State.WHOLE if Side.ALPHA in lost:
                return self._orphan(reason, now_ms)
            case State.BETA if Side.BETA in lost:
                return self._orphan(reason, now_ms)
            case State.ALPHA | State.HANDING_OVER if Side.BETA in lost:
                return self._lift(reason, now_ms)
            case State.ALPHA | State.HANDING_OVER if Side.ALPHA in lost and died.may_write:
                return self._orphan(reason, now_ms)
            case State.ALPHA if Side.ALPHA in lost:
                return self._continue_without_alpha(reason, now_ms)
            case _:  # nobody needs it any more; a beta that was told to continue does so with what has arrived
                return []

    def _on_aborted(self, side: Side, now_ms: float) -> list[Instruction]:
        """Nobody here has asked for it: an engine that is told to stop aborts what it runs (vLLM's `EngineCore._handle_shutdown`)."""
        if not self.needs(side):
            return []
        return self._on_lost(side, f"instance {self._micro(side).instance} has aborted it", now_ms, aborted=True)

    def _on_lost(self, side: Side, reason: str, now_ms: float, *, aborted: bool = False) -> list[Instruction]:
        """A half that is needed has ended before its time."""
        if side is Side.BETA and self.state is not State.BETA:
            return self._lift(reason, now_ms)
        return self._orphan(reason, now_ms, aborted=aborted)

    def _continue_without_alpha(self, reason: str, now_ms: float) -> list[Instruction]:
        """The beta begins where the tokens that the client has end, from the KV that has arrived; in a prompt not beyond where the alpha
        may have stopped: it has sent the block of that token as far as it had filled it, and it counts as there."""
        prompt, tokens = self.record.prompt_tokens, len(self.output_token_ids)
        assert self.earliest_hand_off_at is not None
        hand_off_at = prompt + tokens - 1 if tokens else min(self.earliest_hand_off_at, prompt - 1)
        if not self.granted or hand_off_at < 1:
            return self._orphan(reason, now_ms)
        self.parked_at = hand_off_at
        self.record.mark("alpha_lost", now_ms)
        return self._continue_if_ready(now_ms)

    def _orphan(self, reason: str, now_ms: float, *, aborted: bool = False) -> list[Instruction]:
        """What is left of this attempt ends."""
        aborts: list[Instruction] = [SendAbort(self._micro(side).instance) for side in Side if side in self.live]
        self.record.lose(reason, now_ms, aborted=aborted)
        self.live.clear()
        self.attempt += 1
        self.state = State.ORPHANED
        self.granted, self.parked_at, self.released = False, None, False
        return [*aborts, PlaceAgain()]

    def place_again(self, placement: Placement, now_ms: float) -> list[Instruction]:
        """The orphaned request goes on there, uncut."""
        assert self.state is State.ORPHANED
        self.placement = placement
        self.state = State.WHOLE
        self.live.add(Side.ALPHA)
        name = placement.alpha.instance_id
        self.record.alpha, self.record.beta = MicroRecord(name), None
        self.record.mark("placed_again", now_ms)
        return [SendRun(name, None, tuple(self.output_token_ids))]

    def give_up(self, reason: str, status: int, now_ms: float) -> list[Instruction]:
        """Nobody takes the orphaned request, or it takes too long."""
        if self.state is State.FINISHED:
            return []
        return [*self._finish("error", now_ms), Unavailable(reason, status)]

    def _micros(self) -> dict[Side, MicroRecord]:
        micros = {Side.ALPHA: self.record.alpha, Side.BETA: self.record.beta}
        return {side: micro for side, micro in micros.items() if micro is not None}

    # -- the end -------------------------------------------------------------------------------------------------------

    def _on_moved(self, moved: Moved, now_ms: float) -> None:
        kv = self.record.kv
        if kv is None:
            return
        if moved.kind == "received":
            kv.blocks += moved.blocks
            kv.bytes += moved.bytes
            kv.chunks.append({"blocks": moved.blocks, "bytes": moved.bytes, "at_ms": round(now_ms - moved.age_ms, 3)})
            return
        kv.push_ms += moved.took_ms
        if moved.before_end:
            kv.bytes_before_alpha_end += moved.bytes
            kv.push_ms_before_alpha_end += moved.took_ms

    def _on_ended(self, side: Side, ended: Ended, now_ms: float) -> list[Instruction]:
        micro = self._micro(side)
        micro.computed_tokens, micro.cached_tokens = ended.computed_tokens, ended.cached_tokens
        self.live.discard(side)
        if not self.needs(side):
            return []
        if side is Side.ALPHA and self.state is State.HANDING_OVER:
            return []  # preempted when its beta had everything
        return self._on_lost(side, f"{micro.instance} ended the request without finishing it", now_ms)

    def _finish(self, reason: str | None, now_ms: float, finished: Side | None = None) -> list[Instruction]:
        """Ends the request; every micro-request that did not end by itself is told to."""
        if self.state is State.FINISHED:
            return []
        self.state = State.FINISHED
        self.record.finish_reason = reason or "abort"
        self.record.mark("finished", now_ms)
        if finished is Side.BETA:
            return []  # its first token has released the alpha
        aborts: list[Instruction] = [SendAbort(self._micro(side).instance) for side in Side if side in self.live and side is not finished]
        return aborts

    def _release(self) -> list[Instruction]:
        if self.released or Side.ALPHA not in self.live:
            return []
        self.released = True
        return [SendRelease(self.placement.alpha.instance_id)]

    def _micro(self, side: Side) -> MicroRecord:
        micro = self.record.alpha if side is Side.ALPHA else self.record.beta
        assert micro is not None
        return micro


def new_flow(request_id: str, prompt_tokens: int, placement: Placement, reason: str, transport: str, block_bytes: int) -> RequestFlow:
    """A flow with its record; `transport` and `block_bytes` describe the KV transfer, if there is one."""
    cut = placement.beta is not None
    record = RequestRecord(request_id, prompt_tokens, placement.split_token if cut else None, reason)
    kv = KvRecord(transport, block_bytes)
    if cut:
        record.kv = kv
    return RequestFlow(placement, record, kv)
