"""For whom an instance works, and when it stops."""

from __future__ import annotations

from dynaserve.frontend_sessions import FrontendSessions
from dynaserve.messages import Hello


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


def test_a_hello_may_be_said_again() -> None:
    sessions = FrontendSessions()
    sessions.hello(b"a", Hello("a"))
    assert sessions.hello(b"a", Hello("a")) == []
    assert b"a" in sessions


def test_who_says_goodbye_is_not_known_any_more() -> None:
    sessions = FrontendSessions()
    sessions.hello(b"a", Hello("a"))
    sessions.bye(b"a")
    sessions.bye(b"a stranger")
    assert b"a" not in sessions
    assert sessions.identities == []
