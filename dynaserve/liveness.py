"""Which instances are alive, by what a front-end hears of them.

    UP --silent, or no new pulse of its engine core--> SUSPECT --for longer--> DEAD --join()--> UP, in a new epoch
     |                                                   |
     +--lost()--> DEAD                                   +--heard again--> UP

A killed or stopped API process is noticed by its connection (`dynaserve.instance_link`), which calls `lost`.  Here two more
signals must go on: *beats* of the API process, which a busy event loop delays and only a hanging one ends, and *pulses* of the
engine core that the beats carry.  A pulse comes from a thread that runs beside the forward pass, so a long step does not silence it.

Pure: no sockets, no clock.  What only the observer missed does not count: see `FleetLiveness.tick`.
The states and their limits are in docs/failures.md.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from dynaserve.messages import Pulse

JOINED, REMOVED = "joined", "removed from the fleet"


class Health(enum.Enum):
    UP = "up"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Limits:
    """suspect_s: of either silence. dead_s: without a new pulse. hung_s: without a beat. tick_s: how often the observer looks.
    pause_s: what is longer between two looks is its own pause.

    gap_factor: how many times its accustomed gap an engine core may be silent, where that is longer, up to longest_s: on a starved
    machine pulses come late, and a false alarm costs work. gap_memory: of the longest gap, what is left of it at the next pulse.

    stuck_s: of a single engine step, or `stuck_factor` times its predicted length where that is longer: its workers hang.
    """

    suspect_s: float = 0.8
    dead_s: float = 1.4
    hung_s: float = 10.0
    tick_s: float = 0.1
    pause_s: float = 0.4
    gap_factor: float = 3.0
    gap_memory: float = 0.98
    longest_s: float = 6.0
    stuck_s: float = 60.0
    stuck_factor: float = 10.0

    def why_stuck(self, pulse: Pulse) -> str | None:
        """None: the step that runs, if any does, may still end."""
        allowed_s = max(self.stuck_s, self.stuck_factor * (pulse.step_predicted_ms or 0.0) / 1e3)
        if pulse.step_running_s is None or pulse.step_running_s <= allowed_s:
            return None
        return f"its step {pulse.step} runs for {pulse.step_running_s:.0f} s, {allowed_s:.0f} s are allowed"


@dataclass(frozen=True, slots=True)
class Changed:
    """An instance has another state; `reason` says what was observed. epoch: of its life; counts those of all instances, from 1."""

    instance_id: str
    health: Health
    epoch: int
    reason: str


@dataclass(slots=True)
class _Observed:
    """silent_s: without a beat. still_s: of beats without a new pulse. gap_s: the longest of the latter lately. Seconds that the
    observer was awake."""

    health: Health = Health.DEAD
    epoch: int = 0
    silent_s: float = 0.0
    still_s: float = 0.0
    gap_s: float = 0.0
    pulse: Pulse | None = None


@dataclass
class FleetLiveness:
    """Of all instances of a front-end. An instance that was never joined, or was removed, is dead."""

    limits: Limits = field(default_factory=Limits)
    _observed: dict[str, _Observed] = field(default_factory=dict)
    _epoch: int = 0
    """The newest."""
    _last_tick_s: float | None = None

    def join(self, instance_id: str) -> Changed:
        """The instance has answered as who it is: a new epoch begins."""
        seen = self._observed.get(instance_id, _Observed())
        self._epoch += 1
        # What it died of may have been a pause: it is accustomed to that.
        self._observed[instance_id] = _Observed(Health.UP, self._epoch, gap_s=max(seen.gap_s, seen.still_s))
        return Changed(instance_id, Health.UP, self._epoch, JOINED)

    def beat(self, instance_id: str, pulse: Pulse | None) -> list[Changed]:
        """Something was heard of the API process. pulse: the engine core's newest that it knows; None: it carries none."""
        seen = self._observed.get(instance_id)
        if seen is None or seen.health is Health.DEAD:
            return []  # a late word of a life that is over
        # What the beats do not say of the engine core is no word against it: they are late where the API process is busy.
        seen.still_s += min(seen.silent_s, self.limits.pause_s)
        seen.silent_s = 0.0
        if pulse is not None and (seen.pulse is None or pulse.number != seen.pulse.number):
            seen.gap_s = max(seen.gap_s * self.limits.gap_memory, seen.still_s)
            seen.pulse, seen.still_s = pulse, 0.0
        if seen.health is Health.SUSPECT and self._suspicion(seen) is None:
            seen.health = Health.UP
            return [Changed(instance_id, Health.UP, seen.epoch, "heard again")]
        return []

    def lost(self, instance_id: str, reason: str) -> list[Changed]:
        """Its connection has ended: nothing more can come in this epoch."""
        seen = self._observed.get(instance_id)
        return [] if seen is None or seen.health is Health.DEAD else [self._change(instance_id, seen, Health.DEAD, reason)]

    def remove(self, instance_id: str) -> list[Changed]:
        """The instance has left the fleet, and is not known any more."""
        changes = self.lost(instance_id, REMOVED)
        self._observed.pop(instance_id, None)
        return changes

    def tick(self, now_s: float) -> list[Changed]:
        """Time has passed, to be called every `tick_s`.

        An observer that was paused (a busy event loop, a stopped process) has heard nobody meanwhile: of the time since its
        last look no more than `pause_s` counts.
        """
        passed_s = 0.0 if self._last_tick_s is None else min(max(now_s - self._last_tick_s, 0.0), self.limits.pause_s)
        self._last_tick_s = now_s
        changes: list[Changed] = []
        for instance_id, seen in self._observed.items():
            if seen.health is Health.DEAD:
                continue
            seen.silent_s += passed_s
            if (reason := self._fault(seen)) is not None:
                changes.append(self._change(instance_id, seen, Health.DEAD, reason))
            elif seen.health is Health.UP and (reason := self._suspicion(seen)) is not None:
                changes.append(self._change(instance_id, seen, Health.SUSPECT, reason))
        return changes

    def in_doubt(self, now_s: float) -> bool:
        """Whether what ended one instance may be ending others: one is suspected, or the observer was paused and has not looked since."""
        paused = self._last_tick_s is not None and now_s - self._last_tick_s > self.limits.pause_s
        return paused or any(seen.health is Health.SUSPECT for seen in self._observed.values())

    def health(self, instance_id: str) -> Health:
        seen = self._observed.get(instance_id)
        return Health.DEAD if seen is None else seen.health

    def _change(self, instance_id: str, seen: _Observed, health: Health, reason: str) -> Changed:
        seen.health = health
        return Changed(instance_id, health, seen.epoch, reason)

    def _suspicion(self, seen: _Observed) -> str | None:
        return self._silence(seen, self.limits.suspect_s, self._patience_s(seen) * self.limits.suspect_s / self.limits.dead_s)

    def _fault(self, seen: _Observed) -> str | None:
        """What an instance is dead of; None: it is not."""
        if (reason := self._silence(seen, self.limits.hung_s, self._patience_s(seen))) is not None:
            return reason
        return None if seen.pulse is None else self.limits.why_stuck(seen.pulse)

    def _silence(self, seen: _Observed, api_s: float, core_s: float) -> str | None:
        """Longer than these."""
        if seen.silent_s > api_s:
            return f"its API process is silent for {seen.silent_s:.1f} s"
        if seen.still_s > core_s:
            return f"its engine core is silent for {seen.still_s:.1f} s"
        return None

    def _patience_s(self, seen: _Observed) -> float:
        """With its engine core, by what it is accustomed to."""
        return max(self.limits.dead_s, min(self.limits.gap_factor * seen.gap_s, self.limits.longest_s))
