"""A request cut at any token answers what it answers uncut, and the cut really happened."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from tests.e2e.bit_flip import BitFlip
from tests.e2e.fleet import BLOCK, Answer, FleetUnderTest, alike, prompt_of
from tests.transports import TRANSPORTS

pytestmark = pytest.mark.engine

OUTPUT_TOKENS = 40
PROMPT_TOKENS = (1, 31, 32, 33, 200, 700)


def cuts(prompt_tokens: int) -> list[int]:
    p, length = prompt_tokens, prompt_tokens + OUTPUT_TOKENS
    around = {0, 1, 31, 32, 33, p - 1, p, p + 1, p + 31, p + 33, length - 2, length - 1, length}
    return sorted(s for s in around if 0 <= s <= length)


GRID = [(p, s) for p in PROMPT_TOKENS for s in cuts(p)]


@pytest.fixture(scope="module")
def uncut(fleet: FleetUnderTest) -> Any:
    @cache
    def answer(prompt_tokens: int) -> Answer:
        whole = fleet.complete(prompt_of(prompt_tokens), split=0)
        assert fleet.record(whole)["split_token"] is None
        assert len(set(whole.token_ids)) > OUTPUT_TOKENS // 2, "an answer that repeats itself hides errors"
        return whole

    return answer


def assert_cut_happened(record: dict[str, Any], prompt_tokens: int, split: int) -> None:
    """The record of a request of OUTPUT_TOKENS tokens: cut at exactly `split`, nothing computed twice, every byte counted."""
    total = prompt_tokens + OUTPUT_TOKENS - 1
    if not 0 < split < total:
        assert record["split_token"] is None
        assert record["beta"] is None
        assert record["kv"] is None
        assert record["alpha"]["computed_tokens"] == total
        return
    alpha, beta, kv = record["alpha"], record["beta"], record["kv"]
    assert record["split_token"] == split
    assert record["lifted"] is None
    assert alpha["instance"] != beta["instance"]
    assert alpha["computed_tokens"] == split
    assert beta["computed_tokens"] == total - split
    assert record["recomputed_tokens"] == 0
    assert alpha["output_tokens"] == max(0, split - prompt_tokens + 1)
    assert alpha["output_tokens"] + beta["output_tokens"] == OUTPUT_TOKENS
    blocks = -(-split // BLOCK) - beta["cached_tokens"] // BLOCK
    assert (kv["blocks"], kv["bytes"]) == (blocks, blocks * kv["block_bytes"])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("prompt_tokens", "split"), GRID)
def test_cut_answers_what_uncut_answers(fleet: FleetUnderTest, uncut: Any, prompt_tokens: int, split: int, transport: str) -> None:
    """Streamed over the first transport only: the next test streams all cuts over each."""
    for stream in (False, True) if transport == TRANSPORTS[0] else (False,):
        answer = fleet.complete(prompt_of(prompt_tokens), split=split, stream=stream, transport=transport)
        assert answer.same_as(uncut(prompt_tokens)), (stream, answer, uncut(prompt_tokens))
        assert_cut_happened(fleet.record(answer), prompt_tokens, split)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_cut_answers_what_uncut_answers_while_both_instances_serve_others(
    fleet: FleetUnderTest, uncut: Any, stream: bool, transport: str
) -> None:
    """All cuts of the grid at once, in a random order, beside clients that ask one long question after the other."""
    references = {p: uncut(p) for p in PROMPT_TOKENS}

    def check(case: tuple[int, int]) -> None:
        prompt_tokens, split = case
        answer = fleet.complete(prompt_of(prompt_tokens), split=split, stream=stream, transport=transport)
        assert answer.same_as(references[prompt_tokens]), (prompt_tokens, split, answer)
        assert_cut_happened(fleet.record(answer), prompt_tokens, split)

    cases = random.Random(3).sample(GRID, len(GRID))
    with fleet.others_running(clients=3), ThreadPoolExecutor(8) as pool:
        for result in [pool.submit(check, case) for case in cases]:
            result.result()


def test_a_prefix_that_beta_has_cached_is_not_sent(fleet: FleetUnderTest) -> None:
    prompt, salt = prompt_of(200, seed=5), "a prefix that both instances know"
    for _ in fleet.instances:
        reference = fleet.complete(prompt, split=0, cache_salt=salt, max_tokens=OUTPUT_TOKENS)
    answer = fleet.complete(prompt, split=200, cache_salt=salt)
    record = fleet.record(answer)
    assert answer.same_as(reference)
    cached = record["beta"]["cached_tokens"]
    assert cached == 192, "six whole blocks of the prompt are in the prefix cache"
    assert record["kv"]["blocks"] == 7 - cached // BLOCK


@pytest.mark.parametrize("attempt", range(8))
def test_one_flipped_bit_of_kv_changes_the_logprobs(fleet: FleetUnderTest, uncut: Any, attempt: int) -> None:
    split = 64 + BLOCK * (attempt % 4)
    body = fleet.body(prompt_of(200), split=split, transport=BitFlip.name)
    response = fleet.frontend.post("/v1/completions", json=body)
    if response.status_code == 400:  # the damage made a logprob NaN, for which JSON has no number
        assert "Out of range float values" in response.json()["error"]["message"]
        return
    logprobs = response.raise_for_status().json()["choices"][0]["logprobs"]["token_logprobs"]
    assert not alike(logprobs, uncut(200).logprobs), "the tests of exactness would not notice damaged KV"


@pytest.mark.parametrize("split", [690, 700])
def test_most_of_the_kv_leaves_while_alpha_computes(fleet: FleetUnderTest, split: int) -> None:
    """Of up to twenty transfers one shows it: a machine that pauses beta's process grants late, and then nothing can leave."""
    shares = []
    for _ in range(20):
        kv = fleet.record(fleet.complete(prompt_of(700), split=split))["kv"]
        shares.append(kv["bytes_before_alpha_end"] / kv["bytes"])
        if shares[-1] >= 0.8:
            break
    assert shares[-1] >= 0.8, shares
    assert len(kv["chunks"]) > 1


def test_n_answers_are_cut_one_by_one(fleet: FleetUnderTest) -> None:
    body = fleet.body(prompt_of(50), split=60, n=3, temperature=0.9, seed=11)
    cut = fleet.frontend.post("/v1/completions", json=body).raise_for_status().json()
    whole = fleet.frontend.post("/v1/completions", json=body | {"vllm_xargs": {"dynaserve_split": 0}}).raise_for_status().json()
    assert [choice["token_ids"] for choice in cut["choices"]] == [choice["token_ids"] for choice in whole["choices"]]
    assert len({tuple(choice["token_ids"]) for choice in cut["choices"]}) == 3, "three seeds give three answers"
    sequences = fleet.frontend.get(f"/dynaserve/requests/{cut['id']}").json()["sequences"]
    assert [sequence["split_token"] for sequence in sequences] == [60, 60, 60]


def test_kv_of_a_request_that_asks_for_it_leaves_when_its_first_half_is_done(fleet: FleetUnderTest) -> None:
    """Of a prompt of several steps, most of which leaves while it is computed otherwise."""
    xargs = {"dynaserve_split": 900, "dynaserve_chunked": 0}
    answer = fleet.complete(prompt_of(1000, seed=77), max_tokens=4, vllm_xargs=xargs)
    kv = fleet.record(answer)["kv"]
    assert kv["bytes"] > 0
    assert kv["bytes_before_alpha_end"] == 0
