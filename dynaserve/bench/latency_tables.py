"""Where the simulator's step latencies come from: a profile, a grid of measured GPU steps, or six coefficients."""

from __future__ import annotations

import csv
import math
import random
from pathlib import Path

from dynaserve.errors import ConfigError
from dynaserve.step_latency import BatchShape, ProfileTable, Roofline, StepSample, prefill_pairs
from dynaserve.taught_table import taught
from workloads.trace import READ_ERRORS, open_text

_MOST_DIGITS = 9
"""Of a count: the product of two still fits into 64 bits."""
_COLUMNS = ("model", "system", "tp", "prefill_new", "prefill_cached", "decode_n", "decode_ctx", "ms")


def from_grid(path: Path, model: str, system: str, overhead_ms: float, cost_scale: float) -> ProfileTable:
    """A table that has learnt the steps of one model on one GPU.

    path: CSV, plain or `.gz`, with the columns `model,system,tp,prefill_new,prefill_cached,decode_n,decode_ctx,ms`: a prefill of so
    many tokens after so many cached ones beside so many decodes of that context each. overhead_ms, cost_scale: a step takes
    ms * cost_scale + overhead_ms, since such grids are sums of kernels without the host. Raises ConfigError.
    """
    steps = [StepSample(sample.shape, sample.measured_ms * cost_scale + overhead_ms) for sample in samples(path, model, system)]
    try:
        return taught(steps, random.Random(0))
    except ValueError as error:
        raise ConfigError(f"{path}: the steps of {model} on {system} cannot be learnt: {error}") from error


def from_coefficients(text: str) -> ProfileTable:
    """`OVERHEAD,TOKEN,KNEE,PAIR,DECODE,CONTEXT`: milliseconds, but for the knee's tokens (`cost_model.h`). Raises ConfigError."""
    try:
        overhead, token, knee, pair, decode, context = map(float, text.split(","))
        roofline = Roofline(overhead_ms=overhead, token_ms=token, knee_tokens=knee, pair_ms=pair, decode_ms=decode, context_ms=context)
        return ProfileTable(roofline)
    except ValueError as error:
        raise ConfigError(f"--roofline {text!r} is not OVERHEAD,TOKEN,KNEE,PAIR,DECODE,CONTEXT: {error}") from error


def samples(path: Path, model: str, system: str) -> list[StepSample]:
    """The steps of a grid as they were measured, at least one, without those that have no token. Raises ConfigError."""
    table = _rows(path)
    chosen = [(where, row) for where, row in table if (row["model"], row["system"]) == (model, system)]
    if not chosen:
        known = sorted({f"{row['model']} on {row['system']}" for _, row in table})
        raise ConfigError(f"{path}: has no {model} on {system}; there is {', '.join(known) or 'nothing'}")
    if len(degrees := sorted({row["tp"] for _, row in chosen})) > 1:
        raise ConfigError(f"{path}: {model} on {system} has steps of several tp: {', '.join(degrees)}")
    steps = [sample for where, row in chosen if (sample := _sample(where, row)).shape.tokens]
    if not steps:
        raise ConfigError(f"{path}: no step of {model} on {system} has a token")
    return steps


def _rows(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Each with its file and line."""
    try:
        with open_text(path) as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or ()
            if missing := [column for column in _COLUMNS if column not in columns]:
                raise ConfigError(f"{path}: no column {', '.join(missing)}")
            table = [(f"{path}: line {rows.line_num}", row) for row in rows]
    except READ_ERRORS as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    for where, row in table:
        if None in row or None in row.values():
            raise ConfigError(f"{where}: not {len(columns)} values, one for each column")
    return table


def _sample(where: str, row: dict[str, str]) -> StepSample:
    new, cached, number, context = (_tokens(where, row, name) for name in ("prefill_new", "prefill_cached", "decode_n", "decode_ctx"))
    pairs = prefill_pairs(new, cached)
    shape = BatchShape(prefill_tokens=new, prefill_pairs=pairs, decodes=number, decode_context_tokens=number * context)
    try:
        ms = float(row["ms"])
    except ValueError:
        ms = math.nan
    if not 0 < ms < math.inf:
        raise ConfigError(f"{where}: ms: {row['ms']!r} is not a number above 0")
    return StepSample(shape, ms)


def _tokens(where: str, row: dict[str, str], column: str) -> int:
    text = row[column]
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise ConfigError(f"{where}: {column}: {text!r} is not a whole number of at most {_MOST_DIGITS} digits")
    return int(text)
