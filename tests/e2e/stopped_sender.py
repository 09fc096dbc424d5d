"""A sender is stopped at a random moment before it hands over, and goes on when the memory it was writing to may be another's."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.e2e.chaos import ChaosFleet
from tests.e2e.fleet import Answer, prompt_of, wait_for

PROMPT_TOKENS = 560
"""Nine chunks."""
ATTEMPTS = 20
OTHERS = 48
"""More than the memory of the living instances holds at once."""


def stop_before_hand_over(fleet: ChaosFleet, seed: int, transport: str) -> int:
    """Raises AssertionError if any token of anyone differs. Returns how many of the receiver's blocks were kept from
    others while the sender was dead."""
    rng, client = random.Random(seed), fleet.under_test
    prompts = [prompt_of(PROMPT_TOKENS, seed=rng.randrange(2**20)) for _ in range(1 + OTHERS)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        names = (f"stopped-{transport}-{seed}-{attempt}" for attempt in range(ATTEMPTS))
        attempts = (stop_sender(fleet, pool, name, prompts[0], transport, rng.random() * 0.2) for name in names)
        stopped = next((stopped for stopped in attempts if stopped is not None), None)
        assert stopped is not None, f"all of {ATTEMPTS} senders had handed over before they were stopped"
        sender, receiver, cut = stopped
        try:
            fleet.wait_until(sender, "dead")
            state = client.instances[receiver].get("/dynaserve/instance/state").raise_for_status().json()
            others = [pool.submit(client.complete, prompt, split=0) for prompt in prompts[1:]]
            others[OTHERS // 2].result()
        finally:
            fleet.signal(sender, signal.SIGCONT, "all")
        answers = [task.result() for task in (cut, *others)]
    fleet.wait_until(sender, "up")
    client.wait_until_empty()
    (record,) = client.records(answers[0].request_id)
    assert record["lost_attempts"] or record["alpha"]["lost"], record
    with ThreadPoolExecutor(len(prompts)) as pool:
        references = list(pool.map(lambda prompt: client.complete(prompt, split=0), prompts))
    differing = [i for i, (answer, reference) in enumerate(zip(answers, references, strict=True)) if not answer.same_as(reference)]
    assert not differing, differing
    return int(state["quarantined_blocks"]) + int(state["reserved_blocks"])


def stop_sender(
    fleet: ChaosFleet, pool: ThreadPoolExecutor, name: str, prompt: list[int], transport: str, after_s: float
) -> tuple[int, int, Future[Answer]] | None:
    """The stopped and the receiving instance, and the answer to come; None: it had handed over, and goes on."""
    cut = pool.submit(fleet.under_test.complete, prompt, split=len(prompt), transport=transport, request_id=name)
    record = wait_for(lambda: (known := record_of(fleet, name)) and known["beta"] and known, "the request to be placed")
    sender, receiver = (fleet.local.urls.index(record[side]["instance"]) for side in ("alpha", "beta"))
    time.sleep(after_s)
    fleet.signal(sender, signal.SIGSTOP, "all")
    time.sleep(0.1)  # what it had said before is heard
    record = record_of(fleet, name)
    assert record is not None
    if "continue_sent" not in record["timeline_ms"] and record["lifted"] is None:
        return sender, receiver, cut
    fleet.signal(sender, signal.SIGCONT, "all")
    cut.result()
    return None


def record_of(fleet: ChaosFleet, name: str) -> dict[str, Any] | None:
    answer = fleet.under_test.frontend.get(f"/dynaserve/requests/cmpl-{name}-0")
    if answer.status_code == 404:
        return None
    (record,) = answer.raise_for_status().json()["sequences"]
    return dict(record)
