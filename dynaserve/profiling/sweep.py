"""The points of a sweep, and those already measured. One line of JSON per point, so that an interrupted sweep goes on."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynaserve.errors import ConfigError
from dynaserve.latency_profile import ProfileKey
from dynaserve.messages import MeasuredStep
from dynaserve.step_latency import BatchShape, ProfileTable, StepSample
from dynaserve.taught_table import taught


class Point(NamedTuple):
    """A step of `prefill_tokens` of one prompt beside `decodes` that have about `context_tokens` each."""

    context_tokens: int
    decodes: int
    prefill_tokens: int


class PointRecord(msgspec.Struct, frozen=True):
    """steps: each time that the point was measured."""

    point: Point
    steps: list[MeasuredStep]


class _Header(msgspec.Struct, frozen=True):
    """engine_args: how the engine was started."""

    key: ProfileKey
    engine_args: list[str]


class Limits(NamedTuple):
    """Of the engine: tokens of one step, requests of one step, tokens of KV memory, tokens of one request with its answer."""

    step_tokens: int
    requests: int
    kv_tokens: int
    model_tokens: int


NO_LIMITS = Limits(*[sys.maxsize] * len(Limits._fields))


def grid(prefills: Iterable[int], decodes: Iterable[int], contexts: Iterable[int], limits: Limits, spare_tokens: int) -> list[Point]:
    """All steps that fit; grouped by context, the most decodes first, since a group begins with filling their contexts.

    spare_tokens: that each decode may produce while its group is measured.
    """
    points = {
        # Without decodes their context says nothing.
        Point(context if number else 0, number, tokens)
        for context in contexts
        for number in decodes
        for tokens in prefills
        if number + tokens > 0 and _fits(Point(context, number, tokens), limits, spare_tokens)
    }
    return sorted(points, key=lambda point: (point.context_tokens, -point.decodes, point.prefill_tokens))


def _fits(point: Point, limits: Limits, spare_tokens: int) -> bool:
    if point.decodes + point.prefill_tokens > limits.step_tokens or point.decodes + (point.prefill_tokens > 0) > limits.requests:
        return False
    longest = 0
    if point.decodes:
        longest = point.context_tokens + answer_tokens(point.decodes, point.context_tokens, limits.step_tokens, spare_tokens)
    # The prompt beside the decodes gets a token of an answer, too.
    fits_model = max(longest, point.prefill_tokens + 1) <= limits.model_tokens
    return fits_model and point.decodes * longest + point.prefill_tokens <= limits.kv_tokens


def answer_tokens(decodes: int, context_tokens: int, step_tokens: int, spare_tokens: int) -> int:
    """What each decode of a group may produce: a token in each step that fills the contexts of others, and then `spare_tokens`.

    step_tokens: of one step, at least `decodes`.
    """
    return math.ceil(sum(context_tokens / (step_tokens - ready) for ready in range(decodes))) + 1 + spare_tokens


class PointFile:
    """Points measured so far. Raises ConfigError for a file that is damaged, or was measured on something else."""

    def __init__(self, path: Path, key: ProfileKey, engine_args: Sequence[str]) -> None:
        self.records: list[PointRecord] = []
        self._path = path
        header = _Header(key, list(engine_args))
        if path.exists():
            self._read(header)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(header)

    def missing(self, points: Sequence[Point]) -> list[Point]:
        done = {record.point for record in self.records}
        return [point for point in points if point not in done]

    def add(self, record: PointRecord) -> None:
        self._append(record)
        self.records.append(record)

    def remove(self) -> None:
        self._path.unlink()

    def _append(self, line: _Header | PointRecord) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _read(self, wanted: _Header) -> None:
        lines = self._path.read_bytes().splitlines()
        try:
            header = msgspec.json.decode(lines[0], type=_Header)
            self.records = [msgspec.json.decode(line, type=PointRecord) for line in lines[1:]]
        except (msgspec.MsgspecError, IndexError) as error:
            raise ConfigError(f"{self._path}: is not a file of measured points: {error}; remove it to begin anew") from error
        if header.key != wanted.key:
            raise ConfigError(f"{self._path}: measured on {header.key}, not {wanted.key}; name another --output")
        if header.engine_args != wanted.engine_args:
            there, here = (" ".join(each.engine_args) or "none" for each in (header, wanted))
            raise ConfigError(f"{self._path}: measured with the options {there}, not {here}; name another --output")


def table_of(records: Iterable[PointRecord], rng: random.Random) -> ProfileTable:
    """Learns from the median of each point, in an order by `rng`. Raises ValueError without records."""
    return taught([_median(record.steps) for record in records], rng)


def _median(steps: Sequence[MeasuredStep]) -> StepSample:
    step = sorted(steps, key=lambda step: step.measured_ms)[len(steps) // 2]
    return StepSample(shape_of(step), step.measured_ms)


def shape_of(step: MeasuredStep) -> BatchShape:
    return BatchShape(
        prefill_tokens=step.prefill_tokens,
        prefill_pairs=step.prefill_pairs,
        decodes=step.decodes,
        decode_context_tokens=step.decode_context_tokens,
    )
