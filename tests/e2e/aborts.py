"""Clients that leave at random moments of a cut request: both instances have all their blocks back.

`python -m tests.e2e.aborts --requests 1000 --seed 1` starts its own fleet; `test_aborts` runs a short one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.fleet import FleetUnderTest, prompt_of
from tests.e2e.soak import small_fleet

TOGETHER = 25
BLOCKS = 800
LONGEST_PROMPT, LONGEST_ANSWER = 300, 150
FREE_AFTER_S = 1.0


def leave(fleet: FleetUnderTest, rng: random.Random) -> str:
    """Asks, and closes the connection: after some tokens, or after some time, whatever has happened by then. Returns which."""
    prompt = prompt_of(rng.randrange(1, LONGEST_PROMPT), seed=rng.randrange(2**32))
    outputs = rng.randrange(2, LONGEST_ANSWER)
    body = fleet.body(prompt, split=rng.randrange(1, len(prompt) + outputs), max_tokens=outputs, logprobs=None)
    if rng.random() < 0.5:
        return _leave_by_tokens(fleet, body, rng.randrange(1, outputs))
    return _leave_by_time(fleet, body, rng.random() * 2.0)


def _leave_by_tokens(fleet: FleetUnderTest, body: dict[str, Any], tokens: int) -> str:
    stream = fleet.stream(body)
    fleet.read(stream, tokens)
    stream.close()
    return "after tokens"


def _leave_by_time(fleet: FleetUnderTest, body: dict[str, Any], after_s: float) -> str:
    """Within the prompt as well, when nothing has been answered yet."""
    try:
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=httpx.Timeout(60.0, read=after_s))
    except httpx.ReadTimeout:
        return "after some time"
    assert answer.status_code == httpx.codes.OK, answer.text
    return "not at all: it was answered"


def aborts(fleet: FleetUnderTest, seed: int, requests: int, together: int = TOGETHER) -> tuple[Counter[str], list[float]]:
    """How the clients left, and after each group of them how long it took until nothing was held, in seconds."""
    kinds: Counter[str] = Counter()
    free_after_s = []
    with ThreadPoolExecutor(together) as pool:
        for first in range(0, requests, together):
            rngs = [random.Random(seed * 1_000_003 + number) for number in range(first, min(first + together, requests))]
            kinds.update(pool.map(lambda rng: leave(fleet, rng), rngs))
            began_s = time.monotonic()
            fleet.wait_until_empty()
            free_after_s.append(time.monotonic() - began_s)
    return kinds, free_after_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"command: {' '.join(sys.argv)}; seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as logs, small_fleet(Path(logs), BLOCKS) as fleet:
        fleet.warm_up()
        kinds, free_after_s = aborts(fleet, args.seed, args.requests)
    print(f"{args.requests} requests, clients left {dict(kinds)}")
    print(f"nothing was held {max(free_after_s):.2f} s after the last of each {TOGETHER} had left, at most")
    if max(free_after_s) > FREE_AFTER_S:
        raise SystemExit(f"that is more than {FREE_AFTER_S:g} s")


if __name__ == "__main__":
    main()
