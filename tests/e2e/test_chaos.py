"""The short form of `make test-chaos`, in a fleet with a secret; and the ends of the front-end and of the whole fleet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.chaos import NOTICED_S, ChaosFleet, chaos, chaos_fleet, kill_all, kill_frontend
from tests.e2e.fleet import prompt_of
from tests.e2e.stopped_sender import stop_before_hand_over
from tests.transports import TRANSPORTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

SEED = 1


@pytest.fixture(scope="module")
def chaotic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosFleet]:
    with chaos_fleet(tmp_path_factory.mktemp("chaos")) as fleet:
        yield fleet


def test_requests_survive_what_happens_to_one_of_three_instances(chaotic: ChaosFleet) -> None:
    deaths = ["cut", "stop", "kill"]
    run = chaos(chaotic, SEED, ["leave and join", *deaths], requests=25, questions=12)
    assert run.placed_again > 0
    assert min(noticed_s for kind, noticed_s in run.noticed_s if kind in deaths) < NOTICED_S


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sender_that_is_stopped_before_it_hands_over_harms_nobody(chaotic: ChaosFleet, transport: str) -> None:
    kept_blocks = stop_before_hand_over(chaotic, SEED, transport)
    assert kept_blocks or transport == "torch", "a one-sided sender writes by itself where it was granted to"


def test_instances_free_what_a_killed_frontend_has_asked_for(chaotic: ChaosFleet) -> None:
    kill_frontend(chaotic)
    chaotic.local.start_frontend()
    assert len(chaotic.under_test.complete(prompt_of(20)).token_ids) == 40


def test_without_instances_a_request_fails_at_once_and_says_when_to_come_again(chaotic: ChaosFleet) -> None:
    answer, _ = kill_all(chaotic)
    assert answer.status_code == 503, answer.text
    assert answer.headers["retry-after"] == "1"
