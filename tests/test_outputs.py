"""Outputs of instances, as vLLM's front-end is given them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import PrefillStats

from dynaserve.flow_events import Side
from dynaserve.records import MicroRecord, RequestRecord
from vllm_plugin.outputs import translated

BLOCK_TOKENS = 16


@pytest.mark.parametrize(("prompt_tokens", "cached_tokens"), [(100, 0), (100, 48), (96, 96), (15, 0), (112, 16)])
@pytest.mark.parametrize("block_tokens", [0, BLOCK_TOKENS], ids=["without prefix caching", "with it"])
def test_a_beta_that_samples_the_first_token_tells_the_usage_of_the_uncut_request(
    prompt_tokens: int, cached_tokens: int, block_tokens: int
) -> None:
    uncut = PrefillStats()
    uncut.set(prompt_tokens, cached_tokens, 0)
    uncut.finalize(prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS if block_tokens else 0)  # blocks that have a hash, as vLLM counts them
    record = RequestRecord("r", prompt_tokens, 10, "policy", alpha=MicroRecord("a", cached_tokens=cached_tokens), beta=MicroRecord("b"))
    output = translated(EngineCoreOutput("r/beta", [7], prefill_stats=PrefillStats()), record, Side.BETA, 0.0, block_tokens)
    assert output.prefill_stats == uncut


def test_the_stats_of_an_alpha_are_as_its_instance_told_them() -> None:
    told = PrefillStats(num_prompt_tokens=100, num_computed_tokens=100, num_cache_creation_tokens=96)
    record = RequestRecord("r", 100, 100, "policy", alpha=MicroRecord("a"), beta=MicroRecord("b"))
    assert translated(EngineCoreOutput("r/alpha", [7], prefill_stats=told), record, Side.ALPHA, 0.0, BLOCK_TOKENS).prefill_stats == told
