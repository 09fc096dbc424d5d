"""The short form of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fleet import FleetUnderTest
from tests.e2e.fuzz import fuzz, fuzzed_frontend
from tests.e2e.fuzz_frames import fuzz_frames

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SEED = 1
CASES, MESSAGES = 26, 400


def test_malformed_requests_end_in_no_server_error(fleet: FleetUnderTest, tmp_path: Path) -> None:
    with fuzzed_frontend(fleet, tmp_path) as frontend:
        run = fuzz(frontend, CASES, SEED)
    assert run.cases >= CASES
    assert not run.faults, run.faults


def test_malformed_messages_disturb_nobody(fleet: FleetUnderTest) -> None:
    assert fuzz_frames(fleet, MESSAGES, SEED) >= MESSAGES / 4
