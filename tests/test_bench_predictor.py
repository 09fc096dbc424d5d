"""What `make bench-predictor` says of its errors, and of the load it measured at."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.predictor import Ended, read, report, steadiness, step_limit_ms
from dynaserve.errors import DynaServeError
from dynaserve.messages import MeasuredStep
from dynaserve.step_report import StepLog, StepReport


def ended(arrived_s: float, ttft_ms: float) -> Ended:
    return Ended(arrived_s, ttft_ms, 300.0, 2 * ttft_ms, 600.0, cut=False, revisions=0)


def test_a_queue_that_grows_is_no_steady_load() -> None:
    said = steadiness([ended(second, 300.0 + 200.0 * second) for second in range(20)])
    assert said.startswith("TTFT grows by 0.200")
    assert said.endswith("not a steady load: take a lower --rate")


def test_a_ttft_that_only_varies_is_a_steady_load() -> None:
    assert steadiness([ended(second, 300.0 + 50.0 * (second % 3)) for second in range(20)]).endswith(" a steady load")


@pytest.mark.parametrize("count", [0, 7])
def test_few_requests_tell_nothing_of_the_load(count: int) -> None:
    assert "too few" in steadiness([ended(second, 300.0) for second in range(count)])


def test_errors_are_shares_of_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "arrived_s": 1.0,
        "expected": {"ttft_ms": 80.0, "end_ms": 900.0},
        "timeline_ms": {"first_token": 100.0, "finished": 1000.0},
        "split_token": 7,
        "revisions": [{}],
    }
    report([read(record)] * 3)
    assert capsys.readouterr().out.splitlines() == [
        "3 requests, 3 cut, 3 revisions",
        "  too few to tell whether the load was steady",
        "  first token: absolute error median 20.0%, p95 20.0%; actual over expected, median 1.25",
        "  end: absolute error median 10.0%, p95 10.0%; actual over expected, median 1.11",
    ]


def test_steps_that_aim_at_nothing_are_told(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps-0.csv")
    log.add(StepReport(1.0, MeasuredStep(64, 2080.0, 0, 0, 30.0), None, None, 64, "all_work", late=False))
    log.close()
    with pytest.raises(DynaServeError, match="none of 1 steps had prefill beside decodes"):
        step_limit_ms([tmp_path / "steps-0.csv"])
