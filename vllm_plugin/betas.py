"""Betas on an instance: blocks reserved by token count, filled by another instance, and a request that starts from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from dynaserve.kv_transfer.receiver import Extend
from dynaserve.messages import Granted, Refused
from dynaserve.request_log import of_request
from vllm_plugin.micro_requests import EXTRA_ARG, Reserve

if TYPE_CHECKING:
    from vllm_plugin.micro_requests import MicroRequest, MicroRequests

logger = logging.getLogger("vllm.dynaserve.scheduler")

REVOKED_BLOCKS_WAIT_S = 0.5
"""How long running requests wait for revoked blocks, which their sender must confirm, before one of them is preempted."""


class BetaScheduler(Scheduler):
    """Mixin over vLLM's scheduler.

    A reservation never waits: it is granted, granted in part and grown when there is room, or refused; until `Continue` it
    is taken back when running requests need its blocks.  The request waits as vLLM's asynchronous KV loads do.
    """

    micro: MicroRequests
    monotonic: Callable[[], float]
    fits_adapters: Callable[[Request], bool]
    _revoked_s: float = float("-inf")

    # -- reserve, grow, take back --------------------------------------------------------------------------------------

    def reserve(self, request: Request, micro: MicroRequest) -> bool:
        """Takes blocks for what the beta begins with, or for as many tokens as there is room for, now or not at all."""
        if self._pause_state is not PauseState.UNPAUSED:
            return False  # KV may not come into a cache that an engine at sleep has given up (gpu_worker.py:294)
        plan = micro.plan
        assert plan.hand_off_at is not None
        assert plan.transfer_id is not None
        assert plan.transport is not None
        blocks, cached, *_ = self._get_local_prefix_cache_hit(request)
        # One block at least is transferred: vLLM cannot hold a request that has nothing to wait for.
        usable = min(cached, plan.hand_off_at - 1) // self.block_size * self.block_size
        if usable < cached:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, usable)
        tokens = min(self._begins_with(request, plan.hand_off_at), usable + self._room() * self.block_size)
        if tokens <= usable:
            return False
        allocated = self.kv_cache_manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=usable,
            new_computed_blocks=blocks,
            num_external_computed_tokens=tokens - usable,
            delay_cache_blocks=True,
        )
        if allocated is None:
            return False
        micro.cached_tokens = usable
        micro.first_index = usable // self.block_size
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = tokens
        self._inflight_prefills.add(request)
        # allocate_slots returns without the externally computed blocks (kv_cache_manager.py).
        block_ids = self.kv_cache_manager.get_blocks(request.request_id).get_block_ids()[0]
        command = Reserve(plan.transfer_id, tuple(plan.senders), plan.transport, micro.first_index, tuple(block_ids[micro.first_index :]))
        self.micro.command(request.request_id, command)
        self._tell_granted(micro, len(block_ids), tokens)
        if tokens < plan.hand_off_at:
            self.micro.counts["granted_in_part"] += 1
        return True

    def _begins_with(self, request: Request, hand_off_at: int) -> int:
        """Tokens: those that come, and where the whole prompt does, the slots of its first step here. Nobody may be there to give up
        blocks for it then: vLLM preempts for those that run, and keeps room for the rest of a prompt only
        (`_inflight_prefill_reserved_blocks`)."""
        if hand_off_at < request.num_prompt_tokens:
            return hand_off_at
        return int(min(hand_off_at + 1 + self.num_lookahead_tokens, self.max_model_len))

    def _tell_granted(self, micro: MicroRequest, blocks: int, tokens: int) -> None:
        """tokens: that the blocks hold, of which no more than `hand_off_at` come."""
        assert micro.plan.hand_off_at is not None
        self.micro.granted(micro, blocks, min(tokens, micro.plan.hand_off_at))

    def reservation(self, request_id: str) -> Granted | Refused:
        """What became of an announced request."""
        micro = self.micro.by_id.get(request_id)
        if micro is None:
            paused = "" if self._pause_state is PauseState.UNPAUSED else ", and the engine is paused"
            return Refused(request_id, f"no KV blocks to reserve: {self.kv_cache_manager.usage:.0%} of the cache is in use{paused}")
        assert micro.plan.hand_off_at is not None
        tokens = min(self.requests[request_id].num_computed_tokens, micro.plan.hand_off_at)
        return Granted(request_id, micro.cached_tokens, tokens)

    def _room(self) -> int:
        """Blocks that may be reserved: what is free, less what running and waiting requests are going to ask for next."""
        free = int(self.kv_cache_manager.block_pool.get_num_free_blocks()) - self._inflight_prefill_reserved_blocks()
        if free <= len(self.running):  # nobody looks through a long queue in vain
            return 0
        longest = max((self._blocks_to_come(request) for request in (*self.running, *self.waiting)), default=0)
        return int(free - len(self.running) - longest)

    def _blocks_to_come(self, request: Request) -> int:
        tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return int(-(-tokens // self.block_size) - -(-request.num_computed_tokens // self.block_size))

    def grow_reservations(self) -> None:
        """Gives reservations that were granted in part what there is room for now, the oldest first."""
        room: int | None = None  # the same for all, and dear where many wait
        for request_id, micro in self.micro.betas.items():
            if not micro.revocable or micro.plan.hand_off_at is None:
                continue
            request = self.requests[request_id]
            wanted = self._begins_with(request, micro.plan.hand_off_at)
            if request.num_computed_tokens >= wanted:
                continue
            room = self._room() if room is None else room
            if room <= 0:
                return
            if self._grow(request, micro, min(wanted, (micro.granted_blocks + room) * self.block_size)):
                room = None

    def _grow(self, request: Request, micro: MicroRequest, tokens: int) -> bool:
        """Reserves up to `tokens`; False: there are no blocks."""
        more = tokens - request.num_computed_tokens
        if more <= 0:
            return True
        # Leaves what others, and this request's own prompt, still need: none of them could be preempted for it.
        own = self._request_remaining_blocks(request)
        new = -(-tokens // self.block_size) - micro.granted_blocks
        reserved = self._inflight_prefill_reserved_blocks() - own + max(0, own - new)
        if self.kv_cache_manager.allocate_slots(request, more, delay_cache_blocks=True, reserved_blocks=reserved) is None:
            return False
        request.num_computed_tokens = tokens
        block_ids = self.kv_cache_manager.get_blocks(request.request_id).get_block_ids()[0]
        if len(block_ids) > micro.granted_blocks:
            assert micro.plan.transfer_id is not None
            self.micro.command(request.request_id, Extend(micro.plan.transfer_id, tuple(block_ids[micro.granted_blocks :])))
        self._tell_granted(micro, len(block_ids), tokens)
        return True

    def move_beta(self, micro: MicroRequest, hand_off_at: int | None) -> bool:
        """Reserves up to there from now on; what is reserved beyond stays. False: the alpha has already stopped."""
        if hand_off_at is None or not micro.revocable or not 0 < hand_off_at < self.max_model_len:
            return False
        micro.plan.hand_off_at = hand_off_at
        return True

    def revoke_for_running(self, now_s: float, *, stuck: bool) -> None:
        """Takes reservations back, the youngest first, until this step has the blocks that it needs; one if nothing moves."""
        revocable = [micro for micro in reversed(self.micro.betas.values()) if micro.revocable]
        if not revocable or now_s - self._revoked_s < REVOKED_BLOCKS_WAIT_S:
            return
        missing = self._blocks_of_this_step() - int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        if stuck:  # the last step found no room for anything
            missing = max(missing, 1)
        # Those that were taken back before are still to come.
        missing -= sum(micro.granted_blocks - micro.first_index for micro in self.micro.betas.values() if micro.ended)
        for micro in revocable:
            if missing <= 0:
                return
            missing -= micro.granted_blocks - micro.first_index
            self.revoke(micro, "its blocks are needed by running requests")
            self._revoked_s = now_s

    def _blocks_of_this_step(self) -> int:
        """At most: whole prefill chunks count, whatever the local scheduler will make of them (`max_num_scheduled_tokens` is what it
        made of those of the last step)."""
        budget = self.scheduler_config.max_num_batched_tokens
        blocks = 0
        for request in self.running:
            if request.request_id in self.micro.parked:
                continue
            tokens = min(request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens, budget)
            blocks += -(-(request.num_computed_tokens + tokens) // self.block_size) - -(-request.num_computed_tokens // self.block_size)
        return blocks

    def revoke(self, micro: MicroRequest, reason: str) -> None:
        """The blocks come back when the sender has confirmed that it does not write them any more."""
        self.micro.revoked(micro, reason)
        self.finish_requests(micro.request_id, RequestStatus.FINISHED_ABORTED)

    def revoked_blocks_are_due(self) -> bool:
        """Whether blocks that were taken back will be free in a moment: running requests wait for them (scheduler.py:788)."""
        waits = any(micro.ended for micro in self.micro.betas.values())
        return waits and self.monotonic() - self._revoked_s < REVOKED_BLOCKS_WAIT_S

    # -- continue, resume ----------------------------------------------------------------------------------------------

    def continue_request(
        self, request_id: str, hand_off_at: int, output_token_ids: list[int], waited_ms: float, *, alpha_lost: bool = False
    ) -> bool:
        """The alpha has stopped at `hand_off_at` tokens, having sampled these. False: the request is gone, or is given up.

        waited_ms: since the message came, for the end of a step. alpha_lost: as of `Continue`.
        """
        micro, request = self.micro.by_id.get(request_id), self.requests.get(request_id)
        if micro is None or request is None or not micro.revocable:
            return False
        expected = max(0, hand_off_at - request.num_prompt_tokens + 1)
        if len(output_token_ids) != expected:  # vLLM would run into an assertion, which ends the engine
            told = "%s: continued with %d output tokens instead of %d"
            logger.error(told, request_id, len(output_token_ids), expected, extra=of_request(request_id))
            self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
            return False
        if not self._grow(request, micro, self._begins_with(request, hand_off_at)):
            self.revoke(micro, f"no KV blocks for {hand_off_at} tokens: {request.num_computed_tokens} are reserved")
            return False
        micro.step_rest_ms, micro.alpha_lost = waited_ms, alpha_lost
        request.num_computed_tokens = max(hand_off_at, micro.cached_tokens)
        self._take_outputs(request, micro, output_token_ids)
        self.micro.complete(micro, max(micro.first_index, -(-hand_off_at // self.block_size)))
        return True

    def _take_outputs(self, request: Request, micro: MicroRequest, output_token_ids: list[int]) -> None:
        micro.plan.output_token_ids = output_token_ids
        # The worker reads the tokens from here when the request is first scheduled (`patches.install_worker_patches`).
        request.sampling_params.extra_args[EXTRA_ARG] = msgspec.to_builtins(micro.plan)
        if output_token_ids:
            request.append_output_token_ids(output_token_ids)
            # scheduler.py:1076 asserts num_computed <= num_prompt for requests that still owe prefill statistics.
            request.prefill_stats = None

    def expect(self, request_id: str, at_s: float) -> None:
        """About when the alpha will stop; late messages for a request that is over are normal."""
        micro = self.micro.betas.get(request_id)
        if micro is not None:
            micro.expected_s = at_s

    def hands_over_s(self, request: Request, now_s: float) -> float | None:
        micro = self.micro.betas.get(request.request_id)
        if micro is None or micro.plan.hand_off_at is None or micro.plan.hand_off_at < request.num_prompt_tokens:
            return None
        if micro.end_index is not None:
            return now_s
        return None if micro.expected_s is None else max(now_s, micro.expected_s)

    def known_for_s(self, request: Request) -> float:
        micro = self.micro.by_id.get(request.request_id)
        return 0.0 if micro is None else 1e-3 * micro.step_rest_ms

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        micro = self.micro.betas.get(request.request_id)
        if micro is None:
            return self._handle_blocked_whole(request)
        if not self.can_resume(request, micro):
            return False
        # By what the workers' bells have told of arrived blocks: two steps earlier than by vLLM's own report of a finished transfer.
        self.finished_recving_kv_req_ids.add(request.request_id)
        if not super()._handle_blocked_waiting_request(request):
            return False
        self._accept_outputs(request, micro)
        self.micro.resume(micro)
        return self.fits_adapters(request)

    def _handle_blocked_whole(self, request: Request) -> bool:
        """No beta: it may wait for its grammar, which then stands where an instance that was lost has left it."""
        waited = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        may_run = bool(super()._handle_blocked_waiting_request(request))
        micro = self.micro.by_id.get(request.request_id)
        # It is there once only, though the request may have to wait on, as for an adapter.
        if micro is not None and waited and request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self._accept_outputs(request, micro)
        return may_run

    def can_resume(self, request: Request, micro: MicroRequest) -> bool:
        """KV, the alpha's tokens and the compiled grammar are there."""
        if micro.ended or micro.end_index is None or not self._grammar_is_ready(request):
            return False
        return request.request_id in self.finished_recving_kv_req_ids or self.micro.all_landed(micro)

    def _grammar_is_ready(self, request: Request) -> bool:
        """A beta's status says that it waits for KV, so vLLM does not look at its grammar."""
        if not request.use_structured_output:
            return True
        grammar = request.structured_output_request.grammar
        if isinstance(grammar, Exception):
            self.grammar_compile_error_reqs.add(request.request_id)
            return False
        return grammar is not None

    def _accept_outputs(self, request: Request, micro: MicroRequest) -> None:
        """Brings the grammar to where another instance has left it; once, since a request resumes once."""
        outputs = micro.plan.output_token_ids
        if request.use_structured_output and outputs and not self.structured_output_manager.accept_tokens(request, outputs):
            told = "%s: its grammar rejects the tokens of another instance; it ends"
            logger.error(told, request.request_id, extra=of_request(request.request_id))
            # As vLLM ends one whose grammar rejects its own tokens: what came next would be no answer to the grammar.
            self.grammar_compile_error_reqs.add(request.request_id)

    def promote_betas(self) -> None:
        """Resumes betas whose KV and tokens are here, even while no slot is free to run them.

        Otherwise two instances full of parked alphas would wait for each other: vLLM looks at waiting requests only
        while it may run another one, and only a resumed beta releases its alpha.
        """
        if self._pause_state is PauseState.PAUSED_ALL:
            return
        for request_id in list(self.micro.betas):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._handle_blocked_waiting_request(request)

    def forget_refused(self, request: Request) -> None:
        """A reservation that was refused leaves nothing behind."""
        self.micro.forget(request.request_id)
        self.micro.counts["refused"] += 1
