"""Cost model, profile table and batch rule of the core, against oracles and measured GPU steps."""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.latency_profile import MOST_CONTRADICTION
from dynaserve.step_latency import (
    DECODE_BINS,
    TOKEN_BINS,
    BatchLimits,
    BatchShape,
    BudgetReason,
    PrefillWork,
    ProfileBin,
    ProfileTable,
    Roofline,
    StepSample,
    choose_budget,
    fit_roofline,
    leaves_room_for_decode,
    prefill_pairs,
    shape_with,
)
from dynaserve.taught_table import settled

GRID = Path(__file__).parents[2] / "shared" / "gpu_latency_grid.csv.gz"
A100_14B = Roofline(overhead_ms=12.0, token_ms=0.11, knee_tokens=90.0, pair_ms=5.4e-6, decode_ms=0.02, context_ms=1.3e-4)

counts = st.integers(0, 3000)
shapes = st.builds(
    lambda prefill, context, decodes, mean: BatchShape(
        prefill_tokens=prefill,
        prefill_pairs=prefill_pairs(prefill, context),
        decodes=decodes,
        decode_context_tokens=decodes * mean,
    ),
    counts,
    counts,
    st.integers(0, 600),
    st.integers(0, 40_000),
)
rooflines = st.builds(
    lambda *values: Roofline(
        overhead_ms=values[0], token_ms=values[1], knee_tokens=values[2], pair_ms=values[3], decode_ms=values[4], context_ms=values[5]
    ),
    st.floats(0.1, 50),
    st.floats(0, 1),
    st.floats(1, 500),
    st.floats(0, 1e-4),
    st.floats(0, 1),
    st.floats(0, 1e-3),
)


def prefill(tokens: int, context: int = 0) -> BatchShape:
    return BatchShape(prefill_tokens=tokens, prefill_pairs=prefill_pairs(tokens, context))


def decodes(number: int, mean_context: int) -> BatchShape:
    return BatchShape(decodes=number, decode_context_tokens=number * mean_context)


def random_shape(rng: random.Random) -> BatchShape:
    number = rng.choice([0, 1, 3, 10, 40, 100])
    tokens = rng.choice([0, 16, 100, 400, 1000]) if number else rng.choice([16, 100, 400, 1000])
    return BatchShape(
        prefill_tokens=tokens,
        prefill_pairs=prefill_pairs(tokens, rng.randrange(2000)),
        decodes=number,
        decode_context_tokens=number * rng.randrange(3000),
    )


# -- cost model --------------------------------------------------------------------------------------------------------


def test_pairs_count_each_new_token_with_all_it_attends_to() -> None:
    assert prefill_pairs(3, 10) == 11 + 12 + 13


def test_a_fit_of_exact_samples_predicts_others_exactly() -> None:
    rng = random.Random(1)
    fitted = fit_roofline([StepSample(s, A100_14B.step_ms(s)) for s in (random_shape(rng) for _ in range(300))])
    for _ in range(100):
        shape = random_shape(rng)
        assert fitted.step_ms(shape) == pytest.approx(A100_14B.step_ms(shape), rel=0.02)


def test_a_term_that_no_sample_shows_stays_zero() -> None:
    fitted = fit_roofline([StepSample(prefill(n), 5.0 + 0.1 * n) for n in (64, 128, 256, 512)])
    assert (fitted.decode_ms, fitted.context_ms) == (0.0, 0.0)
    assert fitted.step_ms(prefill(300)) == pytest.approx(35.0, rel=0.01)


def test_one_sample_is_enough_for_a_constant() -> None:
    assert fit_roofline([StepSample(prefill(100), 30.0)]).step_ms(prefill(100)) == pytest.approx(30.0)


