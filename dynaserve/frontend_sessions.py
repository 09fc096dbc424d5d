"""The front-ends that an instance works for, each as long as its connection stands.

Pure: no sockets, no clock.  The counterpart, who watches the instances, is `dynaserve.liveness`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaserve.messages import Hello


@dataclass
class FrontendSessions:
    """By connection (ZeroMQ identity)."""

    _hellos: dict[bytes, Hello] = field(default_factory=dict)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._hellos

    @property
    def identities(self) -> list[bytes]:
        return list(self._hellos)

    def hello(self, identity: bytes, hello: Hello) -> list[bytes]:
        """A connection begins. Returns the connections of the same front-end that it replaces, whose requests nobody hears any more."""
        earlier = {name: known for name, known in self._hellos.items() if known.frontend_id == hello.frontend_id}
        if any(known.session > hello.session for known in earlier.values()):
            return []  # of a connection that this front-end has given up already
        replaced = [name for name in earlier if name != identity]
        for name in replaced:
            del self._hellos[name]
        self._hellos[identity] = hello
        return replaced

    def bye(self, identity: bytes) -> None:
        """It is over, by the front-end's word or because it has gone."""
        self._hellos.pop(identity, None)
