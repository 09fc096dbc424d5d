"""When each request's next token is due, and how many came in time. Seconds, of a clock that the caller reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenSlo:
    """tbt_s: most time between two tokens. ttft_s: from arrival to the first one; None: it may come at any time."""

    tbt_s: float
    ttft_s: float | None = None


@dataclass(slots=True)
class TokenCounts:
    """next_tokens: all but the first ones of their requests. first_tokens: those of requests with a TTFT SLO."""

    next_tokens: int = 0
    next_tokens_in_time: int = 0
    first_tokens: int = 0
    first_tokens_in_time: int = 0


@dataclass
class TokenDeadlines:
    """next_due_s: of each request that has a token, when its next one is due. first_due_s: of those that wait for their first
    token and have a TTFT SLO. tbt_s: the TBT SLO of each that has arrived."""

    next_due_s: dict[str, float] = field(default_factory=dict)
    first_due_s: dict[str, float] = field(default_factory=dict)
    counts: TokenCounts = field(default_factory=TokenCounts)
    tbt_s: dict[str, float] = field(default_factory=dict)
    _by_tbt_s: Counter[float] = field(default_factory=Counter)
    """How many of the requests have this TBT SLO."""
    _earliest_s: dict[str, float] = field(default_factory=dict)

    def arrive(self, request_id: str, slo: TokenSlo, now_s: float, prefill_s: float = 0.0) -> None:
        """prefill_s: of its prompt, on a machine of its own."""
        self._forget_slo(request_id)
        self.tbt_s[request_id] = slo.tbt_s
        self._by_tbt_s[slo.tbt_s] += 1
        self._earliest_s[request_id] = now_s + prefill_s
        if slo.ttft_s is not None:
            self.first_due_s[request_id] = now_s + slo.ttft_s

    def tightest_tbt_s(self, request_ids: Iterable[str]) -> float:
        """Infinite without requests. Where all requests have the same SLO, they are not looked at one by one."""
        if len(self._by_tbt_s) == 1:
            return math.inf if next(iter(request_ids), None) is None else next(iter(self._by_tbt_s))
        return min(map(self.tbt_s.__getitem__, request_ids), default=math.inf)

    def first_token_due_s(self, request_id: str, patience_s: float) -> float:
        """patience_s: instead of a TTFT SLO for a request that has none, counted from when its prefill could have ended."""
        due_s = self.first_due_s.get(request_id)
        return self._earliest_s[request_id] + patience_s if due_s is None else due_s

    def took_over(self, request_id: str, now_s: float) -> None:
        """The request goes on where another instance stopped: its last token is as old as this call, unless it was told before."""
        if request_id not in self.next_due_s:
            self.next_due_s[request_id] = now_s + self.tbt_s[request_id]
            self.first_due_s.pop(request_id, None)

    def token(self, request_id: str, tokens: int, now_s: float) -> None:
        """The request got this many tokens at once: the first of them has the gap, the others none."""
        due_s = self.next_due_s.get(request_id)
        if due_s is None:
            self._first_token(request_id, now_s)
            tokens -= 1
            in_time = tokens
        else:
            in_time = tokens if now_s <= due_s else tokens - 1
        self.counts.next_tokens += tokens
        self.counts.next_tokens_in_time += in_time
        self.next_due_s[request_id] = now_s + self.tbt_s[request_id]

    def forget(self, request_id: str) -> None:
        self._forget_slo(request_id)
        self._earliest_s.pop(request_id, None)
        self.next_due_s.pop(request_id, None)
        self.first_due_s.pop(request_id, None)

    def take_counts(self) -> TokenCounts:
        counts, self.counts = self.counts, TokenCounts()
        return counts

    def _forget_slo(self, request_id: str) -> None:
        tbt_s = self.tbt_s.pop(request_id, None)
        if tbt_s is not None:
            self._by_tbt_s[tbt_s] -= 1
            if not self._by_tbt_s[tbt_s]:
                del self._by_tbt_s[tbt_s]

    def _first_token(self, request_id: str, now_s: float) -> None:
        due_s = self.first_due_s.pop(request_id, None)
        if due_s is not None:
            self.counts.first_tokens += 1
            self.counts.first_tokens_in_time += now_s <= due_s
