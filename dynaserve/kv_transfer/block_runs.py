"""Where the bytes of a one-sided push lie, and where they go: stretches of memory, as long as they follow each other on both sides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from dynaserve.kv_transfer.transport import KvLayers

Stretch = tuple[int, int, int]
"""(address here, address in the peer's process, bytes)."""


def stretches(kv: KvLayers, remote_layers: Sequence[int], local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[Stretch]:
    """remote_layers: address of block 0 in each of the peer's layers, which are laid out as these are. Raises ValueError where they are
    more or fewer."""
    runs = list(_runs(local_blocks, remote_blocks))
    for layer, remote in zip(kv.layers, remote_layers, strict=True):
        stride, width = layer.stride(0), layer.shape[1]
        for local_start, remote_start, blocks in runs if stride == width else _single(runs):
            yield layer.data_ptr() + local_start * stride, remote + remote_start * stride, (blocks - 1) * stride + width


def _runs(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first local, first remote, length) of the stretches in which both sides count up by one."""
    pairs = zip(local_blocks, remote_blocks, strict=True)
    numbered = enumerate(pairs)
    for _, group in itertools.groupby(numbered, key=lambda item: (item[1][0] - item[0], item[1][1] - item[0])):
        run = [pair for _, pair in group]
        yield run[0][0], run[0][1], len(run)


def _single(runs: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """The same blocks one by one, for layers whose blocks do not follow each other in memory."""
    for local, remote, blocks in runs:
        for i in range(blocks):
            yield local + i, remote + i, 1
