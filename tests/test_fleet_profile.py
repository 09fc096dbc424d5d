"""What a front-end learns of its fleet's steps, and when it tells."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dynaserve.fleet_profile import LEAST_UNTOLD_MS, MOST_UNTOLD, FleetProfile
from dynaserve.live_profile import KNOWN_STEPS, LEAST_OF_A_KIND
from dynaserve.step_latency import BatchShape, ProfileTable, Roofline

MACHINE = Roofline(overhead_ms=12.0, token_ms=0.1, knee_tokens=16.0, pair_ms=1e-6, decode_ms=0.3, context_ms=5e-4)
DECODES = BatchShape(decodes=4, decode_context_tokens=1000)


def mixed(number: int) -> BatchShape:
    tokens = 50 * (number % 9)
    return BatchShape(prefill_tokens=tokens, prefill_pairs=tokens * 300.0, decodes=1 + number % 5, decode_context_tokens=200 * (number % 7))


def test_the_first_table_is_that_of_all_steps_so_far() -> None:
    profile = FleetProfile()
    told = [profile.observe(mixed(number), MACHINE.step_ms(mixed(number)), 50.0 * number) for number in range(KNOWN_STEPS)]
    assert told[:-1] == [None] * (KNOWN_STEPS - 1)
    table = told[-1]
    assert table is not None
    unseen = BatchShape(prefill_tokens=333, prefill_pairs=333 * 300.0, decodes=3, decode_context_tokens=700)
    assert table.step_ms(unseen) == pytest.approx(MACHINE.step_ms(unseen), rel=0.1)


def test_a_table_of_another_day_is_corrected() -> None:
    old = ProfileTable(MACHINE)
    profile = FleetProfile(old)
    told = [profile.observe(mixed(number), 1.5 * MACHINE.step_ms(mixed(number)), 50.0 * number) for number in range(4 * KNOWN_STEPS)]
    *_, table = [table for table in told if table is not None]
    assert table.step_ms(mixed(5)) == pytest.approx(1.5 * MACHINE.step_ms(mixed(5)), rel=0.1)


@pytest.mark.parametrize("shape", [DECODES, BatchShape(prefill_tokens=300, prefill_pairs=45_000.0)])
def test_nothing_is_told_from_one_kind_of_step(shape: BatchShape) -> None:
    profile = FleetProfile()
    assert [profile.observe(shape, MACHINE.step_ms(shape), 0.0) for _ in range(4 * KNOWN_STEPS)] == [None] * (4 * KNOWN_STEPS)
    other = DECODES if shape.prefill_tokens else BatchShape(prefill_tokens=300, prefill_pairs=45_000.0)
    told = [profile.observe(other, MACHINE.step_ms(other), 0.0) for _ in range(LEAST_OF_A_KIND)]
    assert [table is None for table in told] == [True] * (LEAST_OF_A_KIND - 1) + [False]


def test_decodes_that_speculate_are_steps_without_prefill() -> None:
    """Eight decodes with three tokens each of speculation, every second step beside a chunk of 500."""
    profile, told = FleetProfile(), []
    for number in range(2 * KNOWN_STEPS):
        shape = BatchShape(prefill_tokens=24 + 500 * (number % 2), prefill_pairs=24_000.0, decodes=8, decode_context_tokens=8000)
        told.append(profile.observe(shape, MACHINE.step_ms(shape), 10_000.0 * number, draft_tokens=24))
    assert any(table is not None for table in told)


def test_the_table_is_told_when_experience_has_doubled_and_later_every_few_thousand_steps() -> None:
    profile, told = FleetProfile(), []
    for number in range(20_000):
        if profile.observe(mixed(number), MACHINE.step_ms(mixed(number)), 100.0 * number) is not None:
            told.append(profile.steps)
    assert told[:4] == [KNOWN_STEPS, 2 * KNOWN_STEPS, 4 * KNOWN_STEPS, 8 * KNOWN_STEPS]
    assert max(later - earlier for earlier, later in pairwise(told)) == MOST_UNTOLD


def test_a_large_fleet_is_not_told_more_often_than_every_few_seconds() -> None:
    profile, told_ms = FleetProfile(), []
    for number in range(40_000):
        if profile.observe(mixed(number), MACHINE.step_ms(mixed(number)), 1.0 * number) is not None:
            told_ms.append(1.0 * number)
    assert len(told_ms) >= 3
    assert min(later - earlier for earlier, later in pairwise(told_ms)) >= LEAST_UNTOLD_MS


@pytest.mark.parametrize(("shape", "measured_ms"), [(BatchShape(), 5.0), (DECODES, 0.0), (DECODES, float("nan")), (DECODES, float("inf"))])
def test_a_step_that_cannot_be_is_refused_and_not_learnt(shape: BatchShape, measured_ms: float) -> None:
    profile = FleetProfile()
    with pytest.raises(ValueError, match=r"both must be positive$"):
        profile.observe(shape, measured_ms, 0.0)
    assert profile.steps == 0
