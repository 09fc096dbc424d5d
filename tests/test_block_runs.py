"""Which bytes a one-sided push moves: those of its blocks, and no others, wherever layers have them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaserve.kv_transfer.block_runs import stretches
from dynaserve.kv_transfer.transport import KvLayers

torch = pytest.importorskip("torch")

BLOCKS, WIDTH = 12, 5


def layers(gap: int) -> list[Any]:
    """Two, whose blocks have so many bytes between them."""
    memory = torch.arange(2 * BLOCKS * (WIDTH + gap)).to(torch.uint8)
    return [half.view(BLOCKS, WIDTH + gap)[:, :WIDTH] for half in memory.chunk(2)]


@given(st.permutations(range(BLOCKS)), st.permutations(range(BLOCKS)), st.integers(1, BLOCKS), st.sampled_from([0, 3]))
def test_each_byte_of_the_blocks_is_named_once(local: list[int], remote: list[int], size: int, gap: int) -> None:
    kv = KvLayers(layers(gap))
    far = [1 << 40, 1 << 41]
    moved = [(source + i, target + i) for source, target, length in stretches(kv, far, local[:size], remote[:size]) for i in range(length)]
    wanted = [
        (layer.data_ptr() + a * layer.stride(0) + i, start + b * layer.stride(0) + i)
        for layer, start in zip(kv.layers, far, strict=True)
        for a, b in zip(local[:size], remote[:size], strict=True)
        for i in range(WIDTH)
    ]
    assert sorted(moved) == sorted(wanted)


def test_blocks_that_follow_each_other_are_one_stretch() -> None:
    kv = KvLayers(layers(0))
    assert [length for *_, length in stretches(kv, [0, 0], [3, 4, 5, 9], [1, 2, 3, 4])] == [3 * WIDTH, WIDTH] * 2
    assert [length for *_, length in stretches(KvLayers(layers(3)), [0, 0], [3, 4], [1, 2])] == [WIDTH] * 4


def test_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        list(stretches(KvLayers(layers(0)), [0], [1], [1]))
