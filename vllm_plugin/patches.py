"""Every change to vLLM's own objects, each with its reason, and the check that this vLLM is the one they fit.

Importing this module changes nothing; each `install_*` is idempotent and runs in the one process that needs it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import inspect
import sys
import time
from typing import TYPE_CHECKING, Any

from dynaserve.errors import ConfigError
from vllm_plugin import options
from vllm_plugin.options import PLUGIN, PluginOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VLLM_VERSION = "0.32."
"""Prefix of the versions whose internals the rest of this file names."""

_EXPECTED: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs.add_cli_args": ("parser",),
    "vllm.plugins:load_endpoint_plugins": ("supported_tasks",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.has_pending_block_frees": ("self",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": ("self", "blocks", "num_computed_tokens"),
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": ("self", "request"),
    "vllm.v1.core.sched.scheduler:Scheduler._inflight_prefill_reserved_blocks": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead": (
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("self", "request_ids", "finished_status"),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    "vllm.v1.engine.core:EngineCoreProc._process_input_queue": ("self",),
    "vllm.v1.engine.core:EngineCoreProc._reject_utility_in_shutdown": ("self", "client_idx", "call_id", "method_name"),
    "vllm.v1.engine.core:EngineCoreProc.has_work": ("self",),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async": ("self", "method", "args"),
    "vllm.v1.engine.core_client:EngineCoreClient.make_async_mp_client": (
        "vllm_config",
        "executor_class",
        "log_stats",
        "client_addresses",
        "client_count",
        "client_index",
        "renderer",
    ),
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait": ("self", "timeout_ms"),
    "vllm.v1.engine.async_llm:AsyncLLM._add_request": ("self", "request", "prompt", "parent_req", "index", "queue"),
    "vllm.v1.request:Request.append_output_token_ids": ("self", "token_ids"),
    "vllm.v1.structured_output:StructuredOutputManager.accept_tokens": ("self", "request", "new_token_ids"),
    "vllm.v1.worker.gpu_input_batch:InputBatch.add_request": ("self", "request"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": (
        "self",
        "request",
        "num_new_tokens",
        "num_new_computed_tokens",
        "new_computed_blocks",
        "num_lookahead_tokens",
        "num_external_computed_tokens",
        "delay_cache_blocks",
        "num_encoder_tokens",
        "full_sequence_must_fit",
        "reserved_blocks",
        "has_scheduled_reqs",
        "skip_zeroing_group_ids",
    ),
}
_EXPECTED_BY_WORKERS = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": ("self", "logits", "spec_decode_metadata"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": (
        "self",
        "scheduler_output",
        "sampler_output",
        "logits",
        "hidden_states",
        "num_scheduled_tokens",
    ),
}
"""What only they import: that takes seconds."""


def check_vllm() -> None:
    """Raises ConfigError, naming both sides, if this vLLM is not the one that the plugin was written against."""
    version = importlib.metadata.version("vllm")
    if not version.startswith(VLLM_VERSION):
        raise ConfigError(f"--plugin dynaserve works with vLLM {VLLM_VERSION}*, this is vLLM {version}")
    _check_functions(_EXPECTED)


def _check_functions(expected_of: Mapping[str, tuple[str, ...]]) -> None:
    for path, expected in expected_of.items():
        found = _parameters(path)
        if found != expected:
            version = importlib.metadata.version("vllm")
            raise ConfigError(f"--plugin dynaserve expects {path}{expected}, vLLM {version} has {found or 'no such function'}")


def _parameters(path: str) -> tuple[str, ...] | None:
    module, _, name = path.partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    return None if target is None else tuple(inspect.signature(target).parameters)


# -- the command line: any process that builds vLLM's parser -------------------------------------------------------------


def install_command_line() -> None:
    """Adds our options, and acts on `--plugin dynaserve`.

    Why: vLLM has no `--plugin` flag, and general plugins have no hook for options; `AsyncEngineArgs.add_cli_args` loads
    plugins first and looks `EngineArgs.add_cli_args` up afterwards, so a wrapper installed here is used.
    """
    from vllm.engine.arg_utils import EngineArgs

    if hasattr(EngineArgs, "_dynaserve_installed"):
        return
    EngineArgs._dynaserve_installed = True
    add_cli_args, from_cli_args = EngineArgs.add_cli_args, EngineArgs.from_cli_args.__func__

    @functools.wraps(add_cli_args)
    def add_ours(parser: Any) -> Any:
        parser = add_cli_args(parser)
        options.add_arguments(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_ours(cls: Any, args: argparse.Namespace) -> Any:
        if options.is_on(args):
            try:
                turn_on(args)
            except ConfigError as error:
                print(f"vllm serve: {error}", file=sys.stderr)
                raise SystemExit(2) from error
        return from_cli_args(cls, args)

    EngineArgs.add_cli_args = staticmethod(add_ours)
    EngineArgs.from_cli_args = classmethod(from_ours)


_ONE_ONLY = (
    "api_server_count",
    "data_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
)


def turn_on(args: argparse.Namespace) -> None:
    """Makes this `vllm serve` an instance: our scheduler, connector and gateway. Raises ConfigError."""
    check_vllm()
    for flag in _ONE_ONLY:
        if (value := getattr(args, flag, None) or 1) > 1:
            raise ConfigError(f"--{flag.replace('_', '-')} {value} is not supported with --plugin dynaserve; use 1")
    # The route of the first two takes `SamplingParams.extra_args` from clients, and with it our plans. The next would put its own connector
    # in the place of ours (config/vllm.py:1099), the last but one asks a beta's worker for what only the alpha has computed, and the last
    # has a beta wait for blocks that it does not need, in the midst of its answer (kv_cache_manager.py:509).
    for flag in ("enable_scale_out", "tokens_only", "kv_offloading_size", "enable_return_routed_experts", "watermark"):
        if getattr(args, flag, None):
            raise ConfigError(f"--{flag.replace('_', '-')} is not supported with --plugin dynaserve")
    if getattr(args, "disable_log_stats", False):  # its statistics carry what instances tell of their load and steps
        raise ConfigError("--disable-log-stats is not supported with --plugin dynaserve: front-ends would hear nothing of its load")
    for flag in ("scheduler_cls", "kv_transfer_config"):
        if getattr(args, flag, None) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')} {getattr(args, flag)} conflicts with --plugin dynaserve, which sets it")
    from vllm.config import KVTransferConfig

    plugin_options = PluginOptions.from_args(args)
    plugin_options.read_secret()  # to refuse now; each process reads it for itself
    args.scheduler_cls = "vllm_plugin.scheduler.make_scheduler"
    args.kv_transfer_config = KVTransferConfig(
        kv_connector="DynaServeConnector",
        kv_connector_module_path="vllm_plugin.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    args.additional_config = {**(args.additional_config or {}), PLUGIN: plugin_options.to_config()}
    _install_gateway()


def _install_gateway() -> None:
    """Runs the gateway inside the API server.

    Why `process_engine_outputs`: it is the hook that sees the outputs of each step before AsyncLLM does, which must not see
    those of a front-end's requests.
    """
    from vllm.v1.engine.core_client import AsyncMPClient

    from vllm_plugin import gateway_endpoint

    if not hasattr(AsyncMPClient, "process_engine_outputs"):
        AsyncMPClient.process_engine_outputs = gateway_endpoint.take_fleet_outputs
        install_endpoint(gateway_endpoint.GatewayEndpoint)


def install_endpoint(factory: Callable[[], Any]) -> None:
    """Adds an endpoint plugin to the API server of this process.

    Why: vLLM loads endpoint plugins only if VLLM_PLUGINS names them, and that variable is an allow-list for plugins of every
    kind.
    """
    from vllm import plugins

    load = plugins.load_endpoint_plugins

    @functools.wraps(load)
    def load_with_ours(supported_tasks: Any = None) -> Any:
        return [*load(supported_tasks), factory()]

    plugins.load_endpoint_plugins = load_with_ours


# -- the engine core process ---------------------------------------------------------------------------------------------


def install_engine_core_calls() -> None:
    """Adds utility calls, which run between steps, to the engine core of this process.

    Why: it is vLLM's thread-safe way into the scheduler (`getattr(self, method)`, v1/engine/core.py:1687).
    """
    from vllm.v1.engine.core import EngineCore

    from vllm_plugin import engine_calls

    for name, call in vars(engine_calls).items():
        if name.startswith("dynaserve_"):
            setattr(EngineCore, name, call)


def install_drain() -> None:
    """With `--shutdown-timeout` the engine keeps what other instances wait for, and hears what they say about it.

    Why: nothing is computed for an alpha that stands at its hand-off point, so the engine would end (v1/engine/core.py:1665) before the
    beta has taken over; and what releases or lifts that alpha is a utility call, which it would refuse (core.py:1689).
    """
    from vllm.v1.engine.core import EngineCoreProc

    if hasattr(EngineCoreProc, "_dynaserve_installed"):
        return
    EngineCoreProc._dynaserve_installed = True
    has_work = EngineCoreProc.has_work
    EngineCoreProc.has_work = _also_while_awaited(has_work)
    EngineCoreProc._process_input_queue = _waiting_while_awaited(EngineCoreProc._process_input_queue, has_work)
    EngineCoreProc._reject_utility_in_shutdown = _but_ours(EngineCoreProc._reject_utility_in_shutdown)


def _is_awaited(core: Any) -> bool:
    """It finishes what it runs, and the beta of an alpha that stands here has not taken over yet."""
    from vllm.v1.engine.core import EngineShutdownState

    return bool(core.shutdown_state == EngineShutdownState.SHUTTING_DOWN and core.scheduler.parked_requests())


def _also_while_awaited(has_work: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(has_work)
    def wrapper(self: Any) -> bool:
        return has_work(self) or _is_awaited(self)

    return wrapper


def _waiting_while_awaited(process: Callable[[Any], None], has_work: Callable[[Any], bool]) -> Callable[[Any], None]:
    """Why: vLLM's loop sleeps in its input queue only while no shutdown was asked for (core.py:1576); it would turn without a pause."""

    @functools.wraps(process)
    def wrapper(self: Any) -> None:
        while _is_awaited(self) and not has_work(self):
            self._handle_client_request(*self.input_queue.get())
        process(self)

    return wrapper


