"""The local scheduler of an instance: vLLM's own, with requests that stop at, or start from, a hand-off point.

`alphas` and `betas` hold what is special about either; here they meet the engine's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from dynaserve.errors import ConfigError
from vllm_plugin import patches
from vllm_plugin.alphas import AlphaScheduler
from vllm_plugin.batching import SloScheduler
from vllm_plugin.betas import BetaScheduler
from vllm_plugin.heart import Heart, StepClock
from vllm_plugin.micro_requests import EXTRA_ARG, MicroRequests, plan_of
from vllm_plugin.options import PluginOptions
from vllm_plugin.resuming import ResumingFirst
from vllm_plugin.wake import Alarm

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_plugin.connector import DynaServeConnector
    from vllm_plugin.step_accounts import StepAccounts

EVENT_CARRIER = ""
"""Request id of the output that carries this step's events to the gateway (`kv_transfer_params`); no real id is empty."""


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    """`--scheduler-cls`: the class must match the engine's mode, and vLLM does not check it."""
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    batching = (SloScheduler,) if PluginOptions.from_config(vllm_config).batching == "slo" else ()
    scheduler_class = type("DynaServeScheduler", (CutScheduler, *batching, ResumingFirst, base), {})
    scheduler: Scheduler = scheduler_class(vllm_config=vllm_config, **kwargs)
    return scheduler


