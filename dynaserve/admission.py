"""Which requests the fleet still takes: a queue of bounded length, and none that would get its first token too late.

The wait for a first token is told by how fast prompts were computed lately while any waited, whatever the policy: what waits and the
request itself, over that rate. Prompts that come one by one are computed more slowly than a batch of them, so a rate alone would
refuse a burst after a quiet time: nobody is refused before someone has waited for half of the time that is asked for. Pure; time is
an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

RECENT_S = 10.0
"""How far back the rate reaches: what is older counts a third (1/e) for each such time."""
LEAST_SAMPLE_S = 1.0
"""With less experience than this much of waiting, the rate is not known, and nobody is refused for it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """kind: queue or ttft. reason: one sentence."""

    kind: str
    reason: str


@dataclass
class Admission:
    """most_waiting: requests that wait for their first token, in the whole fleet."""

    most_waiting: float = math.inf
    _waiting: dict[str, tuple[float, int]] = field(default_factory=dict)  # since when (s), prompt tokens; oldest first
    _waiting_tokens: int = 0
    _computed_tokens: float = 0.0
    _busy_s: float = 0.0
    _looked_s: float = -math.inf

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def why_not(self, prompt_tokens: int, ttft_slo_ms: float, now_s: float) -> Refusal | None:
        """Of a request that comes now. ttft_slo_ms: infinite for one that is served as best it goes."""
        self._look(now_s)
        rate = self._tokens_per_s()
        if self.waiting >= self.most_waiting:
            return Refusal("queue", f"{self.waiting} requests wait for their first token, and at most {self.most_waiting:g} may")
        if rate is None or not self._waiting:
            return None
        wait_s = (self._waiting_tokens + prompt_tokens) / rate
        oldest_s, _ = next(iter(self._waiting.values()))
        if wait_s <= ttft_slo_ms / 1e3 or now_s - oldest_s < ttft_slo_ms / 2e3:
            return None
        return Refusal("ttft", f"the first token would come after {wait_s:.1f} s, and is asked for within {ttft_slo_ms:g} ms")

    def drained_s(self, now_s: float) -> float:
        """Until all that wait now have their first token; 0 where that is not known."""
        self._look(now_s)
        rate = self._tokens_per_s()
        return self._waiting_tokens / rate if rate else 0.0

    def arrived(self, request_id: str, prompt_tokens: int, now_s: float) -> None:
        self._look(now_s)
        self._waiting[request_id] = (now_s, prompt_tokens)
        self._waiting_tokens += prompt_tokens

    def answered(self, request_id: str, now_s: float) -> None:
        """It has tokens; only the first ones tell anything."""
        if request_id in self._waiting:
            self._look(now_s)
            self._computed_tokens += self._forget(request_id)

    def left(self, request_id: str, now_s: float) -> None:
        """It is over, in whatever way: without an answer it taught nothing."""
        self._look(now_s)
        self._forget(request_id)

    def _forget(self, request_id: str) -> int:
        _, tokens = self._waiting.pop(request_id, (0.0, 0))
        self._waiting_tokens -= tokens
        return tokens

    def _look(self, now_s: float) -> None:
        """Time counts as busy while somebody waits; experience fades with busy time only."""
        if self._waiting and now_s > self._looked_s:
            passed_s = now_s - self._looked_s
            fade = math.exp(-passed_s / RECENT_S)
            self._computed_tokens *= fade
            self._busy_s = self._busy_s * fade + RECENT_S * (1 - fade)
        self._looked_s = max(self._looked_s, now_s)

    def _tokens_per_s(self) -> float | None:
        """None: not known."""
        return self._computed_tokens / self._busy_s if self._busy_s >= LEAST_SAMPLE_S and self._computed_tokens else None
