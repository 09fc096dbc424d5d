"""What `make bench-predictor` says of the load it measured at."""

from __future__ import annotations

import pytest

from benchmarks.predictor import Ended, steadiness


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
