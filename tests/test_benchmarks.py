"""What the benchmark of the local scheduler computes from what it measures."""

from __future__ import annotations

import math

import pytest

from benchmarks import prediction, predictor
from benchmarks.load_search import best_rate, next_rate
from benchmarks.runs import growth
from dynaserve.messages import MeasuredStep
from dynaserve.step_report import StepReport


@pytest.mark.parametrize("capacity", [0.3, 2.5, 40.0])
def test_the_load_is_found_within_a_few_tries(capacity: float) -> None:
    tried: dict[float, float] = {}
    rate = next_rate(tried, 0.45, 0.60, first=2.0)
    while rate is not None:
        tried[rate] = 1 / (1 + math.exp(8 * math.log(rate / capacity)))
        rate = next_rate(tried, 0.45, 0.60, first=2.0)
        assert len(tried) < 12
    assert 0.45 <= tried[best_rate(tried, 0.45, 0.60)] <= 0.60


def test_the_search_ends_where_attainment_falls_off_a_cliff() -> None:
    tried: dict[float, float] = {}
    rate = next_rate(tried, 0.45, 0.60, first=2.0)
    while rate is not None:
        tried[rate] = 0.9 if rate < 3.0 else 0.1
        rate = next_rate(tried, 0.45, 0.60, first=2.0)
        assert len(tried) < 15
    assert best_rate(tried, 0.45, 0.60) == pytest.approx(3.0, rel=0.05)


def test_growth_compares_the_last_third_with_the_first() -> None:
    assert growth([10.0, 20.0, 50.0, 50.0, 40.0, 50.0]) == 3.0


def step(at_s: float, predicted_ms: float | None, measured_ms: float, decodes: int = 4) -> StepReport:
    return StepReport(at_s, MeasuredStep(0, 0.0, decodes, 100 * decodes, measured_ms), predicted_ms, None, 0, "all_work", late=False)


def test_errors_are_relative_to_what_was_measured() -> None:
    steps = [step(i, None if i == 0 else 12.0, 10.0) for i in range(60)]
    errors = prediction.errors(steps)
    assert (errors.steps, errors.live) == (59, pytest.approx(0.2))
    assert errors.frozen == pytest.approx(0.0, abs=0.02)


def test_recovery_counts_the_steps_after_the_change() -> None:
    steps = [step(i, 10.0, 10.0 if i < 100 or i >= 150 else 20.0) for i in range(300)]
    # After 50 wrong steps a window of 20 holds at most five of them.
    assert prediction.steps_to_recover(steps, changed_s=99.5) == 50 + 20 - 5
    assert prediction.steps_to_recover(steps, changed_s=199.5) == prediction.WINDOW_STEPS
    assert prediction.steps_to_recover([step(i, 10.0, 20.0) for i in range(300)], 0.0) is None


def test_a_slowdown_is_told_from_a_change_of_the_batches() -> None:
    quiet = [step(i, 10.0, 10.0 + 2.0 * (i % 2), decodes=4 + 8 * (i % 2)) for i in range(200)]
    others = [step(i, 10.0, 18.0, decodes=12) for i in range(20)]
    assert prediction.slowdown(quiet, others) == pytest.approx(1.5, rel=0.1)


def test_the_predictor_s_errors_are_shares_of_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "expected": {"ttft_ms": 80.0, "end_ms": 900.0},
        "timeline_ms": {"first_token": 100.0, "finished": 1000.0},
        "split_token": 7,
        "revisions": [{}],
    }
    predictor.report([predictor.read(record)] * 3)
    assert capsys.readouterr().out.splitlines() == [
        "3 requests, 3 cut, 3 revisions",
        "  first token: absolute error median 20.0%, p95 20.0%; actual over expected, median 1.25",
        "  end: absolute error median 10.0%, p95 10.0%; actual over expected, median 1.11",
    ]
