"""Thousands of requests that do not fit the OpenAPI document of the front-end, and of messages that do not fit the fleet's wire:
none ends in a server error, none leaves anything.

`python -m tests.e2e.fuzz --cases 10000 --seed 1` starts its own fleet. Most of its time it makes up requests: half a second for one
of the largest operations.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.errors
import requests
import schemathesis
from schemathesis.core.result import Err

from tests.e2e.fleet import FleetUnderTest, prompt_of
from tests.e2e.fuzz_frames import fuzz_frames
from tests.e2e.soak import small_fleet

MOST_TOKENS = 4
FRONTEND = ["--override-generation-config", json.dumps({"max_new_tokens": MOST_TOKENS}), "--allowed-media-domains", "127.0.0.1"]
"""What is well-formed enough to be answered is answered soon, and nothing is fetched from elsewhere."""
TIMEOUT_S = 60.0


@dataclass
class Fuzz:
    """statuses: how often each came, by operation."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return sum(sum(counter.values()) for counter in self.statuses.values())


def operations(document: dict[str, Any]) -> Iterator[Any]:
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        if isinstance(found, Err):
            raise found.err()
        yield found.ok()


def fuzz(client: FleetUnderTest, cases: int, seed: int) -> Fuzz:
    """cases: at most so many and a few more, in equal parts for each operation that can be asked wrongly."""
    run, fallible = Fuzz(), []
    for operation in operations(client.frontend.get("/openapi.json").raise_for_status().json()):
        try:
            _fuzz_one(client, run, operation, 1, seed)
        except hypothesis.errors.Unsatisfiable:  # without parameters it cannot be asked wrongly
            continue
        fallible.append(operation)
    for operation in fallible:
        _fuzz_one(client, run, operation, -(-cases // len(fallible)), seed + 1)
    return run


def _fuzz_one(client: FleetUnderTest, run: Fuzz, operation: Any, cases: int, seed: int) -> None:
    statuses = run.statuses.setdefault(f"{operation.method.upper()} {operation.path}", Counter())

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def send(case: Any) -> None:
        try:
            answer = case.call(base_url=client.url, timeout=TIMEOUT_S)
        except requests.RequestException as error:
            run.faults.append(f"{error!r} to {case.as_curl_command()[:1000]}")
            return
        statuses[answer.status_code] += 1
        if answer.status_code >= 500:
            run.faults.append(f"{answer.status_code} {answer.text[:300]} to {case.as_curl_command()[:1000]}")

    send()


@contextmanager
def fuzzed_frontend(client: FleetUnderTest, log_dir: Path) -> Iterator[FleetUnderTest]:
    with client.another_frontend(log_dir, *FRONTEND) as frontend:
        yield frontend
        assert len(frontend.complete(prompt_of(20)).token_ids) == MOST_TOKENS, "the front-end still serves"
        frontend.wait_until_empty()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--messages", type=int, default=10_000, help="to the sockets of the instances (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"command: {' '.join(sys.argv)}; seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as logs, small_fleet(Path(logs)) as client:
        dropped = fuzz_frames(client, args.messages, args.seed)
        print(
            f"{args.messages} messages to gateways and transfer agents, {dropped} of them dropped by gateways: the fleet still serves",
            flush=True,
        )
        with fuzzed_frontend(client, Path(logs)) as frontend:
            run = fuzz(frontend, args.cases, args.seed)
    for name, statuses in run.statuses.items():
        print(f"{name}: {dict(sorted(statuses.items()))}")
    assert run.cases >= args.cases / 2, f"only {run.cases} of {args.cases} requests were made up"
    assert not run.faults, f"{len(run.faults)} faults:\n" + "\n".join(run.faults[:20])
    print(f"{run.cases} requests: no server error, nothing is held")


if __name__ == "__main__":
    main()
