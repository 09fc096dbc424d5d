"""Policies that predict, on the real fleet: they cut or not, say why, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaserve.fleet import describe, profile_key
from dynaserve.latency_profile import save
from dynaserve.step_latency import ProfileTable, Roofline
from tests.e2e.fleet import FleetUnderTest, prompt_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("policy", "reason"), [("paper", "balanced"), ("dynamic", "whole_is_best")])
def test_a_policy_that_predicts_records_its_reason_and_what_it_expected(
    fleet: FleetUnderTest, policy: str, reason: str, tmp_path: Path
) -> None:
    roofline = Roofline(overhead_ms=8.0, token_ms=0.1, knee_tokens=16.0, pair_ms=0.0, decode_ms=0.5, context_ms=1e-3)
    save(tmp_path / "profile.json", ProfileTable(roofline), profile_key(describe(fleet.instance_urls[0])), "made up")
    history = tmp_path / "lengths.json"
    arguments = ["--policy", policy, "--latency-profile", str(tmp_path / "profile.json"), "--length-history", str(history)]
    with fleet.another_frontend(tmp_path, *arguments) as other:
        for _ in range(20):
            answer = other.complete(prompt_of(100), max_tokens=51)
        assert answer.same_as(fleet.complete(prompt_of(100), split=0, max_tokens=51))
        record = other.record(answer)
        assert record["reason"] == reason
        assert (record["split_token"] is not None) == (policy == "paper")
        assert record["expected"]["source"] == "history"
        assert record["expected"]["expected_tokens"] == 51
        assert record["timeline_ms"]["first_token"] > 0
        metrics = other.frontend.get("/metrics").text
        assert "dynaserve_placement_seconds_count 20.0" in metrics
        assert ("dynaserve_ttft_over_predicted_count 20.0" in metrics) == (policy == "dynamic")
        assert "dynaserve_end_over_predicted_count 20.0" in metrics
        assert (len(record["expected"]["candidates"]) > 1) == (policy == "dynamic")
    assert history.exists()
    fleet.wait_until_empty()


def test_instances_on_a_cpu_tell_that_moving_kv_takes_the_time_of_steps(fleet: FleetUnderTest) -> None:
    for instance in fleet.instances:
        description = instance.get("/dynaserve/instance").json()
        assert all("cpu " in worker["kv_layout"] for worker in description["workers"])
        assert description["computes_on_host"] is True
