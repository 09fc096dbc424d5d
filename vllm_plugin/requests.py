"""What DynaServe reads from a request, and which requests it does not cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from vllm.v1.engine import EngineCoreRequest

SPLIT_ARG = "dynaserve_split"
"""`vllm_xargs` key: the token at which to cut, as vLLM counts `num_computed_tokens`; 0 runs the request whole."""
TRANSPORT_ARG = "dynaserve_transport"
"""`vllm_xargs` key: the transport for this request's KV, for comparisons and for finding faults."""

CHUNKED_ARG = "dynaserve_chunked"
"""`vllm_xargs` key: 0 sends this request's KV when its first half is done instead of while it computes, for comparisons."""
TBT_ARG = "dynaserve_tbt_ms"
"""`vllm_xargs` key: the TBT SLO of this request, instead of the instance's."""
TTFT_ARG = "dynaserve_ttft_ms"
"""`vllm_xargs` key: the TTFT SLO of this request, instead of the instance's."""

EXPECTED_ARG = "dynaserve_expected_tokens"
"""`vllm_xargs` key: how many tokens the caller expects as the answer."""
CLASS_ARG = "dynaserve_class"
"""`vllm_xargs` key: a name for requests whose answers are alike in length."""


def is_slo_ms(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


@dataclass(frozen=True, slots=True)
class CutRequest:
    """The part of a request that decides about its cut; token counts."""

    prompt_tokens: int
    max_tokens: int
    forced_split: int | None
    transport: str | None
    chunked: bool
    expected_tokens: int | None = None
    request_class: str = ""
    tbt_ms: float | None = None
    ttft_ms: float | None = None

    @classmethod
    def of(cls, request: EngineCoreRequest) -> CutRequest:
        params = request.sampling_params
        if params is None or params.max_tokens is None:
            raise ValueError(f"request {request.request_id} has no sampling parameters or no max_tokens")
        extra_args = params.extra_args or {}
        return cls(
            len(request.prompt_token_ids or ()),
            params.max_tokens,
            extra_args.get(SPLIT_ARG),
            extra_args.get(TRANSPORT_ARG),
            bool(extra_args.get(CHUNKED_ARG, True)),
            extra_args.get(EXPECTED_ARG),
            str(extra_args.get(CLASS_ARG, "")),
            extra_args.get(TBT_ARG),
            extra_args.get(TTFT_ARG),
        )


def cache_key(request: EngineCoreRequest) -> tuple[str | None, str | None]:
    """What cached blocks must be equal in beside their tokens (vLLM's `generate_block_hash_extra_keys`)."""
    adapter = request.lora_request
    return None if adapter is None else adapter.lora_name, request.cache_salt


def why_whole(request: EngineCoreRequest, obstacles: Sequence[str | None]) -> str | None:
    """The reason why this request cannot be cut exactly; None: it can. obstacles: of the instances."""
    params = request.sampling_params
    if params is None:
        return "pooling"
    reasons = {
        "prompt_embeds": request.prompt_embeds is not None or not request.prompt_token_ids,
        "multimodal": bool(request.mm_features),
        "streaming_input": request.resumable,
        "prompt_logprobs": params.prompt_logprobs is not None,
    }
    reasons |= {obstacle.replace(" ", "_"): True for obstacle in obstacles if obstacle is not None}
    return next((reason for reason, holds in reasons.items() if holds), None)
