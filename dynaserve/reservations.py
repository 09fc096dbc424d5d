"""What the front-ends of an instance have reserved on it, so that each hears of the others.

A front-end says with each micro-request up to which token it expects the request to be computed; the gateway counts the tokens
that it passes on. Pure: no sockets, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dynaserve.messages import Reserved


@dataclass(slots=True)
class _MicroRequest:
    """Of tokens [start_token, end_token); prompt_tokens: all that is prefilled, with what a lost instance had sampled. limit_token:
    where an alpha stops, or None. waits: a beta, for its KV."""

    prompt_tokens: int
    start_token: int
    end_token: int
    limit_token: int | None
    waits: bool
    output_tokens: int = 0
    told_tokens: int = 0
    """By the instance, of a prompt that has begun."""

    @property
    def computed_tokens(self) -> int:
        """As far as its output tells, or, until then, the instance."""
        if not self.output_tokens:
            return max(self.start_token, self.told_tokens)
        # The step that computes the last token of the prompt samples the first one of the answer.
        return max(self.start_token, self.prompt_tokens - 1) + self.output_tokens

    def told(self, most_tokens: int) -> Reserved:
        computed = self.computed_tokens
        # A request that outgrew its expected length, and is still there, has a token to go.
        end = max(self.end_token, computed + 1) if self.limit_token is None else max(self.limit_token, computed)
        return Reserved(min(computed, most_tokens), self.prompt_tokens, min(end, most_tokens), self.waits)


@dataclass
class Reservations:
    """By request id, of those that are not over. most_tokens: of any request on this instance."""

    most_tokens: int
    _by_id: dict[str, _MicroRequest] = field(default_factory=dict)

    def add(self, request_id: str, prompt_tokens: int, end_token: int, hand_off_at: int | None, *, is_beta: bool) -> None:
        """A whole request, an alpha that stops at `hand_off_at`, or a beta that starts there. end_token: of the whole request, as its
        front-end expects."""
        start_token, limit_token = (hand_off_at or 0, None) if is_beta else (0, hand_off_at)
        self._by_id[request_id] = _MicroRequest(prompt_tokens, start_token, end_token, limit_token, waits=is_beta)

    def moved(self, request_id: str, hand_off_at: int | None) -> None:
        """The hand-off point of an alpha, or of a beta that waits; None: the alpha was lifted, for good. Unknown ids are ignored, here
        and below."""
        micro = self._by_id.get(request_id)
        if micro is None:
            return
        if micro.limit_token is not None:
            micro.limit_token = hand_off_at
        elif micro.waits and hand_off_at is not None:
            micro.start_token = hand_off_at

    def cut(self, request_id: str, hand_off_at: int) -> None:
        """A whole request has become an alpha."""
        if (micro := self._by_id.get(request_id)) is not None:
            micro.limit_token = hand_off_at

    def resumed(self, request_id: str) -> None:
        """A beta has its KV."""
        if (micro := self._by_id.get(request_id)) is not None:
            micro.waits = False

    def tokens(self, request_id: str, number: int) -> None:
        """The request has sampled so many more."""
        if (micro := self._by_id.get(request_id)) is not None:
            micro.output_tokens += number

    def computed(self, request_id: str, number: int) -> None:
        """The instance has computed so many tokens of its prompt, those that came from elsewhere included."""
        if (micro := self._by_id.get(request_id)) is not None:
            micro.told_tokens = number

    def forget(self, request_id: str) -> None:
        self._by_id.pop(request_id, None)

    def of(self, request_ids: Iterable[str]) -> list[Reserved]:
        return [self._by_id[request_id].told(self.most_tokens) for request_id in request_ids if request_id in self._by_id]
