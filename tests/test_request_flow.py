"""The life of a request in the front-end, without a fleet."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.flow_events import (
    ClientGone,
    Fail,
    Forward,
    InstanceDied,
    Instruction,
    PlaceAgain,
    SendAbort,
    SendAnnounce,
    SendContinue,
    SendCut,
    SendMove,
    SendPrepare,
    SendRelease,
    SendRun,
    Side,
    StopString,
    Tokens,
)
from dynaserve.global_scheduler import MicroRequest, Placement, PlacementReason, Revision, RevisionReason
from dynaserve.messages import Ended, Event, Granted, Lifted, Moved, Parked, Refused, Resumed, Revoked
from dynaserve.request_flow import RequestFlow, State, new_flow

ALPHA, BETA = Side.ALPHA, Side.BETA
LIFT = SendMove(ALPHA, "a", None)


def cut_flow(split: int = 105) -> RequestFlow:
    placement = Placement(MicroRequest("a", 0, split), MicroRequest("b", split, 120), PlacementReason.policy)
    return new_flow("r", 100, placement, "policy", "torch", 1000)


def whole_flow() -> RequestFlow:
    return new_flow("r", 100, Placement(MicroRequest("a", 0, 120), None, PlacementReason.colocated), "colocated", "torch", 1000)


def running(flow: RequestFlow) -> RequestFlow:
    flow.start()
    return flow


def tell(flow: RequestFlow, side: Side, *events: Event | Tokens | ClientGone | StopString) -> list[Instruction]:
    return [instruction for event in events for instruction in flow.handle(side, event, now_ms=1.0)]


def test_both_halves_are_sent_at_once() -> None:
    assert cut_flow().start() == [SendRun("a", 105), SendAnnounce("b", 105)]


def test_a_whole_request_is_sent_to_one_instance() -> None:
    assert whole_flow().start() == [SendRun("a", None)]


def test_beta_continues_with_the_tokens_of_alpha() -> None:
    flow = running(cut_flow())
    assert tell(flow, ALPHA, Tokens([7], None), Tokens([8], None)) == [Forward(), Forward()]
    assert tell(flow, BETA, Granted("r", 0)) == []
    assert tell(flow, ALPHA, Parked("r", 105)) == [SendContinue("b", 105, [7, 8])]
    assert tell(flow, BETA, Resumed("r")) == [SendRelease("a")]
    assert tell(flow, BETA, Tokens([9], "length")) == [Forward()]
    assert flow.record.output_tokens == 3


def test_betas_instance_is_woken_four_and_two_steps_before_the_alpha_stops() -> None:
    flow = running(cut_flow(split=105))
    tell(flow, BETA, Granted("r", 0))
    steps = [tell(flow, ALPHA, Tokens([token], None)) for token in range(6)]
    woken = [Forward(), SendPrepare("b")]
    assert steps == [[Forward()], woken, [Forward()], woken, [Forward()], [Forward()]]


def test_a_moved_hand_off_wakes_betas_instance_for_its_new_point() -> None:
    flow = running(cut_flow(split=105))
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Tokens([7], None))
    flow.move(103)
    assert tell(flow, ALPHA, Tokens([8], None)) == [Forward(), SendPrepare("b")]


def test_an_instance_that_has_not_granted_is_not_woken() -> None:
    flow = running(cut_flow(split=105))
    assert tell(flow, ALPHA, *(Tokens([token], None) for token in range(6))) == [Forward()] * 6


def test_beta_waits_for_its_grant() -> None:
    flow = running(cut_flow())
    assert tell(flow, ALPHA, Parked("r", 105)) == []
    assert tell(flow, BETA, Granted("r", 0)) == [SendContinue("b", 105, [])]


def test_a_refused_hand_off_is_lifted_and_alpha_finishes_alone() -> None:
    flow = running(cut_flow())
    assert tell(flow, BETA, Refused("r", "full")) == [LIFT]
    assert tell(flow, ALPHA, Tokens([7], "stop")) == [Forward()]
    assert flow.record.lifted == "full"
    tell(flow, ALPHA, Ended("r", 100, 0))
    assert flow.over


def test_an_alpha_that_ends_early_cancels_beta() -> None:
    flow = running(cut_flow())
    assert tell(flow, ALPHA, Tokens([2], "stop")) == [Forward(), SendAbort("b")]
    tell(flow, ALPHA, Ended("r", 100, 0))
    assert not flow.over
    tell(flow, BETA, Ended("r", 0, 0))
    assert flow.over


def test_a_client_that_leaves_ends_both_halves() -> None:
    assert tell(running(cut_flow()), ALPHA, ClientGone()) == [SendAbort("a"), SendAbort("b")]


def test_a_stop_string_ends_both_halves_and_is_an_end_of_the_answer() -> None:
    flow = running(cut_flow())
    assert tell(flow, ALPHA, StopString()) == [SendAbort("a"), SendAbort("b")]
    assert flow.record.finish_reason == "stop"


def test_late_tokens_of_a_released_alpha_are_dropped() -> None:
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Parked("r", 105))
    assert tell(flow, ALPHA, Tokens([1], None)) == []


def test_a_beta_that_finishes_in_the_step_of_its_resumption_releases_alpha_once() -> None:
    """The tokens of a step come before its events."""
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Parked("r", 105))
    assert tell(flow, BETA, Tokens([9], "length"), Resumed("r")) == [Forward(), SendRelease("a")]


def test_a_moved_hand_off_is_told_to_both_and_happens_where_alpha_stopped() -> None:
    flow = running(cut_flow())
    assert flow.move(110) == [SendMove(ALPHA, "a", 110), SendMove(BETA, "b", 110)]
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Tokens([7], None), Tokens([8], None))
    assert tell(flow, ALPHA, Parked("r", 101)) == [SendContinue("b", 101, [7, 8])], "the move came too late"
    assert flow.record.split_token == 101
    assert flow.move(112) == []


@pytest.mark.parametrize(("moves", "begins_at"), [((90,), 20), ((10,), 10), ((90, 30), 20), ((10, 90), 10)])
def test_a_beta_begins_where_an_alpha_that_died_may_have_stopped_whether_it_heard_of_moves_or_not(
    moves: tuple[int, ...], begins_at: int
) -> None:
    flow = running(cut_flow(split=20))
    tell(flow, BETA, Granted("r", 0))
    for hand_off_at in moves:
        flow.move(hand_off_at)
    assert flow.record.split_token == moves[-1]
    assert flow.handle(ALPHA, InstanceDied("a", "gone", may_write=False), now_ms=2.0) == [SendContinue("b", begins_at, [], alpha_lost=True)]
    assert flow.record.split_token == begins_at


def test_second_thoughts_move_or_lift_a_hand_off_and_are_on_record() -> None:
    flow = running(cut_flow())
    later = Revision(110, RevisionReason.later_is_better, objective_ms=50.0, kept_objective_ms=90.0)
    assert flow.revise(later, 7.0) == [SendMove(ALPHA, "a", 110), SendMove(BETA, "b", 110)]
    alone = Revision(None, RevisionReason.alone_is_better, objective_ms=20.0, kept_objective_ms=80.0)
    assert flow.revise(alone, 9.0) == [LIFT, SendAbort("b")]
    assert flow.record.moves == 1
    assert flow.record.lifted == "revised: alone_is_better"
    assert [(one["at_ms"], one["hand_off_at"], one["reason"]) for one in flow.record.revisions] == [
        (7.0, 110, "later_is_better"),
        (9.0, None, "alone_is_better"),
    ]


def test_a_whole_request_is_cut_on_the_way_and_handed_over() -> None:
    flow = running(whole_flow())
    assert not flow.may_cut_on("a"), "it has no token yet"
    tell(flow, ALPHA, Tokens([7], None))
    assert [flow.may_cut_on(name) for name in ("a", "b")] == [True, False]
    late = Revision(109, RevisionReason.gathers_decodes, objective_ms=50.0, kept_objective_ms=900.0, beta="b")
    assert flow.revise(late, 7.0) == [SendAnnounce("b", 109), SendCut("a", 109)]
    assert [(one["hand_off_at"], one["reason"]) for one in flow.record.revisions] == [(109, "gathers_decodes")]
    assert flow.pending_on("b")
    assert flow.shows_from("a")
    assert flow.placement.end_token == 120
    tell(flow, BETA, Granted("r", 0), Moved("r", "received", 4, 4000, False, 0.0))
    assert tell(flow, ALPHA, Tokens([8], None), Parked("r", 101)) == [Forward(), SendContinue("b", 101, [7, 8])]
    assert tell(flow, BETA, Resumed("r")) == [SendRelease("a")]
    assert flow.record.split_token == 101
    assert flow.record.kv is not None
    assert flow.record.kv.bytes == 4000


def test_a_request_is_cut_on_the_way_once_and_only_where_it_was_placed_whole() -> None:
    flow = running(whole_flow())
    tell(flow, ALPHA, Tokens([7], None))
    assert flow.cut("a", 110) == [], "it is there"
    assert flow.cut("b", 110)
    assert flow.cut("c", 111) == []
    assert flow.lift(2.0) == [LIFT, SendAbort("b")]
    assert flow.cut("c", 112) == []
    assert running(cut_flow()).cut("c", 110) == []
    lost = running(whole_flow())
    lost.handle(ALPHA, InstanceDied("a", "gone"), now_ms=2.0)
    lost.place_again(Placement(MicroRequest("c", 0, 120), None, PlacementReason.colocated), 3.0)
    assert lost.cut("b", 110) == []
    over = running(whole_flow())
    tell(over, ALPHA, Tokens([7], "length"))
    assert over.cut("b", 110) == []


def test_a_hand_off_is_pending_on_both_instances_until_alpha_stands() -> None:
    flow = running(cut_flow())
    assert [flow.pending_on(name) for name in ("a", "b", "c")] == [True, True, False]
    tell(flow, ALPHA, Parked("r", 105))
    assert not flow.pending_on("a")
    assert not running(whole_flow()).pending_on("a")


def test_a_hand_off_in_the_answer_shows_until_alpha_stands() -> None:
    flow = running(cut_flow(100))
    assert [flow.shows_from(name) for name in ("a", "b")] == [True, False]
    tell(flow, ALPHA, Parked("r", 100))
    assert not flow.shows_from("a")
    assert not running(cut_flow(99)).shows_from("a")
    assert not running(whole_flow()).shows_from("a")


@given(before=st.lists(st.sampled_from([Granted("r", 0), Parked("r", 105)]), unique=True))
def test_a_revoked_reservation_lifts_the_hand_off_at_any_time(before: list[Event]) -> None:
    flow = running(cut_flow())
    for event in before:
        tell(flow, BETA if isinstance(event, Granted) else ALPHA, event)
    assert tell(flow, BETA, Revoked("r", "needed")) == [LIFT, SendAbort("b")]
    assert tell(flow, BETA, Ended("r", 0, 0)) == []
    assert tell(flow, ALPHA, Tokens([7], "stop")) == [Forward()]


def test_an_alpha_that_its_instance_has_lifted_finishes_alone() -> None:
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Parked("r", 105))
    assert tell(flow, ALPHA, Lifted("r", "too long")) == [SendAbort("b")]
    assert tell(flow, BETA, Tokens([9], None), Resumed("r")) == [], "what beta computes now, alpha computes too"
    assert tell(flow, ALPHA, Tokens([9], None)) == [Forward()]


def test_a_beta_that_has_spoken_cannot_be_lifted() -> None:
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Parked("r", 105))
    assert tell(flow, BETA, Tokens([9], None)) == [Forward(), SendRelease("a")]
    assert tell(flow, ALPHA, Lifted("r", "too long"), Tokens([9], None), Ended("r", 100, 0)) == []
    assert flow.lift(1.0) == []


def test_a_hand_over_whose_alpha_has_ended_cannot_be_lifted_by_hand() -> None:
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Parked("r", 105), Ended("r", 105, 0))
    assert flow.lift(1.0) == []
    assert tell(flow, BETA, Tokens([9], "length"), Ended("r", 1, 0)) == [Forward()]


def test_an_alpha_may_end_when_beta_has_everything() -> None:
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Parked("r", 105))
    assert tell(flow, ALPHA, Ended("r", 105, 0)) == []
    assert tell(flow, BETA, Tokens([9], "length"), Ended("r", 1, 0)) == [Forward()]
    assert flow.over


def test_a_request_that_both_instances_have_given_up_is_placed_again() -> None:
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Parked("r", 105), Ended("r", 105, 0))
    assert [type(i) for i in tell(flow, BETA, Revoked("r", "gone"))] == [SendAbort, PlaceAgain]


def test_a_request_that_its_instance_drops_is_placed_again() -> None:
    flow = running(whole_flow())
    assert tell(flow, ALPHA, Ended("r", 3, 0)) == [PlaceAgain()]
    assert [attempt.reason for attempt in flow.record.lost_attempts] == ["a ended the request without finishing it"]


def test_an_alpha_that_had_ended_when_it_was_lifted_goes_on_elsewhere() -> None:
    """Preempted when its beta had everything; that beta is aborted now."""
    flow = running(cut_flow())
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Tokens([7], None), Parked("r", 105))
    assert flow.lift(1.0) == [LIFT, SendAbort("b")]
    assert tell(flow, BETA, Ended("r", 0, 0)) == []
    assert tell(flow, ALPHA, Ended("r", 105, 0)) == [PlaceAgain()]
    elsewhere = Placement(MicroRequest("c", 0, 120), None, PlacementReason.colocated)
    assert flow.place_again(elsewhere, 2.0) == [SendRun("c", None, (7,))]
    assert tell(flow, ALPHA, Tokens([8], "length")) == [Forward()]


def test_an_instance_that_gives_up_a_half_that_nobody_listens_to_is_forgotten() -> None:
    flow = running(cut_flow())
    tell(flow, ALPHA, ClientGone())
    tell(flow, BETA, Tokens([], "error"))
    assert not flow.over
    tell(flow, ALPHA, Ended("r", 0, 0))
    assert flow.over


def test_the_record_counts_bytes_once_and_overlap_apart() -> None:
    flow = running(cut_flow())
    tell(flow, ALPHA, Moved("r", "sent", 3, 3000, True, 0.0), Moved("r", "sent", 1, 1000, False, 0.0))
    tell(flow, BETA, Moved("r", "received", 3, 3000, False, 0.0), Moved("r", "received", 1, 1000, False, 0.0))
    assert flow.record.kv is not None
    assert (flow.record.kv.blocks, flow.record.kv.bytes, flow.record.kv.bytes_before_alpha_end) == (4, 4000, 3000)


def test_recomputed_tokens_are_what_both_sides_did_too_much() -> None:
    flow = running(cut_flow(split=100))
    tell(flow, BETA, Granted("r", 0))
    tell(flow, ALPHA, Tokens([1], None), Parked("r", 100))
    tell(flow, BETA, Resumed("r"), Tokens([2], None), Tokens([3], "length"), Ended("r", 2 + 30, 0))
    tell(flow, ALPHA, Ended("r", 100, 0))
    assert flow.record.recomputed_tokens == 30


@dataclass
class Instances:
    """Two instances that answer in their own time; each keeps the order of its own messages. Tokens are 0, 1, 2 ..."""

    prompt: int
    outputs: int
    stop_at: int
    rng: random.Random
    refuse: bool
    queues: dict[Side, list[Event | Tokens]] = field(default_factory=lambda: {ALPHA: [], BETA: []})
    live: dict[Side, bool] = field(default_factory=lambda: {ALPHA: True, BETA: True})
    computed: int = 0
    parked: bool = False
    lifted: bool = False
    continued: bool = False

    def say(self, side: Side, *events: Event | Tokens) -> None:
        if self.live[side]:
            self.queues[side] += events

    def end(self, side: Side) -> None:
        self.say(side, Ended("r", 0, 0))
        self.live[side] = False

    def token(self, side: Side, token: int) -> None:
        last = token == self.outputs - 1
        self.say(side, Tokens([token], "length" if last else None))
        if last:
            self.end(side)

    def compute(self) -> None:
        """One step of alpha."""
        self.computed = min(self.computed + 60, self.prompt) if self.computed < self.prompt else self.computed + 1
        self.computed = self.computed if self.lifted else min(self.computed, self.stop_at)
        if self.computed >= self.prompt:
            self.token(ALPHA, self.computed - self.prompt)
        if not self.lifted and self.computed == self.stop_at:
            self.parked = True
            self.say(ALPHA, Parked("r", self.computed))

    def can_compute(self) -> bool:
        return self.live[ALPHA] and not self.parked

    def whim(self) -> None:
        """What an instance may do of its own accord."""
        if self.rng.random() < 0.5 and self.parked and not self.lifted:
            self.lifted, self.parked = True, False
            self.say(ALPHA, Lifted("r", "too long"))
        elif not self.continued and self.live[BETA] and not self.refuse:
            self.say(BETA, Revoked("r", "needed"))
            self.end(BETA)

    def obey(self, instruction: Instruction) -> None:
        match instruction:
            case SendAnnounce():
                self.queues[BETA].append(Refused("r", "full") if self.refuse else Granted("r", 0))
                self.live[BETA] = not self.refuse
            case SendCut(hand_off_at=at):
                self.lifted, self.stop_at = False, max(at, self.computed + 1)
            case SendMove(side=Side.ALPHA, hand_off_at=None):
                self.lifted, self.parked = True, False
            case SendMove(side=Side.ALPHA, hand_off_at=int(at)) if not self.parked and not self.lifted:
                self.stop_at = max(at, self.computed + 1)
            case SendContinue(hand_off_at=at, output_token_ids=known) if self.live[BETA]:
                assert (at, known) == (self.stop_at, list(range(max(0, at - self.prompt + 1))))
                self.continued = True
                for token in range(len(known), self.outputs):
                    self.token(BETA, token)
                    if token == len(known):
                        self.queues[BETA].append(Resumed("r"))
            case SendRelease():
                self.end(ALPHA)
            case SendAbort(instance_id=name):
                self.end(ALPHA if name == "a" else BETA)


@settings(max_examples=1000, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    outputs=st.integers(1, 12),
    stop_at=st.integers(1, 115),
    refuse=st.booleans(),
    whims=st.integers(0, 2),
    moves=st.integers(0, 3),
    lift=st.booleans(),
    leave=st.booleans(),
    late=st.booleans(),
)
def test_every_order_of_events_forwards_each_token_once_and_ends(
    seed: int, outputs: int, stop_at: int, refuse: bool, whims: int, moves: int, lift: bool, leave: bool, late: bool
) -> None:
    """late: it runs whole at first."""
    rng = random.Random(seed)
    flow = whole_flow() if late else cut_flow(split=stop_at)
    instances = Instances(100, outputs, stop_at, rng, refuse, live={ALPHA: True, BETA: not late}, lifted=late)
    forwarded: list[int] = []

    def carry_out(instructions: list[Instruction], event: object = None) -> None:
        for instruction in instructions:
            assert not isinstance(instruction, Fail)
            if isinstance(instruction, Forward):
                assert isinstance(event, Tokens)
                forwarded.extend(event.token_ids)
            instances.obey(instruction)

    def hear(side: Side) -> None:
        event = instances.queues[side].pop(0)
        carry_out(flow.handle(side, event, now_ms=1.0), event)
        assert flow.record.state == flow.state.value, "the record tells it from its marks"

    carry_out(flow.start())
    asks = ["whim"] * whims + ["move"] * moves + ["lift"] * lift + ["leave"] * leave + ["cut"] * late
    left = False
    while any(instances.queues.values()) or instances.can_compute():
        able = [side for side in Side if instances.queues[side]] + ["compute"] * instances.can_compute() + asks
        match rng.choice(able):
            case Side() as side:
                hear(side)
            case "compute":
                instances.compute()
            case ask:
                asks.remove(ask)
                if ask == "whim":
                    instances.whim()
                elif ask == "move":
                    carry_out(flow.move(rng.randint(1, 115)))
                elif ask == "cut":
                    carry_out(flow.cut("b", stop_at))
                elif ask == "lift":
                    carry_out(flow.lift(now_ms=1.0))
                else:
                    left = True
                    carry_out(flow.handle(ALPHA, ClientGone(), now_ms=1.0))
    assert forwarded == list(range(len(forwarded))), "a token is missing, or came twice"
    assert left or len(forwarded) == outputs
    assert flow.state is State.FINISHED
    assert flow.over
