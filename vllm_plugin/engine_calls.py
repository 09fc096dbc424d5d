"""Calls from the gateway into the engine core; they run between steps. `self` is vLLM's `EngineCore`.

`patches.install_engine_core_calls` makes every `dynaserve_*` function here a method of it.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType

from vllm_plugin.device import profile_key
from vllm_plugin.read_by_server import options_of
from vllm_plugin.requests import SPECULATION


def dynaserve_listen(self: Any) -> str:
    """From now on the engine sleeps while all its requests wait for other instances; see `wake`.

    Returns the address of its signs of life; see `heart`.
    """
    self.scheduler.listen_to_workers(lambda: self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)))
    return str(self.scheduler.start_heart())


def dynaserve_describe(self: Any) -> dict[str, Any]:
    """The part of `InstanceDescription` that only the engine core knows."""
    config, scheduler = self.vllm_config, self.scheduler
    key = profile_key(config)
    return {
        "dtype": key.dtype,
        "device": key.device,
        "computes_on_host": bool(current_platform.is_cpu()),
        "parallelism": key.parallelism,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "block_size": scheduler.block_size,
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "read_by_server": options_of(config),
        "reasoning_parser": config.structured_outputs_config.reasoning_parser or None,
        "cut_obstacle": SPECULATION if config.speculative_config is not None else None,
        "workers": msgspec.to_builtins(scheduler.connector.workers),
    }


def dynaserve_reservation(self: Any, request_id: str) -> Any:
    """`Granted` or `Refused` for a request that has just been announced."""
    return msgspec.to_builtins(self.scheduler.reservation(request_id))


def dynaserve_prepare(self: Any) -> bool:
    """A beta is about to resume: an engine at rest runs one step for nothing, since its first one takes longer.

    False: it is not at rest, or somebody has asked for something else, which would wait for that step; or it has adapters, which
    such a step would unload (`LoRAModelRunnerMixin.maybe_setup_dummy_loras`), or is paused, perhaps asleep without its weights.
    """
    if self.has_work() or not self.input_queue.empty() or not self.scheduler.steps.at_rest(time.monotonic()):
        return False
    if self.vllm_config.lora_config is not None or self.scheduler.pause_state is not PauseState.UNPAUSED:
        return False
    self.scheduler.micro.counts["prepared"] += 1
    self.execute_dummy_batch()
    self.scheduler.steps.active_s = time.monotonic()
    return True


def dynaserve_continue(self: Any, request_id: str, hand_off_at: int, output_token_ids: list[int], came_s: float, alpha_lost: bool) -> bool:
    """came_s: when the message came to the gateway, on this machine's monotonic clock."""
    waited_ms = 1e3 * (time.monotonic() - came_s)
    return bool(self.scheduler.continue_request(request_id, hand_off_at, output_token_ids, waited_ms, alpha_lost=alpha_lost))


def dynaserve_expect(self: Any, request_id: str, at_s: float) -> None:
    """at_s: on this machine's monotonic clock."""
    self.scheduler.expect(request_id, at_s)


def dynaserve_move(self: Any, request_id: str, hand_off_at: int | None) -> bool:
    return bool(self.scheduler.move_hand_off(request_id, hand_off_at))


def dynaserve_cut(self: Any, request_id: str, hand_off_at: int, transfer_id: str) -> bool:
    return bool(self.scheduler.cut_whole(request_id, hand_off_at, transfer_id))


def dynaserve_release(self: Any, request_id: str) -> None:
    self.scheduler.release(request_id)


def dynaserve_peers_lost(self: Any, worker_ids: list[str], transfer_ids: list[str]) -> None:
    self.scheduler.peers_lost(worker_ids, transfer_ids)


def dynaserve_state(self: Any) -> dict[str, Any]:
    """What is held right now, to see that nothing leaks."""
    scheduler = self.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "num_blocks": pool.num_gpu_blocks,
        "free_blocks": pool.get_num_free_blocks(),
        "requests": len(scheduler.requests),
        "running": len(scheduler.running),
        "micro_requests": sorted(scheduler.micro.by_id),
        **msgspec.to_builtins(scheduler.micro.holding),
        "counts": {**scheduler.micro.counts, "preempted": scheduler.preemptions},
        "open_transfers": len(scheduler.micro.transfers),
    }
