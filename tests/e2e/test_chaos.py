"""The short form of `make test-chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.chaos import NOTICED_S, VIOLENCE, chaos, chaos_fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SEED = 1


def test_requests_survive_what_happens_to_one_of_three_instances(tmp_path: Path) -> None:
    with chaos_fleet(tmp_path) as fleet:
        run = chaos(fleet, SEED, list(VIOLENCE), requests=40, questions=15)
    assert run.placed_again > 0
    assert min(noticed_s for _, noticed_s in run.noticed_s) < NOTICED_S
