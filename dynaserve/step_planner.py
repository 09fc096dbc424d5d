"""The local scheduler's decision before each step: how much prefill joins the decodes (the paper, section 4.2).

Pure: the engine's scheduler says what runs and waits, and what time it is; it applies the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dynaserve.deadline_margin import DeadlineMargin
from dynaserve.live_profile import LiveProfile
from dynaserve.step_latency import (
    AdmissionMargin,
    BatchLimits,
    BatchShape,
    BudgetReason,
    PrefillBudget,
    PrefillWork,
    choose_budget,
    prefill_pairs,
)


@dataclass(frozen=True, slots=True)
class RunningDecodes:
    """The decodes of the next step. due_s: when the first of them has to be there (its last token's time plus its TBT SLO); of a step
    without decodes, when it has to end for those that are to come.

    draft_tokens: what they speculate, together, which is computed as prefill is. draft_pairs: as `BatchShape.prefill_pairs`.
    """

    number: int
    context_tokens: int
    due_s: float
    draft_tokens: int = 0
    draft_pairs: float = 0.0

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            prefill_tokens=self.draft_tokens,
            prefill_pairs=self.draft_pairs,
            decodes=self.number,
            decode_context_tokens=self.context_tokens,
        )


KNOWN_GROWTH = 2
"""Times the largest step that was measured: what is far beyond it is guessed, from steps that may all have been small."""
SPARED_STEPS = 9
"""In a row, at most, that are without prefill where the least of it is too much by admission's margin, and decodes alone are in time."""
_AT_LIMIT = (BudgetReason.step_limit, BudgetReason.efficiency, BudgetReason.minimum_share)
NO_DECODES = RunningDecodes(0, 0, math.inf)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """limit_ms: what the predicted step had to stay within; infinite where no decode is due. late: it does not."""

    prefill_tokens: int
    limit_ms: float
    predicted_ms: float | None
    reason: BudgetReason | None
    late: bool


@dataclass
class StepPlanner:
    """max_tokens: of one step. min_prefill_tokens: taken even when decodes alone miss their deadline; where they alone keep it, and
    not with admission's margin beside so much prefill, in each tenth step only (reason minimum_share, no tokens): a machine that is slow
    for a while would compute a few prompt tokens at the price of every decode's.

    unprofiled_prefill_tokens: beside decodes, while too few steps, or none as large, were measured to predict one. speculated_tokens:
    of each decode, at most. admission: follows what is late of all tokens, which the caller counts.
    """

    profile: LiveProfile
    max_tokens: int
    min_prefill_tokens: int
    unprofiled_prefill_tokens: int
    margin: DeadlineMargin = field(default_factory=DeadlineMargin)
    speculated_tokens: int = 0
    admission: AdmissionMargin = field(default_factory=AdmissionMargin)
    _spared: int = 0

    def observe(self, shape: BatchShape, plan: StepPlan, predicted_ms: float | None, measured_ms: float, draft_tokens: int = 0) -> None:
        """Learns from a step. predicted_ms: before it ran. draft_tokens: as `LiveProfile.observe`, and raises as it."""
        table = self.profile.table
        if table is not None and predicted_ms is not None and shape.decodes:
            self.margin.count(shape.decodes, at_limit=plan.reason in _AT_LIMIT and plan.prefill_tokens > 0)
            # A step of decodes alone is far from any deadline, and shorter, so that the same pause is a larger error.
            # A fit to a few steps that are alike may predict nothing for another kind, as for a prompt of a single token.
            if plan.prefill_tokens and predicted_ms > 0:
                self.margin.observe(predicted_ms, measured_ms, table.sigma)
        self.profile.observe(shape, measured_ms, draft_tokens)

    def plan(self, decodes: RunningDecodes, waiting: Sequence[PrefillWork], now_s: float) -> StepPlan:
        """waiting: in the order in which they are computed."""
        table = self.profile.table
        if table is None:
            return self._unprofiled(decodes, waiting)
        left_ms = max(0.0, 1e3 * (decodes.due_s - now_s))
        limit_ms = left_ms * self.margin.share(table.sigma)
        limits = BatchLimits(step_ms=limit_ms, max_tokens=self._most_tokens(decodes), min_prefill_tokens=self.min_prefill_tokens)
        budget: PrefillBudget = choose_budget(table, decodes.shape, waiting, limits)
        if budget.reason == BudgetReason.minimum_share and decodes.number and self._spared < SPARED_STEPS:
            alone_ms, usual_ms = table.step_ms(decodes.shape), left_ms * self.admission.share(table.sigma)
            if alone_ms <= left_ms and budget.step_ms > usual_ms:
                self._spared += 1
                return StepPlan(0, limit_ms, alone_ms, budget.reason, late=alone_ms > limit_ms)
        self._spared = 0
        return StepPlan(budget.tokens, limit_ms, budget.step_ms, budget.reason, late=budget.step_ms > limit_ms)

    def _most_tokens(self, decodes: RunningDecodes) -> int:
        """Beside decodes, no step that is far larger than all that were measured."""
        if not decodes.number:
            return self.max_tokens
        unknown = decodes.number + decodes.draft_tokens + self.unprofiled_prefill_tokens
        return int(min(self.max_tokens, max(KNOWN_GROWTH * self.profile.most_tokens, unknown)))

    @property
    def step_share(self) -> float | None:
        """Of the time until a decode is due, what a step may take by prediction; None: nothing is predicted yet."""
        table = self.profile.table
        return None if table is None else self.margin.share(table.sigma)

    @property
    def admitting_share(self) -> float | None:
        """Of the TBT SLO, what a step of decodes alone may take, with one that is to begin; None: nothing is predicted yet."""
        table = self.profile.table
        return None if table is None else self.admission.share(table.sigma)

    def prefill_ms(self, work: PrefillWork) -> float:
        """Of a prompt that is computed alone, in one step; 0 before anything was measured."""
        table = self.profile.table
        if table is None:
            return 0.0
        pairs = prefill_pairs(work.tokens, work.context_tokens)
        return table.step_ms(BatchShape(prefill_tokens=work.tokens, prefill_pairs=pairs))

    def decodes_ms(self, decodes: int, context_tokens: int) -> float:
        """Of a step of so many decodes alone, of `context_tokens` together; 0 before anything was measured."""
        table = self.profile.table
        if table is None:
            return 0.0
        pairs = float(self.speculated_tokens * context_tokens)
        return table.step_ms(RunningDecodes(decodes, context_tokens, math.inf, decodes * self.speculated_tokens, pairs).shape)

    def fits(self, decodes: int, context_tokens: int, slo_ms: float) -> bool:
        """Whether a step of so many decodes alone, of `context_tokens` together, stays within the SLO.

        Nothing is known to be too much before anything was measured.
        """
        table = self.profile.table
        return table is None or self.decodes_ms(decodes, context_tokens) <= slo_ms * self.admission.share(table.sigma)

    def _unprofiled(self, decodes: RunningDecodes, waiting: Sequence[PrefillWork]) -> StepPlan:
        most = self.unprofiled_prefill_tokens if decodes.number else self.max_tokens
        room = max(0, self.max_tokens - decodes.number - decodes.draft_tokens)
        tokens = min(most, room, sum(work.tokens for work in waiting))
        return StepPlan(tokens, math.inf, None, None, late=False)
