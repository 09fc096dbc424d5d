"""The fleet under test as a client sees it."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dynaserve.local.children import start_child, stop_children
from dynaserve.local.fleet import free_ports
from dynaserve.machine import cpu_features
from tests.device import DEVICE

BLOCK = 32
RUNNING_SLOTS = 32
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
"""A server may close an idle connection in the moment in which it is used again."""
VOCABULARY = range(5, 2000)
LOGPROB_TOLERANCE = 0.0 if DEVICE == "cpu" and "avx512f" in cpu_features() else 1e-4
"""With AVX2 alone PyTorch adds in another order where a batch has another size: the logprobs of an uncut request differ by up to 1e-5
then, in a stock vLLM as well; and so does a GPU. The tokens are equal, and one flipped bit of KV does more (`test_exactness`)."""


@dataclass(frozen=True)
class Answer:
    """One completion; `record` is what the front-end says was done."""

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    stop_reason: object
    usage: dict[str, int]

    def same_as(self, other: Answer) -> bool:
        mine, others = ([a.text, a.token_ids, a.logprobs, a.finish_reason, a.stop_reason, _counts(a.usage)] for a in (self, other))
        return alike(mine, others)


def alike(one: Any, other: Any) -> bool:
    """Equal, but for what the processor makes of a number in another batch; of lists and dictionaries, everything in them."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= LOGPROB_TOLERANCE
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return bool(one == other)


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    return {key: value for key, value in usage.items() if isinstance(value, int)}


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(1_000_003 * seed + tokens)
    return [rng.choice(VOCABULARY) for _ in range(tokens)]


