"""When a front-end takes an instance for dead, and when it must not."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.instance_link import LOOK_S, MOST_UNANSWERED
from dynaserve.liveness import Changed, FleetLiveness, Health, Limits
from dynaserve.messages import Pulse

LIMITS = Limits()
BEAT_S = 0.2


class Observer:
    """A front-end that looks every tick; `now_s` is the time of the instance's machine as well."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.liveness = FleetLiveness(limits)
        self.now_s = 100.0
        self.pulses = 0
        self.changes: list[Changed] = []
        self.liveness.join("a")
        self.liveness.tick(self.now_s)

    def run(
        self, for_s: float, *, api: bool = True, core: bool = True, step_s: float | None = None, predicted_ms: float | None = None
    ) -> None:
        """Time passes; api, core: which process of the instance runs. step_s: for how long its step has been running at the start."""
        since_s = self.now_s
        next_beat_s = self.now_s
        while self.now_s < since_s + for_s:
            self.now_s += self.limits.tick_s
            self.changes += self.liveness.tick(self.now_s)
            if api and self.now_s >= next_beat_s:
                next_beat_s += BEAT_S
                self.pulses += core
                running_s = None if step_s is None else step_s + self.now_s - since_s
                self.changes += self.liveness.beat("a", Pulse(self.pulses, 1, running_s, predicted_ms))

    @property
    def health(self) -> Health:
        return self.liveness.health("a")


def test_what_is_silent_is_lost_as_soon_as_the_documents_say() -> None:
    """README.md, docs/failures.md."""
    assert LOOK_S * MOST_UNANSWERED == 1.5
    assert (LIMITS.suspect_s, LIMITS.dead_s, LIMITS.longest_s, LIMITS.hung_s, LIMITS.stuck_s) == (0.8, 1.4, 6.0, 10.0, 60.0)
    assert LOOK_S * MOST_UNANSWERED + LIMITS.tick_s < 2.0


def test_an_api_process_that_hangs_is_suspect_soon_and_dead_in_the_end() -> None:
    observer = Observer()
    observer.run(3.0)
    observer.run(1.0, api=False)
    assert observer.health is Health.SUSPECT
    observer.run(LIMITS.hung_s, api=False)
    assert [change.health for change in observer.changes] == [Health.SUSPECT, Health.DEAD]
    assert "API process" in observer.changes[-1].reason


def test_a_busy_api_process_is_not_taken_for_a_dead_engine_core() -> None:
    """Its beats, and with them the pulses, come late."""
    observer = Observer()
    for _ in range(5):
        observer.run(3.0, api=False)
        observer.run(0.2)
    assert Health.DEAD not in [change.health for change in observer.changes]


def test_a_stopped_engine_core_is_dead_within_two_seconds_though_its_api_process_speaks() -> None:
    observer = Observer()
    observer.run(3.0)
    observer.run(2.0, core=False)
    assert observer.health is Health.DEAD
    assert "engine core" in observer.changes[-1].reason


def test_an_instance_in_a_step_of_three_seconds_stays_up() -> None:
    observer = Observer()
    observer.run(3.0, step_s=0.0)
    assert observer.changes == []


def test_a_step_that_never_ends_is_noticed() -> None:
    observer = Observer(Limits(stuck_s=5.0))
    observer.run(6.0, step_s=0.0)
    assert observer.health is Health.DEAD
    assert "step 1" in observer.changes[-1].reason


def test_a_step_that_was_predicted_to_be_long_may_be() -> None:
    observer = Observer(Limits(stuck_s=5.0))
    observer.run(6.0, step_s=0.0, predicted_ms=2000.0)
    assert observer.changes == []


def test_a_suspect_that_is_heard_again_is_up() -> None:
    observer = Observer()
    observer.run(1.2, api=False)
    assert observer.health is Health.SUSPECT
    observer.run(0.3)
    assert [change.health for change in observer.changes] == [Health.SUSPECT, Health.UP]


def test_a_dead_instance_comes_back_in_a_new_epoch_only() -> None:
    observer = Observer()
    observer.run(LIMITS.hung_s + 1.0, api=False)
    observer.run(2.0)
    assert observer.health is Health.DEAD, "late beats of its old life"
    assert observer.liveness.join("a") == Changed("a", Health.UP, 2, "joined")
    observer.run(2.0)
    assert observer.health is Health.UP


