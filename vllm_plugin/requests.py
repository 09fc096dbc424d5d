"""What DynaServe reads from a request, and which requests it does not cut."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeGuard

from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from dynaserve.errors import BadRequest
from dynaserve.messages import LONGEST_FRAME_BYTES, LONGEST_REQUEST_ID, MOST_FRAMES

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
BEST_EFFORT_ARG = "dynaserve_best_effort"
"""`vllm_xargs` key: 1 has the request served however late, where it would be refused for its TTFT SLO."""

LONGEST_CLASS = 256
"""Characters: the name is looked up each time that the request's length is expected anew, and kept with what was learnt."""
SPECULATION = "speculative decoding"
"""The obstacle of instances with it."""
_LEAST_MIN_P = 1e-5
"""Below, vLLM takes it for 0."""
_MOST_EXPECTED_TOKENS = (1 << 31) - 1
_MOST_SLO_MS = 1e12
"""As in `dynaserve.messages` (`Tokens`, `Milliseconds`). Whole numbers far beyond fit neither msgpack nor a float."""
_BEYOND_MSGPACK = 1 << 63


def is_slo_ms(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MOST_SLO_MS


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


def check_extra_args(extra_args: dict[str, Any], prompt_tokens: int | None, max_tokens: int, offered: Collection[str]) -> None:
    """Raises BadRequest, naming the value. offered: the transports of the fleet."""
    split = extra_args.get(SPLIT_ARG)
    end = (prompt_tokens or 0) + max_tokens
    if split is not None and not (isinstance(split, int) and 0 <= split <= end):
        raise BadRequest(
            f"{SPLIT_ARG} is {split!r}, not a token index in [0, {end}] "
            f"({prompt_tokens} prompt tokens and at most {max_tokens} output tokens)"
        )
    wanted = extra_args.get(TRANSPORT_ARG)
    if wanted is not None and not (isinstance(wanted, str) and wanted in offered):
        raise BadRequest(f"{TRANSPORT_ARG} is {wanted!r}, this fleet offers {', '.join(offered)}")
    for name, default in ((CHUNKED_ARG, 1), (BEST_EFFORT_ARG, 0)):
        if (flag := extra_args.get(name, default)) not in (0, 1):
            raise BadRequest(f"{name} is {flag!r}, not 0 or 1")
    expected = extra_args.get(EXPECTED_ARG)
    if expected is not None and (not isinstance(expected, int) or isinstance(expected, bool) or not 1 <= expected <= _MOST_EXPECTED_TOKENS):
        raise BadRequest(f"{EXPECTED_ARG} is {expected!r}, not a number of tokens above 0 and up to {_MOST_EXPECTED_TOKENS}")
    if len(named := str(extra_args.get(CLASS_ARG, ""))) > LONGEST_CLASS:
        raise BadRequest(f"{CLASS_ARG} has {len(named)} characters, more than {LONGEST_CLASS}")
    for name in (TBT_ARG, TTFT_ARG):
        slo_ms = extra_args.get(name)
        if slo_ms is not None and not is_slo_ms(slo_ms):
            raise BadRequest(f"{name} is {slo_ms!r}, not a number of milliseconds above 0 and up to {_MOST_SLO_MS:g}")
    for name, value in extra_args.items():  # also what is not ours: vLLM hands it to the instances
        for number in _whole_numbers(value):
            if not -_BEYOND_MSGPACK < number < _BEYOND_MSGPACK:
                raise BadRequest(f"{name} {'is' if number is value else 'has'} {number}, not a whole number of 64 bits")


def _whole_numbers(value: Any) -> Iterator[int]:
    """In a JSON value."""
    left = [value]
    while left:
        match left.pop():
            case int() as number:
                yield number
            case list() as items:
                left += items
            case dict() as fields:
                left += fields.values()


def check_speculation(params: SamplingParams, obstacles: Collection[str | None]) -> None:
    """Raises BadRequest for what an engine that speculates would leave out, which vLLM's server refuses
    (`SamplingParams._validate_spec_decode`). obstacles: of the instances."""
    if (params.min_p > _LEAST_MIN_P or params.logit_bias) and SPECULATION in obstacles:
        raise BadRequest("min_p and logit_bias are not supported with speculative decoding, which instances of this fleet use")


def check_request_id(request_id: str) -> None:
    """Clients choose it, with `X-Request-Id`. Raises BadRequest."""
    if len(request_id) > LONGEST_REQUEST_ID:
        raise BadRequest(f"the request id has {len(request_id)} characters, more than {LONGEST_REQUEST_ID}")


def check_frames(frames: Sequence[Any]) -> None:
    """Raises GracefulHTTPError, before anything is sent, where a gateway would take the encoded request for an attack."""
    longest = max(memoryview(frame).nbytes for frame in frames)
    if longest > LONGEST_FRAME_BYTES or len(frames) >= MOST_FRAMES:
        raise GracefulHTTPError(
            f"the request is too large for an instance: {len(frames)} parts of up to {longest} bytes, "
            f"less than {MOST_FRAMES} of at most {LONGEST_FRAME_BYTES} fit",
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )


def cache_key(request: EngineCoreRequest) -> tuple[str | None, str | None]:
    """What cached blocks must be equal in beside their tokens (vLLM's `generate_block_hash_extra_keys`)."""
    adapter = request.lora_request
    return None if adapter is None else f"{adapter.lora_name}\0{adapter.lora_path}", request.cache_salt


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