@given(st.lists(st.tuples(shapes, st.floats(0.01, 1e4)), min_size=1, max_size=30))
def test_no_coefficient_of_a_fit_is_negative(samples: list[tuple[BatchShape, float]]) -> None:
    usable = [StepSample(shape, ms) for shape, ms in samples if shape.tokens]
    if usable:
        fitted = fit_roofline(usable)
        ProfileTable(fitted)  # which refuses a negative or infinite one


@pytest.mark.parametrize(("samples", "message"), [([], "at least one"), ([StepSample(prefill(10), 0.0)], "10 tokens took 0.0")])
def test_a_fit_of_nothing_measurable_is_refused(samples: list[StepSample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_roofline(samples)


def grid_steps(model: str, system: str, tp: str) -> list[StepSample]:
    with gzip.open(GRID, "rt") as file:
        rows = [row for row in csv.DictReader(file) if (row["model"], row["system"], row["tp"]) == (model, system, tp)]
    steps = []
    for row in rows:
        new, cached, number, context = (int(row[name]) for name in ("prefill_new", "prefill_cached", "decode_n", "decode_ctx"))
        shape = BatchShape(
            prefill_tokens=new, prefill_pairs=prefill_pairs(new, cached), decodes=number, decode_context_tokens=number * context
        )
        steps.append(StepSample(shape, float(row["ms"])))
    return [step for step in steps if step.shape.tokens]


@pytest.mark.skipif(not GRID.exists(), reason="the grid of measured GPU steps is not here")
@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "h200_sxm"])
def test_a_table_predicts_measured_gpu_steps_that_it_has_not_seen(system: str) -> None:
    steps = grid_steps("qwen2.5-14b", system, "1")
    random.Random(7).shuffle(steps)
    seen, unseen = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    table = ProfileTable(fit_roofline(seen))
    for _ in range(3):
        for step in seen:
            table.observe(step.shape, step.measured_ms)
    learnt = fmean(abs(table.step_ms(step.shape) / step.measured_ms - 1) for step in unseen)
    alone = fmean(abs(step.measured_ms / table.roofline.step_ms(step.shape) - 1) for step in unseen)
    assert learnt < min(0.025, alone)


# -- profile table -----------------------------------------------------------------------------------------------------


def test_an_untouched_table_predicts_the_roofline_at_its_bins() -> None:
    table = ProfileTable(A100_14B)
    for tokens in TOKEN_BINS[1:]:
        for number in DECODE_BINS:
            if number <= tokens:
                shape = BatchShape(prefill_tokens=int(tokens - number), decodes=int(number), decode_context_tokens=int(number) * 1024)
                assert table.step_ms(shape) == pytest.approx(A100_14B.step_ms(shape), rel=1e-9)


@settings(max_examples=300, deadline=None)
@given(rooflines, st.lists(st.tuples(shapes, st.floats(0.01, 1e4)), max_size=40), shapes, shapes)
def test_a_prediction_never_falls_when_an_argument_grows(
    roofline: Roofline, steps: list[tuple[BatchShape, float]], shape: BatchShape, more: BatchShape
) -> None:
    """Whatever was learnt, also from steps that contradict it. A larger mean context is the argument, not a larger sum."""
    table = ProfileTable(roofline)
    for seen, ms in steps:
        if seen.tokens:
            table.observe(seen, ms)
    before = table.step_ms(shape)
    mean = shape.decode_context_tokens // max(1, shape.decodes)
    grown = [
        BatchShape(
            prefill_tokens=shape.prefill_tokens + more.prefill_tokens,
            prefill_pairs=shape.prefill_pairs,
            decodes=shape.decodes,
            decode_context_tokens=shape.decode_context_tokens,
        ),
        BatchShape(
            prefill_tokens=shape.prefill_tokens,
            prefill_pairs=shape.prefill_pairs + more.prefill_pairs,
            decodes=shape.decodes,
            decode_context_tokens=shape.decode_context_tokens,
        ),
        BatchShape(
            prefill_tokens=shape.prefill_tokens,
            prefill_pairs=shape.prefill_pairs,
            decodes=shape.decodes + more.decodes,
            decode_context_tokens=(shape.decodes + more.decodes) * mean,
        ),
        BatchShape(
            prefill_tokens=shape.prefill_tokens,
            prefill_pairs=shape.prefill_pairs,
            decodes=shape.decodes,
            decode_context_tokens=shape.decode_context_tokens + shape.decodes * more.decode_context_tokens,
        ),
    ]
    for larger in grown:
        assert table.step_ms(larger) >= before * (1 - 1e-9), (shape, larger)


