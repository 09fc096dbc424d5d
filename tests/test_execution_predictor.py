"""The execution predictor against an oracle that walks every step."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.execution_predictor import ExecutionPredictor, Forecast, Horizon, InstanceLimits, VirtualRequest
from dynaserve.step_latency import BatchShape, ProfileTable, Roofline
from tests.virtual_instance import SteppingInstance, Walked

A100 = Roofline(overhead_ms=12.0, token_ms=0.1, knee_tokens=128.0, pair_ms=2e-6, decode_ms=0.05, context_ms=1e-4)

rooflines = st.builds(
    Roofline,
    overhead_ms=st.floats(0.5, 20.0),
    token_ms=st.floats(0.01, 0.3),
    knee_tokens=st.floats(1.0, 256.0),
    pair_ms=st.floats(0.0, 1e-4),
    decode_ms=st.floats(0.0, 0.3),
    context_ms=st.floats(0.0, 2e-3),
)
all_limits = st.builds(
    InstanceLimits,
    max_requests=st.integers(1, 12),
    max_step_tokens=st.integers(16, 2048),
    min_prefill_tokens=st.integers(0, 32),
    kv_tokens=st.integers(500, 20_000),
    step_ms=st.floats(5.0, 150.0) | st.just(math.inf),
    admit_ms=st.just(0.0) | st.floats(5.0, 200.0),
)


@st.composite
def virtual_requests(draw: st.DrawFn, key: int) -> VirtualRequest:
    prefill = draw(st.integers(0, 1500) | st.sampled_from([0, 1]))
    return VirtualRequest(
        key=key,
        context_tokens=draw(st.just(0) | st.integers(0, 1000)),
        prefill_tokens=prefill,
        decode_tokens=draw(st.integers(0 if prefill else 1, 200)),
        ready_ms=draw(st.just(0.0) | st.floats(0.0, 5000.0)),
        is_beta=prefill == 0 or draw(st.booleans()),  # without a prompt left only what has begun elsewhere
    )


@st.composite
def arrivals(draw: st.DrawFn, most: int = 14) -> list[tuple[float, VirtualRequest]]:
    """(arrival, request), in order of arrival."""
    now_ms, coming = 0.0, []
    for key in range(draw(st.integers(1, most))):
        now_ms += draw(st.just(0.0) | st.floats(0.0, 800.0))
        coming.append((now_ms, draw(virtual_requests(key))))
    return coming


def learnt(table: ProfileTable, steps: list[tuple[int, int, int, float]]) -> ProfileTable:
    """The table after steps whose latency differs from the roofline's by a factor."""
    for prefill, decodes, context, factor in steps:
        shape = BatchShape(prefill_tokens=prefill, decodes=decodes, decode_context_tokens=decodes * context)
        table.observe(shape, factor * table.step_ms(shape))
    return table


tables = st.builds(
    learnt,
    st.builds(ProfileTable, rooflines),
    st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 12), st.integers(1, 3000), st.floats(0.5, 2.0)), max_size=20),
)


def about(walked: Walked) -> object:
    times = [walked.start_ms, walked.prefill_end_ms, walked.end_ms]
    return pytest.approx([math.inf if t is None else t for t in times], rel=1e-9)


def times_of(forecast: Forecast) -> list[float]:
    return [forecast.start_ms, forecast.prefill_end_ms, forecast.end_ms]


def check_played_out(predictor: ExecutionPredictor, oracle: SteppingInstance, now_ms: float) -> None:
    """Both are at the end of the step that runs at `now_ms`."""
    gone = len(oracle.ended)
    oracle.play_out()
    played = predictor.play_out(now_ms)
    assert [forecast.end_ms for _, forecast in played] == sorted(forecast.end_ms for _, forecast in played)
    expected = {walked.key: about(walked) for walked in oracle.ended[gone:]}
    assert {key: times_of(forecast) for key, forecast in played} == expected


def check_rests(predictor: ExecutionPredictor, keys: range, now_ms: float) -> None:
    """What is foretold of one request is what becomes of it when all are played out."""
    rests = {key: predictor.predict_rest(key, now_ms) for key in keys}
    played = dict(predictor.play_out(now_ms))
    assert {key for key, rest in rests.items() if rest is not None} == played.keys()
    for key, forecast in played.items():
        rest = rests[key]
        assert rest is not None
        assert rest.end_ms == pytest.approx(forecast.end_ms, rel=1e-9)
        if math.isfinite(rest.start_ms):  # it has not begun yet
            assert times_of(rest) == pytest.approx(times_of(forecast), rel=1e-9)


