"""An instance that gets SIGTERM with `--shutdown-timeout` finishes what it runs, also what stands at its hand-off point."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.chaos import ChaosFleet, chaos_fleet
from tests.e2e.fleet import prompt_of, wait_for
from tests.e2e.stopped_sender import record_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

PROMPT_TOKENS, SPLIT, ANSWER_TOKENS = 300, 330, 240


def stands(fleet: ChaosFleet) -> bool:
    """Or goes on already: on a slow machine its beta may be taken for dead before."""
    record = record_of(fleet, "drained")
    return record is not None and not record["timeline_ms"].keys().isdisjoint({"alpha_parked", "lifted"})


def test_an_alpha_finishes_alone_on_an_instance_that_is_told_to_stop_when_its_beta_is_lost(tmp_path: Path) -> None:
    with chaos_fleet(tmp_path, instances=2, shutdown_timeout_s="600") as fleet:
        client = fleet.under_test
        client.warm_up()
        body = client.body(prompt_of(PROMPT_TOKENS), max_tokens=ANSWER_TOKENS, split=SPLIT, logprobs=None, request_id="drained")
        stream = client.stream(body)
        tokens = client.read(stream, 3)
        record = record_of(fleet, "drained")
        assert record is not None
        alpha, beta = (fleet.local.urls.index(record[side]["instance"]) for side in ("alpha", "beta"))
        fleet.signal(beta, signal.SIGSTOP, "all")
        try:
            wait_for(lambda: stands(fleet), "the alpha to stand at its hand-off point")
            os.kill(fleet.local.pids[f"instance-{alpha}"][0], signal.SIGTERM)
            tokens += sum(len(choice["token_ids"]) for chunk in stream for choice in chunk["choices"])
        finally:
            fleet.signal(beta, signal.SIGCONT, "all")
        record = record_of(fleet, "drained")
        assert record is not None
        assert tokens == ANSWER_TOKENS
        assert record["lost_attempts"] == []
        assert record["lifted"] is not None
        fleet.wait_until(alpha, "dead")
