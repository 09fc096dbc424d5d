"""What a front-end tells Prometheus."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from dynaserve.frontend_metrics import FleetCollector, observe_end
from tests import looked_at
from tests.looked_at import A, B

OVER_PREDICTED = ("dynaserve_ttft_over_predicted", "dynaserve_end_over_predicted")


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_the_end_of_a_cut_request_is_counted() -> None:
    names = {
        "dynaserve_hand_over_seconds_count": 1,
        "dynaserve_hand_over_seconds_sum": 0.02,
        "dynaserve_token_gaps_total": 39,
        "dynaserve_token_gaps_in_slo_total": 36,
        "dynaserve_first_tokens_total": 1,
        "dynaserve_first_tokens_in_slo_total": 1,
    }
    labelled = {
        "dynaserve_requests_ended_total": ({"outcome": "length"}, 1),
        "dynaserve_kv_moved_bytes_total": ({"transport": "torch"}, 4000),
        "dynaserve_kv_moved_early_bytes_total": ({"transport": "torch"}, 3000),
    }
    before = {name: value(name) for name in names} | {name: value(name, **labels) for name, (labels, _) in labelled.items()}
    observe_end(looked_at.cut())
    for name, more in names.items():
        assert abs(value(name) - before[name] - more) < 1e-9, name
    for name, (labels, more) in labelled.items():
        assert value(name, **labels) - before[name] == more, name


def test_what_was_expected_is_compared_with_what_came() -> None:
    record = looked_at.cut()
    record.expected = {"ttft_ms": 200.0, "end_ms": 1000.0}
    before = [value(f"{name}_sum") for name in OVER_PREDICTED]
    observe_end(record)
    assert [value(f"{name}_sum") - was for name, was in zip(OVER_PREDICTED, before, strict=True)] == pytest.approx([1.25, 1.9])


def test_what_was_expected_of_a_request_that_was_placed_again_is_compared_with_nothing() -> None:
    record = looked_at.placed_again()
    record.finish_reason, record.timeline_ms["finished"] = "length", 5000.0
    record.expected = {"ttft_ms": 200.0, "end_ms": 1000.0}
    before = [value(f"{name}_count") for name in OVER_PREDICTED]
    observe_end(record)
    assert [value(f"{name}_count") for name in OVER_PREDICTED] == before


def test_gauges_are_those_of_the_snapshot() -> None:
    registry = CollectorRegistry()
    registry.register(FleetCollector(looked_at.snapshot))
    of_a, of_b = {"url": A}, {"url": B}
    assert registry.get_sample_value("dynaserve_instance_health", of_b | {"health": "suspect"}) == 1
    assert registry.get_sample_value("dynaserve_instance_health", of_b | {"health": "up"}) == 0
    assert registry.get_sample_value("dynaserve_instance_requests_running", of_a) == 3
    assert registry.get_sample_value("dynaserve_instance_kv_usage_ratio", of_a) == 0.25
    assert registry.get_sample_value("dynaserve_instance_kv_usage_ratio", of_b) is None, "it has not said"
    assert registry.get_sample_value("dynaserve_requests_waiting") == 1
