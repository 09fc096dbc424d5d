"""What the client saw of one request. Times are seconds since the start of the run, on a monotonic clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Failure:
    """Why a request has no complete answer. reason: short, the same for all alike; detail: what exactly was seen."""

    reason: str
    detail: str


@dataclass(frozen=True)
class RequestRecord:
    """due_s, sent_s, ended_s: planned and real time of sending, time of the end (of the answer or of the attempt).

    token_times_s: when each output token arrived. tokens_counted_by: `usage` or `token_ids` if the server said how many tokens an
    event carries, `events` if each event was taken for one. usage_*: what the server counted at the end; None: not said.
    """

    index: int
    label: str
    prompt_tokens: int
    output_tokens: int
    due_s: float
    sent_s: float
    ended_s: float
    token_times_s: Sequence[float]
    tokens_counted_by: str | None
    usage_prompt_tokens: int | None
    usage_output_tokens: int | None
    finish_reason: str | None
    http_status: int | None
    failure: Failure | None

    @property
    def send_lag_ms(self) -> float:
        return 1e3 * (self.sent_s - self.due_s)

    @property
    def ttft_ms(self) -> float | None:
        """From sending to the first token; None: no token came."""
        return 1e3 * (self.token_times_s[0] - self.sent_s) if self.token_times_s else None

    @property
    def e2e_ms(self) -> float | None:
        """From sending to the last token; None: no token came."""
        return 1e3 * (self.token_times_s[-1] - self.sent_s) if self.token_times_s else None

    @property
    def longest_gap_ms(self) -> float | None:
        """None: fewer than two tokens came."""
        return max(self.gaps_ms, default=None)

    @property
    def gaps_ms(self) -> list[float]:
        """TBT: one gap for each two consecutive tokens. Of n tokens in one event the first has the gap before the event, n-1 have 0."""
        return [1e3 * (after - before) for before, after in pairwise(self.token_times_s)]
