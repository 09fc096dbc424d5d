"""What crosses between vLLM's one engine, as AsyncLLM knows it, and the engines of a fleet."""

from __future__ import annotations

import copy

from vllm.v1.engine import EngineCoreEvent, EngineCoreOutput, EngineCoreRequest

from dynaserve.flow_events import Side
from dynaserve.records import RequestRecord


def translated(
    output: EngineCoreOutput, record: RequestRecord, side: Side, clock_offset_s: float, cached_block_tokens: int
) -> EngineCoreOutput:
    """An instance's output as AsyncLLM expects it from its one engine; `record` counts the output's tokens already.

    cached_block_tokens: of a block of its prefix cache; 0: it has none.
    """
    output = copy.copy(output)
    output.request_id = output.request_id.rpartition("/")[0]
    output.kv_transfer_params = None
    micro = record.alpha if side is Side.ALPHA else record.beta
    assert micro is not None
    if record.output_tokens > micro.output_tokens:
        output.events = None  # the request was queued and scheduled once, on the instance that spoke first
    elif output.events is not None:  # the engine's monotonic clock is another machine's
        output.events = [EngineCoreEvent(event.type, event.timestamp + clock_offset_s) for event in output.events]
    if side is Side.BETA and output.prefill_stats is not None:
        # What crossed from the alpha is no prefix-cache hit: usage and metrics must be what they are uncut.
        assert record.alpha is not None
        output.prefill_stats.set(record.prompt_tokens, record.alpha.cached_tokens, 0)
        full_blocks = record.prompt_tokens // cached_block_tokens if cached_block_tokens else 0
        output.prefill_stats.finalize(full_blocks * cached_block_tokens)
    return output


def resumed(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request that goes on elsewhere: what came with its first token is not told again."""
    request = copy.copy(request)
    assert request.sampling_params is not None
    if request.sampling_params.prompt_logprobs is not None:
        request.sampling_params = request.sampling_params.clone()
        request.sampling_params.prompt_logprobs = None
    return request
