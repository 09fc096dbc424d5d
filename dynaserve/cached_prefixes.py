"""What the instances' prefix caches have, as far as the front-end can know: the requests that have ended there.

An estimate: what an instance has evicted is found out when it is used again, and then forgotten here as well. Full blocks only, as
in vLLM's own prefix cache (`vllm/v1/core/kv_cache_utils.py`), and at most as many as the instance has. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Prefix:
    """A sequence as the blocks of a cache see it: each hash stands for its block and all before it."""

    block_size: int
    block_hashes: tuple[int, ...]


def prefix_of(token_ids: Sequence[int], block_size: int, key: Hashable = None) -> Prefix:
    """key: what must be equal beside the tokens (LoRA adapter, cache salt)."""
    hashes, last = [], hash((key,))
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        last = hash((last, *token_ids[start : start + block_size]))
        hashes.append(last)
    return Prefix(block_size, tuple(hashes))


@dataclass
class CachedPrefixes:
    """One instance. num_blocks: of its cache; the blocks used last are believed to be there."""

    num_blocks: int
    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def remember(self, prefix: Prefix, tokens: int) -> None:
        """The instance has computed, or been sent, the first `tokens` tokens."""
        # Backwards: a prefix is of use without what follows it, so that its beginning goes last.
        for block in reversed(prefix.block_hashes[: tokens // prefix.block_size]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.num_blocks:
            self._blocks.popitem(last=False)

    def tokens_of(self, prefix: Prefix) -> int:
        """Of the sequence, from its beginning."""
        known = 0
        for block in prefix.block_hashes:
            if block not in self._blocks:
                break
            known += 1
        return known * prefix.block_size

    def correct(self, prefix: Prefix, cached_tokens: int) -> None:
        """The instance had only this much of it."""
        for block in prefix.block_hashes[cached_tokens // prefix.block_size :]:
            self._blocks.pop(block, None)
