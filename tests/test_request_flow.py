"""The life of a request in the front-end, without a fleet."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaserve.global_scheduler import MicroRequest, Placement, PlacementReason
from dynaserve.messages import Ended, Event, Granted, Moved, Parked, Refused, Resumed
from dynaserve.request_flow import (
    ClientGone,
    Fail,
    Forward,
    Instruction,
    RequestFlow,
    SendAbort,
    SendAnnounce,
    SendContinue,
    SendLift,
    SendRelease,
    SendRun,
    Side,
    State,
    Tokens,
    new_flow,
)

ALPHA, BETA = Side.ALPHA, Side.BETA


def cut_flow(split: int = 105) -> RequestFlow:
    placement = Placement(MicroRequest("a", 0, split), MicroRequest("b", split, 120), PlacementReason.policy)
    return new_flow("r", 100, placement, "policy", "torch", 1000)


def whole_flow() -> RequestFlow:
    return new_flow("r", 100, Placement(MicroRequest("a", 0, 120), None, PlacementReason.colocated), "colocated", "torch", 1000)


def running(flow: RequestFlow) -> RequestFlow:
    flow.start()
    return flow


def tell(flow: RequestFlow, side: Side, *events: Event | Tokens | ClientGone) -> list[Instruction]:
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


def test_beta_waits_for_its_grant() -> None:
    flow = running(cut_flow())
    assert tell(flow, ALPHA, Parked("r", 105)) == []
    assert tell(flow, BETA, Granted("r", 0)) == [SendContinue("b", 105, [])]


def test_a_refused_hand_off_is_lifted_and_alpha_finishes_alone() -> None:
    flow = running(cut_flow())
    assert tell(flow, BETA, Refused("r", "full")) == [SendLift("a")]
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


def test_an_instance_that_drops_a_request_fails_it() -> None:
    flow = running(whole_flow())
    assert [type(i) for i in tell(flow, ALPHA, Ended("r", 3, 0))] == [Fail]


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


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), outputs=st.integers(1, 12), alpha_outputs=st.integers(0, 12), refuse=st.booleans(), leave=st.booleans())
def test_every_order_of_events_forwards_each_token_once_and_ends(
    seed: int, outputs: int, alpha_outputs: int, refuse: bool, leave: bool
) -> None:
    """Two instances that answer instructions in their own time; each keeps the order of its own messages."""
    rng = random.Random(seed)
    alpha_outputs = min(alpha_outputs, outputs - 1)
    flow = cut_flow(split=99 + alpha_outputs if alpha_outputs else 50)
    queues: dict[Side, list[Event | Tokens]] = {ALPHA: [], BETA: []}
    forwarded: list[int] = []
    live = {ALPHA: True, BETA: True}

    def end(side: Side) -> None:
        if live[side]:
            live[side] = False
            queues[side].append(Ended("r", 0, 0))

    def tokens(side: Side, first: int, until: int) -> None:
        for token in range(first, until):
            queues[side].append(Tokens([token], "length" if token == outputs - 1 else None))

    def obey(instruction: Instruction) -> None:
        match instruction:
            case SendRun():
                tokens(ALPHA, 0, alpha_outputs)
                queues[ALPHA].append(Parked("r", 0))
            case SendAnnounce():
                live[BETA] = not refuse
                queues[BETA].append(Refused("r", "full") if refuse else Granted("r", 0))
            case SendLift():
                tokens(ALPHA, alpha_outputs, outputs)
                end(ALPHA)
            case SendContinue(output_token_ids=known):
                assert known == list(range(alpha_outputs))
                queues[BETA].append(Resumed("r"))
                tokens(BETA, alpha_outputs, outputs)
                end(BETA)
            case SendRelease():
                end(ALPHA)
            case SendAbort(instance_id=name):
                end(ALPHA if name == "a" else BETA)

    for instruction in flow.start():
        obey(instruction)
    left = False
    while any(queues.values()):
        if leave and not left and rng.random() < 0.1:
            left = True
            side, event = ALPHA, ClientGone()
        else:
            side = rng.choice([s for s in queues if queues[s]])
            event = queues[side].pop(0)  # type: ignore[assignment]
        for instruction in flow.handle(side, event, now_ms=1.0):
            assert not isinstance(instruction, Fail)
            if isinstance(instruction, Forward):
                assert isinstance(event, Tokens)
                forwarded += event.token_ids
            obey(instruction)
    assert forwarded == list(range(len(forwarded))), "a token is missing, or came twice"
    assert left or len(forwarded) == outputs
    assert flow.state is State.FINISHED
    assert flow.over