@settings(max_examples=400, deadline=None)
@given(table=tables, limits=all_limits, coming=arrivals(), scale=st.just(1.0) | st.floats(0.3, 3.0))
def test_a_prediction_is_what_walking_every_step_gives(
    table: ProfileTable, limits: InstanceLimits, coming: list[tuple[float, VirtualRequest]], scale: float
) -> None:
    predictor, oracle = ExecutionPredictor(table, limits), SteppingInstance(table, limits, scale)
    predictor.set_cost_scale(scale, 0.0)
    for now_ms, request in coming[:-1]:
        oracle.advance(now_ms)
        oracle.add(request, now_ms)
        predictor.add(request, now_ms)
    now_ms, newcomer = coming[-1]
    forecast = predictor.predict(newcomer, now_ms)
    oracle.advance(now_ms)
    walked = oracle.add(newcomer, now_ms)
    oracle.play_out()
    assert times_of(forecast) == about(walked)


@settings(max_examples=400, deadline=None)
@given(table=tables, limits=all_limits, coming=arrivals(), data=st.data())
def test_the_timeline_follows_additions_and_removals(
    table: ProfileTable, limits: InstanceLimits, coming: list[tuple[float, VirtualRequest]], data: st.DataObject
) -> None:
    predictor, oracle = ExecutionPredictor(table, limits), SteppingInstance(table, limits)
    for now_ms, request in coming:
        predictor.predict(request, now_ms, data.draw(st.sampled_from(Horizon)))
        oracle.advance(now_ms)
        oracle.add(request, now_ms)
        predictor.add(request, now_ms)
        if data.draw(st.integers(0, 3)) == 0:
            key = data.draw(st.integers(0, request.key))
            assert predictor.remove(key, now_ms) == oracle.remove(key)
    check_rests(predictor, range(len(coming)), now_ms)
    check_played_out(predictor, oracle, now_ms)


@pytest.mark.parametrize("begun_ms", [50.0, 2000.0], ids=["prefills", "decodes"])
def test_a_beta_that_is_ready_later_than_predicted_waits_again(begun_ms: float) -> None:
    predictor = ExecutionPredictor(
        ProfileTable(Roofline(overhead_ms=10.0, token_ms=0.1, knee_tokens=1.0, pair_ms=0.0, decode_ms=0.1, context_ms=1e-4)),
        InstanceLimits(max_step_tokens=2048),
    )
    other = VirtualRequest(key=1, prefill_tokens=100, decode_tokens=1000)
    beta = VirtualRequest(key=2, context_tokens=1000, prefill_tokens=3000, decode_tokens=500, is_beta=True)
    predictor.add(other, 0.0)
    predictor.add(beta, 0.0)
    assert predictor.find(2, begun_ms) != beta
    late = VirtualRequest(key=2, context_tokens=2000, prefill_tokens=2000, decode_tokens=500, ready_ms=begun_ms + 5000.0, is_beta=True)
    forecast = predictor.predict_change(late, begun_ms)
    assert forecast is not None
    assert forecast.start_ms >= late.ready_ms
    assert predictor.change(late, begun_ms)
    assert predictor.find(2, begun_ms) == late
    assert predictor.predict_rest(2, begun_ms) == forecast


def test_a_decode_can_be_given_another_end() -> None:
    predictor = ExecutionPredictor(
        ProfileTable(Roofline(overhead_ms=10.0, token_ms=0.1, knee_tokens=1.0, pair_ms=0.0, decode_ms=0.1, context_ms=0.0)),
        InstanceLimits(),
    )
    predictor.add(VirtualRequest(key=1, context_tokens=100, decode_tokens=1000), 0.0)
    predictor.add(VirtualRequest(key=2, context_tokens=100, decode_tokens=50), 0.0)
    standing = predictor.find(1, 100.0)
    assert standing is not None
    shorter = VirtualRequest(key=1, context_tokens=standing.context_tokens, decode_tokens=10)
    expected = predictor.predict_change(shorter, 100.0)
    assert predictor.change(shorter, 100.0)
    first, second = predictor.predict_rest(1, 100.0), predictor.predict_rest(2, 100.0)
    assert first is not None
    assert expected is not None
    assert second is not None
    assert first.end_ms == expected.end_ms < second.end_ms
    assert not predictor.change(VirtualRequest(key=1, context_tokens=100, prefill_tokens=10, decode_tokens=10), 100.0)


