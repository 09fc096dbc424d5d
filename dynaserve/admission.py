"""Which requests the fleet still takes: a queue of bounded length, and none that would get its first token too late.

The wait for a first token is told by how fast prompts were computed lately while any waited, whatever the policy: what waits and the
request itself, over that rate. Prompts that come one by one are computed more slowly than a batch of them, so a rate alone would
refuse a burst after a quiet time: nobody is refused before the burst itself has told something, that is, before someone has waited for
a while. Pure; time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

LEAST_S, RECENT_S, RECENT_PROMPTS = 1.0, 10.0, 32
"""How far back the rate reaches: so many prompts, but LEAST_S at least, with less of which it is not known, and RECENT_S at most."""
STRETCH_S = 0.1
"""Experience is kept in stretches at least so long; each ends with answers, and has the silence before them."""
PATIENCE, MOST_PATIENCE_S = 0.25, 2.0
"""How long someone must have waited before anyone is refused: this share of the TTFT SLO, and at most so long. Meanwhile a load of
n times the capacity lets in what takes n times as long."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """kind: queue or ttft. reason: one sentence."""

    kind: str
    reason: str


@dataclass(slots=True)
class _Stretch:
    """Of time in which somebody waited: the prompts that were computed in it, and their tokens."""

    seconds: float = 0.0
    prompts: int = 0
    tokens: int = 0


@dataclass
class _Rate:
    """Prompt tokens per second of time in which somebody waited."""

    _stretches: deque[_Stretch] = field(default_factory=lambda: deque([_Stretch()]))  # oldest first
    _seconds: float = 0.0
    _prompts: int = 0

    def passed(self, seconds: float) -> None:
        if self._stretches[-1].prompts and self._stretches[-1].seconds >= STRETCH_S:
            self._stretches.append(_Stretch())
        self._stretches[-1].seconds += seconds
        self._seconds += seconds
        # The last answers stay, however long ago they were: who answers nobody is slow, not of unknown speed.
        while self._seconds - self._stretches[0].seconds >= RECENT_S and self._prompts > self._stretches[0].prompts:
            oldest = self._stretches.popleft()
            self._seconds -= oldest.seconds
            self._prompts -= oldest.prompts

    def computed(self, prompt_tokens: int) -> None:
        self._stretches[-1].prompts += 1
        self._stretches[-1].tokens += prompt_tokens
        self._prompts += 1

    @property
    def tokens_per_s(self) -> float | None:
        """None: not known."""
        seconds, prompts, tokens = 0.0, 0, 0
        for stretch in reversed(self._stretches):
            seconds += stretch.seconds
            prompts += stretch.prompts
            tokens += stretch.tokens
            if seconds >= LEAST_S and prompts >= RECENT_PROMPTS:
                break
        return tokens / seconds if seconds >= LEAST_S and tokens else None


@dataclass
class Admission:
    """most_waiting: requests that wait for their first token, in the whole fleet."""

    most_waiting: float = math.inf
    _waiting: dict[str, tuple[float, int]] = field(default_factory=dict)  # since when (s), prompt tokens; oldest first
    _waiting_tokens: int = 0
    _rate: _Rate = field(default_factory=_Rate)
    _looked_s: float = -math.inf

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def why_not(self, prompt_tokens: int, ttft_slo_ms: float, now_s: float, sequences: int = 1) -> Refusal | None:
        """Of a request that comes now, for so many answers, each of which counts. ttft_slo_ms: infinite for one that is served as best it
        goes."""
        self._look(now_s)
        rate = self._rate.tokens_per_s
        if self.waiting + sequences > self.most_waiting:
            more = "" if sequences == 1 else f", {sequences} more would"
            return Refusal("queue", f"{self.waiting} requests wait for their first token{more}, and at most {self.most_waiting:g} may")
        if rate is None or not self._waiting:
            return None
        wait_s = (self._waiting_tokens + prompt_tokens) / rate
        oldest_s, _ = next(iter(self._waiting.values()))
        if wait_s <= ttft_slo_ms / 1e3 or now_s - oldest_s < min(PATIENCE * ttft_slo_ms / 1e3, MOST_PATIENCE_S):
            return None
        return Refusal("ttft", f"the first token would come after {wait_s:.1f} s, and is asked for within {ttft_slo_ms:g} ms")

    def drained_s(self, now_s: float) -> float:
        """Until all that wait now have their first token; 0 where that is not known."""
        self._look(now_s)
        rate = self._rate.tokens_per_s
        return self._waiting_tokens / rate if rate else 0.0

    def arrived(self, request_id: str, prompt_tokens: int, now_s: float) -> None:
        self._look(now_s)
        self._waiting[request_id] = (now_s, prompt_tokens)
        self._waiting_tokens += prompt_tokens

    def answered(self, request_id: str, now_s: float) -> None:
        """It has tokens; only the first ones tell anything."""
        if request_id in self._waiting:
            self._look(now_s)
            self._rate.computed(self._forget(request_id))

    def left(self, request_id: str, now_s: float) -> None:
        """It is over, in whatever way: without an answer it taught nothing."""
        self._look(now_s)
        self._forget(request_id)

    def _forget(self, request_id: str) -> int:
        _, tokens = self._waiting.pop(request_id, (0.0, 0))
        self._waiting_tokens -= tokens
        return tokens

    def _look(self, now_s: float) -> None:
        """Time counts while somebody waits."""
        if self._waiting and now_s > self._looked_s:
            self._rate.passed(now_s - self._looked_s)
        self._looked_s = max(self._looked_s, now_s)
