"""Requests that were placed whole, and decode where the fleet plan wants no decodes: when they are cut, through the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.execution_predictor import InstanceLimits
from dynaserve.global_scheduler import GlobalScheduler, InstanceState, Options, Policy, Progress, RequestSpec, RevisionReason
from dynaserve.step_latency import ProfileTable, Roofline

TABLE = ProfileTable(Roofline(overhead_ms=12.0, token_ms=0.105, knee_tokens=160.0, pair_ms=1.1e-6, decode_ms=0.05, context_ms=1.3e-4))
GATHERS, FREE, ALSO_GATHERS = "i0", "i1", "i2"
PROMPT = 500
NOW_MS = 20_000.0


def progress(request_id: str, computed: int, expected: int, *, begun: bool = True) -> Progress:
    return Progress(request_id=request_id, computed_tokens=computed, expected_output_tokens=expected, begun=begun)


@dataclass
class Fleet:
    """Of two instances, the first of which gathers; a request decodes on the other one, whole. prompts_per_s: of 2,000 tokens each, which
    are over as soon as they have come, and were expected to have so long answers. gathered: decodes on the first. elsewhere: on a third,
    which gathers as well, of 30,000 tokens each. step_ms, seats: that the first may take, and has."""

    gathered: int = 10
    context: int = 1000
    prompts_per_s: float = 8.0
    answers: int = 1
    may_cut: bool = True
    forced: bool = False
    others: int = 0
    elsewhere: int = 0
    step_ms: float = 47.5
    seats: int = 256
    scheduler: GlobalScheduler = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = GlobalScheduler(Options(Policy.dynamic, gathering=2 if self.elsewhere else 1), TABLE)
        self.accept(GATHERS, False)
        self.accept(FREE, False)
        if self.elsewhere:
            self.accept(ALSO_GATHERS)
            for number in range(self.elsewhere):
                self.place(f"elsewhere-{number}", 30_000, 400, may_cut=True)
            self.accept(ALSO_GATHERS, False)
        self.accept(GATHERS)
        for number in range(self.gathered):
            self.place(f"gathered-{number}", self.context, 400, may_cut=True)
        self.accept(FREE)
        count = int(self.prompts_per_s * NOW_MS / 1e3)
        for number in range(count):
            self.place(f"prompt-{number}", 2000, self.answers, NOW_MS * number / count)
            self.scheduler.finish(f"prompt-{number}", NOW_MS * number / count)
        self.accept(GATHERS, False)
        self.place("r", PROMPT, 30, NOW_MS, may_cut=self.may_cut, forced_split=0 if self.forced else None)
        for number in range(self.others):
            self.place(f"other-{number}", PROMPT, 30, NOW_MS, may_cut=True)
        self.accept(GATHERS)
        if self.elsewhere:
            self.accept(ALSO_GATHERS)
        self.tell_gathered()
        self.place("plans", 2000, 1, NOW_MS + 300.0)
        self.scheduler.finish("plans", NOW_MS + 300.0)

    def accept(self, name: str, accepts: bool = True) -> None:
        first = name == GATHERS
        limits = InstanceLimits(step_ms=self.step_ms if first else 47.5, max_requests=self.seats if first else 256, kv_tokens=400_000)
        self.scheduler.observe(InstanceState(name, accepts, limits))

    def place(
        self, name: str, prompt: int, output: int, now_ms: float = 0.0, *, may_cut: bool = False, forced_split: int | None = None
    ) -> None:
        spec = RequestSpec(
            request_id=name,
            prompt_tokens=prompt,
            max_output_tokens=output,
            expected_output_tokens=output,
            may_cut=may_cut,
            forced_split=forced_split,
        )
        placement = self.scheduler.place(spec, now_ms)
        assert placement is not None
        assert name != "r" or (placement.alpha.instance_id == FREE and placement.beta is None)
        if name == "plans":
            assert placement.prediction is not None
            assert placement.prediction.gathering == (2 if self.elsewhere else 1)

    def tell_gathered(self) -> None:
        told = [progress(f"gathered-{number}", self.context + 50, 400) for number in range(self.gathered)]
        self.scheduler.report(GATHERS, told, NOW_MS + 200.0)
        elsewhere = [progress(f"elsewhere-{number}", 30_050, 400) for number in range(self.elsewhere)]
        if elsewhere:
            self.scheduler.report(ALSO_GATHERS, elsewhere, NOW_MS + 200.0)

    def tell(self, emitted: int, expected: int, now_ms: float = NOW_MS + 500.0) -> None:
        """Of the request on the instance that is kept free."""
        self.scheduler.report(FREE, [progress("r", PROMPT + emitted - 1, expected)], now_ms)


def test_an_answer_that_outgrows_what_was_expected_goes_where_decodes_are_gathered() -> None:
    fleet = Fleet()
    fleet.tell(40, 2000)
    revision = fleet.scheduler.revise("r", NOW_MS + 500.0)
    assert revision is not None
    assert (revision.reason, revision.beta) == (RevisionReason.gathers_decodes, GATHERS)
    assert revision.split_token is not None
    assert PROMPT + 40 < revision.split_token < PROMPT + 80
    assert revision.objective_ms < revision.kept_objective_ms
    at_ms = fleet.scheduler.predict_hand_off_ms("r", NOW_MS + 500.0)
    assert at_ms is not None
    assert NOW_MS + 500.0 < at_ms < revision.hand_off_ms
    end_ms = fleet.scheduler.predict_end_ms("r", NOW_MS + 500.0)
    assert end_ms is not None
    assert end_ms > revision.hand_off_ms
    fleet.scheduler.check_invariants()
    assert fleet.scheduler.revise("r", NOW_MS + 5000.0) is None, "it is cut once"
    fleet.scheduler.parked("r", revision.split_token, NOW_MS + 900.0)
    fleet.scheduler.report(FREE, [], NOW_MS + 1000.0)
    fleet.scheduler.finish("r", NOW_MS + 2000.0)
    fleet.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("what", "fleet", "emitted", "expected"),
    [
        ("it is about to end", Fleet(), 40, 45),
        ("it has not begun to decode", Fleet(), 100 - PROMPT, 2000),
        ("prompts do not press", Fleet(prompts_per_s=1.0), 40, 2000),
        ("those that decode where decodes are gathered leave no room", Fleet(gathered=240), 40, 2000),
        ("those that decode where decodes are gathered leave no seat", Fleet(gathered=20, seats=20), 40, 2000),
        ("it must not be cut", Fleet(may_cut=False), 40, 2000),
        ("its caller wants it whole", Fleet(forced=True), 40, 2000),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_request_stays_whole(what: str, fleet: Fleet, emitted: int, expected: int) -> None:
    fleet.tell(emitted, expected)
    assert fleet.scheduler.revise("r", NOW_MS + 500.0) is None, what
    fleet.scheduler.check_invariants()


def test_one_is_cut_after_the_other() -> None:
    fleet = Fleet(others=3)
    now_ms = NOW_MS + 500.0
    names = ["r", "other-0", "other-1", "other-2"]
    fleet.scheduler.report(FREE, [progress(name, PROMPT + 39, 2000) for name in names], now_ms)
    first = [fleet.scheduler.revise(name, now_ms) for name in names]
    (revision,) = (one for one in first if one is not None)
    then_ms = revision.hand_off_ms + 1.0
    fleet.scheduler.report(FREE, [progress(name, PROMPT + 60, 2000) for name in names], then_ms)
    assert sum(fleet.scheduler.revise(name, then_ms) is not None for name in names) == 1
    fleet.scheduler.check_invariants()


def test_those_that_decode_there_share_the_price() -> None:
    def stays_ms(others: int) -> float:
        fleet, now_ms = Fleet(others=others), NOW_MS + 500.0
        names = ["r", *(f"other-{number}" for number in range(others))]
        fleet.scheduler.report(FREE, [progress(name, PROMPT + 39, 2000) for name in names], now_ms)
        revision = fleet.scheduler.revise("r", now_ms)
        assert revision is not None
        return revision.kept_objective_ms

    assert stays_ms(3) == pytest.approx(stays_ms(0) / 4, rel=0.1)


@pytest.mark.parametrize(
    ("gathered", "prompts_per_s", "answers", "decodes_on"),
    [(100, 2.0, 600, FREE), (100, 2.0, 1, GATHERS), (60, 2.0, 600, GATHERS), (100, 4.0, 600, GATHERS)],
    ids=["answers-are-what-the-fleet-lacks", "few-answers-come", "there-is-room", "prompts-are-what-the-fleet-lacks"],
)
def test_what_decodes_are_gathered_for_has_no_price_where_answers_are_lacking(
    gathered: int, prompts_per_s: float, answers: int, decodes_on: str
) -> None:
    fleet = Fleet(gathered=gathered, prompts_per_s=prompts_per_s, answers=answers)
    spec = RequestSpec(request_id="long", prompt_tokens=PROMPT, max_output_tokens=1000, expected_output_tokens=1000)
    placement = fleet.scheduler.place(spec, NOW_MS + 400.0)
    assert placement is not None
    assert (placement.beta or placement.alpha).instance_id == decodes_on


def test_those_that_only_wait_there_have_no_share_in_the_price() -> None:
    def stays_ms(waiting: int) -> float:
        fleet, now_ms = Fleet(), NOW_MS + 500.0
        fleet.accept(GATHERS, False)
        for number in range(waiting):
            fleet.place(f"waits-{number}", 1000, 5, NOW_MS + 310.0)
        fleet.accept(GATHERS)
        fleet.place("plans", 16, 1, NOW_MS + 320.0)
        fleet.scheduler.finish("plans", NOW_MS + 320.0)
        told = [progress(f"waits-{number}", 0, 5, begun=False) for number in range(waiting)]
        fleet.scheduler.report(FREE, [progress("r", PROMPT + 39, 2000), *told], now_ms)
        revision = fleet.scheduler.revise("r", now_ms)
        assert revision is not None
        return revision.kept_objective_ms

    assert stays_ms(30) > stays_ms(0)


@pytest.mark.parametrize(("gathered", "beta"), [(240, ALSO_GATHERS), (10, GATHERS)])
def test_it_goes_where_steps_have_room_and_of_these_to_the_most_memory(gathered: int, beta: str) -> None:
    fleet = Fleet(gathered=gathered, context=100, elsewhere=4)
    fleet.tell(40, 2000)
    revision = fleet.scheduler.revise("r", NOW_MS + 500.0)
    assert revision is not None
    assert revision.beta == beta


def test_a_gatherer_without_a_limit_of_steps_takes_it() -> None:
    fleet, now_ms = Fleet(step_ms=math.inf), NOW_MS + 510.0  # in the midst of a step
    fleet.tell(40, 2000)
    assert fleet.scheduler.revise("r", now_ms) is not None


def test_few_are_looked_at_at_a_time() -> None:
    """Of those that decode there all but the last are about to end, and stay."""
    names = ["r", *(f"other-{number}" for number in range(20))]

    def looked_at(order: list[str]) -> list[bool]:
        fleet, now_ms = Fleet(others=20), NOW_MS + 500.0
        fleet.scheduler.report(FREE, [progress(name, PROMPT + 39, 42 if name != names[-1] else 2000) for name in names], now_ms)
        return [fleet.scheduler.revise(name, now_ms) is not None for name in order]

    assert any(looked_at(names[-3:]))
    assert not any(looked_at(names))


@pytest.mark.parametrize("name", [GATHERS, FREE])
def test_nothing_is_cut_from_or_to_an_instance_that_takes_no_new_requests(name: str) -> None:
    fleet = Fleet()
    fleet.tell(40, 2000)
    fleet.accept(name, False)
    assert fleet.scheduler.revise("r", NOW_MS + 500.0) is None
    fleet.accept(name)
    assert fleet.scheduler.revise("r", NOW_MS + 800.0) is not None


def test_an_answer_goes_on_elsewhere_while_prompts_wait_though_nobody_comes_any_more() -> None:
    def revision(waiting: int) -> object:
        fleet = Fleet(prompts_per_s=1.0)
        fleet.accept(GATHERS, False)
        for number in range(waiting):
            fleet.place(f"waits-{number}", 8000, 1, NOW_MS + 310.0)
        fleet.accept(GATHERS)
        fleet.place("plans", 16, 1, NOW_MS + 60_000.0)  # by then no arrival counts
        fleet.scheduler.finish("plans", NOW_MS + 60_000.0)
        told = [progress(f"waits-{number}", 0, 1, begun=False) for number in range(waiting)]
        fleet.scheduler.report(FREE, [progress("r", PROMPT + 39, 200), *told], NOW_MS + 60_000.0)
        return fleet.scheduler.revise("r", NOW_MS + 60_100.0)

    assert revision(0) is None
    assert revision(40) is not None


@settings(max_examples=100, deadline=None)
@given(
    emitted=st.integers(1, 400),
    more=st.integers(1, 4000),
    gathered=st.integers(0, 60),
    ends=st.sampled_from(["parks", "lifted", "finished", "beta removed", "alpha removed"]),
)
def test_the_books_are_kept_whatever_becomes_of_a_late_cut(emitted: int, more: int, gathered: int, ends: str) -> None:
    fleet = Fleet(gathered=gathered)
    scheduler, now_ms = fleet.scheduler, NOW_MS + 500.0
    fleet.tell(emitted, emitted + more)
    revision = scheduler.revise("r", now_ms)
    if revision is None:
        return
    assert revision.split_token is not None
    assert PROMPT + emitted - 1 < revision.split_token < PROMPT + emitted + more - 1
    match ends:
        case "parks":
            scheduler.parked("r", revision.split_token, now_ms + 50.0)
        case "lifted":
            scheduler.recut("r", None, now_ms + 50.0)
        case "beta removed":
            scheduler.remove(GATHERS)
        case "alpha removed":
            scheduler.remove(FREE)
    scheduler.check_invariants()
    assert scheduler.revise("r", now_ms + 1000.0) is None
    scheduler.finish("r", now_ms + 2000.0)
    scheduler.check_invariants()


def test_somebody_may_cut_a_whole_request_once() -> None:
    fleet = Fleet(prompts_per_s=1.0)
    scheduler, now_ms = fleet.scheduler, NOW_MS + 500.0
    fleet.tell(10, 100)
    for request_id, beta in (("unknown", GATHERS), ("r", "unknown"), ("r", FREE)):
        scheduler.cut_whole(request_id, beta, PROMPT + 20, now_ms)
        assert scheduler.predict_hand_off_ms("r", now_ms) is None
    scheduler.cut_whole("r", GATHERS, PROMPT + 20, now_ms)
    at_ms = scheduler.predict_hand_off_ms("r", now_ms)
    assert at_ms is not None
    scheduler.cut_whole("r", GATHERS, PROMPT + 80, now_ms)
    assert scheduler.predict_hand_off_ms("r", now_ms) == at_ms
    scheduler.check_invariants()
    with pytest.raises(ValueError, match="split_token is 0"):
        scheduler.cut_whole("r", GATHERS, 0, now_ms)
    colocated = GlobalScheduler(Options(Policy.colocated))
    colocated.observe(InstanceState("a"))
    colocated.observe(InstanceState("b", accepts_new=False))
    colocated.place(RequestSpec(request_id="r", prompt_tokens=10, max_output_tokens=10, expected_output_tokens=10), 0.0)
    assert [colocated.reserved_tokens(name) for name in ("a", "b")] == [19, 0]
    for _ in range(2):
        colocated.cut_whole("r", "b", 5, 1.0)
        assert [colocated.reserved_tokens(name) for name in ("a", "b")] == [5, 14]
    colocated.check_invariants()
    colocated.finish("r", 2.0)
    assert [colocated.reserved_tokens(name) for name in ("a", "b")] == [0, 0]
    colocated.check_invariants()
