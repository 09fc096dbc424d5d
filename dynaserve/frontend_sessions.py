"""The front-ends that an instance works for, each as long as it is heard.

Pure: no sockets, no clock.  The counterpart, who watches the instances, is `dynaserve.liveness`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaserve.messages import Hello

SILENT_S = 1.5
"""Of a front-end; what it has asked for is aborted then. It says `Alive` several times as often."""


@dataclass(slots=True)
class _Session:
    frontend_id: str
    number: int
    silent_s: float = 0.0
    watched: bool = False


@dataclass
class FrontendSessions:
    """By connection (ZeroMQ identity). A front-end that has said hello may take its time to start, up to its first `Alive`."""

    tick_s: float = 0.2
    _sessions: dict[bytes, _Session] = field(default_factory=dict)
    _last_tick_s: float | None = None

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._sessions

    @property
    def identities(self) -> list[bytes]:
        return list(self._sessions)

    def hello(self, identity: bytes, hello: Hello) -> list[bytes]:
        """A connection begins. Returns the connections of the same front-end that it replaces, whose requests nobody hears any more."""
        if any(session.number > hello.session for session in self._sessions.values() if session.frontend_id == hello.frontend_id):
            return []  # of a connection that this front-end has given up already
        replaced = [name for name, session in self._sessions.items() if name != identity and session.frontend_id == hello.frontend_id]
        for known in replaced:
            del self._sessions[known]
        self._sessions[identity] = _Session(hello.frontend_id, hello.session)
        return replaced

    def heard(self, identity: bytes) -> bool:
        """Something came. False: from nobody that said hello, or was silent for too long: it must say hello again."""
        session = self._sessions.get(identity)
        if session is None:
            return False
        session.silent_s = 0.0
        return True

    def alive(self, identity: bytes) -> None:
        """From now on it says so again and again."""
        self._sessions[identity].watched = True

    def bye(self, identity: bytes) -> None:
        self._sessions.pop(identity, None)

    def tick(self, now_s: float) -> list[bytes]:
        """Time has passed. Returns connections that were silent for too long, and forgets them.

        An instance that was paused itself has heard nobody meanwhile: no more than two ticks count.
        """
        passed_s = 0.0 if self._last_tick_s is None else min(max(now_s - self._last_tick_s, 0.0), 2 * self.tick_s)
        self._last_tick_s = now_s
        for session in self._sessions.values():
            session.silent_s += passed_s if session.watched else 0.0
        silent = [identity for identity, session in self._sessions.items() if session.silent_s > SILENT_S]
        for identity in silent:
            del self._sessions[identity]
        return silent
