"""A profile table that an engine fills while it runs, from the first step on."""

from __future__ import annotations

import math
from collections import deque

from dynaserve.step_latency import BatchShape, ProfileTable, StepSample, fit_roofline

WARM_UP_STEPS = 3
"""The first steps of an engine compile and allocate: they say nothing about later ones."""
LEAST_SAMPLES = 8
MOST_SAMPLES = 1024
KNOWN_STEPS = 128 + WARM_UP_STEPS
"""After so many, some seconds of traffic, a table may be told or kept: at this number and its doubles it has just been fitted."""
LEAST_OF_A_KIND = 8
"""Of these, steps with prefill, and steps without: from one kind alone the other cannot be told."""


class LiveProfile:
    """The table, None while too little was measured; and the steps that made it.

    A table that is given is only refined. Without one, a roofline is fitted after `LEAST_SAMPLES` steps and again each time
    their number has doubled, up to `MOST_SAMPLES`: the first steps of a server are too much alike to tell its terms apart.
    """

    def __init__(self, table: ProfileTable | None = None) -> None:
        self.table = table
        self.most_tokens: float = 0 if table is None else math.inf
        """Of the steps that were measured; infinite where the table was given, and what it holds is not known."""
        self.steps = 0
        self._with_prefill = 0
        self._was_given = table is not None
        self._samples: deque[StepSample] = deque(maxlen=MOST_SAMPLES)
        self._next_fit = LEAST_SAMPLES if table is None else None

    @property
    def has_both_kinds(self) -> bool:
        return min(self._with_prefill, self.steps - self._with_prefill) >= LEAST_OF_A_KIND

    @property
    def is_worth_keeping(self) -> bool:
        """A table that is given is fitted no more: one that was made of a few steps would hold for good."""
        return self.table is not None and (self._was_given or (self.steps >= KNOWN_STEPS and self.has_both_kinds))

    def observe(self, shape: BatchShape, measured_ms: float, draft_tokens: int = 0) -> None:
        """draft_tokens: of the prefill, what decodes speculated: where all do, each step has some. Raises ValueError for a step without
        tokens or a time that is not positive."""
        if shape.prefill_tokens + shape.decodes < 1 or not 0 < measured_ms < math.inf:
            tokens = shape.prefill_tokens + shape.decodes
            raise ValueError(f"a step of {tokens} tokens took {measured_ms} ms; both must be positive")
        self.steps += 1
        self._with_prefill += shape.prefill_tokens > draft_tokens
        if self.steps <= WARM_UP_STEPS:
            return
        self.most_tokens = max(self.most_tokens, shape.prefill_tokens + shape.decodes)
        if self.table is not None:
            self.table.observe(shape, measured_ms)
        if self._next_fit is None:
            return
        self._samples.append(StepSample(shape, measured_ms))
        if len(self._samples) >= self._next_fit:
            self._fit()

    def _fit(self) -> None:
        self.table = ProfileTable(fit_roofline(list(self._samples)))
        for sample in self._samples:
            self.table.observe(sample.shape, sample.measured_ms)
        if len(self._samples) == MOST_SAMPLES:
            self._next_fit = None
            self._samples.clear()
        else:
            self._next_fit = min(MOST_SAMPLES, 2 * len(self._samples))