def test_a_table_learns_a_machine_that_no_roofline_describes() -> None:
    """Steps that jump at tiles of 256 tokens, seen with 5 % of noise."""

    def truth(shape: BatchShape) -> float:
        return 10.0 + 20.0 * math.ceil(shape.tokens / 256) + 1e-3 * shape.decode_context_tokens

    rng = random.Random(3)
    table = ProfileTable(Roofline(overhead_ms=10, token_ms=0.078, knee_tokens=1, pair_ms=0, decode_ms=0, context_ms=1e-3))
    kinds = [(tokens, number) for tokens in (64, 192, 320, 448, 768) for number in (0, 8, 32)]
    for _ in range(3000):
        tokens, number = rng.choice(kinds)
        shape = BatchShape(prefill_tokens=tokens - number, decodes=number, decode_context_tokens=number * 512)
        table.observe(shape, truth(shape) * rng.lognormvariate(0, 0.05))
    for tokens, number in kinds:
        shape = BatchShape(prefill_tokens=tokens - number, decodes=number, decode_context_tokens=number * 512)
        assert table.step_ms(shape) == pytest.approx(truth(shape), rel=0.1), shape
    assert table.sigma == pytest.approx(0.05, rel=0.5)


def mean_error(table: ProfileTable, steps: Iterator[tuple[BatchShape, float]]) -> float:
    errors = [abs(table.step_ms(shape) / ms - 1) for shape, ms in steps]
    return sum(errors) / len(errors)


def noisy_steps(rng: random.Random, number: int, factor: float) -> Iterator[tuple[BatchShape, float]]:
    for _ in range(number):
        shape = random_shape(rng)
        yield shape, factor * A100_14B.step_ms(shape) * rng.lognormvariate(0, 0.04)


def test_bins_that_contradict_each_other_do_not_drift_apart() -> None:
    """Each step of the larger kind is too fast for the smaller one, for ever."""
    table = ProfileTable(Roofline(overhead_ms=8.0, token_ms=0.05, knee_tokens=16.0, pair_ms=0.0, decode_ms=0.3, context_ms=5e-4))
    for _ in range(20_000):
        for tokens, ms in ((256, 20.0), (320, 18.0)):
            table.observe(BatchShape(prefill_tokens=tokens), ms)
    assert max(abs(learnt.log_ratio) for learnt in table.bins()) < 1.0
    assert abs(table.log_scale) < 1.0
    for tokens in (256, 320):
        assert 17.0 < table.step_ms(BatchShape(prefill_tokens=tokens)) < 21.0


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 64), st.floats(0.1, 5000.0)), min_size=2, max_size=8))
@settings(max_examples=50)
def test_whatever_is_learnt_contradicts_itself_less_than_a_profile_may(steps: list[tuple[int, int, float]]) -> None:
    table = ProfileTable(A100_14B)
    for _ in range(200):
        for tokens, decodes, ms in steps:
            table.observe(BatchShape(prefill_tokens=tokens, decodes=decodes, decode_context_tokens=500 * decodes), ms)
    assert table.worst_contradiction()[1] < MOST_CONTRADICTION