@settings(max_examples=200, deadline=None)
@given(table=tables, limits=all_limits, coming=arrivals(), running=st.lists(virtual_requests(0), max_size=6))
def test_a_report_replaces_what_was_predicted(
    table: ProfileTable, limits: InstanceLimits, coming: list[tuple[float, VirtualRequest]], running: list[VirtualRequest]
) -> None:
    predictor, oracle = ExecutionPredictor(table, limits), SteppingInstance(table, limits)
    for now_ms, request in coming:
        predictor.add(request, now_ms)
    oracle.now_ms = 1e8  # long after the last of them has ended
    running = [_with_key(request, 100 + number) for number, request in enumerate(running)]
    waiting = [request for _, request in coming]
    predictor.play_out(1e8)
    predictor.replace(running, waiting, 1e8)
    for request in running:
        at_ms = None if request.prefill_tokens else 1e8
        oracle.running.append(Walked(request.key, request.context_tokens, request.prefill_tokens, request.decode_tokens, 0.0, 1e8, at_ms))
    for request in waiting:
        oracle.add(request, 0.0)
    check_played_out(predictor, oracle, 1e8)


def _with_key(request: VirtualRequest, key: int) -> VirtualRequest:
    return VirtualRequest(
        key=key,
        context_tokens=request.context_tokens,
        prefill_tokens=request.prefill_tokens,
        decode_tokens=request.decode_tokens,
        ready_ms=request.ready_ms,
        is_beta=request.is_beta,
    )


# --- one behaviour at a time


def predictor_of(**limits: float) -> ExecutionPredictor:
    return ExecutionPredictor(ProfileTable(A100), InstanceLimits(**limits))  # type: ignore[arg-type]


def test_an_idle_instance_starts_a_newcomer_at_once() -> None:
    forecast = predictor_of().predict(VirtualRequest(key=1, prefill_tokens=100, decode_tokens=10), 50.0)
    assert forecast.start_ms == 50.0
    assert forecast.prefill_end_ms < forecast.end_ms


def test_a_request_that_is_not_ready_lets_others_pass() -> None:
    predictor = predictor_of()
    predictor.add(VirtualRequest(key=1, context_tokens=500, decode_tokens=10, ready_ms=1000.0), 0.0)
    assert predictor.predict(VirtualRequest(key=2, prefill_tokens=10), 0.0).start_ms == 0.0
    assert dict(predictor.play_out(0.0))[1].start_ms == 1000.0


def test_a_request_without_kv_memory_waits_for_the_one_that_holds_it() -> None:
    predictor = predictor_of(kv_tokens=1000)
    predictor.add(VirtualRequest(key=1, prefill_tokens=800, decode_tokens=50), 0.0)
    newcomer = predictor.predict(VirtualRequest(key=2, prefill_tokens=300), 0.0)
    assert newcomer.start_ms == dict(predictor.play_out(0.0))[1].end_ms


def test_a_higher_cost_scale_makes_everything_later() -> None:
    predictor = predictor_of()
    request = VirtualRequest(key=1, prefill_tokens=700, decode_tokens=20)
    before = predictor.predict(request, 0.0)
    predictor.set_cost_scale(2.0, 0.0)
    assert predictor.predict(request, 0.0).end_ms == pytest.approx(2 * before.end_ms)


def test_a_request_is_found_as_far_as_it_is_by_now() -> None:
    predictor = predictor_of()
    predictor.add(VirtualRequest(key=7, context_tokens=100, decode_tokens=10), 0.0)
    predictor.add(VirtualRequest(key=8, prefill_tokens=4000, decode_tokens=10, ready_ms=500.0), 0.0)
    first, later = predictor.find(7, 0.0), predictor.find(7, 1.0)
    assert first is not None
    assert later is not None
    assert (first.context_tokens, first.decode_tokens) == (100, 10)
    assert (later.context_tokens, later.decode_tokens) == (101, 9)
    waiting = predictor.find(8, 1.0)
    assert waiting is not None
    assert (waiting.context_tokens, waiting.prefill_tokens, waiting.ready_ms) == (0, 4000, 500.0)
    assert predictor.find(7, 1e6) is None


