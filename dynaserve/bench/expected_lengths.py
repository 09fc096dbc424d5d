"""What a simulated policy knows of the lengths of answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dynaserve.errors import ConfigError
from workloads.trace import MOST_TOKENS


def expected(how: str, output_tokens: Sequence[int], rng: np.random.Generator) -> list[int]:
    """By request, at least 1 token and at most MOST_TOKENS. Raises ConfigError as `check`.

    how: `exact`; `mean`, of these answers; `fixed:N`, as in the paper's Table 4; `lognormal:SIGMA`, exact times a factor whose
    logarithm has that standard deviation, so that its median is 1.
    """
    kind, value = _parse(how)
    if kind == "exact":
        return list(output_tokens)
    if kind == "lognormal":
        factors = np.exp(value * rng.standard_normal(len(output_tokens)))
        return [_length(tokens * factor) for tokens, factor in zip(output_tokens, factors.tolist(), strict=True)]
    constant = value if kind == "fixed" else float(np.mean(output_tokens))
    return [_length(constant)] * len(output_tokens)


def _length(tokens: float) -> int:
    return max(1, round(min(tokens, MOST_TOKENS)))


def check(how: str) -> None:
    """Raises ConfigError, naming the text and what is accepted."""
    _parse(how)


def _parse(how: str) -> tuple[str, float]:
    kind, colon, text = how.partition(":")
    if kind in ("exact", "mean") and not colon:
        return kind, 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if (kind == "fixed" and 1 <= value <= MOST_TOKENS and value.is_integer()) or (kind == "lognormal" and 0 <= value <= 10):
        return kind, value
    fixed, lognormal = f"fixed:N with N from 1 to {MOST_TOKENS}", "lognormal:SIGMA with SIGMA in [0, 10]"
    raise ConfigError(f"--expect is {how!r}; accepted are exact, mean, {fixed}, {lognormal}")
