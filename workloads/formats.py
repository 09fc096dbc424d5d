"""Readers of public traces in the form in which their authors publish them.

| format | source | what is read |
|---|---|---|
| azure | Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv (2023) | TIMESTAMP, ContextTokens, GeneratedTokens |
| burstgpt | HPMLL/BurstGPT, BurstGPT_*.csv | Timestamp (s), Request tokens, Response tokens; Model becomes the label |
| mooncake-jsonl | kvcache-ai/Mooncake, *_trace.jsonl | timestamp (ms), input_length, output_length, hash_ids |
| vidur | microsoft/vidur, data/processed_traces (arXiv lengths) | num_prefill_tokens, num_decode_tokens; arrived_at (s) if there |
| sharegpt | ShareGPT_V3_unfiltered_cleaned_split.json | the first question and answer of each conversation, counted by a tokenizer |

Times become seconds since the first request that is kept. Rows without output (BurstGPT: the request failed) and conversations
that do not begin with a question and its answer are left out.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from workloads.trace import HASH_BLOCK_TOKENS, MOST_TOKENS, READ_ERRORS, TraceRequest, WorkloadError, open_text

CountTokens = Callable[[str], int]
_QUESTION, _ANSWER = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


def read(kind: str, path: Path, count_tokens: CountTokens | None = None) -> list[TraceRequest]:
    """The requests of a file of one of FORMATS, plain or gzip, by time where there are times.

    count_tokens: needed for `sharegpt`, which has text only. Raises WorkloadError, naming file, line and value.
    """
    if kind == "sharegpt" and count_tokens is None:
        raise WorkloadError(f"{path}: ShareGPT has text only: name a tokenizer that counts its tokens with --tokenizer")
    try:
        rows = [request for request in FORMATS[kind](path, count_tokens) if request.output_tokens > 0]
    except READ_ERRORS as error:
        raise WorkloadError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not rows:
        raise WorkloadError(f"{path}: holds no request")
    if rows[0].arrived_at_s is None:
        return rows
    rows.sort(key=lambda row: row.arrived_at_s or 0.0)
    start_s = rows[0].arrived_at_s or 0.0
    return [replace(row, arrived_at_s=(row.arrived_at_s or 0.0) - start_s) for row in rows]


def tokenizer(path: Path) -> CountTokens:
    """Counts as the `tokenizer.json` of that path does, without special tokens. Raises WorkloadError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise WorkloadError(f"{path}: counting tokens needs the package `tokenizers`, which is not installed") from error
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as error:  # the only type that tokenizers raises
        raise WorkloadError(f"{path}: is no tokenizer.json: {error}") from error
    # For batches of a model's training; here they would change lengths.
    loaded.no_truncation()
    loaded.no_padding()
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def _azure(path: Path, _: CountTokens | None) -> Iterator[TraceRequest]:
    for where, row in _table(path, "TIMESTAMP", "ContextTokens", "GeneratedTokens"):
        try:
            at_s = datetime.fromisoformat(f"{row['TIMESTAMP'].removesuffix('Z')}+00:00").timestamp()
        except ValueError as error:
            raise WorkloadError(f"{where}: TIMESTAMP: {row['TIMESTAMP']!r} is not a date and time") from error
        yield TraceRequest(at_s, _tokens(where, row, "ContextTokens"), _tokens(where, row, "GeneratedTokens", 0))


def _burstgpt(path: Path, _: CountTokens | None) -> Iterator[TraceRequest]:
    for where, row in _table(path, "Timestamp", "Request tokens", "Response tokens"):
        output_tokens = _tokens(where, row, "Response tokens", 0)
        # A request that failed, and is left out, may not have been counted at all.
        prompt_tokens = _tokens(where, row, "Request tokens", 1 if output_tokens else 0)
        yield TraceRequest(_number(where, row, "Timestamp"), prompt_tokens, output_tokens, label=row.get("Model", ""))


