"""The local scheduler of an instance: vLLM's own, with requests that stop at, or start from, a hand-off point.

An alpha is an ordinary request that is not scheduled beyond `hand_off_at` (VLLM_FACTS 4.6: `_reserve_prefill_lookahead`
is the last word on a request's tokens in both scheduling loops).  A beta has blocks reserved by token count, waits as
vLLM's asynchronous KV loads do, and is promoted when its KV *and* the alpha's tokens are there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from dynaserve.errors import ConfigError
from dynaserve.messages import Granted, Refused
from vllm_plugin import patches
from vllm_plugin.batching import SloScheduler
from vllm_plugin.micro_requests import EXTRA_ARG, MicroRequest, MicroRequests, Reserve, plan_of
from vllm_plugin.options import PluginOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_plugin.connector import DynaServeConnector

logger = logging.getLogger("vllm.dynaserve.scheduler")

EVENT_CARRIER = ""
"""Request id of the output that carries this step's events to the gateway (`kv_transfer_params`); no real id is empty."""


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """`--scheduler-cls`: the class must match the engine's mode, and vLLM does not check it (VLLM_FACTS 2.1)."""
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    batching = (SloScheduler,) if PluginOptions.from_config(vllm_config).batching == "slo" else ()
    scheduler_class = type("DynaServeScheduler", (CutScheduler, *batching, base), {})
    scheduler: Scheduler = scheduler_class(vllm_config=vllm_config, **kwargs)
    return scheduler