@dataclass
class FleetUnderTest:
    """frontend and instances: HTTP clients of real servers. pid: of every server process."""

    frontend: httpx.Client
    instances: list[httpx.Client]
    model: str

    @property
    def url(self) -> str:
        return str(self.frontend.base_url).rstrip("/")

    @property
    def instance_urls(self) -> list[str]:
        return [str(instance.base_url).rstrip("/") for instance in self.instances]

    def warm_up(self) -> None:
        """Lets both instances compile vLLM's samplers, which on a cold machine takes longer than a hand-off is waited for."""
        sampled: dict[str, Any] = {"temperature": 0.9, "seed": 1}
        for params in ({}, sampled):
            for instance in self.instances:
                answer = instance.post("/v1/completions", json=self.body(prompt_of(8), max_tokens=2, **params), timeout=300)
                assert answer.status_code == 200, answer.text

    def body(self, prompt: list[int], *, split: int | None = None, transport: str | None = None, **params: Any) -> dict[str, Any]:
        """A greedy request that no prefix cache can serve (its salt is new)."""
        xargs = {"dynaserve_split": split, "dynaserve_transport": transport}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            "cache_salt": str(random.random()),
            "vllm_xargs": {key: value for key, value in xargs.items() if value is not None},
        } | params

    def complete(self, prompt: list[int], *, stream: bool = False, **params: Any) -> Answer:
        body = self.body(prompt, **params)
        return self._streamed(body) if stream else self._whole(body)

    def _whole(self, body: dict[str, Any]) -> Answer:
        response = self.frontend.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        choice = answer["choices"][0]
        return Answer(
            answer["id"],
            choice["text"],
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            choice["finish_reason"],
            choice["stop_reason"],
            answer["usage"],
        )

    def _streamed(self, body: dict[str, Any]) -> Answer:
        return self.answer_of(list(self.stream(body | {"stream_options": {"include_usage": True}})))

    @staticmethod
    def answer_of(chunks: list[dict[str, Any]]) -> Answer:
        """Of a stream that tells its usage."""
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        return Answer(
            chunks[0]["id"],
            "".join(choice["text"] for choice in choices),
            [token for choice in choices for token in choice["token_ids"]],
            [value for choice in choices for value in choice["logprobs"]["token_logprobs"]],
            choices[-1]["finish_reason"],
            choices[-1]["stop_reason"],
            chunks[-1]["usage"],
        )

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        with self.frontend.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    @staticmethod
    def read(stream: Iterator[dict[str, Any]], tokens: int) -> int:
        """Reads until at least this many tokens have come, and returns how many did: a chunk may carry several."""
        seen = 0
        while seen < tokens:
            seen += sum(len(choice["token_ids"]) for choice in next(stream)["choices"])
        return seen

    def record(self, answer: Answer) -> dict[str, Any]:
        """The record of a finished request, once both instances have said that they are done with it."""
        return wait_for(lambda: self._ended_record(answer.request_id), f"the record of {answer.request_id}")

    def _ended_record(self, request_id: str) -> dict[str, Any] | None:
        records = self._ended_records(request_id)
        if records is None:
            return None
        (record,) = records
        return record

    def records(self, request_id: str) -> list[dict[str, Any]]:
        """Of all sequences of a request, as `record`."""
        found: list[dict[str, Any]] = wait_for(lambda: self._ended_records(request_id), f"the records of {request_id}")
        return found

    def _ended_records(self, request_id: str) -> list[dict[str, Any]] | None:
        sequences: list[dict[str, Any]] = self.frontend.get(f"/dynaserve/requests/{request_id}").raise_for_status().json()["sequences"]
        micros = [micro for record in sequences for micro in (record["alpha"], record["beta"]) if micro is not None]
        return sequences if all(micro["computed_tokens"] is not None or micro["lost"] for micro in micros) else None

    def held(self) -> list[dict[str, Any]]:
        """What each instance holds right now."""
        return [instance.get("/dynaserve/instance/state").raise_for_status().json() for instance in self.instances]

    def wait_until_empty(self) -> None:
        """Returns when no instance holds a request, a block or a transfer; fails, telling what is held, if that never comes."""

        def empty() -> bool:
            return all(
                state["free_blocks"] == state["num_blocks"] - 1  # block 0 is vLLM's null block
                and not state["requests"]
                and not state["micro_requests"]
                and not state["open_transfers"]
                for state in self.held()
            )

        try:
            wait_for(empty, "empty block pools")
        except TimeoutError as error:
            raise AssertionError(f"still held: {self.held()}") from error

    @contextmanager
    def another_frontend(self, log_dir: Path, *arguments: str) -> Iterator[FleetUnderTest]:
        """A second front-end over the same instances."""
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "dynaserve.cli", "serve", self.model, "--instances", *self.instance_urls]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        child = start_child("frontend", command, log_dir / "frontend.log", {}, grace_s=20.0)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=NO_KEEP_ALIVE) as client:
                wait_for(lambda: child.exit_status is not None or is_healthy(client), f"the front-end ({child.log})", timeout_s=120)
                assert child.exit_status is None, child.last_lines()
                yield FleetUnderTest(client, self.instances, self.model)
        finally:
            stop_children([child])

    @contextmanager
    def others_running(self, clients: int = 6) -> Iterator[None]:
        """Keeps both instances busy: clients that ask one question after the other while the block runs."""
        over = threading.Event()

        def ask(client: int) -> None:
            rng = random.Random(client)
            while not over.is_set():
                body = self.body(prompt_of(rng.randrange(20, 300), seed=client), max_tokens=400, logprobs=None, split=0)
                for _ in self.stream(body):
                    if over.is_set():
                        return

        with ThreadPoolExecutor(clients) as pool:
            tasks = [pool.submit(ask, client) for client in range(clients)]
            try:
                wait_for(lambda: all(state["running"] for state in self.held()), "both instances to be busy")
                yield
            finally:
                over.set()
            for task in tasks:
                task.result()


def is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def wait_for(probe: Any, what: str, timeout_s: float = 60.0) -> Any:
    """Polls until `probe()` is true and returns it; the bound only ends a hopeless wait."""
    deadline = time.monotonic() + timeout_s
    while not (value := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s} s for {what}")
        time.sleep(0.02)
    return value
