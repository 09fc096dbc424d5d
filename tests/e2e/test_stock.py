"""A vLLM server without the plugin beside two instances with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from dynaserve.local.fleet import LocalFleet
from dynaserve.stock import load_of
from tests.e2e.chaos import send_signal
from tests.e2e.fleet import FleetUnderTest, alike, prompt_of, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

REQUESTS = 60
CLIENTS = 8
CARRIED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 5},
    {"stop": ["a"], "ignore_eos": False},
]
NOT_CARRIED: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"logit_bias": {"7": 5.0}},
    {"structured_outputs": {"regex": "(ab|cd)+"}, "ignore_eos": False},
    {"vllm_xargs": {"dynaserve_split": 30}},
]


@dataclass
class Mixed:
    """front-end: of the fleet's instances and the stock server. reference: of the instances alone."""

    frontend: FleetUnderTest
    reference: FleetUnderTest
    stock: LocalFleet

    @property
    def stock_url(self) -> str:
        return self.stock.urls[0]

    def body(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return self.frontend.body(prompt, **({"logprobs": None} | params))


@pytest.fixture(scope="module")
def mixed(fleet: FleetUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    folder = tmp_path_factory.mktemp("stock")
    # All prompts fit into one step: stock vLLM dies on a CPU of a seeded request whose prefill is chunked (`vllm_plugin/patches.py`).
    limits = ["--max-num-batched-tokens", "2048", "--max-num-seqs", "32"]
    with (
        LocalFleet(fleet.model, instances=1, plugin=None, vllm_args=limits, max_model_len=2048, log_dir=folder) as stock,
        fleet.another_frontend(folder, "--allow-stock", "--policy", "fixed:0.5") as frontend,
    ):
        joined = frontend.frontend.post("/dynaserve/instances", json={"url": stock.urls[0]})
        assert joined.status_code == 200, joined.text
        yield Mixed(frontend, fleet, stock)


def told(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    return [*(choice[name] for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs")), usage["total_tokens"]]


def test_a_mixed_load_is_served_exactly_and_what_http_cannot_carry_goes_elsewhere(mixed: Mixed) -> None:
    kinds = [*CARRIED, *NOT_CARRIED]

    def one(number: int) -> tuple[bool, dict[str, Any]]:
        params = kinds[number % len(kinds)]
        body = mixed.body(prompt_of(20 + number, seed=number), params)
        answer = mixed.frontend.frontend.post("/v1/completions", json=body)
        alone = mixed.reference.frontend.post("/v1/completions", json=body | {"vllm_xargs": {"dynaserve_split": 0}})
        assert alike(told(answer), told(alone)), (params, answer.text, alone.text)
        (record,) = mixed.frontend.records(answer.json()["id"])
        return params in CARRIED, record

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = list(pool.map(one, range(REQUESTS)))
    on_stock = [(carried, record) for carried, record in asked if record["alpha"]["instance"] == mixed.stock_url]
    assert len(on_stock) > REQUESTS / len(kinds)
    assert all(carried and record["reason"] == "whole_only" and record["beta"] is None for carried, record in on_stock)
    assert any(record["beta"] is not None for _, record in asked)
    mixed.reference.wait_until_empty()


def test_a_client_that_leaves_ends_its_request_on_the_stock_server(mixed: Mixed) -> None:
    streams = [mixed.frontend.stream(mixed.body(prompt_of(20, seed=i), {"max_tokens": 1500})) for i in range(6)]
    for stream in streams:
        mixed.frontend.read(stream, 2)
    assert running_on_stock(mixed) > 0
    for stream in streams:
        stream.close()
    wait_for(lambda: running_on_stock(mixed) == 0, "the stock server to be empty")
    mixed.reference.wait_until_empty()


def running_on_stock(mixed: Mixed) -> int:
    return load_of(httpx.get(f"{mixed.stock_url}/metrics").raise_for_status().text).running_requests


def test_requests_of_a_killed_stock_server_go_on_elsewhere(mixed: Mixed) -> None:
    bodies = [mixed.body(prompt_of(30, seed=i), {"max_tokens": 300, "stream": True}) for i in range(6)]
    streams = [mixed.frontend.stream(body) for body in bodies]
    for stream in streams:
        mixed.frontend.read(stream, 5)
    assert running_on_stock(mixed) > 0
    send_signal(mixed.stock.pids["instance-0"], signal.SIGKILL)
    answers = [[token for chunk in stream for token in chunk["choices"][0]["token_ids"]] for stream in streams]
    for body, rest in zip(bodies, answers, strict=True):
        alone = mixed.reference.frontend.post("/v1/completions", json=body | {"stream": False, "vllm_xargs": {"dynaserve_split": 0}})
        assert alone.json()["choices"][0]["token_ids"][-len(rest) :] == rest
    state = mixed.frontend.frontend.get("/dynaserve/fleet").json()["instances"][mixed.stock_url]
    assert state["health"] == "dead"
    mixed.reference.wait_until_empty()