def test_of_an_instance_that_was_removed_nothing_is_kept_and_its_epoch_is_not_used_again() -> None:
    observer = Observer()
    liveness = observer.liveness
    assert liveness.remove("a") == [Changed("a", Health.DEAD, 1, "removed from the fleet")]
    assert liveness.join("b").epoch == 2
    liveness.lost("b", "cut")
    assert liveness.remove("b") == liveness.remove("stranger") == []
    assert not liveness._observed
    assert liveness.join("a") == Changed("a", Health.UP, 3, "joined")
    observer.run(2.0)
    assert observer.health is Health.UP


def test_a_lost_connection_is_death_at_once_and_once() -> None:
    observer = Observer()
    assert observer.liveness.lost("a", "cut") == [Changed("a", Health.DEAD, 1, "cut")]
    assert observer.liveness.lost("a", "cut") == []
    assert observer.liveness.lost("stranger", "cut") == []


def test_an_instance_on_a_starved_machine_is_given_more_time_for_a_while() -> None:
    observer = Observer()
    for _ in range(5):
        observer.run(1.0, core=False)
        observer.run(0.2)
    assert observer.health is not Health.DEAD
    observer.run(2.0, core=False)
    assert observer.health is not Health.DEAD, "as long as it is used to such gaps"
    observer.run(60.0)
    observer.changes.clear()
    observer.run(2.0, core=False)
    assert observer.health is Health.DEAD


def test_a_pause_that_was_taken_for_death_is_not_taken_for_it_again() -> None:
    observer = Observer()
    observer.run(1.8, core=False)
    assert observer.health is Health.DEAD
    observer.liveness.join("a")
    observer.run(1.0)
    observer.run(1.8, core=False)
    assert observer.health is not Health.DEAD


@settings(max_examples=300, deadline=None)
@given(pauses=st.lists(st.floats(0.0, 30.0), max_size=8))
def test_an_observer_that_sleeps_declares_nobody_dead(pauses: list[float]) -> None:
    """Its own pause is no silence of the instances, whose words wait in its socket."""
    observer = Observer()
    for pause in pauses:
        observer.now_s += pause
        observer.run(1.0)
    assert observer.health is Health.UP


@settings(max_examples=500, deadline=None)
@given(
    phases=st.lists(st.tuples(st.sampled_from(["run", "no api", "no core", "join", "lost"]), st.floats(0.0, 12.0)), max_size=12),
)
def test_whatever_happens_death_is_told_once_a_life_and_silence_is_bounded(phases: list[tuple[str, float]]) -> None:
    observer = Observer()
    epochs = [1]
    for phase, for_s in phases:
        match phase:
            case "join":
                if observer.health is Health.DEAD:
                    epochs.append(observer.liveness.join("a").epoch)
            case "lost":
                observer.changes += observer.liveness.lost("a", "cut")
            case _:
                observer.run(for_s, api=phase != "no api", core=phase != "no core")
                bound_s = {"run": math.inf, "no api": LIMITS.hung_s, "no core": LIMITS.longest_s}[phase]
                if for_s > bound_s + 0.5:
                    assert observer.health is Health.DEAD
    deaths = [change.epoch for change in observer.changes if change.health is Health.DEAD]
    assert deaths == sorted(set(deaths))
    assert epochs == sorted(set(epochs))


def test_what_ended_one_instance_may_be_ending_others_that_are_suspected() -> None:
    observer = Observer()
    observer.run(2.0)
    assert not observer.liveness.in_doubt(observer.now_s)
    observer.run(1.0, api=False)
    assert observer.liveness.in_doubt(observer.now_s)
    observer.run(1.0)
    assert not observer.liveness.in_doubt(observer.now_s)


def test_an_observer_that_was_paused_is_in_doubt_until_it_looks() -> None:
    observer = Observer()
    observer.run(2.0)
    woken_s = observer.now_s + 5.0
    assert observer.liveness.in_doubt(woken_s)
    observer.liveness.tick(woken_s)
    assert not observer.liveness.in_doubt(woken_s)