def test_what_had_drifted_in_a_profile_is_put_together_again() -> None:
    table, drifted = (
        ProfileTable(Roofline(overhead_ms=8.0, token_ms=0.05, knee_tokens=16.0, pair_ms=0.0, decode_ms=0.3, context_ms=5e-4))
        for _ in range(2)
    )
    shape = BatchShape(prefill_tokens=300, decodes=9, decode_context_tokens=3000)
    for _ in range(100):
        table.observe(shape, 40.0)
    bins = [ProfileBin(learnt.index, learnt.log_ratio + 30.0, learnt.weight) for learnt in table.bins()]
    drifted.restore(bins, table.log_scale - 30.0, table.sigma)
    assert drifted.step_ms(shape) == pytest.approx(settled(table).step_ms(shape), rel=0.02)
    drifted.observe(shape, 40.0)
    assert drifted.step_ms(shape) == pytest.approx(40.0, rel=0.05)


def test_drift_is_followed_within_200_steps_both_ways() -> None:
    rng = random.Random(5)
    table = ProfileTable(A100_14B)
    for factor in (1.0, 2.2, 1.0):
        for shape, ms in noisy_steps(rng, 200, factor):
            table.observe(shape, ms)
        assert mean_error(table, noisy_steps(rng, 200, factor)) < 0.15, factor


def test_pauses_of_the_machine_do_not_poison_the_table() -> None:
    rng = random.Random(6)
    table = ProfileTable(A100_14B)
    for shape, ms in noisy_steps(rng, 500, 1.0):
        table.observe(shape, ms * 50 if rng.random() < 0.01 else ms)
    assert mean_error(table, noisy_steps(rng, 200, 1.0)) < 0.1


def test_bins_and_scale_do_not_drift_apart_where_pauses_are_long_and_rare() -> None:
    rng = random.Random(10)
    table = ProfileTable(A100_14B)
    shapes = [
        decodes(20, 1000),
        shape_with(decodes(20, 1000), [PrefillWork(300, 0)], 300),
        shape_with(decodes(5, 400), [PrefillWork(60, 0)], 60),
    ]
    true_ms = [1.1 * ProfileTable(A100_14B).step_ms(shape) for shape in shapes]
    for _ in range(30_000):
        kind = rng.randrange(3)
        table.observe(shapes[kind], true_ms[kind] * math.exp(0.08 * (rng.expovariate(1.0) - 1.0)))
    assert abs(table.log_scale) < 0.2
    unseen = prefill(4000, 12_000)
    assert table.step_ms(unseen) == pytest.approx(1.1 * ProfileTable(A100_14B).step_ms(unseen), rel=0.15)


def test_a_kind_of_step_that_changes_for_good_is_learnt_anew_and_the_others_are_not() -> None:
    rng = random.Random(11)
    table = ProfileTable(A100_14B)
    kept, changed = decodes(20, 1000), shape_with(decodes(20, 1000), [PrefillWork(500, 0)], 500)
    kept_ms, changed_ms = table.step_ms(kept), table.step_ms(changed)
    for factor, steps in ((1.0, 500), (1.4, 1500)):
        for _ in range(steps):
            table.observe(kept, kept_ms * math.exp(rng.gauss(0, 0.03)))
            table.observe(changed, factor * changed_ms * math.exp(rng.gauss(0, 0.03)))
    assert table.step_ms(changed) / table.step_ms(kept) == pytest.approx(1.4 * changed_ms / kept_ms, rel=0.06)


def test_a_step_of_which_the_roofline_says_nothing_teaches_nothing() -> None:
    table = ProfileTable(Roofline(overhead_ms=0, token_ms=0, knee_tokens=1, pair_ms=0, decode_ms=0, context_ms=0.001))
    sigma = table.sigma
    for _ in range(1000):
        table.observe(prefill(100), 20.0)
    assert (table.step_ms(prefill(100)), table.sigma, table.observed) == (0.0, sigma, 1000)
    table.observe(decodes(10, 1000), 11.0)
    assert 10.0 < table.step_ms(decodes(10, 1000)) < 11.0


