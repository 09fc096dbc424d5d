"""What front-ends of one instance tell each other through it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from dynaserve.messages import Reserved
from dynaserve.reservations import Reservations

MOST_TOKENS = 100


def whole(books: Reservations) -> None:
    books.add("r", 10, 30, None, is_beta=False)


def alpha(books: Reservations) -> None:
    books.add("r", 10, 30, 15, is_beta=False)


def beta(books: Reservations) -> None:
    books.add("r", 10, 30, 15, is_beta=True)


def beta_in_the_prompt(books: Reservations) -> None:
    books.add("r", 10, 30, 4, is_beta=True)


@pytest.mark.parametrize(
    ("kind", "fresh", "after_one_token", "after_six"),
    [
        (whole, Reserved(0, 10, 30), Reserved(10, 10, 30), Reserved(15, 10, 30)),
        (alpha, Reserved(0, 10, 15), Reserved(10, 10, 15), Reserved(15, 10, 15)),
        (beta, Reserved(15, 10, 30), Reserved(16, 10, 30), Reserved(21, 10, 30)),
        (beta_in_the_prompt, Reserved(4, 10, 30), Reserved(10, 10, 30), Reserved(15, 10, 30)),
    ],
)
def test_what_is_computed_shows_in_the_output(
    kind: Callable[[Reservations], None], fresh: Reserved, after_one_token: Reserved, after_six: Reserved
) -> None:
    books = Reservations(MOST_TOKENS)
    kind(books)
    books.resumed("r")
    assert books.of(["r"]) == [fresh]
    books.tokens("r", 1)
    assert books.of(["r"]) == [after_one_token]
    books.tokens("r", 5)
    assert books.of(["r"]) == [after_six]
    books.forget("r")
    assert books.of(["r"]) == []


def test_how_far_a_prompt_is_the_instance_tells() -> None:
    books = Reservations(MOST_TOKENS)
    books.add("r", 50, 80, None, is_beta=False)
    books.computed("r", 40)
    assert books.of(["r"]) == [Reserved(40, 50, 80)]
    books.computed("r", 0)  # preempted
    assert books.of(["r"]) == [Reserved(0, 50, 80)]
    books.computed("r", 50)
    books.tokens("r", 1)
    assert books.of(["r"]) == [Reserved(50, 50, 80)]
    books.computed("unknown", 3)


def test_a_beta_waits_until_it_has_its_kv() -> None:
    books = Reservations(MOST_TOKENS)
    beta(books)
    assert books.of(["r"]) == [Reserved(15, 10, 30, waits=True)]
    books.moved("r", 12)
    assert books.of(["r"]) == [Reserved(12, 10, 30, waits=True)]
    books.resumed("r")
    assert books.of(["r"]) == [Reserved(12, 10, 30)]


def test_an_alpha_goes_where_its_hand_off_is_moved() -> None:
    books = Reservations(MOST_TOKENS)
    alpha(books)
    books.moved("r", 20)
    assert books.of(["r"]) == [Reserved(0, 10, 20)]
    books.moved("r", None)
    assert books.of(["r"]) == [Reserved(0, 10, 30)]
    books.moved("r", 15)
    assert books.of(["r"]) == [Reserved(0, 10, 30)], "it was lifted before"


def test_a_beta_that_runs_begins_where_it_began() -> None:
    books = Reservations(MOST_TOKENS)
    beta(books)
    books.resumed("r")
    books.moved("r", 20)
    assert books.of(["r"]) == [Reserved(15, 10, 30)]


@pytest.mark.parametrize("kind", [whole, alpha, beta])
def test_nothing_is_told_that_the_wire_refuses(kind: Callable[[Reservations], None]) -> None:
    books = Reservations(MOST_TOKENS)
    kind(books)
    books.moved("r", (1 << 31) - 1)
    books.tokens("r", 5000)
    (told,) = books.of(["r"])
    assert told.computed_tokens == told.end_token == MOST_TOKENS
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Reserved) == told


def test_an_answer_that_outgrew_its_expectation_has_a_token_to_go() -> None:
    books = Reservations(MOST_TOKENS)
    whole(books)
    books.tokens("r", 40)
    assert books.of(["r"]) == [Reserved(49, 10, 50)]


def test_what_is_not_known_is_ignored() -> None:
    books = Reservations(MOST_TOKENS)
    books.moved("r", 5)
    books.resumed("r")
    books.tokens("r", 1)
    books.forget("r")
    assert books.of(["r"]) == []
