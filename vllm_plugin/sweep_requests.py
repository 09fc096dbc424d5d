"""Requests of which only the lengths matter, for both sweeps: `sweep_engine` and `stock_sweep`."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

_TOKEN_IDS = range(1000, 20000)
"""Above the control tokens and below the end of the vocabularies in use."""


def sweep_request(number: int, prompt_tokens: int, output_tokens: int, block_hasher: Any = None) -> Request:
    """Greedy, of exactly so many tokens; its prompt is another for each number."""
    prompt = [_TOKEN_IDS[(number * 7919 + index * 31) % len(_TOKEN_IDS)] for index in range(prompt_tokens)]
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    params.update_from_generation_config({}, None)
    return Request(f"sweep-{number}", prompt, params, None, block_hasher=block_hasher)
