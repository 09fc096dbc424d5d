"""Random requests over a fleet with little memory: everything that can happen to a hand-off happens, and no token differs.

`python -m tests.e2e.soak --requests 3000 --seed 1` starts its own fleet; `test_random` runs a short one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import cache_dir, random_model, smollm2
from tests.e2e.fleet import NO_KEEP_ALIVE, FleetUnderTest, wait_for

BLOCKS = 60
MAX_MODEL_LEN = 640
LONGEST_ANSWER = 150
SLOTS = 16
CLIENTS = 24
MUST_HAPPEN = ("parked", "preempted", "refused", "revoked", "granted_in_part")
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0.9, "seed": 5},
    {"allowed_token_ids": list(range(300, 330)), "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"structured_outputs": {"regex": "([a-z]{2,6} ){40,200}"}},
)


@contextmanager
def small_fleet(log_dir: Path, blocks: int = BLOCKS) -> Iterator[FleetUnderTest]:
    """Two instances whose caches hold a few requests."""
    model = random_model(smollm2(), cache_dir() / "random-llama", seed=1)
    local = LocalFleet(
        model,
        vllm_args=["--max-num-batched-tokens", "64", "--max-num-seqs", str(SLOTS), "--num-gpu-blocks-override", str(blocks)],
        max_model_len=MAX_MODEL_LEN,
        log_dir=log_dir,
    )
    with local:
        frontend, *instances = [httpx.Client(base_url=url, timeout=300, limits=NO_KEEP_ALIVE) for url in (local.frontend_url, *local.urls)]
        yield FleetUnderTest(frontend, instances, str(model))
        for client in (frontend, *instances):
            client.close()


@dataclass
class Question:
    """A prompt with its parameters, and the whole answer to it, asked alone and uncut."""

    prompt: list[int]
    params: dict[str, Any]
    answer: list[int] = field(default_factory=list)


@dataclass
class Soak:
    """requests run from `CLIENTS` threads; all that is random comes from `seed` and the number of the request."""

    fleet: FleetUnderTest
    seed: int
    questions: list[Question] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    longest_wait_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_uncut(self, questions: int) -> None:
        """Prompts share prefixes, within a group of ten."""
        rng = random.Random(self.seed)
        for i in range(questions):
            if i % 10 == 0:
                shared = [rng.randrange(5, 2000) for _ in range(rng.randrange(0, 200))]
            prompt = shared[: rng.randrange(len(shared) + 1)] + [rng.randrange(5, 2000) for _ in range(rng.randrange(1, 250))]
            question = Question(prompt, rng.choice(PARAMS))
            question.answer = self._whole_answer(question, self.fleet.frontend)
            self.questions.append(question)

    def run(self, requests: int) -> None:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(self._one, number) for number in range(requests)]:
                done.result()

    def ask_again(self) -> None:
        """Every instance, uncut, with whatever it has cached."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [(question, instance) for instance in self.fleet.instances for question in self.questions]
            answers = pool.map(lambda pair: self._whole_answer(*pair), asked)
        for (question, instance), answer in zip(asked, answers, strict=True):
            if answer != question.answer:
                what = f"a prompt of {len(question.prompt)} tokens with {question.params}"
                self.faults.append(f"the cache of {instance.base_url} answers {what} otherwise")

    def hand_off_counts(self) -> Counter[str]:
        return sum((Counter(state["counts"]) for state in self.fleet.held()), Counter())

    def _whole_answer(self, question: Question, server: httpx.Client) -> list[int]:
        body = self._body(question, {"max_tokens": LONGEST_ANSWER}, split=0)
        answer = server.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def _body(self, question: Question, limits: dict[str, Any], split: int) -> dict[str, Any]:
        body = self.fleet.body(question.prompt, split=split, logprobs=None) | question.params | limits
        del body["cache_salt"]
        if "structured_outputs" in body:
            body["ignore_eos"] = False
        return body

    def _one(self, number: int) -> None:
        rng = random.Random(self.seed * 1_000_003 + number)
        question = rng.choice(self.questions)
        outputs = rng.randrange(2, len(question.answer) + 1)
        expected = question.answer[:outputs]
        limits: dict[str, Any] = {"max_tokens": outputs}
        if rng.random() < 0.3 and outputs > 3 and "structured_outputs" not in question.params:  # a grammar masks stop tokens
            stop = rng.choice(expected)
            expected = expected[: expected.index(stop) + 1]
            limits["stop_token_ids"] = [stop]
        prompt = len(question.prompt)
        split = rng.choice((0, rng.randrange(prompt), rng.randrange(prompt, prompt + outputs)))
        leave_after = rng.randrange(outputs) if rng.random() < 0.15 else None
        got = self._stream(number, self._body(question, limits, split), rng, prompt + outputs, leave_after)
        if got != expected[: len(got)] or (leave_after is None and len(got) != len(expected)):
            same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
            record = self.fleet.frontend.get(f"/dynaserve/requests/cmpl-soak-{self.seed}-{number}-0").json()["sequences"]
            with self.lock:
                self.faults.append(
                    f"request {number} of seed {self.seed}, {len(question.prompt)} + {len(expected)} tokens, split {split}, "
                    f"{question.params | limits}, differs from token {same} of {len(expected)} on, {len(got)} came: {record}"
                )

    def _stream(self, number: int, body: dict[str, Any], rng: random.Random, length: int, leave_after: int | None) -> list[int]:
        name = f"soak-{self.seed}-{number}"
        tokens: list[int] = []
        split = body["vllm_xargs"]["dynaserve_split"]
        at = rng.randrange(1, length) if rng.random() < 0.7 or not split else None
        emitted_by_alpha = max(1, (split or length) - len(body["prompt"]))
        move_after = rng.choice((None, 0, rng.randrange(emitted_by_alpha)))  # tokens seen here, some way behind the alpha
        change = self._move if split else self._cut
        moves = threading.Timer(0.0 if move_after else rng.random() * 0.05, change, (f"cmpl-{name}-0", at))
        if move_after == 0:
            moves.start()
        asked_s = last_s = time.monotonic()
        with self.fleet.frontend.stream("POST", "/v1/completions", json=body | {"stream": True, "request_id": name}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                now_s = time.monotonic()
                self.longest_wait_s, last_s = max(self.longest_wait_s, now_s - last_s), now_s
                if move_after and len(tokens) >= move_after and moves.ident is None:
                    moves.start()
                if leave_after is not None and len(tokens) > leave_after:
                    self._count("left")
                    break
        moves.cancel()
        self._count("asked")
        assert last_s >= asked_s
        return tokens

    def _cut(self, request_id: str, hand_off_at: int) -> None:
        """A request that runs whole."""
        found = httpx.get(f"{self.fleet.url}/dynaserve/requests/{request_id}", timeout=60)
        if found.status_code != httpx.codes.OK:
            return  # not placed yet
        (record,) = found.json()["sequences"]
        (beta,) = (url for url in self.fleet.instance_urls if url != record["alpha"]["instance"])
        answer = httpx.post(
            f"{self.fleet.url}/dynaserve/requests/{request_id}/hand_off", json={"hand_off_at": hand_off_at, "to": beta}, timeout=60
        )
        if answer.status_code == httpx.codes.OK and answer.json()["moved"]:
            self._count("cut late")

    def _move(self, request_id: str, hand_off_at: int | None) -> None:
        answer = httpx.post(f"{self.fleet.url}/dynaserve/requests/{request_id}/hand_off", json={"hand_off_at": hand_off_at}, timeout=60)
        if answer.status_code == httpx.codes.OK and answer.json()["moved"]:
            self._count("moved" if hand_off_at is not None else "lifted by hand")

    def _count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1


def soak(fleet: FleetUnderTest, seed: int, requests: int, questions: int) -> Soak:
    """Raises AssertionError with all that is wrong."""
    run = Soak(fleet, seed)
    run.ask_uncut(questions)
    run.run(requests)
    fleet.wait_until_empty()
    run.ask_again()
    wait_for(lambda: all(not state["requests"] for state in fleet.held()), "the last requests to end")
    print(f"seed {seed}: {dict(run.counts)}, {dict(run.hand_off_counts())}, longest wait {run.longest_wait_s:.1f} s")
    assert not run.faults, "\n".join(run.faults[:10])
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"command: {' '.join(sys.argv)}; seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as logs, small_fleet(Path(logs)) as fleet:
        run = soak(fleet, args.seed, args.requests, args.questions)
        counts = run.hand_off_counts() + run.counts
    missing = [what for what in (*MUST_HAPPEN, "moved", "lifted by hand", "cut late", "left") if not counts[what]]
    assert not missing, f"never happened: {', '.join(missing)}"
    print(f"{args.requests} requests, no token differs, nothing is held")


if __name__ == "__main__":
    main()
