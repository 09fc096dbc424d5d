"""Clients leave cut requests at random moments."""

from __future__ import annotations

import pytest

from tests.e2e.aborts import aborts
from tests.e2e.fleet import FleetUnderTest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SEED = 4


def test_blocks_of_clients_that_leave_come_back(fleet: FleetUnderTest) -> None:
    kinds, _ = aborts(fleet, SEED, requests=50)
    assert all(kinds[kind] for kind in ("after tokens", "after some time")), kinds
