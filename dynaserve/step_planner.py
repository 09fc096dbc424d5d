"""The local scheduler's decision before each step: how much prefill joins the decodes (the paper, section 4.2).

Pure: the engine's scheduler says what runs and waits, and what time it is; it applies the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynaserve.live_profile import LiveProfile
from dynaserve.step_latency import BatchLimits, BatchShape, BudgetReason, PrefillBudget, PrefillWork, choose_budget, leaves_room_for_decode

QUANTILE_SIGMAS = 2.33
"""One step in a hundred is longer than the prediction by more than this many standard deviations of its error."""


@dataclass(frozen=True, slots=True)
class RunningDecode:
    """due_s: when its next token has to be there, that is the time of its last one and its TBT SLO."""

    context_tokens: int
    due_s: float


@dataclass(frozen=True, slots=True)
class StepPlan:
    """limit_ms: what the predicted step had to stay within; infinite without decodes. late: no budget could keep a deadline."""

    prefill_tokens: int
    limit_ms: float
    predicted_ms: float | None
    reason: BudgetReason | None
    late: bool


@dataclass
class StepPlanner:
    """max_tokens: of one step. min_prefill_tokens: taken even when decodes alone miss their deadline.

    unprofiled_prefill_tokens: beside decodes, while too few steps were measured to predict one.
    """

    profile: LiveProfile
    max_tokens: int
    min_prefill_tokens: int
    unprofiled_prefill_tokens: int

    def plan(self, decodes: Sequence[RunningDecode], waiting: Sequence[PrefillWork], now_s: float) -> StepPlan:
        """waiting: in the order in which they are computed."""
        table = self.profile.table
        if table is None:
            return self._unprofiled(decodes, waiting)
        limit_ms = math.inf
        if decodes:
            rest_ms = 1e3 * (min(decode.due_s for decode in decodes) - now_s)
            limit_ms = max(0.0, rest_ms) * math.exp(-QUANTILE_SIGMAS * table.sigma)
        shape = BatchShape(decodes=len(decodes), decode_context_tokens=sum(decode.context_tokens for decode in decodes))
        limits = BatchLimits(step_ms=limit_ms, max_tokens=self.max_tokens, min_prefill_tokens=self.min_prefill_tokens)
        budget: PrefillBudget = choose_budget(table, shape, waiting, limits)
        return StepPlan(budget.tokens, limit_ms, budget.step_ms, budget.reason, late=budget.step_ms > limit_ms)

    def admits(self, contexts: Sequence[int], context_tokens: int, slo_ms: float) -> bool:
        """Whether one more decode of `context_tokens` beside those of `contexts` leaves a step of them all within the SLO.

        One always runs alone, and nothing is refused before anything was measured.
        """
        table = self.profile.table
        if table is None or not contexts:
            return True
        shape = BatchShape(decodes=len(contexts), decode_context_tokens=sum(contexts))
        return leaves_room_for_decode(table, shape, context_tokens, slo_ms * math.exp(-QUANTILE_SIGMAS * table.sigma))

    def _unprofiled(self, decodes: Sequence[RunningDecode], waiting: Sequence[PrefillWork]) -> StepPlan:
        most = self.unprofiled_prefill_tokens if decodes else self.max_tokens
        tokens = min(most, max(0, self.max_tokens - len(decodes)), sum(work.tokens for work in waiting))
        return StepPlan(tokens, math.inf, None, None, late=False)
