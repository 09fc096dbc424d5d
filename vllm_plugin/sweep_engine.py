"""vLLM's engine, in this process, taking steps of a given composition: for `dynaserve profile`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request, RequestStatus

from dynaserve.errors import ConfigError
from dynaserve.live_profile import LiveProfile
from dynaserve.messages import MeasuredStep
from dynaserve.profiling.command import SPARE_TOKENS
from dynaserve.profiling.sweep import Limits, Point, answer_tokens
from dynaserve.step_latency import BatchShape, BudgetReason, PrefillWork
from dynaserve.step_planner import RunningDecodes, StepPlan, StepPlanner
from vllm_plugin.batching import SloScheduler
from vllm_plugin.device import profile_key
from vllm_plugin.options import PLUGIN, PluginOptions
from vllm_plugin.sweep_requests import sweep_request

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SweepPlanner(StepPlanner):
    """Takes as much prefill as it is told, and keeps what is measured."""

    prefill_tokens = 0
    measured: list[tuple[BatchShape, float]]

    def plan(self, decodes: RunningDecodes, waiting: Sequence[PrefillWork], now_s: float) -> StepPlan:
        return StepPlan(self.prefill_tokens, float("inf"), None, BudgetReason.all_work, late=False)

    def fits(self, decodes: int, context_tokens: int, slo_ms: float) -> bool:
        return True

    def observe(self, shape: BatchShape, plan: StepPlan, predicted_ms: float | None, measured_ms: float, draft_tokens: int = 0) -> None:
        self.measured.append((shape, measured_ms))


def make_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> Scheduler:
    scheduler_class = type("SweepScheduler", (SloScheduler, Scheduler), {})
    return obedient(scheduler_class(vllm_config=vllm_config, **kwargs))


def obedient(scheduler: Any) -> Any:
    """The scheduler, which plans its steps with a SweepPlanner from now on."""
    most = scheduler.max_num_scheduled_tokens
    scheduler.accounts.planner = SweepPlanner(LiveProfile(), most, min_prefill_tokens=0, unprofiled_prefill_tokens=most)
    scheduler.accounts.planner.measured = []
    return scheduler


class SweepEngine:
    """See `dynaserve.profiling.command.Engine`. Raises ConfigError for options that vLLM refuses."""

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="dynaserve profile", add_help=False))
        args = parser.parse_args(["--model", model, *arguments])
        config = _config(args)
        self.key = profile_key(config)
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        scheduler: Any = self._core.scheduler
        self.limits = Limits(
            step_tokens=config.scheduler_config.max_num_batched_tokens,
            requests=config.scheduler_config.max_num_seqs,
            kv_tokens=scheduler.kv_cache_manager.block_pool.num_gpu_blocks * scheduler.block_size,
            model_tokens=scheduler.max_model_len,
        )
        self._steps = Steps(self._core, self.limits.step_tokens)

    def measure(self, point: Point, times: int) -> list[MeasuredStep]:
        return self._steps.measure(point, times)

    def close(self) -> None:
        self._core.shutdown()


class Core(Protocol):
    """What is used of vLLM's `EngineCore`. scheduler: an `obedient` one."""

    scheduler: Any
    request_block_hasher: Any
    step_fn: Callable[[], Any]
    add_request: Callable[[Request], Any]


class Steps:
    """Steps of a given composition, and the decodes that are held for them. step_tokens: the most of one step."""

    def __init__(self, core: Core, step_tokens: int) -> None:
        self._core, self._scheduler, self._step_tokens = core, core.scheduler, step_tokens
        self._added = 0
        self._held: tuple[int, list[str]] = (0, [])
        """Context and ids of the decodes that run now."""

    def measure(self, point: Point, times: int) -> list[MeasuredStep]:
        """See `dynaserve.profiling.command.Engine`."""
        self._hold(point.decodes, point.context_tokens, times)
        return [self._step(point.prefill_tokens) for _ in range(times)]

    def _step(self, prefill_tokens: int) -> MeasuredStep:
        planner = self._scheduler.accounts.planner
        planner.prefill_tokens = prefill_tokens
        if prefill_tokens:
            self._add(prefill_tokens, output_tokens=1)
        planner.measured.clear()
        self._core.step_fn()
        (shape, measured_ms), *rest = planner.measured
        assert not rest
        return MeasuredStep(shape.prefill_tokens, shape.prefill_pairs, shape.decodes, shape.decode_context_tokens, measured_ms)

    def _hold(self, decodes: int, context_tokens: int, steps: int) -> None:
        """For so many steps just so many requests run, whose prompts have so many tokens; of more ones of the same context the first
        are kept."""
        context, names = self._held
        if context != context_tokens or len(names) < decodes or not all(self._lasts(name, steps) for name in names[:decodes]):
            self._end(names)
            names = self._filled(decodes, context_tokens)
        self._end(names[decodes:])
        self._held = (context_tokens, names[:decodes])

    def _lasts(self, name: str, steps: int) -> bool:
        request = self._scheduler.requests.get(name)
        return request is not None and request.max_tokens - request.num_output_tokens >= steps

    def _filled(self, decodes: int, context_tokens: int) -> list[str]:
        """The ids of so many new decodes."""
        tokens = answer_tokens(decodes, context_tokens, self._step_tokens, SPARE_TOKENS)
        names = [self._add(context_tokens, output_tokens=tokens) for _ in range(decodes)]
        self._scheduler.accounts.planner.prefill_tokens = self._step_tokens
        while any(self._scheduler.requests[name].num_output_tokens == 0 for name in names):
            self._core.step_fn()
        return names

    def _end(self, names: list[str]) -> None:
        self._scheduler.finish_requests([name for name in names if name in self._scheduler.requests], RequestStatus.FINISHED_ABORTED)

    def _add(self, prompt_tokens: int, output_tokens: int) -> str:
        self._added += 1
        request = sweep_request(self._added, prompt_tokens, output_tokens, self._core.request_block_hasher)
        self._core.add_request(request)
        return str(request.request_id)


def _config(args: argparse.Namespace) -> VllmConfig:
    engine_args: Any = EngineArgs.from_cli_args(args)
    engine_args.scheduler_cls = "vllm_plugin.sweep_engine.make_scheduler"
    engine_args.enable_prefix_caching = False
    engine_args.async_scheduling = False
    engine_args.additional_config = {PLUGIN: PluginOptions().to_config()}
    try:
        return engine_args.create_engine_config()
    except ValueError as error:
        raise ConfigError(str(error)) from error
