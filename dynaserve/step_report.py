"""What an instance tells about its steps: to Prometheus, to the front-end and to a log file."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from dynaserve.errors import ConfigError
from dynaserve.messages import MeasuredStep, PromptProgress
from dynaserve.token_deadlines import TokenCounts

logger = logging.getLogger("vllm.dynaserve.batching")

REPORT_INTERVAL_S = 0.25
UNPROFILED = "unprofiled"
"""The reason of a budget that was chosen before there was a profile."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """One step. at_s: its end, on the instance's monotonic clock. limit_ms: what it had to stay within; None: no decode ran.

    predicted_ms: before it ran; None: no profile yet. budget_tokens: of prefill, chosen for the `reason`.
    late: by prediction it did not stay within the limit.
    """

    at_s: float
    measured: MeasuredStep
    predicted_ms: float | None
    limit_ms: float | None
    budget_tokens: int
    reason: str
    late: bool


class BatchReport(msgspec.Struct, frozen=True):
    """Everything since the last report. Tokens: see `token_deadlines.TokenCounts`. prompts: those that have begun, as of now.
    step_share, admitting_share: as in `messages.Load`; None: no profile yet."""

    steps: list[StepReport]
    tokens: TokenCounts
    prompts: list[PromptProgress]
    step_share: float | None
    admitting_share: float | None


class StepReporter:
    """Collects, and says when there is something to send: at most each `REPORT_INTERVAL_S`, and always before a rest."""

    def __init__(self) -> None:
        self._steps: list[StepReport] = []
        self._taken_s = 0.0

    def add(self, step: StepReport) -> None:
        self._steps.append(step)

    def take(self, now_s: float, *, resting: bool) -> list[StepReport] | None:
        """None: not now. resting: no request is left, so that no step will follow soon."""
        if not self._steps or (now_s - self._taken_s < REPORT_INTERVAL_S and not resting):
            return None
        steps, self._steps, self._taken_s = self._steps, [], now_s
        return steps


_COLUMNS = (
    "at_s",
    "prefill_tokens",
    "prefill_pairs",
    "decodes",
    "decode_context_tokens",
    "measured_ms",
    "draft_tokens",
    "predicted_ms",
    "limit_ms",
    "budget_tokens",
    "reason",
    "late",
)


class StepLog:
    """One line of CSV for each step. Raises ConfigError if the file cannot be written; where its disk is full later, it ends."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
        self._ended = False
        self._writer = csv.writer(self._file)
        self._writer.writerow(_COLUMNS)

    def add(self, step: StepReport) -> None:
        if self._ended:
            return
        measured = [getattr(step.measured, name) for name in MeasuredStep.__struct_fields__]
        row = [f"{step.at_s:.6f}", *measured, step.predicted_ms, step.limit_ms, step.budget_tokens, step.reason, int(step.late)]
        with self._ending_where_it_fails():
            self._writer.writerow(row)

    def flush(self) -> None:
        if not self._ended:
            with self._ending_where_it_fails():
                self._file.flush()

    @contextmanager
    def _ending_where_it_fails(self) -> Iterator[None]:
        """An engine goes on without its log."""
        try:
            yield
        except OSError as error:
            self._ended = True
            logger.warning("the step log %s ends: %s", self._file.name, error)

    def close(self) -> None:
        with self._ending_where_it_fails():
            self._file.close()


def read_log(path: Path) -> Iterator[StepReport]:
    """Raises ConfigError, naming file and line, for what `StepLog` does not write."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        if tuple(rows.fieldnames or ()) != _COLUMNS:
            raise ConfigError(f"{path}: its columns are {rows.fieldnames}, those of a step log are {list(_COLUMNS)}")
        for row in rows:
            try:
                yield _parse(row)
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path}: line {rows.line_num}: {error}") from error


def _parse(row: dict[str, Any]) -> StepReport:
    measured = MeasuredStep(
        int(row["prefill_tokens"]),
        float(row["prefill_pairs"]),
        int(row["decodes"]),
        int(row["decode_context_tokens"]),
        float(row["measured_ms"]),
        int(row["draft_tokens"]),
    )
    return StepReport(
        at_s=float(row["at_s"]),
        measured=measured,
        predicted_ms=float(row["predicted_ms"]) if row["predicted_ms"] else None,
        limit_ms=float(row["limit_ms"]) if row["limit_ms"] else None,
        budget_tokens=int(row["budget_tokens"]),
        reason=row["reason"],
        late=row["late"] == "1",
    )
