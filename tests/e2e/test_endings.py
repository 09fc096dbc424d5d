"""However a request ends, both instances get their blocks back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.fleet import RUNNING_SLOTS, FleetUnderTest, prompt_of

pytestmark = pytest.mark.engine

PROMPT = prompt_of(200, seed=9)


@pytest.fixture(autouse=True)
def _nothing_leaks(fleet: FleetUnderTest) -> Iterator[None]:
    fleet.wait_until_empty()
    yield
    fleet.wait_until_empty()


@pytest.mark.parametrize("split", [1, 100, 199, 200, 210, 400])
@pytest.mark.parametrize("tokens_seen", [0, 1, 15])
def test_client_that_goes_away(fleet: FleetUnderTest, split: int, tokens_seen: int) -> None:
    body = fleet.body(PROMPT, split=split, max_tokens=1800)
    if tokens_seen == 0:
        with fleet.frontend.stream("POST", "/v1/completions", json=body | {"stream": True}):
            return
    stream = fleet.stream(body)
    fleet.read(stream, tokens_seen)
    stream.close()


@pytest.mark.parametrize("offset", [-12, -1, 0, 1, 12], ids=["before", "ends at", "across", "starts at", "after"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_stop_string_before_across_and_after_the_cut(fleet: FleetUnderTest, offset: int, stream: bool) -> None:
    """The stop string is the text of two tokens; the cut lies `offset` tokens before the second of them."""
    plain = fleet.complete(PROMPT, split=0)
    pieces = fleet.frontend.post("/v1/completions", json=fleet.body(PROMPT, split=0)).json()["choices"][0]["logprobs"]["tokens"]
    second = next(i for i in range(16, 30) if re.fullmatch(r"[ -~]{4,}", pieces[i - 1] + pieces[i]))
    stop = pieces[second - 1] + pieces[second]
    split = len(PROMPT) + second - offset
    reference = fleet.complete(PROMPT, split=0, stop=[stop])
    answer = fleet.complete(PROMPT, split=split, stop=[stop], stream=stream)
    assert answer.finish_reason == reference.finish_reason == "stop"
    assert reference.text == plain.text[: plain.text.index(stop)]
    assert (answer.text, answer.stop_reason) == (reference.text, stop)
    assert answer.usage["completion_tokens"] == reference.usage["completion_tokens"]


@pytest.mark.parametrize("split", [205, 206, 207, 215])
def test_stop_token_around_the_cut(fleet: FleetUnderTest, split: int) -> None:
    stop = fleet.complete(PROMPT, split=0).token_ids[6]
    reference = fleet.complete(PROMPT, split=0, stop_token_ids=[stop])
    answer = fleet.complete(PROMPT, split=split, stop_token_ids=[stop])
    assert answer.same_as(reference)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("split", [210, 230])
def test_end_of_sequence_before_the_cut(fleet: FleetUnderTest, split: int) -> None:
    """From the sixth token on the model wants to end."""
    params: dict[str, Any] = {"ignore_eos": False, "min_tokens": 5, "logit_bias": {"2": 100.0}}
    reference = fleet.complete(PROMPT, split=0, **params)
    answer = fleet.complete(PROMPT, split=split, **params)
    assert answer.same_as(reference)
    assert answer.finish_reason == "stop"
    record = fleet.record(answer)
    assert record["split_token"] == split
    assert record["beta"]["computed_tokens"] == 0


def test_many_requests_at_once(fleet: FleetUnderTest) -> None:
    """Streams that are all open before the first is closed, at different tokens."""
    streams = [fleet.stream(fleet.body(prompt_of(150, seed=i), split=100 + 8 * i, max_tokens=1500)) for i in range(12)]
    for stream in streams:
        fleet.read(stream, 1)  # only now it is asked for
    assert sum(state["requests"] for state in fleet.held()) >= len(streams)
    for i, stream in enumerate(streams):
        fleet.read(stream, 1 + i)
        stream.close()


def test_more_cut_requests_than_running_slots_all_finish(fleet: FleetUnderTest) -> None:
    """Alphas that stand at their hand-off keep their slots; in both directions at once they must not lock each other out."""
    prompts = [prompt_of(40, seed=200 + i) for i in range(3 * RUNNING_SLOTS)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: fleet.complete(prompt, split=42, max_tokens=8), prompts))
    records = [fleet.record(answer) for answer in answers]
    assert all(len(answer.token_ids) == 8 for answer in answers)
    assert {record["split_token"] for record in records} == {42}
    assert len({record["alpha"]["instance"] for record in records}) == 2
