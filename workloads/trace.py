"""One request of a workload, and the reader of trace files.

A trace is a CSV file, plain or gzip (`.gz`), with a header line and the columns `arrived_at_s,prompt_tokens,output_tokens`.
Optional: `hash_ids` (ids of the prompt's leading 512-token blocks, separated by spaces), `class` or `client` (a label).
Other columns are ignored.
"""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

REQUIRED_COLUMNS = ("arrived_at_s", "prompt_tokens", "output_tokens")
LABEL_COLUMNS = ("class", "client")
MOST_TOKENS = 1 << 40
"""Of one length, far above any context: more is refused by the scheduler core, too (`kMaxTokens`), whose sums then fit into 64 bits."""
HASH_BLOCK_TOKENS = 512
"""What one id of the column `hash_ids` stands for: the block size of the Mooncake traces."""
LONGEST_ID = 40
"""Digits of one id: 64 bits have 20."""
READ_ERRORS = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error)
"""What reading a file raises if the file is not there, or not what its name says."""


class WorkloadError(ValueError):
    """A workload cannot be had as asked; the text is one sentence that names the values."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What is known of a request before it is sent.

    arrived_at_s: since the start of the trace; None where the source has no times. prefix_hashes: ids of the leading blocks of
    `prefix_block_tokens` tokens; two prompts share as many tokens as their leading ids are equal. label: its class, or "".
    """

    arrived_at_s: float | None
    prompt_tokens: int
    output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    prefix_block_tokens: int = HASH_BLOCK_TOKENS
    label: str = ""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def read(path: Path) -> list[TraceRequest]:
    """All requests of a trace file, in its order.

    Either all requests have arrival times, which never decrease, or none has. Raises WorkloadError, naming file, line,
    column and value.
    """
    try:
        with open_text(path) as file:
            requests = list(_requests(path, file))
    except READ_ERRORS as error:
        raise WorkloadError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not requests:
        raise WorkloadError(f"{path}: holds no request")
    return requests


def length_of(text: str) -> int | None:
    """In tokens, from 1 to MOST_TOKENS; None: the text says none. Digits are counted first, as `int` takes the square of their number."""
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    if not digits or len(digits) > len(str(MOST_TOKENS)) or int(digits) > MOST_TOKENS:
        return None
    return int(digits)


def open_text(path: Path) -> TextIO:
    """Plain or, by its name `.gz`, gzip."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _requests(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    rows = csv.reader(file)
    header = next(rows, [])
    if missing := [column for column in REQUIRED_COLUMNS if column not in header]:
        raise WorkloadError(f"{path}: line 1: no column {', '.join(missing)} in {','.join(header)!r}")
    first: TraceRequest | None = None
    before: TraceRequest | None = None
    for values in rows:
        where = f"{path}: line {rows.line_num}"
        if len(values) != len(header):
            raise WorkloadError(f"{where}: {len(values)} values for {len(header)} columns")
        request = _Row(where, dict(zip(header, values, strict=True))).request()
        first = first or request
        _check_order(where, first, before, request)
        before = request
        yield request


def _check_order(where: str, first: TraceRequest, before: TraceRequest | None, request: TraceRequest) -> None:
    if (first.arrived_at_s is None) != (request.arrived_at_s is None):
        there, here = first.arrived_at_s, request.arrived_at_s
        raise WorkloadError(f"{where}: arrived_at_s is {_shown(here)}, but {_shown(there)} in the first row: all rows have it, or none")
    if before is None or before.arrived_at_s is None or request.arrived_at_s is None:
        return
    if request.arrived_at_s < before.arrived_at_s:
        raise WorkloadError(f"{where}: arrived_at_s {request.arrived_at_s} is less than {before.arrived_at_s} in the row before")


def _shown(time_s: float | None) -> str:
    return "empty" if time_s is None else str(time_s)


@dataclass(frozen=True)
class _Row:
    where: str
    cells: dict[str, str]

    def request(self) -> TraceRequest:
        prompt_tokens = self._tokens("prompt_tokens")
        hashes = self._hashes()
        if len(hashes) > (blocks := math.ceil(prompt_tokens / HASH_BLOCK_TOKENS)):
            raise self._error("hash_ids", f"{len(hashes)} ids, but {prompt_tokens} prompt tokens are {blocks} blocks")
        label = next((self.cells[column] for column in LABEL_COLUMNS if column in self.cells), "")
        return TraceRequest(self._time(), prompt_tokens, self._tokens("output_tokens"), hashes, label=label)

    def _tokens(self, column: str) -> int:
        if (length := length_of(self.cells[column])) is None:
            raise self._error(column, f"{self.cells[column]!r} is not a whole number from 1 to {MOST_TOKENS}")
        return length

    def _time(self) -> float | None:
        text = self.cells["arrived_at_s"]
        if not text:
            return None
        try:
            time_s = float(text)
        except ValueError:
            time_s = math.nan
        if not 0 <= time_s < math.inf:
            raise self._error("arrived_at_s", f"{text!r} is not a number of seconds of at least 0")
        return time_s

    def _hashes(self) -> tuple[int, ...]:
        texts = self.cells.get("hash_ids", "").split()
        for text in texts:
            if not (text.isascii() and text.isdigit() and len(text) <= LONGEST_ID):
                raise self._error("hash_ids", f"{text[:LONGEST_ID]!r} is not a whole number from 0 on of at most {LONGEST_ID} digits")
        return tuple(map(int, texts))

    def _error(self, column: str, what: str) -> WorkloadError:
        return WorkloadError(f"{self.where}: {column}: {what}")
