"""One fleet of real engines for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.fleet import FleetUnderTest


@pytest.fixture(scope="session")
def fleet() -> Iterator[FleetUnderTest]:
    frontend, *instances = [httpx.Client(base_url=url, timeout=120) for url in os.environ["DYNASERVE_TEST_FLEET"].split()]
    under_test = FleetUnderTest(frontend, instances, frontend.get("/v1/models").json()["data"][0]["id"])
    yield under_test
    under_test.wait_until_empty()
