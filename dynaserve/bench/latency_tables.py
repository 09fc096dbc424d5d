"""Where the simulator's step latencies come from: a profile, a grid of measured GPU steps, or six coefficients."""

from __future__ import annotations

import csv
import gzip
import zlib
from pathlib import Path

from dynaserve.errors import ConfigError
from dynaserve.step_latency import BatchShape, ProfileTable, Roofline, StepSample, fit_roofline, prefill_pairs

_ROUNDS = 3
_COLUMNS = ("model", "system", "tp", "prefill_new", "prefill_cached", "decode_n", "decode_ctx", "ms")


def from_grid(path: Path, model: str, system: str, overhead_ms: float, cost_scale: float) -> ProfileTable:
    """A table that has learnt the steps of one model on one GPU.

    path: CSV, plain or `.gz`, with the columns `model,system,tp,prefill_new,prefill_cached,decode_n,decode_ctx,ms`: a prefill of so
    many tokens after so many cached ones beside so many decodes of that context each. overhead_ms, cost_scale: a step takes
    ms * cost_scale + overhead_ms, since such grids are sums of kernels without the host. Raises ConfigError.
    """
    steps = [StepSample(sample.shape, sample.measured_ms * cost_scale + overhead_ms) for sample in samples(path, model, system)]
    table = ProfileTable(fit_roofline(steps))
    for _ in range(_ROUNDS):
        for sample in steps:
            table.observe(sample.shape, sample.measured_ms)
    return table


def from_coefficients(text: str) -> ProfileTable:
    """`OVERHEAD,TOKEN,KNEE,PAIR,DECODE,CONTEXT`: milliseconds, but for the knee's tokens (`cost_model.h`). Raises ConfigError."""
    try:
        overhead, token, knee, pair, decode, context = map(float, text.split(","))
        roofline = Roofline(overhead_ms=overhead, token_ms=token, knee_tokens=knee, pair_ms=pair, decode_ms=decode, context_ms=context)
        return ProfileTable(roofline)
    except ValueError as error:
        raise ConfigError(f"--roofline {text!r} is not OVERHEAD,TOKEN,KNEE,PAIR,DECODE,CONTEXT: {error}") from error


def samples(path: Path, model: str, system: str) -> list[StepSample]:
    """The steps of a grid as they were measured, but those without a token. Raises ConfigError."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            rows = csv.DictReader(file)
            if missing := [column for column in _COLUMNS if column not in (rows.fieldnames or ())]:
                raise ConfigError(f"{path}: no column {', '.join(missing)}")
            table = list(rows)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    chosen = [row for row in table if (row["model"], row["system"]) == (model, system)]
    if not chosen:
        known = sorted({f"{row['model']} on {row['system']}" for row in table})
        raise ConfigError(f"{path}: has no {model} on {system}; there is {', '.join(known)}")
    if len(degrees := sorted({row["tp"] for row in chosen})) > 1:
        raise ConfigError(f"{path}: {model} on {system} has steps of several tp: {', '.join(degrees)}")
    try:
        return [sample for row in chosen if (sample := _sample(row)).shape.tokens]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a step of {model} on {system} is not made of numbers: {error}") from error


def _sample(row: dict[str, str]) -> StepSample:
    new, cached, number, context = (int(row[name]) for name in ("prefill_new", "prefill_cached", "decode_n", "decode_ctx"))
    pairs = prefill_pairs(new, cached)
    shape = BatchShape(prefill_tokens=new, prefill_pairs=pairs, decodes=number, decode_context_tokens=number * context)
    return StepSample(shape, float(row["ms"]))
