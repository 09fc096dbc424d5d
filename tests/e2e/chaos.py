"""Instances are killed, stopped, cut off and started anew under load: no request fails or hangs, no token differs, nothing is held.

`test_chaos` runs a short form, `python -m tests.e2e.whole_chaos` (`make test-chaos`) the long one.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dynaserve.local.fleet import LocalFleet
from dynaserve.local.model import cache_dir, random_model, smollm2
from dynaserve.metrics_page import total
from tests.cut_sockets import cut_sockets
from tests.e2e.fleet import NO_KEEP_ALIVE, FleetUnderTest, prompt_of, wait_for
from tests.e2e.soak import PARAMS, Question
from tests.transports import OFFERED

INSTANCES = 3
CLIENTS = 16
LONGEST_ANSWER = 120
LONG_ANSWER = 500
"""Of those that are to be running when something ends, in tokens."""
STOPPED_S = 4.0
NOTICED_S = 2.0
"""Most time until a death is known."""
ANSWER_TIMEOUT_S = 120.0
"""Of a whole request; who runs into it hangs."""


@dataclass
class ChaosFleet:
    """Instances with memory for all requests, and what may be done to one of them (`VIOLENCE`)."""

    local: LocalFleet
    under_test: FleetUnderTest

    def health(self, index: int) -> str:
        fleet = self.under_test.frontend.get("/dynaserve/fleet").raise_for_status().json()
        return str(fleet["instances"][self.local.urls[index]]["health"])

    def wait_until(self, index: int, health: str, timeout_s: float = 60.0) -> float:
        """Returns how long it took, in seconds."""
        began_s = time.monotonic()
        wait_for(lambda: self.health(index) == health, f"instance {index} to be {health}", timeout_s)
        return time.monotonic() - began_s

    def signal(self, index: int, number: signal.Signals, processes: str) -> None:
        """processes: "all" of the instance, its "api" process or the others, its "core"."""
        pids = self.local.pids[f"instance-{index}"]
        send_signal({"all": pids, "api": pids[:1], "core": pids[1:]}[processes], number)

    def leave_and_join(self, index: int) -> float:
        """Under load; nobody notices. Returns 0: nothing died."""
        url = self.local.urls[index]
        left = self.under_test.frontend.delete("/dynaserve/instances", params={"url": url}).raise_for_status().json()
        assert left["health"] in ("draining", "gone"), left
        wait_for(lambda: url not in self.under_test.frontend.get("/dynaserve/fleet").json()["instances"], "the instance to leave")
        self.under_test.frontend.post("/dynaserve/instances", json={"url": url}).raise_for_status()
        assert self.health(index) == "up"
        return 0.0

    def kill(self, index: int) -> float:
        self.signal(index, signal.SIGKILL, "all")
        return self.wait_until(index, "dead")

    def terminate(self, index: int) -> float:
        """As a supervisor does: the instance finishes what it runs, as far as its `--shutdown-timeout` goes."""
        os.kill(self.local.pids[f"instance-{index}"][0], signal.SIGTERM)
        self.wait_until(index, "dead")
        return 0.0

    def stop(self, index: int, processes: str) -> float:
        self.signal(index, signal.SIGSTOP, processes)
        noticed_s = self.wait_until(index, "dead")
        time.sleep(max(0.0, STOPPED_S - noticed_s))
        self.signal(index, signal.SIGCONT, processes)
        self.wait_until(index, "up")
        return noticed_s

    def cut(self, index: int) -> float:
        """Its connections end, while all of its processes go on."""
        before, began_s = self.deaths(index), time.monotonic()
        assert cut_sockets(self.local.pids[f"instance-{index}"]) > 0
        wait_for(lambda: self.deaths(index) > before, f"the cut of instance {index} to be noticed")
        noticed_s = time.monotonic() - began_s
        self.wait_until(index, "up")
        return noticed_s

    def deaths(self, index: int) -> float:
        page = self.under_test.frontend.get("/metrics").raise_for_status().text
        return total(page, f'dynaserve_instance_deaths_total{{url="{self.local.urls[index]}"}}')

    def restart(self, index: int) -> float:
        noticed_s = self.kill(index)
        self.bring_back(index)
        return noticed_s

    def bring_back(self, index: int) -> None:
        if self.health(index) != "up":
            self.local.start_instance(index)
            self.local.wait_healthy({f"instance-{index}": self.local.urls[index]}, time.monotonic() + 300.0)
            self.wait_until(index, "up")


def send_signal(pids: list[int], number: signal.Signals) -> None:
    """The first of them runs; killing it may end the others before their turn comes."""
    os.kill(pids[0], number)
    for pid in pids[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


VIOLENCE: dict[str, Callable[[ChaosFleet, int], float]] = {
    "kill": ChaosFleet.kill,
    "stop": lambda fleet, index: fleet.stop(index, "all"),
    "stop the engine core": lambda fleet, index: fleet.stop(index, "core"),
    "stop the API process": lambda fleet, index: fleet.stop(index, "api"),
    "cut": ChaosFleet.cut,
    "restart": ChaosFleet.restart,
    "leave and join": ChaosFleet.leave_and_join,
    "terminate": ChaosFleet.terminate,
}


def kill_frontend(fleet: ChaosFleet, streams: int = 6) -> float:
    """Its clients hear of it at once. Returns for how long at most the instances hold what they ran, in seconds."""
    all_answer = threading.Barrier(streams + 1)
    with ThreadPoolExecutor(streams) as pool:
        tokens = [pool.submit(read_until_cut_off, fleet.under_test, seed, all_answer) for seed in range(streams)]
        all_answer.wait(ANSWER_TIMEOUT_S)
        send_signal(fleet.local.pids["frontend"], signal.SIGKILL)
        began_s = time.monotonic()
        assert min(future.result() for future in tokens) < LONG_ANSWER, "all answers were complete before the front-end was killed"
    fleet.under_test.wait_until_empty()
    return time.monotonic() - began_s


def read_until_cut_off(under_test: FleetUnderTest, seed: int, all_answer: threading.Barrier) -> int:
    """Tokens that came. An answer that ends as if it were complete has to be."""
    stream = under_test.stream(under_test.body(prompt_of(100, seed=seed), max_tokens=LONG_ANSWER, split=110))
    tokens = under_test.read(stream, 3)
    all_answer.wait(ANSWER_TIMEOUT_S)
    with suppress(httpx.TransportError):
        tokens += sum(len(choice["token_ids"]) for chunk in stream for choice in chunk["choices"])
        assert tokens == LONG_ANSWER, f"an answer of a front-end that was killed ended as if it were complete, after {tokens} tokens"
    return tokens


def kill_all(fleet: ChaosFleet) -> tuple[httpx.Response, float]:
    """What a client is told who asks then, and when the last running answer has ended, in seconds."""
    stream = fleet.under_test.stream(fleet.under_test.body(prompt_of(100), max_tokens=LONG_ANSWER))
    fleet.under_test.read(stream, 3)
    began_s = time.monotonic()
    for index in range(len(fleet.local.urls)):
        fleet.signal(index, signal.SIGKILL, "all")
    last = list(stream)[-1]
    assert "no instance" in last["error"]["message"], last
    ended_s = time.monotonic() - began_s
    return fleet.under_test.frontend.post("/v1/completions", json=fleet.under_test.body(prompt_of(10))), ended_s


@contextmanager
def chaos_fleet(log_dir: Path, instances: int = INSTANCES, shutdown_timeout_s: str = "0") -> Iterator[ChaosFleet]:
    """Its processes speak with a fleet secret."""
    model = random_model(smollm2(), cache_dir() / "random-llama", seed=1)
    log_dir.mkdir(parents=True, exist_ok=True)
    secret = log_dir / "secret"
    secret.write_text(secrets.token_urlsafe(32))
    secret.chmod(0o600)
    local = LocalFleet(
        model,
        instances=instances,
        vllm_args=[
            "--shutdown-timeout",
            shutdown_timeout_s,
            "--max-num-batched-tokens",
            "64",
            "--max-num-seqs",
            "32",
            "--num-gpu-blocks-override",
            "400",
            "--dynaserve-fleet-secret-file",
            str(secret),
            "--dynaserve-transports",
            *OFFERED,
        ],
        frontend_args=["--fleet-secret-file", str(secret)],
        max_model_len=640,
        start_timeout_s=900.0,
        log_dir=log_dir,
    )
    with local:
        clients = [httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, limits=NO_KEEP_ALIVE) for url in (local.frontend_url, *local.urls)]
        yield ChaosFleet(local, FleetUnderTest(clients[0], clients[1:], str(model)))
        for client in clients:
            client.close()


@dataclass
class Chaos:
    """All that is random comes from `seed`. noticed_s: by round."""

    fleet: ChaosFleet
    seed: int
    questions: list[Question] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    noticed_s: list[tuple[str, float]] = field(default_factory=list)
    placed_again: int = 0
    continued_without_alpha: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_undisturbed(self, questions: int) -> None:
        rng = random.Random(self.seed)
        for _ in range(questions):
            prompt = [rng.randrange(5, 2000) for _ in range(rng.randrange(1, 300))]
            question = Question(prompt, rng.choice(PARAMS))
            body = self._body(question, LONGEST_ANSWER, split=0)
            answer = self.fleet.under_test.frontend.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            question.answer = answer.json()["choices"][0]["token_ids"]
            self.questions.append(question)

    def round(self, violence: str, number: int, requests: int) -> None:
        rng = random.Random(self.seed * 1_000_003 + number)
        victim = rng.randrange(len(self.fleet.local.urls))
        asked = threading.Semaphore(0)
        with ThreadPoolExecutor(CLIENTS) as pool:
            tasks = [pool.submit(self._one, f"{self.seed}-{number}-{i}", rng.randrange(2**32), asked) for i in range(requests)]
            for _ in range(rng.randrange(1, max(2, requests // 2))):
                asked.acquire()
            time.sleep(rng.random())
            self.noticed_s.append((violence, VIOLENCE[violence](self.fleet, victim)))
            for task in tasks:
                task.result()
        self.fleet.bring_back(victim)
        self.fleet.under_test.wait_until_empty()

    def _one(self, name: str, seed: int, asked: threading.Semaphore) -> None:
        rng = random.Random(seed)
        question = rng.choice(self.questions)
        outputs = rng.randrange(2, len(question.answer) + 1)
        split = rng.choice([0, rng.randrange(len(question.prompt) + outputs)])
        body = self._body(question, outputs, split, rng.choice(OFFERED)) | {"stream": True, "request_id": name}
        asked.release()
        got: list[int] = []
        try:
            with self.fleet.under_test.frontend.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        got += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
        except (httpx.HTTPError, AssertionError, ValueError, LookupError) as error:
            self._blame(f"request {name}, split {split}, after {len(got)} tokens: {error!r}")
            return
        record = self.fleet.under_test.frontend.get(f"/dynaserve/requests/cmpl-{name}-0").json()["sequences"][0]
        with self.lock:
            self.placed_again += bool(record["lost_attempts"])
            self.continued_without_alpha += "alpha_lost" in record["timeline_ms"]
        if got != question.answer[:outputs]:
            same = next((i for i, (a, b) in enumerate(zip(got, question.answer, strict=False)) if a != b), len(got))
            self._blame(
                f"request {name}, {len(question.prompt)} + {outputs} tokens, {question.params}: {len(got)} came, {same} right: {record}"
            )

    def _body(self, question: Question, outputs: int, split: int, transport: str | None = None) -> dict[str, Any]:
        body = self.fleet.under_test.body(question.prompt, split=split, transport=transport, logprobs=None, max_tokens=outputs)
        body |= question.params
        if "structured_outputs" in body:
            body["ignore_eos"] = False
        return body

    def _blame(self, fault: str) -> None:
        with self.lock:
            self.faults.append(fault)


def chaos(fleet: ChaosFleet, seed: int, violence: list[str], requests: int, questions: int) -> Chaos:
    """One round for each entry of `violence`. Raises AssertionError with all that is wrong."""
    run = Chaos(fleet, seed)
    run.ask_undisturbed(questions)
    for number, kind in enumerate(violence):
        run.round(kind, number, requests)
        _, noticed_s = run.noticed_s[-1]
        print(
            f"round {number}, {kind}: noticed after {noticed_s:.2f} s; so far {run.placed_again} requests placed again, "
            f"{run.continued_without_alpha} continued without their alpha, {len(run.faults)} faults",
            flush=True,
        )
    assert not run.faults, "\n".join(run.faults[:10])
    return run
