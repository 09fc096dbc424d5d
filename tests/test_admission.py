"""Admission against a server of known speed, on a virtual clock."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaserve.admission import Admission

TOKENS_PER_S = 1000.0


def served(admission: Admission, arrivals: list[tuple[float, int]], ttft_slo_ms: float) -> tuple[list[float], int]:
    """One prompt after the other at `TOKENS_PER_S`. Returns the times to first tokens, in ms, and how many were refused."""
    queue: deque[tuple[str, float, int]] = deque()
    free_s, ttft_ms, refused = 0.0, [], 0

    def finish(until_s: float) -> None:
        nonlocal free_s
        while queue:
            name, arrived_s, tokens = queue[0]
            done_s = max(free_s, arrived_s) + tokens / TOKENS_PER_S
            if done_s > until_s:
                return
            queue.popleft()
            free_s = done_s
            admission.answered(name, done_s)
            ttft_ms.append(1e3 * (done_s - arrived_s))

    for number, (at_s, tokens) in enumerate(arrivals):
        finish(at_s)
        if admission.why_not(tokens, ttft_slo_ms, at_s) is not None:
            refused += 1
            continue
        admission.arrived(str(number), tokens, at_s)
        queue.append((str(number), at_s, tokens))
    finish(math.inf)
    return ttft_ms, refused


@pytest.mark.parametrize("times", [3, 10])
def test_under_overload_those_who_are_taken_are_in_time_and_the_server_is_never_idle(times: int) -> None:
    arrivals = [(number / 10 / times, 100) for number in range(1000 * times)]  # of the capacity, for 100 s
    ttft_ms, refused = served(Admission(), arrivals, ttft_slo_ms=500.0)
    assert max(ttft_ms[50 * times :]) <= 550, "after the first seconds, in which the speed was not known"
    assert len(ttft_ms) >= 0.95 * 1000
    assert refused == 1000 * times - len(ttft_ms)


@pytest.mark.parametrize("times", [3, 10])
def test_an_overload_after_a_time_of_less_load_lets_few_in_who_are_late(times: int) -> None:
    before = [(number / 5, 100) for number in range(100)]  # half of the capacity
    over = [(20 + number / 10 / times, 100) for number in range(600 * times)]
    ttft_ms, _ = served(Admission(), before + over, ttft_slo_ms=10_000.0)
    assert max(ttft_ms) <= max(1.0, 0.2 * times) * 1.1 * 10_000, "a fifth of the SLO is waited for at most, 2 s"
    assert sum(ttft > 11_000 for ttft in ttft_ms) <= 0.2 * len(ttft_ms)


def test_nobody_is_refused_below_the_capacity() -> None:
    ttft_ms, refused = served(Admission(most_waiting=8), [(number / 8, 100) for number in range(800)], ttft_slo_ms=500.0)
    assert refused == 0
    assert len(ttft_ms) == 800


def test_the_queue_is_bounded() -> None:
    admission = Admission(most_waiting=2)
    for name in ("a", "b"):
        assert admission.why_not(10, math.inf, 0.0) is None
        admission.arrived(name, 10, 0.0)
    refusal = admission.why_not(10, math.inf, 0.5)
    assert refusal is not None
    assert refusal.reason == "2 requests wait for their first token, and at most 2 may"
    admission.left("a", 1.0)
    assert admission.why_not(10, math.inf, 1.0) is None
    several = admission.why_not(10, math.inf, 1.0, sequences=2)
    assert several is not None
    assert several.reason == "1 requests wait for their first token, 2 more would, and at most 2 may"


def test_a_first_token_that_would_come_too_late_is_refused() -> None:
    admission = Admission()
    for number in range(20):
        admission.arrived(str(number), 100, 0.1 * number)
        admission.answered(str(number), 0.1 * number + 0.1)
    admission.arrived("long", 5000, 2.0)
    refusal = admission.why_not(100, 1000.0, 2.5)
    assert refusal is not None
    assert refusal.kind == "ttft"
    assert admission.drained_s(2.5) == pytest.approx(5.0 * 25 / 20, rel=0.05)
    assert admission.why_not(100, math.inf, 2.5) is None, "as best it goes"


def test_a_burst_after_a_quiet_time_is_taken() -> None:
    admission = Admission()
    for number in range(100):  # one by one, 10 tokens in 30 ms
        admission.arrived(str(number), 10, float(number))
        admission.answered(str(number), number + 0.03)
    for number in range(100, 200):
        assert admission.why_not(10, 1000.0, 100.0 + 1e-3 * number) is None
        admission.arrived(str(number), 10, 100.0 + 1e-3 * number)


def test_a_step_that_answers_many_at_once_does_not_swing_the_rate() -> None:
    """Two instances, each of which answers 64 prompts of 128 tokens once in 0.2 s, 5 ms apart."""
    admission, told_s = Admission(), []
    for number in range(5000):
        admission.arrived(str(number), 128, 0.0)
    answered = iter(range(5000))
    for step in range(30):
        for at_s in (0.2 * step + 0.2, 0.2 * step + 0.205):
            for _ in range(64):
                admission.answered(str(next(answered)), at_s)
        if step > 8:
            told_s += [admission.drained_s(0.2 * step + after_s) / admission.waiting for after_s in (0.21, 0.3, 0.395)]
    assert max(told_s) / min(told_s) < 1.5
    assert sum(told_s) / len(told_s) == pytest.approx(0.2 / 128, rel=0.1)


def test_a_burst_that_goes_on_is_judged_by_its_own_speed() -> None:
    admission = Admission()
    for number in range(100):  # one by one, 333 tokens/s
        admission.arrived(str(number), 10, float(number))
        admission.answered(str(number), number + 0.03)
    for number in range(400):
        admission.arrived(f"burst-{number}", 100, 200.0)
    for number in range(300):  # 20,000 tokens/s
        admission.answered(f"burst-{number}", 200.0 + (number + 1) / 200)
    assert admission.why_not(100, 1000.0, 201.5) is None


def test_a_long_silence_is_forgotten_with_a_few_answers() -> None:
    admission = Admission()
    for number in range(200):
        admission.arrived(str(number), 100, 0.0)
    for number in range(100):  # after a minute of nothing
        admission.answered(str(number), 60.0 + 0.1 * number)
    assert admission.drained_s(70.0) == pytest.approx(100 * 0.1, rel=0.1)


def test_a_fleet_that_answers_nobody_for_long_takes_nobody_for_it() -> None:
    admission = Admission()
    for number in range(300):
        admission.arrived(str(number), 100, 0.0)
    for number in range(100):  # 1,000 tokens/s
        admission.answered(str(number), 0.1 * (number + 1))
    for passed in range(1, 60):  # looks, and no answer
        assert admission.why_not(100, 15_000.0, 10.0 + passed) is not None
        assert admission.drained_s(10.0 + passed) >= 20.0


def test_long_steps_that_answer_many_are_judged_with_the_silence_before_them() -> None:
    admission = Admission()
    for number in range(2000):
        admission.arrived(str(number), 128, 0.0)
    for step in range(1, 6):  # 64 prompts every 3 s
        for number in range(64):
            admission.answered(str(64 * step + number), 3.0 * step)
        for after_s in (0.01, 0.5):
            assert admission.drained_s(3.0 * step + after_s) / admission.waiting == pytest.approx(3.0 / 64, rel=0.25)


@given(st.lists(st.tuples(st.sampled_from(["arrived", "answered", "left"]), st.integers(0, 5), st.floats(0, 10)), max_size=40))
def test_any_order_of_calls_keeps_the_count(steps: list[tuple[str, int, float]]) -> None:
    admission, waiting = Admission(), set[str]()
    for what, number, now_s in steps:
        name = str(number)
        if what == "arrived":
            if name in waiting:
                continue
            admission.arrived(name, 7, now_s)
            waiting.add(name)
        else:
            getattr(admission, what)(name, now_s)
            waiting.discard(name)
        assert admission.waiting == len(waiting)
        admission.why_not(5, 100.0, now_s)