def test_what_was_learnt_can_be_carried_to_another_table() -> None:
    rng = random.Random(8)
    table, copy = ProfileTable(A100_14B), ProfileTable(A100_14B)
    for shape, ms in noisy_steps(rng, 100, 1.3):
        table.observe(shape, ms)
    copy.restore(table.bins(), table.log_scale, table.sigma)
    shapes = [random_shape(rng) for _ in range(50)]
    of_the_last_steps = table.step_ms(shapes[0]) / copy.step_ms(shapes[0])
    assert 0.8 < of_the_last_steps < 1.25
    for shape in shapes:
        assert table.step_ms(shape) == pytest.approx(of_the_last_steps * copy.step_ms(shape))
    assert copy.sigma == table.sigma


def test_what_the_last_steps_had_in_common_is_expected_of_the_next_and_soon_forgotten() -> None:
    table = ProfileTable(A100_14B)
    shape = BatchShape(decodes=20, decode_context_tokens=20_000)
    for _ in range(300):
        table.observe(shape, 20.0)
    for _ in range(5):
        table.observe(shape, 20.0 * 1.025)
    assert table.step_ms(shape) == pytest.approx(20.0 * 1.025, rel=0.01)
    for _ in range(10):
        table.observe(shape, 20.0)
    assert table.step_ms(shape) == pytest.approx(20.0, rel=0.005)


@pytest.mark.parametrize("wrong_token_ms", [0.02, 0.4])
def test_what_a_large_step_costs_is_learnt_though_budgets_follow_the_speed_of_the_machine(wrong_token_ms: float) -> None:
    """Each step is the largest that is predicted to fit, so that those of fast spells are large, those of slow ones small, and so is the
    last one before a spell ends: a table that learns by that would find large steps cheap, or dear."""

    def true_ms(prefill_tokens: int, decodes: int) -> float:
        return 30.0 + 0.13 * prefill_tokens + 0.5 * decodes

    rng = random.Random(9)
    learnt = []
    for _ in range(5):
        table = ProfileTable(
            Roofline(overhead_ms=30.0, token_ms=wrong_token_ms, knee_tokens=1.0, pair_ms=0.0, decode_ms=0.5, context_ms=0.0)
        )
        slow = False
        for _ in range(4000):
            slow = slow if rng.random() < 0.95 else not slow
            beside, waiting = decodes(rng.randrange(4, 13), 250), [PrefillWork(rng.randrange(10, 400), 0)]
            budget = choose_budget(table, beside, waiting, BatchLimits(step_ms=60.0, max_tokens=256, min_prefill_tokens=16))
            speed = (1.5 if slow else 1.0) * math.exp(rng.gauss(0, 0.08))
            table.observe(shape_with(beside, waiting, budget.tokens), true_ms(budget.tokens, beside.decodes) * speed)
        small, large = (shape_with(decodes(8, 250), [PrefillWork(tokens, 0)], tokens) for tokens in (32, 160))
        learnt.append(table.step_ms(large) / table.step_ms(small))
    assert fmean(learnt) == pytest.approx(true_ms(160, 8) / true_ms(32, 8), rel=0.1)


@pytest.mark.parametrize(
    ("bins", "log_scale", "sigma", "message"),
    [
        ([ProfileBin(5, 0.1, 1.0), ProfileBin(5, 0.1, 1.0)], 0.0, 0.1, "bin 5 after bin 5"),
        ([ProfileBin(1_000_000, 0.1, 1.0)], 0.0, 0.1, "bin 1000000 after"),
        ([ProfileBin(5, math.nan, 1.0)], 0.0, 0.1, "bin 5: log_ratio"),
        ([ProfileBin(5, 0.0, -1.0)], 0.0, 0.1, "bin 5: weight is -1"),
        ([], math.inf, 0.1, "log_scale"),
        ([], 0.0, -0.1, "sigma is -0.1"),
    ],
)
def test_impossible_state_is_refused_and_changes_nothing(bins: list[ProfileBin], log_scale: float, sigma: float, message: str) -> None:
    table = ProfileTable(A100_14B)
    table.observe(prefill(100), 40.0)
    before = (table.bins(), table.log_scale, table.sigma)
    with pytest.raises(ValueError, match=message):
        table.restore(bins, log_scale, sigma)
    assert (table.bins(), table.log_scale, table.sigma) == before


