"""How many tokens a request will answer: a distribution, learnt from the requests that have finished.

Kept per model, class, and powers of two of prompt length and max_tokens; where too few have finished, per model and class; else a
prior. Conditioned on what has been emitted: an answer of 500 tokens that goes on is not one of 100. Pure but for `save`
and `load`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import neg
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
        """The narrow and the wide group it belongs to, whatever callers name models and classes."""
        wide = f"{_escaped(self.model)}|{_escaped(self.request_class)}"
        return f"{wide}|{self.prompt_tokens.bit_length()}|{self.max_tokens.bit_length()}", wide


def _escaped(name: str) -> str:
    return name.replace("%", "%25").replace("|", "%7C")


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """Output tokens, those already emitted included. source: `hint`, `history` or `prior`."""

    expected_tokens: int
    likely_tokens: int
    source: str
    finished: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """tokens: lengths of answers, rising. weights, moments: the sums of weights, and of tokens x weight, from each of them on."""

    tokens: list[float]
    weights: list[float]
    moments: list[float]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Distribution:
        """points: (tokens, weight), shortest first."""
        weights = accumulate((weight for _, weight in reversed(points)), initial=0.0)
        moments = accumulate((tokens * weight for tokens, weight in reversed(points)), initial=0.0)
        return cls([tokens for tokens, _ in points], list(weights)[::-1], list(moments)[::-1])

    def goes_beyond(self, emitted: int) -> bool:
        return self.tokens[-1] > emitted

    def mean_beyond(self, emitted: int) -> float:
        """Of the answers that are longer; of one that is longer than all that were ever seen: as much again by half."""
        first = bisect.bisect_right(self.tokens, emitted)
        return self.moments[first] / self.weights[first] if first < len(self.tokens) else 1.5 * emitted

    def quantile_beyond(self, emitted: int, quantile: float) -> float:
        """Of the answers that are longer; of one that is longer than all that were ever seen: as much again."""
        first = bisect.bisect_right(self.tokens, emitted)
        if first == len(self.tokens):
            return 2.0 * emitted
        longer = (1.0 - quantile) * self.weights[first]
        return self.tokens[bisect.bisect_left(self.weights, -longer, lo=first + 1, key=neg) - 1]


@dataclass
class Lengths:
    """A histogram over geometric bins whose older entries fade."""

    weights: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    means: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    finished: int = 0
    _distribution: Distribution | None = None
    """Of all that was learnt: requests that run are asked about far more often than others finish."""

    def learn(self, tokens: int) -> None:
        self.weights = [weight * (1 - 1 / _MEMORY) for weight in self.weights]
        bin_ = bisect.bisect_right(_EDGES, tokens)
        self.weights[bin_] += 1.0
        self.means[bin_] += (tokens - self.means[bin_]) / self.weights[bin_]
        self.finished += 1
        self._distribution = None

    @property
    def distribution(self) -> Distribution:
        if self._distribution is None:
            points = zip(self.means, self.weights, strict=True)
            self._distribution = Distribution.of([(mean, weight) for mean, weight in points if weight > 0])
        return self._distribution


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
            if group is not None and group.finished >= LEAST_FINISHED and group.distribution.goes_beyond(emitted):
                source, lengths, finished = "history", group.distribution, group.finished
                break
        else:
            source, lengths, finished = "prior", _PRIOR, 0
        expected, likely = lengths.mean_beyond(emitted), lengths.quantile_beyond(emitted, self.likely_quantile)
        if query.hint is not None and query.hint > emitted:
            source, expected = "hint", float(query.hint)
            likely = max(expected, likely) if finished else expected
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


def _distribution_of(quantiles: Sequence[tuple[float, int]]) -> Distribution:
    """Each length stands for the answers that are nearer to its quantile than to another."""
    edges = [0.0, *((low + high) / 2 for (low, _), (high, _) in pairwise(quantiles)), 1.0]
    return Distribution.of([(float(tokens), edges[n + 1] - edges[n]) for n, (_, tokens) in enumerate(quantiles)])


_PRIOR = _distribution_of(PRIOR)


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    weights: list[float]
    means: list[float]
    finished: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    groups: dict[str, _Group]


def save(path: Path, predictor: LengthPredictor) -> None:
    """Writes what was learnt in one move: a reader finds the old file or the new one."""
    known = list(predictor.groups.items())  # at once: others may learn meanwhile, in another thread
    groups = {key: _Group(group.weights, group.means, group.finished) for key, group in known}
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
        if not _is_histogram(group):
            raise ConfigError(f"{path}: the group {key!r} needs {_NUM_BINS} weights and means, none of them negative, the means rising")
        predictor.groups[key] = Lengths(group.weights, group.means, group.finished)
    return predictor


def _is_histogram(group: _Group) -> bool:
    if not (len(group.weights) == len(group.means) == _NUM_BINS) or min(*group.weights, *group.means, group.finished) < 0:
        return False
    means = [mean for mean, weight in zip(group.means, group.weights, strict=True) if weight > 0]
    return bool(means) == bool(group.finished) and means == sorted(means)
