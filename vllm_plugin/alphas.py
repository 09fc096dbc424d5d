"""Alphas on an instance: requests that stop at a hand-off point, keep their blocks there, and may be told to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm_plugin.micro_requests import MicroRequest, MicroRequests


class AlphaScheduler(Scheduler):
    """Mixin over vLLM's scheduler.

    A request that stands at its hand-off point stays in `running`, unscheduled: `_reserve_prefill_lookahead` is the last word
    on a request's tokens in both scheduling loops.
    """

    micro: MicroRequests
    max_num_running_reqs: int
    max_num_active_reqs: int
    parked_slots: int = 0
    """Parked alphas that take none of the running requests' slots."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = self.max_num_running_reqs
        self._active_slots = self.max_num_active_reqs
        # The V2 model runner keeps a row of its batch for every request in `running`, the V1 runner for scheduled ones only.
        self._rows_are_scarce = bool(self.vllm_config.use_v2_model_runner)
        self._delivered_and_preempted: list[str] = []
        self.preemptions = 0

    # -- stop ----------------------------------------------------------------------------------------------------------

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        tokens = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))
        hand_off = self.micro.hand_off_of(request.request_id)
        return tokens if hand_off is None else max(0, min(tokens, hand_off - num_computed_tokens))

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[Any, int, int, bool]:
        blocks, cached, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        hand_off = self.micro.hand_off_of(request.request_id)
        if hand_off is not None and cached >= hand_off:
            # With nothing left to compute the waiting loop would break at this request for ever (scheduler.py:1217).
            cached = (hand_off - 1) // self.block_size * self.block_size
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, cached)
        return blocks, cached, boundary, diverged

    def most_cached_tokens(self, request: Request) -> int:
        """As `_get_local_prefix_cache_hit` leaves them."""
        hand_off = self.micro.hand_off_of(request.request_id)
        tokens = int(request.num_tokens)
        return (tokens if hand_off is None else min(tokens, hand_off)) - 1

    def park_if_at_hand_off(self, request_id: str, now_s: float) -> None:
        micro, request = self.micro.by_id.get(request_id), self.requests.get(request_id)
        if micro is None or request is None or not micro.is_alpha or micro.parked or request.is_finished():
            return
        if micro.plan.hand_off_at == request.num_computed_tokens - request.num_in_flight_tokens:
            self._inflight_prefills.discard(request)  # it needs no more blocks
            self.micro.park(micro, now_s)

    def becomes_decode(self, request: Request) -> bool:
        """Not an alpha that stops within its prompt, or at its end."""
        hand_off = self.micro.hand_off_of(request.request_id)
        return hand_off is None or hand_off > request.num_prompt_tokens

    # -- move, lift, release -------------------------------------------------------------------------------------------

    def move_alpha(self, micro: MicroRequest, request: Request, hand_off_at: int | None) -> bool:
        """Moves the point at which the alpha stops, to the nearest token that it can still stop at, or lifts it (None).

        False: it stands at its hand-off point already, was lifted, or `hand_off_at` is beyond what the model can compute.
        """
        if hand_off_at is not None:
            if micro.plan.hand_off_at is None or micro.told_parked or micro.complete or hand_off_at >= self.max_model_len:
                return False
            # A preempted request computes anew what it has sampled, and cannot stop before its newest token.
            sampled = request.num_tokens - 1 if request.num_output_tokens else 0
            hand_off_at = max(hand_off_at, request.num_computed_tokens + 1, sampled)
        micro.plan.hand_off_at = hand_off_at
        return True

    def release(self, request_id: str) -> None:
        """The beta does not need the alpha any more: free it, without an output."""
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # -- before a step -------------------------------------------------------------------------------------------------

    def settle_parked(self, now_s: float, timeout_s: float, most: int) -> None:
        """Lifts alphas that have stood for too long, and the oldest of too many; those lifted run once there is a slot."""
        for micro in list(self.micro.parked.values()):
            if micro.plan.hand_off_at is None:
                most += 1  # lifted before, and still without a slot
                continue
            if now_s - micro.parked_s > timeout_s:
                self.micro.lift(micro, f"the alpha stood at its hand-off point for more than {timeout_s:g} s")
            elif len(self.micro.parked) > most:
                self.micro.lift(micro, f"more than {most} alphas stand at their hand-off points")
            else:
                break
            most += 1  # one less counts
        self._give_slots_to_lifted()
        self._keep_parked_aside()

    def _give_slots_to_lifted(self) -> None:
        active = [request for request in self.running if request.request_id not in self.micro.parked]
        free = self._slots - len(active)
        adapters = {request.lora_request.lora_int_id for request in active if request.lora_request}
        for micro in [micro for micro in self.micro.parked.values() if micro.plan.hand_off_at is None]:
            lora = self.requests[micro.request_id].lora_request
            # vLLM asserts that the running requests use no more adapters than there is room for (scheduler.py:897).
            fits = lora is None or lora.lora_int_id in adapters or len(adapters) < self.lora_config.max_loras
            if fits and (free > 0 or self._rows_are_scarce):
                self.micro.unpark(micro)
                free -= 1
                adapters |= {lora.lora_int_id} if lora else set()

    def _keep_parked_aside(self) -> None:
        """They take no slot of a running request, and come first: vLLM preempts the last running request first, and a parked
        alpha would recompute what its beta already has."""
        parked = [request for request in self.running if request.request_id in self.micro.parked]
        self.parked_slots = 0 if self._rows_are_scarce else len(parked)
        self.max_num_running_reqs = self._slots + self.parked_slots
        self.max_num_active_reqs = self._active_slots + self.parked_slots
        if parked:
            self.running[:] = [*parked, *(r for r in self.running if r.request_id not in self.micro.parked)]

    def next_lift_s(self, timeout_s: float) -> float | None:
        """When the first parked alpha will have stood for too long."""
        return next((micro.parked_s + timeout_s for micro in self.micro.parked.values() if micro.plan.hand_off_at is not None), None)

    # -- preemption ----------------------------------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        micro = self.micro.by_id.get(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)
        self.preemptions += 1
        if micro is not None and micro.parked and self.micro.is_delivered(micro):
            self._delivered_and_preempted.append(request.request_id)

    def finish_delivered(self) -> None:
        """An alpha whose beta has everything is not computed again."""
        for request_id in self._delivered_and_preempted:
            micro = self.micro.by_id.get(request_id)
            if micro is not None and micro.plan.hand_off_at is not None:  # else it was lifted, and must go on
                self.micro.counts["finished_delivered"] += 1
                self.release(request_id)
        self._delivered_and_preempted.clear()
