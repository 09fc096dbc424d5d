"""How well steps were predicted, from an instance's step log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.disturbance import Disturbance
from dynaserve.live_profile import LiveProfile
from dynaserve.messages import MeasuredStep
from dynaserve.step_latency import BatchShape, ProfileTable
from dynaserve.step_report import StepReport
from dynaserve.taught_table import settled

WINDOW_STEPS = 20
RECOVERED = 0.15


@dataclass(frozen=True)
class Errors:
    """Mean absolute percentage errors, as shares. live: each step as predicted before it ran. frozen: the second half of the steps
    by a profile that learnt from the first half only."""

    steps: int
    live: float
    frozen: float


def errors(steps: Sequence[StepReport]) -> Errors:
    predicted = [step for step in steps if step.predicted_ms is not None]
    return Errors(len(predicted), mean(map(live_error, predicted)), _frozen_error([step.measured for step in steps]))


def live_error(step: StepReport) -> float:
    assert step.predicted_ms is not None
    return abs(step.predicted_ms - step.measured.measured_ms) / step.measured.measured_ms


def slowdown(quiet: Sequence[StepReport], others: Sequence[StepReport]) -> float:
    """How much longer the others took than steps of their kind among the quiet ones: the median."""
    table = _learnt([step.measured for step in quiet])
    return median(step.measured.measured_ms / table.step_ms(shape_of(step.measured)) for step in others)


def _frozen_error(steps: Sequence[MeasuredStep]) -> float:
    half = len(steps) // 2
    table = _learnt(steps[:half])
    return mean(abs(table.step_ms(shape_of(step)) - step.measured_ms) / step.measured_ms for step in steps[half:])


def _learnt(steps: Sequence[MeasuredStep]) -> ProfileTable:
    profile = LiveProfile()
    for step in steps:
        profile.observe(shape_of(step), step.measured_ms)
    if profile.table is None:
        raise ValueError(f"{len(steps)} steps are too few to learn from")
    return settled(profile.table)


def shape_of(step: MeasuredStep) -> BatchShape:
    return BatchShape(
        prefill_tokens=step.prefill_tokens,
        prefill_pairs=step.prefill_pairs,
        decodes=step.decodes,
        decode_context_tokens=step.decode_context_tokens,
    )


def steps_to_recover(steps: Sequence[StepReport], changed_s: float) -> int | None:
    """How many steps after the change until the mean error of `WINDOW_STEPS` in a row is below `RECOVERED`; None: never."""
    after = [live_error(step) for step in steps if step.at_s > changed_s and step.predicted_ms is not None]
    for end in range(WINDOW_STEPS, len(after) + 1):
        if mean(after[end - WINDOW_STEPS : end]) < RECOVERED:
            return end
    return None


def report(steps: Sequence[StepReport], measured_s: float, disturbed: Disturbance) -> str:
    """In words. measured_s: when the warm-up was over."""
    quiet = [step for step in steps if measured_s <= step.at_s < disturbed.began_s]
    found = errors(quiet)
    during = [step for step in steps if disturbed.began_s < step.at_s < disturbed.ended_s]
    lines = [
        f"prediction: mean absolute error {found.live:.1%} over {found.steps} steps, each predicted before it ran;",
        f"  {found.frozen:.1%} on the second half of them by a profile that learnt from the first half only",
        f"  busy processes on the core got {disturbed.core_share:.0%} of it and made steps {slowdown(quiet, during):.2f}x as long",
    ]
    for what, changed_s in (("began", disturbed.began_s), ("ended", disturbed.ended_s)):
        recovered = steps_to_recover(steps, changed_s)
        until = "never" if recovered is None else f"{recovered} steps until {WINDOW_STEPS} in a row were within 15 % on average"
        lines.append(f"  after they {what}: {until}")
    return "\n".join(lines)
