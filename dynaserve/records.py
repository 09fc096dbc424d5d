"""What was done with each request: the answer of `GET /dynaserve/requests/{request_id}`."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

_ONE_OF_SEVERAL = re.compile(r"(cmpl-.+)-[0-9]+")
"""vLLM numbers the prompts of a completion (entrypoints/openai/completion/serving.py); ids of other answers end as their clients like."""


def answer_id(sequence_id: str) -> str:
    """The id of the answer that a sequence is part of."""
    numbered = _ONE_OF_SEVERAL.fullmatch(sequence_id)
    return sequence_id if numbered is None else numbered[1]


@dataclass
class MicroRecord:
    """One micro-request. computed_tokens: run through the model, repeats included. cached_tokens: prefix-cache hits.

    lost: its instance has died, and never tells what it has computed.
    """

    instance: str
    computed_tokens: int | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    lost: bool = False


@dataclass
class LostAttempt:
    """A request that had to go on elsewhere: why, with how many tokens, when, and what of it had been where. aborted: by an instance
    that lives, as one does that is told to stop."""

    reason: str
    output_tokens: int
    at_ms: float
    alpha: MicroRecord | None
    beta: MicroRecord | None
    aborted: bool = False


@dataclass
class KvRecord:
    """The KV transfer. ..._before_alpha_end: of what had left while the alpha was still computing. push_ms: time to send it all."""

    transport: str
    block_bytes: int
    blocks: int = 0
    bytes: int = 0
    bytes_before_alpha_end: int = 0
    push_ms: float = 0.0
    push_ms_before_alpha_end: float = 0.0
    chunks: list[dict[str, float]] = field(default_factory=list)


@dataclass
class TokenGaps:
    """The gaps between tokens (TBT), as they reached the front-end; tokens of one step have none between them. slo_ms: the request's.

    last_ms: when the newest token came, from arrival; None: none has.
    """

    slo_ms: float
    count: int = 0
    in_slo: int = 0
    longest_ms: float = 0.0
    last_ms: float | None = None

    def add(self, tokens: int, now_ms: float) -> None:
        """So many tokens have come at once."""
        if not tokens:
            return
        gap_ms = 0.0 if self.last_ms is None else now_ms - self.last_ms
        late = gap_ms > self.slo_ms
        count = tokens if self.last_ms is not None else tokens - 1  # none before the first token
        self.count += count
        self.in_slo += count - late
        self.longest_ms = max(self.longest_ms, round(gap_ms, 3))
        self.last_ms = round(now_ms, 3)


@dataclass
class RequestRecord:
    """One sequence of a request. reason: why it was cut or not. lifted: why an announced hand-off did not happen.

    expected: of the answer's length and, under policies that predict, of its times and of the best uncut run (objective_ms,
    whole_objective_ms), when it was placed; candidates: what else was predicted then. revisions: how the scheduler changed the
    hand-off afterwards, and what it expected of that.

    split_token: where alpha stopped, once it has; before, where it is to stop. moves: how often that was changed on the way.

    arrived_s: Unix time, in seconds. timeline_ms: milliseconds from arrival to each phase, as the front-end saw it. step_rest_ms: how
    long the hand-over waited for the end of a step of beta's instance. ttft_slo_ms: None where it has none.
    """

    request_id: str
    prompt_tokens: int
    split_token: int | None
    reason: str
    output_tokens: int = 0
    finish_reason: str | None = None
    lifted: str | None = None
    moves: int = 0
    step_rest_ms: float | None = None
    alpha: MicroRecord | None = None
    beta: MicroRecord | None = None
    kv: KvRecord | None = None
    lost_attempts: list[LostAttempt] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)
    revisions: list[dict[str, Any]] = field(default_factory=list)
    timeline_ms: dict[str, float] = field(default_factory=dict)
    arrived_s: float = 0.0
    ttft_slo_ms: float | None = None
    gaps: TokenGaps | None = None

    def mark(self, phase: str, now_ms: float) -> None:
        self.timeline_ms.setdefault(phase, round(now_ms, 3))

    def lose(self, reason: str, now_ms: float, *, aborted: bool = False) -> None:
        """The request has lost an instance that it needs; alpha and beta are from now on those of its next attempt."""
        self.lost_attempts.append(LostAttempt(reason, self.output_tokens, round(now_ms, 3), self.alpha, self.beta, aborted))

    @property
    def lost_lives(self) -> int:
        """Attempts in which the request may have ended its instance (decision 8)."""
        return sum(not attempt.aborted for attempt in self.lost_attempts)

    @property
    def state(self) -> str:
        """How far it is, by the names of `request_flow.State`."""
        if self.finish_reason is not None:
            return "finished"
        if self.lost_attempts and self.lost_attempts[-1].alpha is self.alpha:
            return "orphaned"
        if self.beta is None or self.lifted is not None:
            return "whole"
        if "beta_resumed" in self.timeline_ms:
            return "beta"
        return "handing_over" if "continue_sent" in self.timeline_ms else "alpha"

    @property
    def recomputed_tokens(self) -> int | None:
        """Tokens that ran through a model more often than an uncut run needs; None until both sides have ended."""
        parts = [micro for micro in (self.alpha, self.beta) if micro is not None]
        unknown = self.lost_attempts or any(micro.computed_tokens is None for micro in parts)
        if not self.output_tokens or unknown or self.alpha is None:
            return None
        needed = self.prompt_tokens + self.output_tokens - 1 - self.alpha.cached_tokens
        return sum(micro.computed_tokens or 0 for micro in parts) - needed

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"recomputed_tokens": self.recomputed_tokens}


class RecordBook:
    """The last `capacity` sequences, by the request id that the client saw. A request with n > 1 has several, and clients, who choose
    ids, may use one again: each sequence ages by itself."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._records: deque[RequestRecord] = deque()  # oldest first, as each list of `_answers`
        self._answers: dict[str, list[RequestRecord]] = {}

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._answers.setdefault(answer_id(record.request_id), []).append(record)
        if len(self._records) > self._capacity:
            answer = answer_id(self._records.popleft().request_id)
            del self._answers[answer][0]
            if not self._answers[answer]:
                del self._answers[answer]

    def recent(self, most: int) -> list[RequestRecord]:
        """The last sequences, the newest first."""
        return list(islice(reversed(self._records), most))

    def find(self, request_id: str) -> list[RequestRecord]:
        """All sequences of the answer with this id, else the sequence with it."""
        if (found := self._answers.get(request_id)) is not None:
            return found
        return [record for record in self._answers.get(answer_id(request_id), []) if record.request_id == request_id]
