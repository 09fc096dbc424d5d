"""What a simulated policy knows of the lengths of answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dynaserve.errors import ConfigError


def expected(how: str, output_tokens: Sequence[int], rng: np.random.Generator) -> list[int]:
    """By request, at least 1 token. Raises ConfigError as `check`.

    how: `exact`; `mean`, of these answers; `fixed:N`, as in the paper's Table 4; `lognormal:SIGMA`, exact times a factor whose
    logarithm has that standard deviation, so that its median is 1.
    """
    kind, value = _parse(how)
    if kind == "exact":
        return list(output_tokens)
    if kind == "lognormal":
        factors = np.exp(value * rng.standard_normal(len(output_tokens)))
        return [max(1, round(tokens * factor)) for tokens, factor in zip(output_tokens, factors.tolist(), strict=True)]
    constant = value if kind == "fixed" else float(np.mean(output_tokens))
    return [max(1, round(constant))] * len(output_tokens)


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
    if (kind == "fixed" and value >= 1 and value.is_integer()) or (kind == "lognormal" and 0 <= value <= 10):
        return kind, value
    raise ConfigError(f"--expect is {how!r}; accepted are exact, mean, fixed:N with N of at least 1, lognormal:SIGMA with SIGMA in [0, 10]")
