"""The worker half of the connector: this worker's KV cache as bytes, and its transfer agent."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from dynaserve.errors import ConfigError
from dynaserve.kv_transfer.agent import Agent, PeerLost
from dynaserve.kv_transfer.receiver import Cancel, Complete, Expect, Extend
from dynaserve.kv_transfer.results import Results, TransferReport
from dynaserve.kv_transfer.sender import Ready, Stop
from dynaserve.kv_transfer.transport import KvLayers
from dynaserve.kv_transfer.transports import make_transport
from dynaserve.messages import WorkerDescription
from vllm_plugin.micro_requests import Command, Reserve
from vllm_plugin.options import PluginOptions
from vllm_plugin.step_timer import StepTimer
from vllm_plugin.wake import Bell

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KvWorker:
    """Lives in the worker process; every method is called from the engine's thread.

    kv_caches: by layer name, logical shape [num_blocks, ...], each block contiguous within its layer.
    """

    def __init__(self, vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> None:
        options = PluginOptions.from_config(vllm_config)
        names = sorted(kv_caches)
        for name in names:
            _check_block_size(name, kv_caches[name], vllm_config.cache_config.block_size)
        kv = KvLayers([_as_bytes(name, kv_caches[name]) for name in names])
        worker_id = uuid.uuid4().hex
        transports = {name: make_transport(name, worker_id, options.host, kv) for name in options.transports}
        self._rank = get_tensor_model_parallel_rank()
        self._device = kv.layers[0].device
        secret = options.read_secret()
        self.bell = Bell(options.host, self._rank, secret)
        self.agent = Agent(worker_id, options.host, kv.block_bytes, transports, self.bell.ring, self.bell.ring_landed, secret)
        self.description = WorkerDescription(self.agent.endpoint, _layout(vllm_config, kv_caches), kv.block_bytes)
        # One clock tells how long a step took: ranks compute it together.
        self._timer = StepTimer() if self._device.type == "cuda" and self._rank == 0 else None
        self._results = Results()
        self._sending: dict[str, str] = {}
        self._receiving: dict[str, str] = {}

    def submit(self, commands: list[tuple[str, Command]]) -> None:
        for request_id, command in commands:
            match command:
                case Reserve():
                    self._receiving[command.transfer_id] = request_id
                    sender = command.senders[self._rank]
                    self.agent.submit(Expect(command.transfer_id, sender, command.transport, command.first_index, command.block_ids))
                case Extend() | Complete() | Cancel() | PeerLost():
                    self.agent.submit(command)
                case Stop():
                    self._sending[command.transfer_id] = request_id
                    self.agent.submit(command)
                case Ready():
                    self.agent.submit(dataclasses.replace(command, fence=self._fence()))

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Request ids whose blocks (are not being sent any more, have all been received), since the last call."""
        self._results = self.agent.take_results()
        sent = {self._sending.pop(transfer_id) for transfer_id in self._results.sending_stopped}
        # A transfer that was cancelled in the moment in which it ended is reported twice.
        received = {self._receiving.pop(transfer_id) for transfer_id in self._results.received if transfer_id in self._receiving}
        return sent or None, received or None

    def take_lost_blocks(self) -> set[int]:
        """Of the transfers that `take_finished` has just returned."""
        return set(self._results.lost_blocks)

    def take_reports(self) -> list[TransferReport]:
        return self._results.reports

    def launched(self, number: int) -> None:
        """The step is launched: all of it on a GPU, where it may still run."""
        if self._timer is not None:
            self._timer.launched(number)

    def take_device_ms(self) -> list[tuple[int, float]]:
        """See `StepTimer.take`; nothing on CPU, where the host's clock tells."""
        return [] if self._timer is None else self._timer.take()

    def close(self) -> None:
        self.agent.close()
        self.bell.close()

    def _fence(self) -> Callable[[], None] | None:
        """On CPU the forward pass is complete when the connector is called; on CUDA it is only launched."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        wait: Callable[[], None] = event.synchronize
        return wait


def _check_block_size(name: str, cache: torch.Tensor, block_size: int) -> None:
    """Raises ConfigError where the attention backend has split blocks into smaller ones: an index would name another block.

    cache: logical shape [num_blocks, heads, tokens of a block, numbers] (v1/kv_cache_interface.py).
    """
    if cache.dim() != 4 or cache.shape[2] != block_size:
        raise ConfigError(
            f"layer {name}: the attention backend keeps blocks of shape {tuple(cache.shape[1:])} and not of (heads, {block_size} tokens, "
            "numbers); name a --block-size that it takes as it is"
        )


def _as_bytes(name: str, cache: torch.Tensor) -> torch.Tensor:
    """A uint8 view [num_blocks, block_bytes]; raises ConfigError where a block is not one piece of memory."""
    # Its dimensions are heads, tokens, numbers; its memory may be in another order, as on CUDA, where the tokens come first.
    in_memory = sorted(range(1, cache.dim()), key=lambda dimension: -cache.stride(dimension))
    if not cache.permute(0, *in_memory)[0].is_contiguous():
        raise ConfigError(
            f"layer {name}: a KV block of shape {tuple(cache.shape[1:])} with strides {cache.stride()[1:]} is not contiguous; "
            "this attention backend cannot be used for cutting requests"
        )
    num_blocks, elements = cache.shape[0], cache[0].numel()
    flat = cache.as_strided((num_blocks, elements), (cache.stride(0), 1))
    return flat.view(torch.uint8)


def _layout(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> str:
    """Equal for two workers only if the raw bytes of a block, which has the layers in the order of their names, mean the same to both."""
    layers = [_kind(kv_caches[name]) for name in sorted(kv_caches)]
    kinds = list(dict.fromkeys(layers))
    order = "" if len(kinds) == 1 else f" in the order {' '.join(str(kinds.index(kind)) for kind in layers)}"
    parallel = vllm_config.parallel_config
    return (
        f"{len(layers)} layers of {' and '.join(kinds)}{order}, cache {vllm_config.cache_config.cache_dtype}, "
        f"{_instruction_set(vllm_config, next(iter(kv_caches.values())))}, tp {parallel.tensor_parallel_size}"
    )


def _kind(cache: torch.Tensor) -> str:
    """What a block holds, and in which order."""
    return f"{tuple(cache.shape[1:])} {str(cache.dtype).removeprefix('torch.')}, strides {cache.stride()[1:]}"


def _instruction_set(vllm_config: VllmConfig, cache: torch.Tensor) -> str:
    """On CPU the order inside a block depends on it (cpu_attn.py)."""
    if cache.device.type != "cpu":
        return str(cache.device.type)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    return f"cpu {_get_attn_isa(model.dtype, vllm_config.cache_config.block_size, model.get_head_size())}"
