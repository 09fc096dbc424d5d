"""Two front-ends over the same instances: what one has placed, the other takes into account."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleet import FleetUnderTest, prompt_of, wait_for

pytestmark = pytest.mark.engine


def long_streams(fleet: FleetUnderTest) -> dict[str, Generator[dict[str, Any], None, None]]:
    """One that runs on each instance, by its URL."""
    streams = {}
    for seed in (1, 2):
        stream = fleet.stream(fleet.body(prompt_of(20, seed=seed), max_tokens=1800, logprobs=None, split=0))
        (record,) = fleet.frontend.get(f"/dynaserve/requests/{next(stream)['id']}").raise_for_status().json()["sequences"]
        streams[record["alpha"]["instance"]] = stream
    assert streams.keys() == set(fleet.instance_urls)
    return streams


def placed(frontend: FleetUnderTest) -> list[str]:
    """Where four short requests have run."""
    return [frontend.record(frontend.complete(prompt_of(20), max_tokens=4))["alpha"]["instance"] for _ in range(4)]


def test_a_front_end_avoids_the_instance_that_another_one_uses(fleet: FleetUnderTest, tmp_path: Path) -> None:
    with fleet.another_frontend(tmp_path) as other:
        streams = long_streams(fleet)
        busy, free = sorted(fleet.instance_urls)  # the first is where both begin
        streams[free].close()
        wait_for(lambda: placed(other) == 4 * [free], "the other front-end to hear of the stream")
        assert next(streams[busy])["choices"], "it still runs"
        streams[busy].close()
        fleet.wait_until_empty()
        wait_for(lambda: set(placed(other)) == {busy, free}, "the other front-end to hear of its end")
