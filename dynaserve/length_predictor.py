"""How many tokens a request will answer: a distribution, learnt from the requests that have finished.

Kept per model, class, and powers of two of prompt length and max_tokens; where too few have finished, per model and class; else a
prior. Conditioned on what has been emitted: an answer of 500 tokens that goes on is not one of 100. Pure but for `save`
and `load`.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynaserve.errors import ConfigError
from dynaserve.files import write_in_one_move

FORMAT_VERSION = 1
LEAST_FINISHED = 16
"""Finished requests that a distribution needs before it is believed."""
MOST_GROUPS = 4096
"""Callers name classes: the groups that have learnt nothing for the longest time are forgotten."""
_MEMORY = 2000.0
"""Finished requests after which an old one counts a third."""
_BINS_PER_OCTAVE = 4
_NUM_BINS = 22 * _BINS_PER_OCTAVE
_EDGES = [2 ** (bin_ / _BINS_PER_OCTAVE) for bin_ in range(1, _NUM_BINS)]

PRIOR = ((0.05, 39), (0.25, 81), (0.5, 115), (0.75, 393), (0.9, 421), (0.95, 448), (0.99, 598))
"""(quantile, output tokens) of 14,453 conversations of the Azure LLM inference trace 2023."""


@dataclass(frozen=True, slots=True)
class LengthQuery:
    """What is known of a request at its arrival. hint: the caller's own guess of the output tokens."""

    model: str
    request_class: str
    prompt_tokens: int
    max_tokens: int
    hint: int | None = None

    @property
    def keys(self) -> tuple[str, str]:
        """The narrow and the wide group it belongs to."""
        wide = f"{self.model}|{self.request_class}"
        return f"{wide}|{self.prompt_tokens.bit_length()}|{self.max_tokens.bit_length()}", wide


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """Output tokens, those already emitted included. source: `hint`, `history` or `prior`."""

    expected_tokens: int
    likely_tokens: int
    source: str
    finished: int


@dataclass
class Lengths:
    """A histogram over geometric bins whose older entries fade."""

    weights: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    means: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    finished: int = 0

    def learn(self, tokens: int) -> None:
        self.weights = [weight * (1 - 1 / _MEMORY) for weight in self.weights]
        bin_ = bisect.bisect_right(_EDGES, tokens)
        self.weights[bin_] += 1.0
        self.means[bin_] += (tokens - self.means[bin_]) / self.weights[bin_]
        self.finished += 1

    def beyond(self, emitted: int) -> list[tuple[float, float]]:
        """(tokens, weight) of the bins whose answers are longer than `emitted`, shortest first."""
        return [(mean, weight) for mean, weight in zip(self.means, self.weights, strict=True) if weight > 0 and mean > emitted]


@dataclass
class LengthPredictor:
    """margin_tokens: added to what is expected, since too short a guess costs more than too long a one (the paper, section 5)."""

    margin_tokens: int = 20
    likely_quantile: float = 0.9
    groups: dict[str, Lengths] = field(default_factory=dict)

    def predict(self, query: LengthQuery, emitted: int = 0) -> LengthForecast:
        """What to expect of a request that has emitted this much and goes on; never above its max_tokens."""
        for key in query.keys:
            group = self.groups.get(key)
            if group is not None and group.finished >= LEAST_FINISHED and (found := group.beyond(emitted)):
                source, points, finished = "history", found, group.finished
                break
        else:
            source, points, finished = "prior", _prior_beyond(emitted), 0
        if query.hint is not None and query.hint > emitted:
            source, expected = "hint", float(query.hint)
            likely = max(expected, _quantile(points, self.likely_quantile)) if finished else expected
        else:
            expected, likely = _mean(points, emitted), _quantile(points, self.likely_quantile) if points else 2.0 * emitted
        least = emitted + 1
        return LengthForecast(
            expected_tokens=max(1, min(query.max_tokens, max(least, round(expected) + self.margin_tokens))),
            likely_tokens=max(1, min(query.max_tokens, max(least, round(likely) + self.margin_tokens))),
            source=source,
            finished=finished,
        )

    def learn(self, query: LengthQuery, output_tokens: int) -> None:
        """From a request that has finished by itself or at its max_tokens, not from one that was aborted."""
        if output_tokens < 1:
            return
        for key in query.keys:
            group = self.groups.pop(key, None) or Lengths()
            group.learn(output_tokens)
            self.groups[key] = group  # the last one learnt from is the last to go
        while len(self.groups) > MOST_GROUPS:
            del self.groups[next(iter(self.groups))]


def _prior_beyond(emitted: int) -> list[tuple[float, float]]:
    edges = [0.0, *((PRIOR[n][0] + PRIOR[n + 1][0]) / 2 for n in range(len(PRIOR) - 1)), 1.0]
    points = [(float(tokens), edges[n + 1] - edges[n]) for n, (_, tokens) in enumerate(PRIOR)]
    return [(tokens, weight) for tokens, weight in points if tokens > emitted]


def _mean(points: list[tuple[float, float]], emitted: int) -> float:
    """Beyond all that was ever seen: as much again by half."""
    total = sum(weight for _, weight in points)
    return sum(tokens * weight for tokens, weight in points) / total if total else 1.5 * emitted


def _quantile(points: list[tuple[float, float]], quantile: float) -> float:
    reached, wanted = 0.0, quantile * sum(weight for _, weight in points)
    for tokens, weight in points:
        reached += weight
        if reached >= wanted:
            return tokens
    return points[-1][0]


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    weights: list[float]
    means: list[float]
    finished: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    groups: dict[str, _Group]


def save(path: Path, predictor: LengthPredictor) -> None:
    """Writes what was learnt in one move: a reader finds the old file or the new one."""
    groups = {key: _Group(group.weights, group.means, group.finished) for key, group in predictor.groups.items()}
    write_in_one_move(path, msgspec.json.encode(_File(FORMAT_VERSION, groups)))


def load(path: Path) -> LengthPredictor:
    """Raises ConfigError, naming the file, if it cannot be read or does not hold what `save` writes."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not a history of output lengths: {error}") from error
    if content.format_version != FORMAT_VERSION:
        raise ConfigError(f"{path}: format_version is {content.format_version}, this version of DynaServe reads {FORMAT_VERSION}")
    predictor = LengthPredictor()
    for key, group in content.groups.items():
        if not (len(group.weights) == len(group.means) == _NUM_BINS) or min(*group.weights, *group.means, group.finished) < 0:
            raise ConfigError(f"{path}: the group {key!r} needs {_NUM_BINS} weights and means, none of them negative")
        predictor.groups[key] = Lengths(group.weights, group.means, group.finished)
    return predictor
