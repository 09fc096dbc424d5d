"""When tokens are due, and how many came in time."""

from __future__ import annotations

import math
import random

import pytest

from dynaserve.deadline_margin import LATE_SHARE, LEAST_SHARE, MOST_LATE_SHARE, NORMAL_SIGMAS, DeadlineMargin
from dynaserve.token_deadlines import TokenCounts, TokenDeadlines, TokenSlo

SLO = TokenSlo(tbt_s=0.1)


def arrived(slo: TokenSlo = SLO, at_s: float = 5.0) -> TokenDeadlines:
    deadlines = TokenDeadlines()
    deadlines.arrive("r", slo, at_s)
    return deadlines


def test_the_next_token_is_due_one_slo_after_the_last() -> None:
    deadlines = arrived()
    assert "r" not in deadlines.next_due_s
    deadlines.token("r", 1, 7.0)
    assert deadlines.next_due_s["r"] == pytest.approx(7.1)


def test_tokens_within_and_beyond_the_slo_are_told_apart() -> None:
    deadlines = arrived()
    for now_s in (7.0, 7.05, 7.3, 7.35):
        deadlines.token("r", 1, now_s)
    assert deadlines.take_counts() == TokenCounts(next_tokens=3, next_tokens_in_time=2)
    assert deadlines.take_counts() == TokenCounts()


def test_of_tokens_that_come_together_only_the_first_has_a_gap() -> None:
    deadlines = arrived()
    deadlines.token("r", 4, 7.0)
    deadlines.token("r", 4, 7.5)
    assert deadlines.take_counts() == TokenCounts(next_tokens=7, next_tokens_in_time=6)


def test_first_tokens_count_against_the_ttft_slo_if_there_is_one() -> None:
    assert arrived().first_due_s == {}
    for now_s, in_time in ((5.9, 1), (6.1, 0)):
        deadlines = arrived(TokenSlo(0.1, ttft_s=1.0))
        deadlines.token("r", 1, now_s)
        assert deadlines.take_counts() == TokenCounts(first_tokens=1, first_tokens_in_time=in_time)


def test_a_request_that_goes_on_here_is_due_since_its_tokens_came() -> None:
    deadlines = arrived(TokenSlo(0.1, ttft_s=1.0))
    deadlines.took_over("r", 8.0)
    deadlines.took_over("r", 8.05)
    assert deadlines.next_due_s["r"] == pytest.approx(8.1)
    deadlines.token("r", 1, 8.2)
    assert deadlines.take_counts() == TokenCounts(next_tokens=1, next_tokens_in_time=0)


def test_nothing_is_left_of_a_request_that_is_forgotten() -> None:
    deadlines = arrived(TokenSlo(0.1, ttft_s=1.0))
    deadlines.token("r", 1, 6.0)
    deadlines.forget("r")
    deadlines.forget("never came")
    assert deadlines == TokenDeadlines(counts=deadlines.counts)


@pytest.mark.parametrize("heavy", [1.0, 1.8])
@pytest.mark.parametrize(("decodes_alone", "late_share"), [(0, LATE_SHARE), (1, 2 * LATE_SHARE), (20, MOST_LATE_SHARE)])
def test_the_margin_follows_the_errors_that_are_seen(heavy: float, decodes_alone: int, late_share: float) -> None:
    """heavy: how much longer the tail is than a normal distribution's. decodes_alone: steps of them beside each at its limit."""
    rng, margin, sigma = random.Random(3), DeadlineMargin(), 0.05
    assert margin.share(0.0) == 1.0
    late = 0
    for step in range(20_000):
        error = sigma * rng.gauss(0, heavy)
        if step >= 1000:
            late += error > margin.sigmas * sigma
        margin.count(5, at_limit=True)
        for _ in range(decodes_alone):
            margin.count(5, at_limit=False)
        margin.observe(10.0, 10.0 * math.exp(error), sigma)
    assert margin.late_share == pytest.approx(min(MOST_LATE_SHARE, late_share), rel=0.05)
    assert late / 19_000 == pytest.approx(min(MOST_LATE_SHARE, late_share), rel=0.3)


def test_the_margin_begins_as_if_all_steps_used_up_their_time() -> None:
    assert DeadlineMargin().late_share == LATE_SHARE
    assert DeadlineMargin().sigmas == NORMAL_SIGMAS


def test_without_a_ttft_slo_patience_is_counted_from_when_the_prefill_could_have_ended() -> None:
    deadlines = TokenDeadlines()
    deadlines.arrive("patient", SLO, 5.0, prefill_s=0.5)
    deadlines.arrive("urgent", TokenSlo(0.1, ttft_s=1.0), 5.0, prefill_s=0.5)
    assert deadlines.first_token_due_s("patient", patience_s=10.0) == pytest.approx(15.5)
    assert deadlines.first_token_due_s("urgent", patience_s=10.0) == pytest.approx(6.0)


def test_however_large_errors_are_a_step_may_take_some_of_its_time() -> None:
    """Steps that are smaller still would not be predicted better."""
    margin = DeadlineMargin()
    for _ in range(100):
        margin.observe(5.0, 50.0, sigma=1.0)
    assert margin.share(1.0) == LEAST_SHARE
    assert margin.share(0.05) > LEAST_SHARE
