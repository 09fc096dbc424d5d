"""Every feature of a request answers cut at any token what it answers uncut, on every transport."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from tests.e2e.features import FEATURES, README, with_table
from tests.e2e.fleet import BLOCK, FleetUnderTest, alike, prompt_of
from tests.transports import TRANSPORTS

P = 70
PROMPT = prompt_of(P, seed=21)
CUTS = ("1", "block-1", "block", "block+1", "P-1", "P", "P+1", "P+7", "L-2")
RUNS_ON = ("stop",)
"""The front-end ends these: the instance may have computed some tokens more."""


def answer(fleet: FleetUnderTest, params: dict[str, Any], **how: Any) -> dict[str, Any]:
    body = fleet.body(PROMPT, **how) | params
    response = fleet.frontend.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def said(answer: dict[str, Any]) -> Any:
    """All that must be equal."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    usage = {key: value for key, value in answer["usage"].items() if isinstance(value, int)}
    return [[{key: value for key, value in choice.items() if key != "index"} for choice in choices], usage]


@pytest.fixture(scope="module")
def complete_params(fleet: FleetUnderTest) -> Any:
    """Fills in what depends on the greedy answer: a token of it, or the text of two, that it says at one place only."""
    plain = answer(fleet, {}, split=0)["choices"][0]
    tokens, pieces = plain["token_ids"], plain["logprobs"]["tokens"]
    text = "".join(pieces)

    def pair(word: bool) -> str:
        """word: one that the tokenizer splits into the same two tokens."""
        for i in range(9, 20):
            two = pieces[i] + pieces[i + 1]
            if text.count(two) == 1 and two.isascii() and two.isprintable():
                if not word:
                    return two
                if said(answer(fleet, {"bad_words": [two]}, split=0))[0][0]["token_ids"] != tokens:
                    return two
        raise AssertionError("the answer has no such pair of tokens")

    def complete(params: dict[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if "stop_token_ids" in params:
            values["stop_token_ids"] = [next(t for i, t in enumerate(tokens) if i >= 12 and t not in tokens[:i])]
        if "bad_words" in params:
            values["bad_words"] = [pair(word=True)]
        if "stop" in params:
            values["stop"] = [pair(word=False)]
        return params | values

    return complete


@pytest.fixture(scope="module")
def uncut(fleet: FleetUnderTest, complete_params: Any) -> Any:
    """The uncut answer with a feature, and the parameters, once it is clear that the feature changes the answer."""

    @cache
    def ask(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        feature = FEATURES[name]
        params = complete_params(feature.params)
        reference = answer(fleet, params, split=0)
        if feature.without is not None:
            plain = answer(fleet, complete_params(feature.without), split=0)
            assert not alike(said(reference)[0], said(plain)[0]), f"{name} changes nothing, so this test would prove nothing"
        return reference, params

    return ask


def most_tokens(answer: dict[str, Any]) -> int:
    return max(len(choice["token_ids"]) for choice in answer["choices"])


def split_of(cut: str, outputs: int) -> int:
    return {
        "1": 1,
        "block-1": BLOCK - 1,
        "block": BLOCK,
        "block+1": BLOCK + 1,
        "P-1": P - 1,
        "P": P,
        "P+1": P + 1,
        "P+7": P + 7,
        "L-2": P + outputs - 2,
    }[cut]


@pytest.fixture(scope="module")
def cut_answers(fleet: FleetUnderTest, uncut: Any) -> Iterator[Any]:
    """The answers with a feature, by cut: all cuts of a transport are asked at once, so that they meet in mixed batches."""
    with ThreadPoolExecutor(len(CUTS)) as pool:

        @cache
        def ask(name: str, transport: str) -> dict[str, Future[dict[str, Any]]]:
            reference, params = uncut(name)
            splits = {cut: split_of(cut, most_tokens(reference)) for cut in CUTS}
            return {cut: pool.submit(answer, fleet, params, split=split, transport=transport) for cut, split in splits.items()}

        yield ask


@pytest.mark.engine
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_survives_the_cut(fleet: FleetUnderTest, uncut: Any, cut_answers: Any, name: str, cut: str, transport: str) -> None:
    reference, _ = uncut(name)
    got = cut_answers(name, transport)[cut].result()
    assert alike(said(got), said(reference)), (got, reference)
    for record in fleet.records(got["id"]):
        assert_cut(record, split_of(cut, most_tokens(reference)), exactly=name not in RUNS_ON)


def assert_cut(record: dict[str, Any], split: int, *, exactly: bool) -> None:
    alpha, beta, kv, outputs = record["alpha"], record["beta"], record["kv"], record["output_tokens"]
    total = P + outputs - 1
    assert (record["split_token"], record["lifted"]) == (split, None)
    assert alpha["instance"] != beta["instance"]
    if split >= total:  # the answer ended before the cut
        assert (alpha["output_tokens"], beta["computed_tokens"]) == (outputs, 0)
        return
    assert alpha["computed_tokens"] == split - alpha["cached_tokens"]
    assert alpha["output_tokens"] == max(0, split - P + 1)
    blocks = -(-split // BLOCK) - beta["cached_tokens"] // BLOCK
    assert (kv["blocks"], kv["bytes"]) == (blocks, blocks * kv["block_bytes"])
    if exactly:
        assert beta["computed_tokens"] == total - split
        assert record["recomputed_tokens"] == 0


def test_the_readme_lists_what_is_proven_here() -> None:
    readme = README.read_text()
    assert readme == with_table(readme), "run: python -m tests.e2e.features"
