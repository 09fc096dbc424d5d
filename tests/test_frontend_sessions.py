"""For whom an instance works, and when it stops."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.frontend_sessions import SILENT_S, FrontendSessions
from dynaserve.messages import Hello


def ticked(sessions: FrontendSessions, start_s: float, for_s: float, *heard: bytes) -> list[bytes]:
    """Time passes in ticks; those of `heard` speak in each."""
    silent: list[bytes] = []
    for tick in range(round(for_s / sessions.tick_s)):
        for identity in heard:
            assert sessions.heard(identity)
        silent += sessions.tick(start_s + tick * sessions.tick_s)
    return silent


def test_a_silent_frontend_is_forgotten_and_one_that_speaks_is_not() -> None:
    sessions = FrontendSessions()
    sessions.hello(b"a", Hello("a"))
    sessions.hello(b"b", Hello("b"))
    sessions.alive(b"a")
    sessions.alive(b"b")
    assert ticked(sessions, 0.0, SILENT_S + 0.6, b"b") == [b"a"]
    assert sessions.identities == [b"b"]
    assert not sessions.heard(b"a"), "it must say hello again"


def test_a_frontend_may_take_its_time_to_start() -> None:
    sessions = FrontendSessions()
    sessions.hello(b"a", Hello("a"))
    assert ticked(sessions, 0.0, 20.0) == []
    sessions.alive(b"a")
    assert ticked(sessions, 20.0, 5.0) == [b"a"]


def test_a_frontend_s_new_connection_replaces_its_old_ones() -> None:
    sessions = FrontendSessions()
    sessions.hello(b"a1", Hello("a", session=1))
    sessions.hello(b"b1", Hello("b", session=1))
    assert sessions.hello(b"a2", Hello("a", session=2)) == [b"a1"]
    assert sessions.identities == [b"b1", b"a2"]


def test_a_hello_that_was_given_up_is_late() -> None:
    """It waited in the queue of an instance that was stopped."""
    sessions = FrontendSessions()
    sessions.hello(b"a2", Hello("a", session=2))
    assert sessions.hello(b"a1", Hello("a", session=1)) == []
    assert sessions.identities == [b"a2"]


def test_who_says_goodbye_is_not_missed() -> None:
    sessions = FrontendSessions()
    sessions.hello(b"a", Hello("a"))
    sessions.bye(b"a")
    assert ticked(sessions, 0.0, 5.0) == []


@settings(max_examples=200, deadline=None)
@given(pauses=st.lists(st.floats(0.0, 30.0), max_size=8))
def test_an_instance_that_sleeps_drops_nobody(pauses: list[float]) -> None:
    sessions = FrontendSessions()
    sessions.hello(b"a", Hello("a"))
    sessions.alive(b"a")
    now_s = 0.0
    for pause in pauses:
        now_s += pause
        assert ticked(sessions, now_s, 1.0, b"a") == []
        now_s += 1.0
