"""Output lengths: what is learnt, what is said without history, and what survives a restart."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaserve.errors import ConfigError
from dynaserve.length_predictor import LEAST_FINISHED, MOST_GROUPS, LengthForecast, LengthPredictor, LengthQuery, load, save

CHAT = LengthQuery(model="m", request_class="chat", prompt_tokens=300, max_tokens=4096)


def taught(lengths: list[int], query: LengthQuery = CHAT, margin: int = 0) -> LengthPredictor:
    predictor = LengthPredictor(margin_tokens=margin)
    for length in lengths:
        predictor.learn(query, length)
    return predictor


def test_without_history_the_prior_speaks_and_says_so() -> None:
    forecast = LengthPredictor().predict(CHAT)
    assert (forecast.source, forecast.finished) == ("prior", 0)
    assert 100 < forecast.expected_tokens < forecast.likely_tokens < 700


def test_nothing_above_max_tokens_is_expected() -> None:
    assert LengthPredictor().predict(replace(CHAT, max_tokens=7)) == LengthForecast(7, 7, "prior", 0)


def test_the_distribution_is_learnt_not_only_its_mean() -> None:
    forecast = taught([10] * 80 + [1000] * 20).predict(CHAT)
    assert forecast.source == "history"
    assert forecast.expected_tokens == pytest.approx(208, rel=0.1)
    assert forecast.likely_tokens == pytest.approx(1000, rel=0.1)


def test_an_answer_that_goes_on_is_one_of_the_long_ones() -> None:
    predictor = taught([10] * 80 + [1000] * 20)
    assert predictor.predict(CHAT, emitted=50).expected_tokens == pytest.approx(1000, rel=0.1)
    assert predictor.predict(CHAT, emitted=2000).expected_tokens > 2000


def test_a_group_of_its_own_is_used_once_enough_have_finished() -> None:
    predictor = taught([100] * 50)
    other = replace(CHAT, prompt_tokens=3000)
    assert predictor.predict(other).expected_tokens == 100
    for _ in range(LEAST_FINISHED):
        predictor.learn(other, 30)
    assert predictor.predict(other).expected_tokens == 30
    assert predictor.predict(CHAT).expected_tokens == 100


def test_classes_do_not_mix() -> None:
    assert taught([100] * 50).predict(replace(CHAT, request_class="code")).source == "prior"


@given(st.lists(st.text("a|%7C4", max_size=8), min_size=4, max_size=4))
def test_groups_of_different_names_are_different(names: list[str]) -> None:
    one, other = (LengthQuery(model, request_class, 100, 100) for model, request_class in (names[:2], names[2:]))
    assert len({*one.keys, *other.keys}) == (2 if one == other else 4)


def test_classes_without_end_do_not_fill_the_memory() -> None:
    predictor = LengthPredictor()
    for number in range(MOST_GROUPS):
        predictor.learn(replace(CHAT, request_class=str(number)), 10)
    assert len(predictor.groups) == MOST_GROUPS
    assert replace(CHAT, request_class=str(MOST_GROUPS - 1)).keys[0] in predictor.groups


def test_the_hint_and_the_margin_are_honoured() -> None:
    assert LengthPredictor().predict(replace(CHAT, hint=55)) == LengthForecast(75, 75, "hint", 0)


def test_a_hint_that_has_proved_too_short_is_dropped() -> None:
    forecast = LengthPredictor().predict(replace(CHAT, hint=55), emitted=60)
    assert forecast.source == "prior"
    assert forecast.expected_tokens > 60


def test_a_change_of_lengths_is_followed() -> None:
    predictor = taught([50] * 3000 + [500] * 8000)
    assert predictor.predict(CHAT).expected_tokens == pytest.approx(500, rel=0.05)


def test_nine_answers_in_ten_are_within_what_is_likely() -> None:
    rng = random.Random(3)
    lengths = [max(1, round(rng.lognormvariate(5.0, 0.8))) for _ in range(4000)]
    predictor = taught(lengths[:2000])
    likely = predictor.predict(CHAT).likely_tokens
    assert sum(length <= likely for length in lengths[2000:]) / 2000 == pytest.approx(0.9, abs=0.05)


@given(
    lengths=st.lists(st.integers(1, 2000), min_size=LEAST_FINISHED, max_size=200),
    emitted=st.integers(0, 2000),
    quantile=st.floats(0.01, 0.99),
)
def test_what_goes_on_is_summed_up_as_counting_says(lengths: list[int], emitted: int, quantile: float) -> None:
    learnt = next(iter(taught(lengths).groups.values()))
    points = [(mean, weight) for mean, weight in zip(learnt.means, learnt.weights, strict=True) if weight > 0 and mean > emitted]
    assert learnt.distribution.goes_beyond(emitted) == bool(points)
    if not points:
        return
    total = sum(weight for _, weight in points)
    assert learnt.distribution.mean_beyond(emitted) == pytest.approx(sum(mean * weight for mean, weight in points) / total)
    found = learnt.distribution.quantile_beyond(emitted, quantile)
    below, up_to = (sum(weight for mean, weight in points if test(mean)) for test in (found.__gt__, found.__ge__))
    assert below / total <= quantile + 1e-9
    assert up_to / total >= quantile - 1e-9


@given(
    lengths=st.lists(st.integers(1, 100_000), max_size=40),
    max_tokens=st.integers(1, 10_000),
    hint=st.none() | st.integers(1, 20_000),
    emitted=st.integers(0, 9_000),
)
def test_every_forecast_is_possible(lengths: list[int], max_tokens: int, hint: int | None, emitted: int) -> None:
    forecast = taught(lengths, margin=20).predict(replace(CHAT, max_tokens=max_tokens, hint=hint), emitted)
    assert min(emitted + 1, max_tokens) <= forecast.expected_tokens <= max_tokens
    assert min(emitted + 1, max_tokens) <= forecast.likely_tokens <= max_tokens


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    predictor = taught([10] * 80 + [1000] * 20, margin=20)
    save(tmp_path / "lengths.json", predictor)
    assert load(tmp_path / "lengths.json").predict(CHAT) == predictor.predict(CHAT)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "missing required field `format_version`"),
        ('{"format_version": 9, "groups": {}}', "format_version is 9"),
        ('{"format_version": 1, "groups": {"m|c": {"weights": [1], "means": [2], "finished": 1}}}', "the group 'm|c' needs"),
        (
            f'{{"format_version": 1, "groups": {{"m|c": {{"weights": {[0] * 88}, "means": {[0] * 88}, "finished": 20}}}}}}',
            "the group 'm|c' needs",
        ),
        ("x", "is not a history of output lengths"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert str(path) in str(refusal.value)
    assert message in str(refusal.value)