@pytest.mark.parametrize(("shape", "ms"), [(BatchShape(), 5.0), (prefill(10), 0.0), (prefill(10), math.nan)])
def test_a_step_that_cannot_be_is_not_learnt(shape: BatchShape, ms: float) -> None:
    table = ProfileTable(A100_14B)
    with pytest.raises(ValueError, match="must be positive"):
        table.observe(shape, ms)
    assert table.bins() == []


@pytest.mark.parametrize("field", ["overhead_ms", "token_ms", "knee_tokens", "pair_ms", "decode_ms", "context_ms"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_table_over_an_impossible_roofline_is_refused(field: str, value: float) -> None:
    names = ("overhead_ms", "token_ms", "knee_tokens", "pair_ms", "decode_ms", "context_ms")
    fields = {name: getattr(A100_14B, name) for name in names} | {field: value}
    with pytest.raises(ValueError, match=field):
        ProfileTable(Roofline(**fields))


# -- batch rule --------------------------------------------------------------------------------------------------------

work = st.lists(st.builds(PrefillWork, st.integers(1, 400), st.integers(0, 3000)), max_size=5)


def speculating(number: int, context: int, drafts: int) -> BatchShape:
    """Decodes that speculate so many tokens each."""
    alone, pairs = decodes(number, context), number * prefill_pairs(drafts, context)
    return BatchShape(
        prefill_tokens=number * drafts,
        prefill_pairs=pairs,
        decodes=alone.decodes,
        decode_context_tokens=alone.decode_context_tokens,
    )


def learnt_table(seed: int) -> ProfileTable:
    rng = random.Random(seed)
    table = ProfileTable(A100_14B)
    for shape, ms in noisy_steps(rng, 150, rng.uniform(0.5, 2.0)):
        table.observe(shape, ms * rng.uniform(0.8, 1.3))
    return table


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 20),
    st.integers(0, 60),
    st.integers(0, 2000),
    st.sampled_from([0, 0, 1, 3]),
    work,
    st.floats(5, 200),
    st.integers(0, 1000),
    st.integers(0, 200),
)
def test_the_budget_is_what_an_exhaustive_search_finds(
    seed: int, number: int, context: int, drafts: int, waiting: list[PrefillWork], limit_ms: float, max_tokens: int, least: int
) -> None:
    table, running = learnt_table(seed), speculating(number, context, drafts)
    limits = BatchLimits(step_ms=limit_ms, max_tokens=max_tokens, min_prefill_tokens=least)
    budget = choose_budget(table, running, waiting, limits)

    def step_ms(tokens: int) -> float:
        return table.step_ms(shape_with(running, waiting, tokens))

    waits = sum(w.tokens for w in waiting)
    most = max(0, min(waits, max_tokens - number * (1 + drafts)))
    share = min(least, most)
    within = [tokens for tokens in range(most + 1) if step_ms(tokens) <= limit_ms]
    largest = max(within, default=0)
    assert budget.step_ms == step_ms(budget.tokens)
    if largest == 0:
        assert budget.tokens == share
        assert (budget.reason == BudgetReason.minimum_share) == (share > 0)
        return
    assert 0 < budget.tokens <= largest

    def pays_to_finish(first: int) -> bool:
        pairs = shape_with(running, waiting, waits).prefill_pairs - shape_with(running, waiting, first).prefill_pairs
        rest_ms = table.step_ms(
            BatchShape(
                prefill_tokens=running.prefill_tokens + waits - first,
                prefill_pairs=running.prefill_pairs + pairs,
                decodes=running.decodes,
                decode_context_tokens=running.decode_context_tokens,
            )
        )
        return step_ms(waits) <= step_ms(first) - step_ms(0) + 1.1 * rest_ms

    cost = {tokens: step_ms(tokens) / tokens for tokens in range(1, largest + 1)}
    cheap = [tokens for tokens in cost if cost[tokens] <= 1.05 * min(cost.values())]
    if budget.tokens == waits:
        assert waits in cheap or any(map(pays_to_finish, cheap))
    else:
        assert budget.tokens in cheap
        assert largest < waits or not pays_to_finish(budget.tokens)
    if budget.tokens == largest < most:
        assert budget.reason == BudgetReason.step_limit
    elif budget.tokens == most:
        assert budget.reason == (BudgetReason.all_work if most == waits else BudgetReason.max_tokens)
    else:
        assert budget.reason == BudgetReason.efficiency


