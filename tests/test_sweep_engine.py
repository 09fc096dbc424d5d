"""The steps of `dynaserve profile` on vLLM's real scheduler, on a virtual machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from dynaserve.messages import MeasuredStep
from dynaserve.profiling.command import REPETITIONS, SPARE_TOKENS
from dynaserve.profiling.sweep import Point
from tests.virtual_engine import Engine
from vllm_plugin.sweep_engine import Steps, obedient


class VirtualCore:
    """The virtual machine as vLLM's `EngineCore` is seen by a sweep."""

    request_block_hasher = None

    def __init__(self, folder: Path, step_tokens: int, **how: Any) -> None:
        engine = Engine(folder, max_num_batched_tokens=step_tokens, enable_prefix_caching=False, **how)
        self.scheduler = obedient(engine.scheduler)
        self.add_request, self.step_fn = engine.scheduler.add_request, engine.step


def steps(folder: Path, step_tokens: int = 2048, **how: Any) -> Steps:
    return Steps(VirtualCore(folder, step_tokens, **how), step_tokens)


def shape(step: MeasuredStep) -> tuple[int, int]:
    return step.prefill_tokens, step.decodes


def test_each_step_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    sweep = steps(tmp_path)
    for point in (Point(0, 0, 2048), Point(100, 8, 0), Point(100, 8, 64), Point(100, 3, 500), Point(900, 3, 0), Point(900, 1, 7)):
        for step in sweep.measure(point, REPETITIONS):
            assert shape(step) == (point.prefill_tokens, point.decodes)
            # What its decodes produce is part of their contexts.
            produced = step.decode_context_tokens - point.decodes * point.context_tokens
            assert 0 <= produced <= point.decodes * SPARE_TOKENS


def test_a_group_of_more_steps_than_its_decodes_last_is_filled_again(tmp_path: Path) -> None:
    sweep, points = steps(tmp_path), SPARE_TOKENS // REPETITIONS + 40
    measured = [step for _ in range(points) for step in sweep.measure(Point(100, 4, 0), REPETITIONS)]
    assert {shape(step) for step in measured} == {(0, 4)}
    assert max(step.decode_context_tokens for step in measured) <= 4 * (100 + SPARE_TOKENS + 2)


def test_the_first_decodes_last_while_the_others_are_filled(tmp_path: Path) -> None:
    sweep = steps(tmp_path, step_tokens=64, blocks=4000)
    assert {shape(step) for step in sweep.measure(Point(300, 60, 4), REPETITIONS)} == {(4, 60)}