class CutScheduler(Scheduler):
    """Mixin over vLLM's `Scheduler` or `AsyncScheduler`."""

    connector: DynaServeConnector

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = len(self.kv_cache_config.kv_cache_groups)
        if groups != 1:
            raise ConfigError(f"the model has {groups} KV cache groups; DynaServe cuts requests of models with exactly one")
        self.micro = MicroRequests()
        self.connector.bind(self.micro)
        patches.install_engine_core_calls()

    # -- beta: reserve, continue, resume ------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        plan = plan_of(request.sampling_params and request.sampling_params.extra_args)
        if plan is None:
            super().add_request(request)
            return
        micro = self.micro.add(request.request_id, plan)
        if not micro.is_beta:
            super().add_request(request)
        elif self._reserve(request, micro):
            super().add_request(request)  # its status sends it to kv_holding_waiting
        else:
            self.micro.forget(request.request_id)

    def _reserve(self, request: Request, micro: MicroRequest) -> bool:
        """Takes blocks for the first `hand_off_at` tokens, now or not at all; never waits."""
        plan = micro.plan
        assert plan.hand_off_at is not None
        assert plan.transfer_id is not None
        assert plan.transport is not None
        if not self._leaves_room(plan.hand_off_at):
            return False
        blocks, cached, *_ = self._get_local_prefix_cache_hit(request)
        # One block at least is transferred: vLLM cannot hold a request that has nothing to wait for.
        usable = min(cached, plan.hand_off_at - 1) // self.block_size * self.block_size
        if usable < cached:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, usable)
        allocated = self.kv_cache_manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=usable,
            new_computed_blocks=blocks,
            num_external_computed_tokens=plan.hand_off_at - usable,
            delay_cache_blocks=True,
            reserved_blocks=self._inflight_prefill_reserved_blocks(),
        )
        if allocated is None:
            return False
        micro.cached_tokens = usable
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = plan.hand_off_at
        self._inflight_prefills.add(request)
        # allocate_slots returns without the externally computed blocks (VLLM_FACTS 11.3).
        block_ids = self.kv_cache_manager.get_blocks(request.request_id).get_block_ids()[0]
        first = usable // self.block_size
        self.micro.command(
            request.request_id,
            Reserve(plan.transfer_id, tuple(plan.senders), plan.transport, first, tuple(block_ids[first:])),
        )
        return True

    def _leaves_room(self, hand_off_at: int) -> bool:
        """Reservations are not preemptible: always leave enough for one request of any length, so that two instances that
        reserve for each other can each still run an alpha to its end."""
        reserved = sum(
            -(-(other.plan.hand_off_at or 0) // self.block_size)
            for other in self.micro.by_id.values()
            if other.is_beta and other.exposed and not other.resumed
        )
        longest = -(-self.max_model_len // self.block_size)
        return bool(reserved + hand_off_at // self.block_size + 1 + longest < self.kv_cache_manager.block_pool.num_gpu_blocks)

    def reservation(self, request_id: str) -> Granted | Refused:
        """What became of an announced request."""
        micro = self.micro.by_id.get(request_id)
        if micro is None:
            usage = self.kv_cache_manager.usage
            return Refused(request_id, f"no KV blocks to reserve: {usage:.0%} of the cache is in use")
        return Granted(request_id, micro.cached_tokens)

    def continue_request(self, request_id: str, output_token_ids: list[int]) -> bool:
        """The alpha is done and has sampled these tokens. False: the request is gone."""
        micro, request = self.micro.by_id.get(request_id), self.requests.get(request_id)
        if micro is None or micro.ended or request is None or not micro.is_beta or micro.plan.output_token_ids is not None:
            return False
        assert micro.plan.hand_off_at is not None
        expected = max(0, micro.plan.hand_off_at - request.num_prompt_tokens + 1)
        if len(output_token_ids) != expected:  # vLLM would run into an assertion, which ends the engine
            logger.error("%s: continued with %d output tokens instead of %d", request_id, len(output_token_ids), expected)
            self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
            return False
        micro.plan.output_token_ids = output_token_ids
        # The worker reads the tokens from here when the request is first scheduled (patches.V1_OUTPUT_TOKENS).
        request.sampling_params.extra_args[EXTRA_ARG] = msgspec.to_builtins(micro.plan)
        if output_token_ids:
            request.append_output_token_ids(output_token_ids)
            # scheduler.py:1076 asserts num_computed <= num_prompt for requests that still owe prefill statistics.
            request.prefill_stats = None
        return True

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        micro = self.micro.by_id.get(request.request_id)
        if micro is None or not micro.is_beta or micro.resumed:
            return bool(super()._handle_blocked_waiting_request(request))
        if micro.plan.output_token_ids is None:
            return False
        ready = bool(super()._handle_blocked_waiting_request(request))
        if ready:
            self.micro.resume(micro)
        return ready

    # -- alpha: stop at the hand-off point, move it, release ------------------------------------------------------------

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

    def move_hand_off(self, request_id: str, hand_off_at: int | None) -> bool:
        """Moves the point at which the alpha stops, or lifts it (None).

        False: the request is gone, or has reached its hand-off point or `hand_off_at` already, or could never reach it.
        """
        micro, request = self.micro.by_id.get(request_id), self.requests.get(request_id)
        if micro is None or micro.ended or request is None or not micro.is_alpha:
            return False
        if hand_off_at is not None and (micro.complete or not request.num_computed_tokens < hand_off_at < self.max_model_len):
            return False
        micro.plan.hand_off_at = hand_off_at
        micro.parked = False
        return True

    def release(self, request_id: str) -> None:
        """The beta does not need the alpha any more: free it, without an output."""
        self.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    # -- every step ----------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._promote_betas()
        self._keep_parked_alphas_first()
        output = super().schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:
            if (micro := self.micro.by_id.get(new.req_id)) and not micro.is_beta:
                micro.cached_tokens = new.num_computed_tokens
        for request_id, tokens in output.num_scheduled_tokens.items():
            if micro := self.micro.by_id.get(request_id):
                micro.computed_tokens += tokens
        return output

    def _promote_betas(self) -> None:
        """Resumes betas whose KV and tokens are here, even while no slot is free to run them.

        Otherwise two instances full of parked alphas would wait for each other: vLLM looks at waiting requests only
        while it may run another one, and only a resumed beta releases its alpha.
        """
        if self._pause_state is PauseState.PAUSED_ALL:
            return
        for request in list(self.kv_holding_waiting):
            micro = self.micro.by_id.get(request.request_id)
            if micro is not None and micro.is_beta and not micro.resumed:
                self._handle_blocked_waiting_request(request)

    def _keep_parked_alphas_first(self) -> None:
        """vLLM preempts the last running request first; a parked alpha would recompute what its beta already has."""
        parked = [r for r in self.running if (micro := self.micro.by_id.get(r.request_id)) and micro.parked]
        if parked:
            self.running[:] = [*parked, *(r for r in self.running if r not in parked)]

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self._park_if_at_hand_off(request_id)
        if events := self.micro.take_events():
            carrier = EngineCoreOutput(EVENT_CARRIER, [], kv_transfer_params={EXTRA_ARG: msgspec.to_builtins(events)})
            outputs.setdefault(0, EngineCoreOutputs()).outputs.append(carrier)
        return outputs

    def _park_if_at_hand_off(self, request_id: str) -> None:
        micro, request = self.micro.by_id.get(request_id), self.requests.get(request_id)
        if micro is None or request is None or not micro.is_alpha or micro.parked or request.is_finished():
            return
        if micro.plan.hand_off_at == request.num_computed_tokens - request.num_in_flight_tokens:
            self._inflight_prefills.discard(request)  # it needs no more blocks (VLLM_FACTS 4.6 c)
            self.micro.park(micro)