@settings(max_examples=200, deadline=None)
@given(
    table=tables,
    limits=all_limits,
    coming=arrivals(),
    which=st.integers(0, 13),
    now_ms=st.floats(0.0, 3000.0),
    prefill=st.integers(1, 2000),
    decode=st.integers(0, 100),
)
def test_a_changed_request_does_what_was_predicted_of_it(
    table: ProfileTable,
    limits: InstanceLimits,
    coming: list[tuple[float, VirtualRequest]],
    which: int,
    now_ms: float,
    prefill: int,
    decode: int,
) -> None:
    predictor = ExecutionPredictor(table, limits)
    for arrived_ms, request in coming:
        predictor.add(request, arrived_ms)
    now_ms = max(now_ms, coming[-1][0])
    key = which % len(coming)
    standing = predictor.find(key, now_ms)
    if standing is None:
        assert predictor.predict_change(VirtualRequest(key=key, prefill_tokens=1), now_ms) is None
        return
    if (unchanged := predictor.predict_change(standing, now_ms)) is not None:
        assert unchanged.end_ms == pytest.approx(dict(predictor.play_out(now_ms))[key].end_ms, rel=1e-9)
    changed = VirtualRequest(
        key=key, context_tokens=standing.context_tokens, prefill_tokens=prefill, decode_tokens=decode, ready_ms=standing.ready_ms
    )
    forecast = predictor.predict_change(changed, now_ms)
    assert (forecast is not None) == predictor.change(changed, now_ms)
    if forecast is not None:
        played = dict(predictor.play_out(now_ms))[key]
        assert played.end_ms == pytest.approx(forecast.end_ms, rel=1e-9)
        assert forecast.prefill_end_ms <= forecast.end_ms


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (VirtualRequest(key=1), "a virtual request has no tokens to compute"),
        (VirtualRequest(key=1, prefill_tokens=-1), r"prefill_tokens is -1; it must lie between 0 and 2\^40"),
        (VirtualRequest(key=1, decode_tokens=2**41), r"decode_tokens is 2199023255552; it must lie between 0 and 2\^40"),
        (VirtualRequest(key=2**63, decode_tokens=1), r"key is 9223372036854775808; it must be below 2\^63"),
        (VirtualRequest(key=1, decode_tokens=1, ready_ms=math.inf), "ready_ms is inf; it must be finite"),
    ],
)
def test_impossible_requests_are_refused(request_: VirtualRequest, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        predictor_of().add(request_, 0.0)


@pytest.mark.parametrize(("field", "value"), [("max_requests", 0), ("max_step_tokens", 0), ("kv_tokens", 0), ("step_ms", 0.0)])
def test_impossible_limits_are_refused_with_their_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} is 0"):
        predictor_of(**{field: value})


def test_what_was_asked_before_changes_no_prediction() -> None:
    """1024 tokens at a time are the cheapest; 2048 that are all there is are not put off."""
    table = ProfileTable(A100)
    for _ in range(300):
        table.observe(BatchShape(prefill_tokens=1024), 110.0)
        table.observe(BatchShape(prefill_tokens=2048), 225.0)

    def end_ms(predictor: ExecutionPredictor, tokens: int) -> float:
        return predictor.predict(VirtualRequest(key=1, prefill_tokens=tokens), 0.0, Horizon.prefill_end).prefill_end_ms

    limits = InstanceLimits(max_step_tokens=2048)
    fresh = {tokens: end_ms(ExecutionPredictor(table, limits), tokens) for tokens in (2048, 6000)}
    for order in ((2048, 6000, 2048), (6000, 2048, 6000)):
        asked = ExecutionPredictor(table, limits)
        assert [end_ms(asked, tokens) for tokens in order] == [fresh[tokens] for tokens in order]


# --- behind a deep queue, whose timeline is not played again for all news

WAITING = 400


