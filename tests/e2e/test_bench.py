"""`dynaserve bench replay` against the real front-end and real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import FleetUnderTest
from workloads import catalog

pytestmark = pytest.mark.engine

REQUESTS = 30


def replay(fleet: FleetUnderTest, raw: Path, *options: str) -> dict[str, Any]:
    """The engines share this machine's cores with the client, which may be late here."""
    command = [sys.executable, "-m", "dynaserve.cli", "bench", "replay", "--url", fleet.url, "--requests", str(REQUESTS)]
    command += ["--rate", "5", "--max-client-lag-ms", "60000", "--output", str(raw), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{REQUESTS} of {REQUESTS} finished" in done.stdout
    result: dict[str, Any] = json.loads(raw.read_text())
    return result


def test_the_sample_is_replayed_with_exact_lengths(fleet: FleetUnderTest, tmp_path: Path) -> None:
    raw = replay(fleet, tmp_path / "raw.json", "--workload", "sample", "--arrivals", "trace", "--warmup", "2")
    assert raw["run"]["model"] == fleet.model
    assert raw["not_trusted_because"] is None
    for request, planned in zip(raw["requests"], catalog.load("sample").requests, strict=False):
        assert request["failure"] is None
        assert (request["usage_prompt_tokens"], request["usage_output_tokens"]) == (planned.prompt_tokens, planned.output_tokens)
        assert (request["tokens_counted_by"], len(request["gaps_ms"])) == ("usage", planned.output_tokens - 1)
        assert request["ttft_ms"] > 0
    fleet.wait_until_empty()


def test_every_request_of_a_replay_may_be_cut_by_hand(fleet: FleetUnderTest, tmp_path: Path) -> None:
    cut = ("--extra-body", '{"vllm_xargs": {"dynaserve_split": 70}}')
    raw = replay(fleet, tmp_path / "raw.json", "--workload", "fixed:100,20", *cut)
    assert [request["usage_output_tokens"] for request in raw["requests"]] == [20] * REQUESTS
    fleet.wait_until_empty()


@pytest.mark.parametrize("cut_at", [0, 70, 110], ids=["whole", "in the prompt", "in the answer"])
def test_answers_end_by_their_token_where_lengths_are_hidden(fleet: FleetUnderTest, tmp_path: Path, cut_at: int) -> None:
    cut = ("--extra-body", json.dumps({"vllm_xargs": {"dynaserve_split": cut_at}}))
    raw = replay(fleet, tmp_path / "raw.json", "--workload", "normal:100,20,5", "--eos-token-id", "2", *cut)
    lengths = [request["usage_output_tokens"] for request in raw["requests"]]
    assert len(set(lengths)) > 5
    assert lengths == [request["output_tokens"] for request in raw["requests"]]
    assert {request["finish_reason"] for request in raw["requests"]} == {"stop"}
    fleet.wait_until_empty()
