"""Placement and reservations of the global scheduler, against a dictionary model and a brute-force oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from dynaserve.global_scheduler import (
    GlobalScheduler,
    InstanceState,
    MicroRequest,
    Options,
    OtherRequest,
    Placement,
    PlacementReason,
    Policy,
    RequestSpec,
    parse_policy,
    predicts,
)

MakeScheduler: TypeAlias = Callable[..., GlobalScheduler]

INSTANCE_IDS = ["a", "b", "c", "d", "e"]
CUT = {PlacementReason.forced, PlacementReason.policy}

ratios = st.floats(0.0, 1.0)
all_options = st.builds(
    Options,
    st.sampled_from([policy for policy in Policy if not predicts(policy)]),
    ratios,
    prefill_instances=st.integers(0, 6),
)


@st.composite
def requests(draw: st.DrawFn, request_id: str = "r") -> RequestSpec:
    prompt_tokens = draw(st.integers(0, 200))
    max_output_tokens = draw(st.integers(0, 200))
    return RequestSpec(
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        max_output_tokens=max_output_tokens,
        expected_output_tokens=draw(st.integers(0, 250)),
        forced_split=draw(st.none() | st.integers(0, prompt_tokens + max_output_tokens)),
        may_cut=draw(st.sampled_from([True, True, True, False])),
        fits_whole_only=draw(st.booleans()),
    )


def simple_request(request_id: str = "r", *, forced_split: int | None = None, may_cut: bool = True) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        prompt_tokens=10,
        max_output_tokens=20,
        expected_output_tokens=11,
        forced_split=forced_split,
        may_cut=may_cut,
    )


def computed_tokens(prompt_tokens: int, output_tokens: int) -> int:
    return prompt_tokens + max(output_tokens - 1, 0)


def fitting_request(request_id: str, fits_whole_only: bool) -> RequestSpec:
    return RequestSpec(
        request_id=request_id, prompt_tokens=10, max_output_tokens=20, expected_output_tokens=11, fits_whole_only=fits_whole_only
    )


def limit_end(request: RequestSpec) -> int:
    return computed_tokens(request.prompt_tokens, request.max_output_tokens)


def expected_end(request: RequestSpec) -> int:
    return computed_tokens(request.prompt_tokens, min(request.expected_output_tokens, request.max_output_tokens))


def parts(placement: Placement) -> list[MicroRequest]:
    return [placement.alpha] if placement.beta is None else [placement.alpha, placement.beta]


@pytest.fixture
def make_scheduler() -> Iterator[MakeScheduler]:
    """Schedulers over the named instances; all of them must be consistent when the test ends."""
    made: list[GlobalScheduler] = []

    def make(policy: str = "colocated", *, instances: str = "ab") -> GlobalScheduler:
        made.append(scheduler_over(parse_policy(policy), list(instances)))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.check_invariants()


def scheduler_over(options: Options, instance_ids: list[str]) -> GlobalScheduler:
    scheduler = GlobalScheduler(options)
    for instance_id in instance_ids:
        scheduler.observe(InstanceState(instance_id))
    return scheduler


# --- the decision, one behaviour at a time


def test_without_instances_nothing_is_placed(make_scheduler: MakeScheduler) -> None:
    assert make_scheduler(instances="").place(simple_request()) is None


def test_draining_instances_get_no_new_work(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.observe(InstanceState("a", accepts_new=False))
    assert scheduler.place(simple_request()) == Placement(MicroRequest("b", 0, 20), None, PlacementReason.single_instance)


@pytest.mark.parametrize("policy", ["colocated", "disaggregated", "fixed:0.3"])
def test_a_whole_only_instance_takes_its_turns_of_what_fits_it(make_scheduler: MakeScheduler, policy: str) -> None:
    scheduler = make_scheduler(policy)
    scheduler.observe(InstanceState("c", whole_only=True))
    placements = [scheduler.place(fitting_request(str(number), fits)) for number, fits in enumerate([False, False, True, True])]
    names = [[part.instance_id for part in parts(placement)] for placement in placements if placement]
    assert names[2] == ["c"]
    assert not any("c" in others for others in (names[0], names[1], names[3]))


def test_what_does_not_fit_the_only_instance_is_not_placed(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler(instances="")
    scheduler.observe(InstanceState("a", whole_only=True))
    assert scheduler.place(fitting_request("1", False)) is None
    assert scheduler.place(fitting_request("2", True)) == Placement(MicroRequest("a", 0, 20), None, PlacementReason.whole_only)


def test_colocated_instances_take_turns(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler("colocated", instances="abc")
    placements = [scheduler.place(simple_request(str(number))) for number in range(6)]
    assert [placement.alpha.instance_id for placement in placements if placement] == list("abcabc")


def test_what_other_front_ends_have_placed_counts(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.report_others("a", [OtherRequest(computed_tokens=10, prompt_tokens=10, end_token=40, waits=True)], 0.0)
    assert scheduler.reserved_tokens("a") == 30
    placements = [scheduler.place(simple_request(str(number))) for number in range(2)]
    assert [placement.alpha.instance_id for placement in placements if placement is not None] == ["b", "b"]
    scheduler.report_others("a", [], 0.0)
    assert scheduler.reserved_tokens("a") == 0


@pytest.mark.parametrize("name", ["computed_tokens", "prompt_tokens", "end_token"])
def test_impossible_reservations_of_others_are_refused(make_scheduler: MakeScheduler, name: str) -> None:
    scheduler = make_scheduler()
    tokens: dict[str, Any] = {"computed_tokens": 1, "prompt_tokens": 2, "end_token": 3}
    with pytest.raises(ValueError, match=f"{name} is -1"):
        scheduler.report_others("a", [OtherRequest(**tokens), OtherRequest(**tokens | {name: -1})], 0.0)
    assert scheduler.reserved_tokens("a") == 0


def test_disaggregated_prefills_on_the_first_half_and_decodes_on_the_rest(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler("disaggregated", instances="abc")
    assert scheduler.place(simple_request()) == Placement(MicroRequest("a", 0, 10), MicroRequest("b", 10, 20), PlacementReason.policy)


def test_fixed_ratio_cuts_the_expected_tokens(make_scheduler: MakeScheduler) -> None:
    placement = make_scheduler("fixed:0.3").place(simple_request())
    assert placement == Placement(MicroRequest("a", 0, 6), MicroRequest("b", 6, 20), PlacementReason.policy)


@pytest.mark.parametrize("policy", ["colocated", "disaggregated", "fixed:0.3"])
def test_forced_split_overrides_every_policy(make_scheduler: MakeScheduler, policy: str) -> None:
    placement = make_scheduler(policy).place(simple_request(forced_split=7))
    assert placement == Placement(MicroRequest("a", 0, 7), MicroRequest("b", 7, 20), PlacementReason.forced)
    assert placement.split_token == 7


@pytest.mark.parametrize(
    ("forced_split", "reason"),
    [(0, "split_at_start"), (1, "forced"), (28, "forced"), (29, "split_at_end"), (30, "split_at_end")],
)
def test_forced_split_cuts_strictly_inside_the_output_limit(make_scheduler: MakeScheduler, forced_split: int, reason: str) -> None:
    placement = make_scheduler().place(simple_request(forced_split=forced_split))
    assert placement is not None
    assert placement.reason.name == reason


def test_a_request_that_may_not_be_cut_runs_whole_although_forced(make_scheduler: MakeScheduler) -> None:
    placement = make_scheduler("fixed:0.5").place(simple_request(forced_split=7, may_cut=False))
    assert placement == Placement(MicroRequest("a", 0, 20), None, PlacementReason.not_cuttable)


def test_finish_of_an_unknown_request_changes_nothing(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.place(simple_request())
    scheduler.finish("other")
    assert scheduler.reserved_tokens("a") == 20


# --- refusals


def test_placing_a_request_twice_is_refused(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.place(simple_request("r"))
    with pytest.raises(ValueError, match=r'^request_id "r" is already placed$'):
        scheduler.place(simple_request("r"))


@pytest.mark.parametrize(
    ("name", "prompt", "limit", "expected"),
    [("prompt_tokens", -5, 1, 1), ("max_output_tokens", 1, -5, 1), ("expected_output_tokens", 1, 1, -5)],
)
def test_negative_token_counts_are_refused(make_scheduler: MakeScheduler, name: str, prompt: int, limit: int, expected: int) -> None:
    request = RequestSpec(request_id="r", prompt_tokens=prompt, max_output_tokens=limit, expected_output_tokens=expected)
    with pytest.raises(ValueError, match=f"^{name} is -5, outside"):
        make_scheduler().place(request)


@pytest.mark.parametrize("forced_split", [-1, 31])
def test_forced_split_outside_the_request_is_refused(make_scheduler: MakeScheduler, forced_split: int) -> None:
    with pytest.raises(ValueError, match=rf"^forced_split is {forced_split}, outside \[0, 30\]"):
        make_scheduler().place(simple_request(forced_split=forced_split))


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_ratio_outside_the_unit_interval_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=rf"^ratio is {ratio}, outside \[0, 1\]$"):
        GlobalScheduler(Options(Policy.fixed, ratio))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("colocated", Options(Policy.colocated)),
        ("disaggregated", Options(Policy.disaggregated)),
        ("fixed:0.3", Options(Policy.fixed, 0.3)),
        ("fixed:1", Options(Policy.fixed, 1.0)),
        ("disaggregated:1P3D", Options(Policy.disaggregated, prefill_instances=1)),
        ("dynamic", Options(Policy.dynamic)),
        ("paper", Options(Policy.paper)),
    ],
)
def test_policy_text_becomes_options(text: str, options: Options) -> None:
    assert parse_policy(text) == options


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Colocated",
        "colocated:1",
        "fixed",
        "fixed:",
        "fixed:x",
        "fixed:1.5",
        "fixed:-0.1",
        "fixed:nan",
        "disaggregated:0P2D",
        "dynamic:1",
    ],
)
def test_unknown_policy_text_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^policy is '{text}'; accepted are 'colocated', 'disaggregated', "):
        parse_policy(text)


def test_disaggregation_for_another_number_of_instances_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^policy is 'disaggregated:1P3D', for 4 instances; there are 2$"):
        parse_policy("disaggregated:1P3D", 2)


# --- properties over all requests, policies and fleets


@given(options=all_options, request=requests(), num_instances=st.integers(1, 5))
def test_every_placement_covers_the_request_with_legal_parts(options: Options, request: RequestSpec, num_instances: int) -> None:
    placement = scheduler_over(options, INSTANCE_IDS[:num_instances]).place(request)
    assert placement is not None
    assert placement.alpha.start_token == 0
    assert (placement.beta is not None) == (placement.reason in CUT)
    if placement.beta is None:
        assert placement.alpha.end_token == expected_end(request)
        return
    assert 0 < placement.split_token < limit_end(request)
    assert placement.beta.start_token == placement.split_token
    assert placement.beta.end_token == max(expected_end(request), placement.split_token + 1)
    assert placement.beta.instance_id != placement.alpha.instance_id


@given(options=all_options, request=requests(), num_instances=st.integers(2, 5))
def test_a_forced_split_cuts_exactly_there_if_it_is_legal(options: Options, request: RequestSpec, num_instances: int) -> None:
    placement = scheduler_over(options, INSTANCE_IDS[:num_instances]).place(request)
    assert placement is not None
    split = request.forced_split
    legal = request.may_cut and split is not None and 0 < split < limit_end(request)
    assert (placement.reason is PlacementReason.forced) == legal
    if legal:
        assert placement.split_token == split


@given(options=all_options, sequence=st.lists(requests(), max_size=20))
def test_the_same_calls_give_the_same_placements(options: Options, sequence: list[RequestSpec]) -> None:
    def placements(instance_ids: list[str]) -> list[Placement | None]:
        scheduler = scheduler_over(options, instance_ids)
        return [scheduler.place(renamed(request, str(number))) for number, request in enumerate(sequence)]

    assert placements(INSTANCE_IDS) == placements(INSTANCE_IDS[::-1])


def renamed(request: RequestSpec, request_id: str) -> RequestSpec:
    return RequestSpec(
        request_id=request_id,
        prompt_tokens=request.prompt_tokens,
        max_output_tokens=request.max_output_tokens,
        expected_output_tokens=request.expected_output_tokens,
        forced_split=request.forced_split,
        may_cut=request.may_cut,
        fits_whole_only=request.fits_whole_only,
    )


# --- the model: what the scheduler must know, as dictionaries, and the decision by exhaustive search


@dataclass
class Model:
    """The scheduler's contract in its plainest form."""

    options: Options
    accepts_new: dict[str, bool] = field(default_factory=dict)
    whole_only: set[str] = field(default_factory=set)
    others: dict[str, int] = field(default_factory=dict)
    last_used: dict[str, int] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    num_reservations: int = 0

    def reserved_tokens(self, instance_id: str) -> int:
        held = [part for placement in self.placements.values() for part in parts(placement)]
        own = sum(part.end_token - part.start_token for part in held if part.instance_id == instance_id)
        return own + self.others.get(instance_id, 0)

    def reserve(self, request_id: str, placement: Placement) -> None:
        self.placements[request_id] = placement
        for part in parts(placement):
            self.num_reservations += 1
            self.last_used[part.instance_id] = self.num_reservations

    def remove(self, instance_id: str) -> None:
        self.accepts_new.pop(instance_id, None)
        self.others.pop(instance_id, None)
        self.last_used.pop(instance_id, None)

    def place(self, request: RequestSpec) -> Placement | None:
        accepting = sorted(instance_id for instance_id, accepts_new in self.accepts_new.items() if accepts_new)
        least = min(accepting, key=self._preference, default=None)
        cut_by_hand = request.forced_split is not None and request.may_cut
        if request.fits_whole_only and not cut_by_hand and least in self.whole_only:
            return Placement(MicroRequest(least, 0, expected_end(request)), None, PlacementReason.whole_only)
        accepting = [instance_id for instance_id in accepting if instance_id not in self.whole_only]
        if not accepting:
            return None
        alphas, betas = self._groups(accepting)
        reason, split = self._split(request, len(accepting))
        if reason not in CUT:
            instance_id = min(alphas if reason is PlacementReason.split_at_end else betas, key=self._preference)
            return Placement(MicroRequest(instance_id, 0, expected_end(request)), None, reason)
        pairs = [(alpha, beta) for alpha in alphas for beta in betas if alpha != beta]
        alpha, beta = min(pairs, key=lambda pair: (self._preference(pair[0]), self._preference(pair[1])))
        end_token = max(expected_end(request), split + 1)
        return Placement(MicroRequest(alpha, 0, split), MicroRequest(beta, split, end_token), reason)

    def _preference(self, instance_id: str) -> tuple[int, int, str]:
        return self.reserved_tokens(instance_id), self.last_used.get(instance_id, 0), instance_id

    def _groups(self, accepting: list[str]) -> tuple[list[str], list[str]]:
        one_way = self.options.policy is Policy.fixed and self.options.prefill_instances > 0
        if not (one_way or self.options.policy is Policy.disaggregated) or len(accepting) == 1:
            return accepting, accepting
        half = max(1, len(accepting) // 2)
        prefilling = min(self.options.prefill_instances, len(accepting) - 1) or half
        return accepting[:prefilling], accepting[prefilling:]

    def _split(self, request: RequestSpec, num_instances: int) -> tuple[PlacementReason, int]:
        split = self._policy_split(request) if request.forced_split is None else request.forced_split
        rules = [
            (not request.may_cut, PlacementReason.not_cuttable),
            (limit_end(request) < 2, PlacementReason.prompt_too_short),
            (num_instances == 1, PlacementReason.single_instance),
            (split is None, PlacementReason.colocated),
            (split == 0, PlacementReason.split_at_start),
            (split is not None and split >= limit_end(request), PlacementReason.split_at_end),
            (request.forced_split is not None, PlacementReason.forced),
        ]
        return next((reason for applies, reason in rules if applies), PlacementReason.policy), split or 0

    def _policy_split(self, request: RequestSpec) -> int | None:
        if self.options.policy is Policy.colocated:
            return None
        if self.options.policy is Policy.disaggregated:
            return request.prompt_tokens
        return int(Decimal(self.options.ratio * expected_end(request)).quantize(Decimal(1), ROUND_HALF_UP))


class SchedulerAgainstModel(RuleBasedStateMachine):
    """Random events on the scheduler and the model: equal placements, equal reservations, no leak."""

    placed = Bundle("placed")

    @initialize(options=all_options, instance_ids=st.sets(st.sampled_from(INSTANCE_IDS)))
    def start(self, options: Options, instance_ids: set[str]) -> None:
        self.scheduler = GlobalScheduler(options)
        self.model = Model(options)
        self.num_placed = 0
        for instance_id in sorted(instance_ids):
            self.observe(instance_id, True)

    @rule(instance_id=st.sampled_from(INSTANCE_IDS), accepts_new=st.booleans(), whole_only=st.booleans())
    def observe(self, instance_id: str, accepts_new: bool, whole_only: bool = False) -> None:
        self.scheduler.observe(InstanceState(instance_id, accepts_new, whole_only=whole_only))
        self.model.accepts_new[instance_id] = accepts_new
        (self.model.whole_only.add if whole_only else self.model.whole_only.discard)(instance_id)

    @rule(instance_id=st.sampled_from(INSTANCE_IDS))
    def remove(self, instance_id: str) -> None:
        self.scheduler.remove(instance_id)
        self.model.remove(instance_id)

    @rule(instance_id=st.sampled_from(INSTANCE_IDS), tokens=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=3))
    def hear_of_others(self, instance_id: str, tokens: list[tuple[int, int]]) -> None:
        others = [OtherRequest(computed_tokens=computed, prompt_tokens=50, end_token=end) for computed, end in tokens]
        self.scheduler.report_others(instance_id, others, 0.0)
        if instance_id in self.model.accepts_new:
            self.model.others[instance_id] = sum(max(0, end - computed) for computed, end in tokens)

    @rule(target=placed, request=requests())
    def place(self, request: RequestSpec) -> str:
        self.num_placed += 1
        request = renamed(request, str(self.num_placed))
        placement = self.scheduler.place(request)
        assert placement == self.model.place(request)
        if placement is not None:
            self.model.reserve(request.request_id, placement)
        return request.request_id

    @precondition(lambda self: self.model.placements)
    @rule(request=requests(), data=st.data())
    def place_again(self, request: RequestSpec, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model.placements)))
        with pytest.raises(ValueError, match="already placed"):
            self.scheduler.place(renamed(request, request_id))

    @rule(request_id=consumes(placed))
    def finish(self, request_id: str) -> None:
        self.scheduler.finish(request_id)
        self.model.placements.pop(request_id, None)

    @invariant()
    def reservations_match_the_model(self) -> None:
        self.scheduler.check_invariants()
        for instance_id in INSTANCE_IDS:
            assert self.scheduler.reserved_tokens(instance_id) == self.model.reserved_tokens(instance_id)

    def teardown(self) -> None:
        for request_id in list(self.model.placements):
            self.scheduler.finish(request_id)
        for instance_id in INSTANCE_IDS:
            self.scheduler.report_others(instance_id, [], 0.0)
        self.scheduler.check_invariants()
        assert [self.scheduler.reserved_tokens(instance_id) for instance_id in INSTANCE_IDS] == [0] * len(INSTANCE_IDS)


SchedulerAgainstModel.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_scheduler_behaves_as_the_model = SchedulerAgainstModel.TestCase