def _but_ours(reject: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(reject)
    def wrapper(self: Any, client_idx: int, call_id: int, method_name: str) -> bool:
        return not method_name.startswith("dynaserve_") and reject(self, client_idx, call_id, method_name)

    return wrapper


def tell_before_shutdown(engine_client: Any, tell: Callable[[], None]) -> None:
    """Calls `tell` when the server is told to stop.

    Why: vLLM's launcher holds the signal handlers; `AsyncLLM.shutdown` is the first thing that it does then, in another thread.
    """
    shutdown = engine_client.shutdown

    @functools.wraps(shutdown)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tell()
        return shutdown(*args, **kwargs)

    engine_client.shutdown = wrapper


# -- any process of an engine ---------------------------------------------------------------------------------------------

BUSY_S, BUSY_RECHECK_MS, IDLE_RECHECK_MS = 1.0, 1, 20


def install_waits_that_sleep() -> None:
    """Engine core and workers wait for the notification that vLLM's writers send anyway, instead of polling for a second.

    Why: they poll shared memory with `sched_yield` (shm_broadcast.py:204). Where they share a core that takes the worker's time, and
    on Linux 6.18 each yield moves the caller a slice ahead in virtual time, and the average with it, at which whoever wakes up is
    placed: threads that had slept waited for over a second behind a worker (measured: 1.7 s; a real-time thread beside it 0 ms).
    Notifications get lost (`SNDHWM` 1), which costs an engine that has rested up to `SHM_READER_RECHECK_INTERVAL_MS`, 5 s: we look
    again much sooner.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    if not hasattr(SpinCondition, "_dynaserve_installed"):
        SpinCondition._dynaserve_installed = True
        SpinCondition.wait = _asleep(SpinCondition.wait)


def _asleep(wait: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(wait)
    def wrapper(self: Any, timeout_ms: int | None = None) -> None:
        busy = time.monotonic() <= self.last_read + BUSY_S
        limit_ms = BUSY_RECHECK_MS if busy else IDLE_RECHECK_MS
        self.busy_loop_s = -1.0  # never polls
        wait(self, limit_ms if timeout_ms is None else min(timeout_ms, limit_ms))

    return wrapper


# -- the worker processes ------------------------------------------------------------------------------------------------


def install_worker_patches() -> None:
    """V1 model runner: a beta's output tokens, and generators on CPU. The V2 runner needs neither. Raises ConfigError as `check_vllm`."""
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(InputBatch, "_dynaserve_installed"):
        return
    _check_functions(_EXPECTED_BY_WORKERS)
    InputBatch._dynaserve_installed = True
    InputBatch.add_request = _with_output_tokens(InputBatch.add_request)
    GPUModelRunner._sample = _without_discarded_generators(GPUModelRunner._sample)
    GPUModelRunner._bookkeeping_sync = _with_discarded_generators(GPUModelRunner._bookkeeping_sync)


def _with_output_tokens(add_request: Callable[..., Any]) -> Callable[..., Any]:
    """Why: the runner builds a new request's state with no output tokens (gpu_model_runner.py:1276), so a beta would read
    its last token, penalties and generator position from nowhere. Done once per state: rows are added again after a pause."""
    import torch

    from vllm_plugin.micro_requests import plan_of

    @functools.wraps(add_request)
    def wrapper(self: Any, request: Any) -> Any:
        plan = plan_of(request.sampling_params and request.sampling_params.extra_args)
        if plan is not None and plan.output_token_ids and not hasattr(request, "_dynaserve_done"):
            request._dynaserve_done = True
            request.output_token_ids.extend(plan.output_token_ids)
            if request.generator is not None:
                _advance_generator(torch, request.generator, len(plan.output_token_ids))
        return add_request(self, request)

    return wrapper


def _advance_generator(torch: Any, generator: Any, tokens: int) -> None:
    """Puts a seeded generator where it stands after `tokens` sampled tokens."""
    if generator.device.type == "cuda":  # exponential_ takes one Philox offset of 4 a token (not run here)
        generator.set_offset(generator.get_offset() + 4 * tokens)
    else:  # topk_topp_sampler.py:346 draws one integer a token
        torch.randint(0, 2**31, (tokens,), generator=generator, dtype=torch.long)


def _without_discarded_generators(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Why: a row whose prompt is not complete is sampled and thrown away; the runner then rewinds its generator, which a CPU
    generator cannot do: it raises and ends the engine (gpu_model_runner.py:3502). Such rows draw from the global generator."""

    @functools.wraps(sample)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cpu":
            generators = self.input_batch.generators
            discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
            self._dynaserve_hidden = {int(row): generators.pop(int(row)) for row in discarded if int(row) in generators}
        return sample(self, *args, **kwargs)

    return wrapper


def _with_discarded_generators(bookkeeping: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(bookkeeping)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(self.__dict__.pop("_dynaserve_hidden", {}))

    return wrapper


# -- the front-end process -----------------------------------------------------------------------------------------------


def install_fleet_client(make_client: Callable[[Any], Any]) -> None:
    """Puts our engine-core client under AsyncLLM, which has no parameter for one."""
    from vllm.v1.engine.core_client import EngineCoreClient

    EngineCoreClient.make_async_mp_client = staticmethod(lambda **kwargs: make_client(kwargs["vllm_config"]))