class CutScheduler(AlphaScheduler, BetaScheduler):
    """Mixin over vLLM's `Scheduler` or `AsyncScheduler`."""

    connector: DynaServeConnector
    accounts: StepAccounts | None = None
    """Those of `SloScheduler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.micro = MicroRequests()
        self.monotonic: Callable[[], float] = time.monotonic
        super().__init__(*args, **kwargs)
        self._check()
        options = PluginOptions.from_config(self.vllm_config)
        self._park_timeout_s = options.park_timeout_ms / 1e3
        self._most_parked = options.max_parked
        self._alarm: Alarm | None = None
        self._heart: Heart | None = None
        self._host = options.host
        self._secret = options.read_secret()
        self.steps = StepClock()
        self._stuck = self._freed = False
        self.connector.bind(self)
        patches.install_engine_core_calls()
        patches.install_drain()

    def _check(self) -> None:
        """Raises ConfigError for an engine whose requests cannot be cut, or would not be what they are uncut."""
        groups = len(self.kv_cache_config.kv_cache_groups)
        if groups != 1:
            raise ConfigError(f"the model has {groups} KV cache groups; DynaServe cuts requests of models with exactly one")
        # Others free or leave out blocks within a prompt, and what a beta takes over is all of them.
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        if type(manager) is not FullAttentionManager:
            raise ConfigError(
                f"the model's KV cache is kept by {type(manager).__name__}; DynaServe cuts requests of models with full attention"
            )
        if not self.scheduler_config.enable_chunked_prefill:
            raise ConfigError("chunked prefill is off; DynaServe computes prompts in parts, which some models cannot on some platforms")
        if (cache_dtype := self.vllm_config.cache_config.cache_dtype).endswith("per_token_head"):
            # v1/attention/backends/triton_attn.py:430: with its first step a fresh instance sets the scales of all blocks, also of those
            # that have come.
            raise ConfigError(f"--kv-cache-dtype {cache_dtype} is not supported with --plugin dynaserve")

    def listen_to_workers(self, wake: Callable[[], None]) -> None:
        """From now on the engine is woken when a worker has news; `wake` is called from another thread."""
        self._alarm = Alarm(self.connector.bells, wake, self._secret)

    def start_heart(self) -> str:
        """From now on signs of life are sent. Returns the address where."""
        self._heart = Heart(self._host, self.steps, self._secret)
        return self._heart.address

    def shutdown(self) -> None:
        if self._alarm is not None:
            self._alarm.close()
        if self._heart is not None:
            self._heart.close()
        super().shutdown()

    def add_request(self, request: Request) -> None:
        plan = plan_of(request.sampling_params and request.sampling_params.extra_args)
        if plan is None:
            super().add_request(request)
            return
        micro = self.micro.add(request.request_id, plan)
        if plan.output_token_ids:
            self.take_outputs_of_lost(request, plan.output_token_ids)
        if not micro.is_beta or self.reserve(request, micro):
            super().add_request(request)  # a beta's status sends it to kv_holding_waiting
        else:
            self.forget_refused(request)

    def take_outputs_of_lost(self, request: Request, output_token_ids: list[int]) -> None:
        """The request goes on where an instance that was lost has left it: its output is computed anew, as after a preemption.

        The worker reads these tokens from the plan (`patches._with_output_tokens`).
        """
        request.append_output_token_ids(output_token_ids)
        # vLLM asserts num_computed <= num_prompt for requests that still owe prefill statistics (scheduler.py:1076).
        request.prefill_stats = None

    def peers_lost(self, worker_ids: list[str], transfer_ids: list[str]) -> None:
        """Another instance is dead: of these transfers nothing more comes from its workers, nor goes to them."""
        self.micro.peers_lost(worker_ids, transfer_ids)

    def blocks_came_free(self) -> None:
        """A reservation that was granted in part may grow in a step that nothing else asks for."""
        self._freed = any(micro.revocable for micro in self.micro.betas.values())

    def move_hand_off(self, request_id: str, hand_off_at: int | None) -> bool:
        """False: the request is gone, or its hand-off cannot move there any more."""
        micro, request = self.micro.by_id.get(request_id), self.requests.get(request_id)
        if micro is None or request is None or micro.ended:
            return False
        if micro.is_alpha:
            return self.move_alpha(micro, request, hand_off_at)
        return micro.is_beta and self.move_beta(micro, hand_off_at)

    def cut_whole(self, request_id: str, hand_off_at: int, transfer_id: str) -> bool:
        """False: the request is over, or was cut before."""
        micro, request = self.micro.by_id.get(request_id), self.requests.get(request_id)
        if micro is None or request is None or micro.ended or not self.micro.cut(micro, hand_off_at, transfer_id):
            return False
        return self.move_alpha(micro, request, hand_off_at)

    # -- every step ----------------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Whether a step would do anything; requests that wait for another instance do not count (docs/kv_transfer.md, waking up)."""
        if self._alarm is None:
            return bool(super().has_requests())
        self._take_landed(self._alarm)
        return (
            self._alarm.rings.is_set()
            or self.micro.has_messages
            or self._freed
            or bool(self.finished_req_ids)
            or (self._counts_all and bool(super().has_requests()))
            or self._has_runnable()
        )

    @property
    def _counts_all(self) -> bool:
        """A pause is complete once vLLM counts no request, and may take the cache away, which others may still read or write."""
        return self.ec_connector is not None or self._pause_state is not PauseState.UNPAUSED

    def _take_landed(self, alarm: Alarm) -> None:
        while alarm.landed:
            self.micro.landed(*alarm.landed.popleft())

    def _has_runnable(self) -> bool:
        if self._pause_state is PauseState.PAUSED_ALL:
            return False
        if any(request.request_id not in self.micro.parked for request in self.running):
            return True
        lifted = sum(micro.plan.hand_off_at is None for micro in self.micro.parked.values())
        if lifted or len(self.micro.parked) > self._most_parked:
            return True  # waits for a slot, or is about to be lifted
        if len(self.waiting) and self._pause_state is PauseState.UNPAUSED:
            return True
        return any(self._is_runnable(request) for request in self.kv_holding_waiting)

    def _is_runnable(self, request: Request) -> bool:
        micro = self.micro.betas.get(request.request_id)
        if micro is None:  # a session's next input comes as a message, which wakes
            return bool(request.status != RequestStatus.WAITING_FOR_STREAMING_REQ)
        received = self.micro.all_landed(micro) or request.request_id in self.finished_recving_kv_req_ids
        return micro.end_index is not None and received

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        now_s = self.monotonic()
        if self._alarm is not None:
            self._alarm.rings.clear()
            self._take_landed(self._alarm)
        self._freed = False
        self.finish_delivered()
        self.promote_betas()
        self.settle_parked(now_s, self._park_timeout_s, self._most_parked)
        self.revoke_for_running(now_s, stuck=self._stuck)
        self.grow_reservations()
        output = super().schedule(*args, **kwargs)
        self._stuck = output.total_num_scheduled_tokens == 0 and self._has_ready_waiting()
        self._count(output)
        self.steps.begin(output, now_s, self.predicted_step_ms())
        return output

    def predicted_step_ms(self) -> float | None:
        """Of the step that was scheduled last, where a local scheduler knows."""
        return None if self.accounts is None else self.accounts.predicted_ms

    def _has_ready_waiting(self) -> bool:
        """Of those, one at least could run, had it blocks."""
        if self._pause_state is not PauseState.UNPAUSED or len(self.running) >= self.max_num_active_reqs:
            return False
        waiting = (*self.kv_holding_waiting, *self.waiting)
        return any(not self._is_blocked_waiting_status(request.status) and self.fits_adapters(request) for request in waiting)

    def _count(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            if (micro := self.micro.by_id.get(new.req_id)) and not micro.is_beta:
                micro.cached_tokens = new.num_computed_tokens
        for request_id, tokens in output.num_scheduled_tokens.items():
            if micro := self.micro.by_id.get(request_id):
                micro.computed_tokens += tokens

    def parked_requests(self) -> Collection[str]:
        """Alphas at their hand-off point."""
        return self.micro.parked.keys()

    def is_followed(self, request: Request) -> bool:
        """Front-ends hear of their own requests; the others, of clients of this server, have ids of any length."""
        return request.request_id in self.micro.by_id

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        if (connector_output := model_runner_output.kv_connector_output) is not None:
            self.connector.take_reports(connector_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self.steps.end(scheduler_output)
        now_s = self.monotonic()
        if scheduler_output.total_num_scheduled_tokens:
            self.steps.active_s = now_s
        for request_id in scheduler_output.num_scheduled_tokens:
            self.park_if_at_hand_off(request_id, now_s)
        self.steps.holding = self.micro.holding
        if self._alarm is not None:
            self._alarm.deadline_s = self.next_lift_s(self._park_timeout_s)
        if events := self.micro.take_events():
            carrier = EngineCoreOutput(EVENT_CARRIER, [], kv_transfer_params={EXTRA_ARG: msgspec.to_builtins(events)})
            outputs.setdefault(0, EngineCoreOutputs()).outputs.append(carrier)
        return outputs
