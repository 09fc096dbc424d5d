"""A request that runs whole is handed over on the way, and answers what it answers uncut."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.fleet import Answer, FleetUnderTest, prompt_of, wait_for
from tests.transports import TRANSPORTS

pytestmark = pytest.mark.engine

OUTPUT_TOKENS = 120
PROMPT_TOKENS = 75


@pytest.fixture(scope="module")
def uncut(fleet: FleetUnderTest) -> Answer:
    return fleet.complete(prompt_of(PROMPT_TOKENS), split=0, max_tokens=OUTPUT_TOKENS)


def other_than(fleet: FleetUnderTest, instance: str) -> str:
    (other,) = (url for url in fleet.instance_urls if url != instance)
    return other


def hand_over(fleet: FleetUnderTest, request_id: str, **body: Any) -> httpx.Response:
    return fleet.frontend.post(f"/dynaserve/requests/{request_id}/hand_off", json=body)


def where(fleet: FleetUnderTest, request_id: str) -> str:
    (record,) = fleet.frontend.get(f"/dynaserve/requests/{request_id}").raise_for_status().json()["sequences"]
    return str(record["alpha"]["instance"])


def cut_after(fleet: FleetUnderTest, seen: int, hand_off_at: int, **params: Any) -> Answer:
    """Streams a whole request, and has it handed over once so many tokens have come."""
    body = fleet.body(prompt_of(PROMPT_TOKENS), split=0, max_tokens=OUTPUT_TOKENS, **params)
    chunks: list[dict[str, Any]] = []
    tokens = 0
    for chunk in fleet.stream(body | {"stream_options": {"include_usage": True}}):
        chunks.append(chunk)
        before, tokens = tokens, tokens + sum(len(choice["token_ids"]) for choice in chunk["choices"])
        if before < seen <= tokens:
            beta = other_than(fleet, where(fleet, chunk["id"]))
            assert hand_over(fleet, chunk["id"], hand_off_at=hand_off_at, to=beta).json()["moved"] == 1
    return fleet.answer_of(chunks)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ahead", [-1000, 2, 40])
def test_a_whole_request_goes_on_elsewhere_with_the_same_answer(fleet: FleetUnderTest, uncut: Answer, ahead: int, transport: str) -> None:
    """At once, where the token is computed already; or so many tokens later."""
    asked = max(1, PROMPT_TOKENS + 10 + ahead)
    answer = cut_after(fleet, 10, asked, transport=transport)
    assert answer.same_as(uncut)
    record = fleet.record(answer)
    split = record["split_token"]
    assert max(asked, PROMPT_TOKENS + 10) <= split < PROMPT_TOKENS + OUTPUT_TOKENS - 1
    assert record["lifted"] is None
    assert (record["alpha"]["computed_tokens"], record["recomputed_tokens"]) == (split, 0)
    assert record["beta"]["instance"] != record["alpha"]["instance"]
    assert record["beta"]["computed_tokens"] == PROMPT_TOKENS + OUTPUT_TOKENS - 1 - split
    kv = record["kv"]
    assert kv["transport"] == transport
    assert kv["bytes"] == kv["blocks"] * kv["block_bytes"] > 0


def test_requests_are_handed_over_while_both_instances_serve_others(fleet: FleetUnderTest, uncut: Answer) -> None:
    rng = random.Random(5)
    turns = [(rng.randrange(1, 60), rng.randrange(0, 80)) for _ in range(24)]

    def ask(turn: tuple[int, int]) -> Answer:
        seen, ahead = turn
        return cut_after(fleet, seen, PROMPT_TOKENS + seen + ahead)

    with fleet.others_running(), ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, turns))
    assert all(answer.same_as(uncut) for answer in answers)
    handed_over = [answer for answer in answers if "beta_resumed" in fleet.record(answer)["timeline_ms"]]
    assert len(handed_over) > len(turns) // 2, "the others ended before their hand-off, or it was lifted for want of memory"


def test_a_client_that_leaves_before_a_late_hand_off_leaves_nothing_behind(fleet: FleetUnderTest) -> None:
    stream = fleet.stream(fleet.body(prompt_of(PROMPT_TOKENS), split=0, max_tokens=400))
    request_id = next(stream)["id"]
    beta = other_than(fleet, where(fleet, request_id))
    assert hand_over(fleet, request_id, hand_off_at=PROMPT_TOKENS + 300, to=beta).json()["moved"] == 1
    stream.close()
    fleet.wait_until_empty()


def test_a_late_hand_off_may_be_moved_and_lifted_but_not_set_again(fleet: FleetUnderTest, uncut: Answer) -> None:
    stream = fleet.stream(fleet.body(prompt_of(PROMPT_TOKENS), split=0, max_tokens=OUTPUT_TOKENS))
    first = next(stream)
    beta = other_than(fleet, where(fleet, first["id"]))
    assert hand_over(fleet, first["id"], hand_off_at=PROMPT_TOKENS + 110, to=beta).json()["moved"] == 1
    assert hand_over(fleet, first["id"], hand_off_at=PROMPT_TOKENS + 112).json()["moved"] == 1
    assert hand_over(fleet, first["id"], hand_off_at=None).json()["moved"] == 1
    assert hand_over(fleet, first["id"], hand_off_at=PROMPT_TOKENS + 112, to=beta).json()["moved"] == 0
    tokens = [token for chunk in (first, *stream) for token in chunk["choices"][0]["token_ids"]]
    assert tokens == uncut.token_ids
    fleet.wait_until_empty()


def test_what_cannot_be_handed_over_is_told(fleet: FleetUnderTest) -> None:
    body = fleet.body(prompt_of(PROMPT_TOKENS), split=0, max_tokens=400, prompt_logprobs=1) | {"request_id": "not-cut"}
    request_id = "cmpl-not-cut-0"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fleet.frontend.post, "/v1/completions", json=body)
        wait_for(lambda: fleet.frontend.get(f"/dynaserve/requests/{request_id}").status_code == httpx.codes.OK, "its placement")
        here = where(fleet, request_id)
        there = other_than(fleet, here)
        assert hand_over(fleet, request_id, hand_off_at=100, to=there).json()["moved"] == 0, "it has prompt logprobs"
        assert hand_over(fleet, request_id, hand_off_at=100, to=here).json()["moved"] == 0
        unknown = hand_over(fleet, request_id, hand_off_at=100, to="http://127.0.0.1:9")
        assert unknown.status_code == 400
        assert "http://127.0.0.1:9 is no instance of this fleet" in unknown.text
        lifted = hand_over(fleet, request_id, hand_off_at=None, to=there)
        assert lifted.status_code == 400
        assert "hand_off_at is null" in lifted.text
        assert answer.result().status_code == httpx.codes.OK
    fleet.wait_until_empty()
    assert hand_over(fleet, request_id, hand_off_at=100, to=there).status_code == 404
