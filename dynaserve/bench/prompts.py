"""Prompts as token ids: exactly as long as the workload says, and equal only where it says so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workloads.trace import TraceRequest

_OWN, _SHARED = 0, 1


@dataclass(frozen=True)
class Prompts:
    """Draws prompts. vocabulary: the ids to draw from.

    The same seed gives the same prompts. Requests of different index start differently, so that no prefix cache serves one from
    another, except for the blocks that the workload says they share.
    """

    seed: int
    vocabulary: range

    def token_ids(self, index: int, request: TraceRequest) -> list[int]:
        """The request's prompt; index: its number in the run."""
        shared = [self._draw(_SHARED, block, request.prefix_block_tokens) for block in request.prefix_hashes]
        own = self._draw(_OWN, index, max(0, request.prompt_tokens - sum(map(len, shared))))
        ids: list[int] = np.concatenate([*shared, own])[: request.prompt_tokens].tolist()
        return ids

    def _draw(self, kind: int, number: int, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        rng = np.random.default_rng((self.seed, kind, number))
        return rng.integers(self.vocabulary.start, self.vocabulary.stop, tokens)
