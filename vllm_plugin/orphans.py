"""Requests that have lost their instance while no other one takes new work. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

PATIENCE_S = 5.0
"""An instance that has only dropped its front-end, or is suspected, is back in less."""


@dataclass
class Orphans:
    """By request id, oldest first."""

    patience_s: float = PATIENCE_S
    _since_s: dict[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> list[str]:
        return list(self._since_s)

    def add(self, request_id: str, now_s: float) -> None:
        self._since_s.setdefault(request_id, now_s)

    def remove(self, request_id: str) -> None:
        self._since_s.pop(request_id, None)

    def given_up(self, now_s: float) -> list[str]:
        """Those that have waited for too long, and forgets them."""
        late = [request_id for request_id, since_s in self._since_s.items() if now_s - since_s > self.patience_s]
        for request_id in late:
            del self._since_s[request_id]
        return late
