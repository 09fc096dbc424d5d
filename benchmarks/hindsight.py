"""What of a prediction's error is chance: how long a request takes is also for those to decide who come after it.

`with_all_known` plays a run again, on the timelines that the front-end predicts by, with all requests at the times at which they came.
What errs then is the predictor; what erred beside that was not known yet. `by_chance` draws again, many times, who comes after a
request: whoever predicts its end before they have come errs by as much as those ends differ from their median.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dynaserve.execution_predictor import ExecutionPredictor, Forecast, InstanceLimits, VirtualRequest
from dynaserve.simulation import SimulatedRequest, SimulationOptions, simulate
from dynaserve.step_latency import ProfileTable

ROUNDS = 5
"""A beta is ready once its alpha has ended, which is known when that was played: each round corrects the one before."""
BEFORE, AFTER, FUTURES = 40, 40, 16
"""Requests that are played before and after the one that is looked at, and how often the latter are drawn."""

Shape = tuple[int, int]
"""Tokens of prompt and answer."""


@dataclass(frozen=True)
class Part:
    """A micro-request that has run. follows: the alpha's number, where it is a beta."""

    instance: str
    context_tokens: int
    prefill_tokens: int
    decode_tokens: int
    ready_ms: float
    follows: int | None = None


@dataclass(frozen=True)
class Times:
    """Of a request, in milliseconds from its arrival."""

    ttft_ms: float
    end_ms: float


def with_all_known(records: Sequence[Mapping[str, Any]], table: ProfileTable, limits: InstanceLimits) -> list[Times]:
    """records: the front-end's, of all requests that came, in order of arrival. Returns what is predicted of each."""
    parts, owners = _parts(records)
    waits = [_hand_over_ms(record) for record in records if _is_cut(record)]
    hand_over_ms = median(waits) if waits else 0.0
    ready = [part.ready_ms for part in parts]
    forecasts: dict[int, Forecast] = {}
    for _ in range(ROUNDS):
        forecasts = _play(parts, ready, table, limits)
        for number, part in enumerate(parts):
            if part.follows is not None:
                ready[number] = forecasts[part.follows].end_ms + hand_over_ms
    return [
        _times(record, records[0], [(parts[part], forecasts[part]) for part in own]) for record, own in zip(records, owners, strict=True)
    ]


def _parts(records: Sequence[Mapping[str, Any]]) -> tuple[list[Part], list[list[int]]]:
    """All parts, and the numbers of those of each record."""
    parts: list[Part] = []
    owners: list[list[int]] = []
    for record in records:
        prompt, split = record["prompt_tokens"], record["split_token"]
        end = prompt + record["output_tokens"] - 1
        arrived_ms = _arrived_ms(record, records[0])
        alpha = record["alpha"]["instance"]
        owners.append([len(parts)])
        if not _is_cut(record):
            parts.append(Part(alpha, 0, prompt, end - prompt, arrived_ms))
            continue
        owners[-1].append(len(parts) + 1)
        resumed_ms = arrived_ms + record["timeline_ms"]["beta_resumed"]
        parts.append(Part(alpha, 0, min(split, prompt), max(0, split - prompt), arrived_ms))
        rest = Part(record["beta"]["instance"], split, max(0, prompt - split), end - max(split, prompt), resumed_ms, len(parts) - 1)
        parts.append(rest)
    return parts, owners


def _play(parts: Sequence[Part], ready_ms: Sequence[float], table: ProfileTable, limits: InstanceLimits) -> dict[int, Forecast]:
    """By the parts' numbers."""
    found: dict[int, Forecast] = {}
    for instance in {part.instance for part in parts}:
        predictor = ExecutionPredictor(table, limits)
        for number in sorted((n for n, part in enumerate(parts) if part.instance == instance), key=lambda n: ready_ms[n]):
            part = parts[number]
            predictor.add(
                VirtualRequest(
                    key=number,
                    context_tokens=part.context_tokens,
                    prefill_tokens=part.prefill_tokens,
                    decode_tokens=part.decode_tokens,
                    ready_ms=ready_ms[number],
                ),
                0.0,
            )
        found |= dict(predictor.play_out(0.0))
    return found


def _times(record: Mapping[str, Any], first: Mapping[str, Any], run: Sequence[tuple[Part, Forecast]]) -> Times:
    arrived_ms = _arrived_ms(record, first)
    # The part that computes the last token of the prompt gives the first of the answer.
    gives = next(forecast for part, forecast in run if part.context_tokens + part.prefill_tokens == record["prompt_tokens"])
    return Times(gives.prefill_end_ms - arrived_ms, run[-1][1].end_ms - arrived_ms)


def _is_cut(record: Mapping[str, Any]) -> bool:
    """Also handed over: an answer may end before its cut."""
    return record["split_token"] is not None and record["lifted"] is None and "beta_resumed" in record["timeline_ms"]


def _hand_over_ms(record: Mapping[str, Any]) -> float:
    return float(record["timeline_ms"]["beta_resumed"] - record["timeline_ms"]["alpha_parked"])


def _arrived_ms(record: Mapping[str, Any], first: Mapping[str, Any]) -> float:
    return float(1e3 * (record["arrived_s"] - first["arrived_s"]))


def by_chance(
    requests: Sequence[tuple[float, Shape]],
    draw: Callable[[random.Random], tuple[float, Shape]],
    table: ProfileTable,
    fleet: Callable[[int], SimulationOptions],
    seed: int,
) -> list[float]:
    """Relative errors of the median end of each request, against its ends with others coming after it, in the simulator.

    requests: when each came, in ms, and its shape. draw: the time in ms until the next one, and its shape. fleet: by the seed of the
    noise of its steps, which nobody knows before either.
    """
    rng = random.Random(seed)
    errors: list[float] = []
    for number, (came_ms, _) in enumerate(requests):
        before = requests[max(0, number - BEFORE) : number + 1]
        ends = []
        for _ in range(FUTURES):
            coming = _drawn_after(came_ms, draw, rng)
            result = simulate([table], [_simulated(one, before[0][0]) for one in (*before, *coming)], fleet(rng.getrandbits(32)))
            ends.append(result.outcomes[len(before) - 1].end_ms + before[0][0] - came_ms)
        errors += [abs(end - median(ends)) / end for end in ends]
    return errors


def _drawn_after(came_ms: float, draw: Callable[[random.Random], tuple[float, Shape]], rng: random.Random) -> list[tuple[float, Shape]]:
    coming = []
    for _ in range(AFTER):
        gap_ms, shape = draw(rng)
        came_ms += gap_ms
        coming.append((came_ms, shape))
    return coming


def _simulated(request: tuple[float, Shape], origin_ms: float) -> SimulatedRequest:
    came_ms, (prompt, outputs) = request
    return SimulatedRequest(came_ms - origin_ms, prompt, outputs, outputs)
