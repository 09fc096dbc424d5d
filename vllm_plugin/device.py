"""What the latencies of an engine hold for."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

from vllm import envs
from vllm.platforms import current_platform

from dynaserve.latency_profile import ProfileKey
from dynaserve.machine import cpu_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def profile_key(config: VllmConfig) -> ProfileKey:
    parallel = config.parallel_config
    return ProfileKey(
        model=config.model_config.model,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=device_name(),
        parallelism=f"tp{parallel.tensor_parallel_size}pp{parallel.pipeline_parallel_size}",
        vllm_version=metadata.version("vllm"),
    )


def device_name() -> str:
    """Of the accelerator; of a CPU its model and how many threads compute."""
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    return f"{cpu_model()}, {_cores(envs.VLLM_CPU_OMP_THREADS_BIND)} cores"


def _cores(bind: str) -> int:
    """Of one worker, by vLLM's list of cores (`0-3,6`, one list per rank, separated by `|`); its other words mean all."""
    ranges = [part.partition("-") for part in bind.split("|")[0].split(",")]
    if not all(low.isdigit() and (high.isdigit() or not dash) for low, dash, high in ranges):
        return len(os.sched_getaffinity(0))
    return sum(int(high or low) - int(low) + 1 for low, _, high in ranges)
