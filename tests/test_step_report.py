"""The log of steps, where its disk is full."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dynaserve.errors import ConfigError
from dynaserve.messages import MeasuredStep
from dynaserve.step_report import StepLog, StepReport


def test_a_full_disk_ends_the_log_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog(Path("/dev/full"))
    step = StepReport(1.0, MeasuredStep(0, 0.0, 1, 100, 10.0), 10.0, None, 0, "none", late=False)
    with caplog.at_level(logging.WARNING, "vllm.dynaserve.batching"):
        for _ in range(3):
            log.add(step)
            log.flush()
        log.close()
    assert caplog.messages[0].startswith("the step log /dev/full ends: ")


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        StepLog(tmp_path / "missing" / "steps.csv")