class DeepQueue:
    """An instance, and what is told of it: `anew` by a timeline that is played for each question."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.table, self.limits = ProfileTable(A100), InstanceLimits(max_requests=64, step_ms=95.0, kv_tokens=1_000_000)
        self.instance, self.told = (ExecutionPredictor(self.table, self.limits) for _ in range(2))
        for key in range(WAITING):
            request = VirtualRequest(key=key, prefill_tokens=rng.randint(100, 2000), decode_tokens=rng.randint(10, 200))
            self.instance.add(request, 0.0)
            self.told.add(request, 0.0)
        self.told.prefill_free_ms(0.0)

    def standing(self, now_ms: float) -> tuple[list[VirtualRequest], list[VirtualRequest]]:
        """What runs and what waits."""
        live = [request for key in range(WAITING) if (request := self.instance.find(key, now_ms)) is not None]
        return [r for r in live if r.context_tokens > 0], [r for r in live if r.context_tokens == 0]

    def anew(self, now_ms: float) -> ExecutionPredictor:
        predictor = ExecutionPredictor(self.table, self.limits)
        predictor.replace(*self.standing(now_ms), now_ms)
        return predictor


def test_behind_a_deep_queue_predictions_follow_the_news() -> None:
    deep = DeepQueue()
    deep.instance.set_cost_scale(1.2, 0.0)
    for news in range(1, 200):
        now_ms = 50.0 * news
        deep.told.replace(*deep.standing(now_ms), now_ms)
        assert deep.told.prefill_free_ms(now_ms) - now_ms == pytest.approx(deep.anew(now_ms).prefill_free_ms(now_ms) - now_ms, rel=0.02)


def test_a_beta_that_overtakes_a_deep_queue_begins_before_it() -> None:
    deep = DeepQueue()
    beta = VirtualRequest(key=WAITING, context_tokens=1000, prefill_tokens=500, decode_tokens=50, ready_ms=10.0, is_beta=True)
    queue_ms = deep.told.prefill_free_ms(0.0)
    deep.told.add(beta, 0.0)
    forecast = deep.told.predict_rest(WAITING, 0.0)
    assert forecast is not None
    assert forecast.start_ms == pytest.approx(dict(deep.told.play_out(0.0))[WAITING].start_ms, rel=0.02)
    assert forecast.start_ms < 0.1 * queue_ms


def test_behind_a_deep_queue_a_great_change_counts_at_once() -> None:
    deep = DeepQueue()
    for key in range(100, 140):
        assert deep.instance.remove(key, 0.0)
        assert deep.told.remove(key, 0.0)
    assert deep.told.prefill_free_ms(0.0) == pytest.approx(deep.anew(0.0).prefill_free_ms(0.0), rel=1e-9)


def test_behind_a_deep_queue_other_speeds_count_once_they_make_a_difference() -> None:
    deep = DeepQueue()
    for scale in (1.005, 1.01, 1.015, 1.02, 1.025, 1.03):
        deep.told.set_cost_scale(scale, 0.0)
        as_before = ExecutionPredictor(deep.table, deep.limits)
        as_before.set_cost_scale(scale, 0.0)
        as_before.replace(*deep.standing(0.0), 0.0)
        assert deep.told.prefill_free_ms(0.0) == pytest.approx(as_before.prefill_free_ms(0.0), rel=0.025)


def test_behind_a_deep_queue_a_request_is_what_it_was_changed_to() -> None:
    deep = DeepQueue()
    last = WAITING - 1
    longer = VirtualRequest(key=last, prefill_tokens=3000, decode_tokens=300)
    assert deep.instance.change(longer, 0.0)
    assert deep.told.change(longer, 0.0)
    assert deep.told.find(last, 0.0) == longer
    rest, expected = deep.told.predict_rest(last, 0.0), deep.anew(0.0).predict_rest(last, 0.0)
    assert rest is not None
    assert expected is not None
    assert rest.end_ms == pytest.approx(expected.end_ms, rel=0.01)
    assert rest.end_ms - rest.prefill_end_ms == pytest.approx(expected.end_ms - expected.prefill_end_ms, rel=0.05)
    assert deep.told.remove(last, 0.0)
    assert deep.told.predict_rest(last, 0.0) is None


def test_behind_a_deep_queue_what_comes_late_is_behind_all() -> None:
    deep = DeepQueue()
    newcomer = VirtualRequest(key=WAITING, prefill_tokens=500, decode_tokens=50)
    deep.told.remove(WAITING - 1, 0.0)
    deep.told.add(newcomer, 0.0)
    rest = deep.told.predict_rest(WAITING, 0.0)
    assert rest is not None
    assert rest.end_ms >= max(forecast.start_ms for _, forecast in deep.told.play_out(0.0))
