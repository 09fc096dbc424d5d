"""How far ahead of its deadline a step has to end, by prediction, so that few tokens miss theirs.

Who may begin is asked by another margin, that of a step of decodes alone: `dynaserve.step_latency.AdmissionMargin`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LATE_SHARE = 0.004
"""Of all tokens after the first, what may miss its deadline: one in a hundred is promised, also of a few hundred of them."""
MOST_LATE_SHARE = 0.01
"""Of the steps that use up their time, what may be late however few they are: those who decode meanwhile get no other steps."""
NORMAL_SIGMAS = 2.65
"""What `LATE_SHARE` of normally distributed errors exceed."""
LEAST_SHARE = 0.4
"""Of the time that is left, what the prediction may take however large its errors are: they are none of chance then, and steps that are
smaller, with more of them for each prompt, would not have smaller ones."""
_LEAST_SIGMAS, _MOST_SIGMAS = 1.0, 5.0
_GAIN = 0.2
_FORGOTTEN = 0.005
"""Of the counted tokens, with each step: some two hundred steps are remembered."""


@dataclass
class DeadlineMargin:
    """sigmas: how many standard deviations of the predictor's error. Begins as for a normal distribution, and follows the errors
    that are seen: up at once when a step took longer, down slowly, so that `late_share` of them stay above.

    Most tokens come in steps of decodes alone, far ahead of their deadlines, unless prompts wait all the time. Steps that use up
    their time may be late the more often, the fewer they are.
    """

    sigmas: float = NORMAL_SIGMAS
    _tokens: float = 4.0
    _tokens_at_limit: float = 4.0

    def share(self, sigma: float) -> float:
        """Of the time that is left, what the prediction may take. sigma: of the logarithm of measured over predicted."""
        return max(LEAST_SHARE, math.exp(-self.sigmas * sigma))

    @property
    def late_share(self) -> float:
        """Of the steps that use up their time, what may be late."""
        return LATE_SHARE / max(self._tokens_at_limit / self._tokens, LATE_SHARE / MOST_LATE_SHARE)

    def count(self, tokens: int, *, at_limit: bool) -> None:
        """The tokens of a step. at_limit: it used up its time."""
        self._tokens += _FORGOTTEN * (tokens - self._tokens)
        self._tokens_at_limit += _FORGOTTEN * (tokens * at_limit - self._tokens_at_limit)

    def observe(self, predicted_ms: float, measured_ms: float, sigma: float) -> None:
        """The error of a step that mixed prefill and decodes."""
        exceeded = math.log(measured_ms / predicted_ms) > self.sigmas * sigma
        self.sigmas += _GAIN * (exceeded - self.late_share)
        self.sigmas = min(_MOST_SIGMAS, max(_LEAST_SIGMAS, self.sigmas))