def test_several_prompts_share_a_step_in_arrival_order() -> None:
    waiting = [PrefillWork(100, 500), PrefillWork(300, 0)]
    shape = shape_with(decodes(4, 10), waiting, 250)
    assert shape.prefill_tokens == 250
    assert shape.prefill_pairs == prefill_pairs(100, 500) + prefill_pairs(150, 0)
    assert (shape.decodes, shape.decode_context_tokens) == (4, 40)


def test_a_cheaper_smaller_step_beats_a_larger_one_that_fits() -> None:
    """384 tokens for 46 ms, 512 for 67 ms: an A100 with a 14B model."""
    table = ProfileTable(A100_14B)
    for _ in range(200):
        table.observe(prefill(384), 46.0)
        table.observe(prefill(512), 67.0)
    budget = choose_budget(table, BatchShape(), [PrefillWork(4000)], BatchLimits(step_ms=70, max_tokens=2048))
    assert (budget.tokens, budget.reason) == (384, BudgetReason.efficiency)


def test_the_last_tokens_of_what_waits_are_not_put_off() -> None:
    limits, table = BatchLimits(step_ms=500, max_tokens=2048), ProfileTable(A100_14B)
    for tokens in (769, 777, 900):
        budget = choose_budget(table, BatchShape(), [PrefillWork(tokens)], limits)
        assert (budget.tokens, budget.reason) == (tokens, BudgetReason.all_work)


def test_decodes_alone_over_the_limit_leave_the_minimum_share() -> None:
    budget = choose_budget(
        ProfileTable(A100_14B), decodes(100, 4000), [PrefillWork(500)], BatchLimits(step_ms=20, max_tokens=2048, min_prefill_tokens=16)
    )
    assert (budget.tokens, budget.reason) == (16, BudgetReason.minimum_share)


def test_a_decode_is_taken_only_while_all_stay_within_the_limit() -> None:
    table, limit_ms = ProfileTable(A100_14B), 60.0
    fits = [n for n in range(200) if leaves_room_for_decode(table, decodes(n, 2000), 2000, limit_ms)]
    assert fits == list(range(len(fits)))
    assert table.step_ms(decodes(len(fits), 2000)) <= limit_ms < table.step_ms(decodes(len(fits) + 1, 2000))


@pytest.mark.parametrize(
    ("limits", "waiting", "message"),
    [
        ({"step_ms": -1.0, "max_tokens": 10}, [], "step_ms is -1"),
        ({"step_ms": math.nan, "max_tokens": 10}, [], "step_ms is"),
        ({"step_ms": 1.0, "max_tokens": -1}, [], "max_tokens is -1"),
        ({"step_ms": 1.0, "max_tokens": 10, "min_prefill_tokens": -2}, [], "min_prefill_tokens is -2"),
        ({"step_ms": 1.0, "max_tokens": 10}, [PrefillWork(0)], "waiting work of 0 tokens"),
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, float], waiting: list[PrefillWork], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_budget(ProfileTable(A100_14B), BatchShape(), waiting, BatchLimits(**limits))  # type: ignore[arg-type]
