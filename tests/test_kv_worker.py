"""A worker's KV cache as bytes, in the memory orders in which vLLM's attention backends keep a block."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from dynaserve.errors import ConfigError  # noqa: E402 - only where torch is
from vllm_plugin.kv_worker import _as_bytes, _check_block_size, _kind, _layout  # noqa: E402

pytestmark = pytest.mark.vllm

BLOCKS, SIZES = 5, {"heads": 2, "tokens": 4, "numbers": 6}


@pytest.mark.parametrize("in_memory", list(itertools.permutations(SIZES)), ids="-".join)
def test_a_block_is_its_memory_in_whatever_order_its_dimensions_are(in_memory: tuple[str, ...]) -> None:
    """vLLM names them (heads, tokens, numbers), and on CUDA has the heads of a token side by side (its LBNHC layout)."""
    memory = torch.randn(BLOCKS, *(SIZES[name] for name in in_memory))
    cache = memory.permute(0, *(1 + in_memory.index(name) for name in SIZES))
    assert tuple(cache.shape) == (BLOCKS, *SIZES.values())
    view = _as_bytes("layer", cache)
    assert torch.equal(view, memory.view(BLOCKS, -1).view(torch.uint8))
    view[3] = view[1]
    assert torch.equal(cache[3], cache[1]), "a view, not a copy"


def test_two_orders_in_memory_are_two_layouts() -> None:
    one, other = torch.randn(BLOCKS, 2, 4, 6), torch.randn(BLOCKS, 4, 2, 6).permute(0, 2, 1, 3)
    assert one.shape == other.shape
    assert _kind(one) != _kind(other)
    assert _kind(one) == _kind(torch.randn(3, 2, 4, 6))


def test_layers_of_two_kinds_in_another_order_are_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_plugin.kv_worker._instruction_set", lambda *_: "cpu")
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1), cache_config=SimpleNamespace(cache_dtype="fp8"))
    wide, narrow = torch.zeros(BLOCKS, 2, 4, 6), torch.zeros(BLOCKS, 2, 4, 6, dtype=torch.uint8)
    layouts = [_layout(config, {"l.0": first, "l.1": second, "l.2": wide}) for first, second in ((wide, narrow), (narrow, wide))]
    assert layouts[0] != layouts[1]
    assert layouts[0] == _layout(config, {"l.2": wide, "l.1": narrow, "l.0": wide}), "by name, whatever order they come in"
    assert "in the order" not in _layout(config, {"l.0": wide, "l.1": wide})


def test_blocks_of_two_layers_in_turns_are_taken() -> None:
    both = torch.randn(BLOCKS, 2, 8)
    assert torch.equal(_as_bytes("layer", both[:, 1]), both[:, 1].contiguous().view(torch.uint8))


def test_a_block_in_several_pieces_of_memory_is_refused() -> None:
    keys_then_values = torch.randn(2, BLOCKS, 4, 6).transpose(0, 1)
    with pytest.raises(ConfigError, match=r"layer attn: a KV block of shape \(2, 4, 6\) with strides \(120, 6, 1\) is not contiguous"):
        _as_bytes("attn", keys_then_values)


def test_blocks_that_the_backend_has_split_are_refused() -> None:
    """Its kernels take 64 tokens at most: a block of 128 is two rows of the cache."""
    _check_block_size("attn", torch.empty(10, 2, 64, 6), 64)
    for cache in (torch.empty(10, 2, 64, 6), torch.empty(10, 128, 6)):
        with pytest.raises(ConfigError, match=r"layer attn: the attention backend keeps blocks of shape .* and not of \(heads, 128 tokens"):
            _check_block_size("attn", cache, 128)