def _vidur(path: Path, _: CountTokens | None) -> Iterator[TraceRequest]:
    for where, row in _table(path, "num_prefill_tokens", "num_decode_tokens"):
        at_s = _number(where, row, "arrived_at") if "arrived_at" in row else None
        yield TraceRequest(at_s, _tokens(where, row, "num_prefill_tokens"), _tokens(where, row, "num_decode_tokens", 0))


def _mooncake(path: Path, _: CountTokens | None) -> Iterator[TraceRequest]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}: line {number}"
            row = _object(where, line)
            hashes = row.get("hash_ids", [])
            if not isinstance(hashes, list) or any(type(item) is not int or item < 0 for item in hashes):
                raise WorkloadError(f"{where}: hash_ids: {str(hashes)[:80]} is not a list of whole numbers of at least 0")
            prompt, output = _tokens(where, row, "input_length"), _tokens(where, row, "output_length", 0)
            if len(hashes) > (blocks := math.ceil(prompt / HASH_BLOCK_TOKENS)):
                raise WorkloadError(f"{where}: hash_ids: {len(hashes)} ids, but {prompt} prompt tokens are {blocks} blocks")
            yield TraceRequest(_number(where, row, "timestamp") / 1e3, prompt, output, prefix_hashes=tuple(hashes))


def _sharegpt(path: Path, count_tokens: CountTokens | None) -> Iterator[TraceRequest]:
    assert count_tokens is not None
    with open_text(path) as file:
        try:
            conversations = json.load(file)
        except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
            raise WorkloadError(f"{path}: is not JSON: {error}") from error
    if not isinstance(conversations, list):
        raise WorkloadError(f"{path}: is not a JSON list of conversations")
    for index, conversation in enumerate(conversations):
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(turns, list):
            raise WorkloadError(f"{path}: conversation {index}: has no list of conversations")
        for number, turn in enumerate(turns[:2]):
            if not isinstance(turn, dict):
                raise WorkloadError(f"{path}: conversation {index}: turn {number}: {str(turn)[:80]!r} is not a JSON object")
        if len(turns) >= 2 and turns[0].get("from") in _QUESTION and turns[1].get("from") in _ANSWER:
            prompt_tokens, output_tokens = (count_tokens(_sendable(str(turn.get("value", "")))) for turn in turns[:2])
            if prompt_tokens:
                yield TraceRequest(None, prompt_tokens, output_tokens)


def _sendable(text: str) -> str:
    """JSON may hold halves of UTF-16 pairs, which no request can."""
    return text.encode(errors="replace").decode()


FORMATS: dict[str, Callable[[Path, CountTokens | None], Iterator[TraceRequest]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake-jsonl": _mooncake,
    "vidur": _vidur,
    "sharegpt": _sharegpt,
}


def _table(path: Path, *columns: str) -> Iterator[tuple[str, dict[str, str]]]:
    with open_text(path) as file:
        rows = csv.DictReader(file)
        header = rows.fieldnames or []
        if missing := [column for column in columns if column not in header]:
            raise WorkloadError(f"{path}: line 1: no column {', '.join(missing)} in {','.join(header)!r}")
        for row in rows:
            where = f"{path}: line {rows.line_num}"
            if None in row or None in row.values():
                raise WorkloadError(f"{where}: not {len(header)} values, one for each column")
            yield where, row


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
        raise WorkloadError(f"{where}: is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise WorkloadError(f"{where}: is not a JSON object")
    return row


def _number(where: str, row: Mapping[str, Any], column: str) -> float:
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError, OverflowError):  # the last one of an integer in JSON
        value = -1.0
    if not 0 <= value < float("inf"):
        raise WorkloadError(f"{where}: {column}: {row.get(column)!r} is not a number of at least 0")
    return value


def _tokens(where: str, row: Mapping[str, Any], column: str, least: int = 1) -> int:
    value = _number(where, row, column)
    if value != int(value) or not least <= value <= MOST_TOKENS:
        raise WorkloadError(f"{where}: {column}: {row[column]!r} is not a whole number from {least} to {MOST_TOKENS}")
    return int(value)
