"""Random requests, cut, moved, lifted and left at random moments, answer what they answer alone and uncut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.fleet import FleetUnderTest
from tests.e2e.soak import small_fleet, soak

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SEED = 2


def test_hand_offs_that_are_moved_and_lifted_at_random_moments(fleet: FleetUnderTest) -> None:
    run = soak(fleet, SEED, requests=200, questions=25)
    assert run.counts["moved"] > 10
    assert run.counts["lifted by hand"] > 5


def test_too_little_memory_for_all_reservations(tmp_path: Path) -> None:
    """The short form of `make soak`."""
    with small_fleet(tmp_path) as fleet:
        run = soak(fleet, SEED, requests=60, questions=15)
        happened = run.hand_off_counts()
    assert all(happened[what] for what in ("parked", "refused", "preempted")), happened
