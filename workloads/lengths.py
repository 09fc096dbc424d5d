"""Distributions of prompt and output lengths: fitted to requests, or by mean and spread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workloads.trace import TraceRequest, WorkloadError


@dataclass(frozen=True)
class LogNormal:
    """Whole token counts whose logarithm is normal, at least `least` and at most `most` (the nearest bound is taken)."""

    mu: float
    sigma: float
    least: int = 1
    most: int = 1 << 20

    @classmethod
    def of_mean(cls, mean_tokens: float, cv: float, least: int = 1, most: int = 1 << 20) -> LogNormal:
        """cv: standard deviation over mean, both before the bounds."""
        sigma_squared = math.log1p(cv**2)
        return cls(math.log(mean_tokens) - sigma_squared / 2, math.sqrt(sigma_squared), least, most)

    def tokens(self, normal: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The token counts that belong to values of a standard normal variable."""
        # Bounded first: beyond 2^63 the cast has no value.
        bounded = np.clip(np.rint(np.exp(self.mu + self.sigma * normal)), self.least, self.most)
        whole: np.ndarray[tuple[int], np.dtype[np.int64]] = bounded.astype(np.int64)
        return whole


@dataclass(frozen=True)
class JointLengths:
    """Prompt and output of one request; correlation: of their logarithms, in [-1, 1]."""

    prompt: LogNormal
    output: LogNormal
    correlation: float = 0.0

    def draw(self, count: int, rng: np.random.Generator) -> list[TraceRequest]:
        """That many requests without arrival times."""
        first, second = rng.standard_normal((2, count))
        mixed = self.correlation * first + math.sqrt(1 - self.correlation**2) * second
        pairs = zip(self.prompt.tokens(first).tolist(), self.output.tokens(mixed).tolist(), strict=True)
        return [TraceRequest(None, prompt_tokens, output_tokens) for prompt_tokens, output_tokens in pairs]


def fit(requests: Sequence[TraceRequest]) -> JointLengths:
    """The maximum-likelihood joint log-normal, bounded by the shortest and longest that were seen. Raises WorkloadError below 2."""
    if len(requests) < 2:
        raise WorkloadError(f"a length distribution is fitted to at least 2 requests, not to {len(requests)}")
    prompts, outputs = (
        [request.prompt_tokens for request in requests],
        [request.output_tokens for request in requests],
    )
    logs = np.log([prompts, outputs])
    sigmas = logs.std(axis=1)
    correlation = float(np.corrcoef(logs)[0, 1]) if sigmas.min() > 0 else 0.0
    means = logs.mean(axis=1)
    return JointLengths(
        LogNormal(float(means[0]), float(sigmas[0]), min(prompts), max(prompts)),
        LogNormal(float(means[1]), float(sigmas[1]), min(outputs), max(outputs)),
        max(-1.0, min(1.0, correlation)),
    )


def drawn(requests: Sequence[TraceRequest], count: int, rng: np.random.Generator) -> list[TraceRequest]:
    """That many of the requests, each at random (with repetition), in no order of theirs."""
    return [requests[index] for index in rng.integers(0, len(requests), count)]
