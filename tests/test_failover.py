"""What becomes of a request whose instance dies, without a fleet: the tables of docs/failures.md."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    SendMove,
    SendRelease,
    SendRun,
    Side,
    Tokens,
    Unavailable,
)
from dynaserve.global_scheduler import MicroRequest, Placement, PlacementReason
from dynaserve.messages import Ended, Event, Granted, Parked, Resumed, Revoked
from dynaserve.request_flow import RequestFlow, State, new_flow

ALPHA, BETA = Side.ALPHA, Side.BETA
PROMPT = 100
GRANTED, PARKED, RESUMED = (BETA, Granted("r", 0)), (ALPHA, Parked("r", 105)), (BETA, Resumed("r"))
ALPHAS_TOKENS = (ALPHA, Tokens([7, 8], None))
BETAS_TOKEN = (BETA, Tokens([9], None))
Said = tuple[Side, Event | Tokens | ClientGone]


def whole_on(instance: str) -> Placement:
    return Placement(MicroRequest(instance, 0, 120), None, PlacementReason.colocated)


def cut_flow(split: int = 105) -> RequestFlow:
    placement = Placement(MicroRequest("a", 0, split), MicroRequest("b", split, 120), PlacementReason.policy)
    return new_flow("r", PROMPT, placement, "policy", "torch", 1000)


def told(flow: RequestFlow, *said: Said) -> RequestFlow:
    flow.start()
    for side, event in said:
        flow.handle(side, event, now_ms=1.0)
    return flow


def die(flow: RequestFlow, instance: str, *, may_write: bool = False) -> list[Instruction]:
    return flow.handle(ALPHA, InstanceDied(instance, "killed", may_write), now_ms=2.0)


LIFT: Sequence[Instruction] = [SendMove(ALPHA, "a", None), SendAbort("b")]
ELSEWHERE: Sequence[Instruction] = [PlaceAgain()]
WITHOUT_B: Sequence[Instruction] = [SendAbort("b"), PlaceAgain()]
STATES: dict[str, tuple[tuple[Said, ...], Sequence[Instruction], Sequence[Instruction], State, State]] = {
    # said so far: what A's death causes, what B's death causes, and the states afterwards
    "announced": ((), WITHOUT_B, LIFT[:1], State.ORPHANED, State.WHOLE),
    "granted": ((GRANTED,), [SendContinue("b", 99, [], alpha_lost=True)], LIFT[:1], State.HANDING_OVER, State.WHOLE),
    "granted, tokens": (
        (GRANTED, ALPHAS_TOKENS),
        [SendContinue("b", 101, [7, 8], alpha_lost=True)],
        LIFT[:1],
        State.HANDING_OVER,
        State.WHOLE,
    ),
    "parked": ((PARKED,), WITHOUT_B, LIFT[:1], State.ORPHANED, State.WHOLE),
    "handing over": ((GRANTED, ALPHAS_TOKENS, PARKED), [], LIFT[:1], State.HANDING_OVER, State.WHOLE),
    "beta resumed": ((GRANTED, ALPHAS_TOKENS, PARKED, RESUMED), [], [SendAbort("a"), PlaceAgain()], State.BETA, State.ORPHANED),
    "beta speaks": ((GRANTED, ALPHAS_TOKENS, PARKED, BETAS_TOKEN), [], [SendAbort("a"), PlaceAgain()], State.BETA, State.ORPHANED),
    "revoked": ((GRANTED, (BETA, Revoked("r", "full"))), WITHOUT_B, [], State.ORPHANED, State.WHOLE),
    "client gone": (((ALPHA, ClientGone()),), [], [], State.FINISHED, State.FINISHED),
    "finished": ((GRANTED, PARKED, (BETA, Tokens([9], "stop"))), [], [], State.FINISHED, State.FINISHED),
}


@pytest.mark.parametrize("name", STATES)
def test_every_state_survives_the_death_of_a_and_of_b(name: str) -> None:
    said, after_a, after_b, state_a, state_b = STATES[name]
    for instance, instructions, state in (("a", after_a, state_a), ("b", after_b, state_b)):
        flow = told(cut_flow(), *said)
        assert (instance, die(flow, instance)) == (instance, instructions)
        assert (instance, flow.state) == (instance, state)


@pytest.mark.parametrize("name", STATES)
def test_a_death_is_told_twice_without_harm(name: str) -> None:
    for instance in ("a", "b"):
        flow = told(cut_flow(), *STATES[name][0])
        die(flow, instance)
        state = flow.state
        assert die(flow, instance) == []
        assert flow.state is state


def test_a_whole_request_goes_on_elsewhere_with_its_tokens() -> None:
    flow = new_flow("r", PROMPT, whole_on("a"), "colocated", "torch", 1000)
    told(flow, ALPHAS_TOKENS)
    assert die(flow, "a") == ELSEWHERE
    assert flow.attempt == 1
    assert flow.place_again(whole_on("c"), 3.0) == [SendRun("c", None, (7, 8))]
    assert flow.handle(ALPHA, Tokens([9], "length"), 4.0) == [Forward()]
    assert flow.output_token_ids == [7, 8, 9]
    flow.handle(ALPHA, Ended("r", 103, 0), 5.0)
    assert flow.over
    assert [(lost.output_tokens, lost.alpha and lost.alpha.instance) for lost in flow.record.lost_attempts] == [(2, "a")]
    assert flow.record.alpha is not None
    assert (flow.record.alpha.instance, flow.record.alpha.output_tokens) == ("c", 1)


def test_a_late_token_of_the_orphan_s_old_life_changes_nothing() -> None:
    flow = told(cut_flow(), GRANTED, ALPHAS_TOKENS, PARKED, BETAS_TOKEN)
    die(flow, "b")
    assert flow.handle(BETA, Tokens([10], None), 3.0) == []
    assert flow.output_token_ids == [7, 8, 9]


def test_an_orphan_that_nobody_takes_ends_as_unavailable() -> None:
    flow = told(new_flow("r", PROMPT, whole_on("a"), "colocated", "torch", 1000))
    die(flow, "a")
    assert flow.give_up("none left", 503, 3.0) == [Unavailable("none left", 503)]
    assert flow.over
    assert flow.give_up("none left", 503, 4.0) == []


def test_a_request_that_takes_too_long_ends_everywhere() -> None:
    flow = told(cut_flow(), GRANTED)
    assert flow.give_up("too long", 504, 3.0) == [SendAbort("a"), SendAbort("b"), Unavailable("too long", 504)]


def test_an_orphan_whose_client_leaves_is_over() -> None:
    flow = told(new_flow("r", PROMPT, whole_on("a"), "colocated", "torch", 1000))
    die(flow, "a")
    assert flow.handle(ALPHA, ClientGone(), 3.0) == []
    assert flow.over


def test_kv_that_a_lost_instance_may_still_write_is_not_used() -> None:
    """On a one-sided transport."""
    for said in ((GRANTED, ALPHAS_TOKENS), (GRANTED, ALPHAS_TOKENS, PARKED)):
        assert die(told(cut_flow(), *said), "a", may_write=True) == WITHOUT_B


def test_a_beta_that_cannot_go_on_without_its_alpha_is_placed_again() -> None:
    flow = told(cut_flow(), GRANTED, ALPHAS_TOKENS)
    die(flow, "a")
    assert flow.handle(BETA, Revoked("r", "no blocks"), 3.0) == WITHOUT_B


def test_a_prompt_of_one_token_has_nothing_to_continue_from() -> None:
    placement = Placement(MicroRequest("a", 0, 1), MicroRequest("b", 1, 20), PlacementReason.policy)
    flow = told(new_flow("r", 1, placement, "policy", "torch", 1000), GRANTED)
    assert die(flow, "a") == WITHOUT_B


@pytest.mark.parametrize("name", [name for name in STATES if name not in ("client gone", "finished")])
def test_what_an_instance_aborts_of_its_own_accord_goes_on_elsewhere(name: str) -> None:
    """It was told to stop."""
    said, *_ = STATES[name]
    for side in Side:
        flow = told(cut_flow(), *said)
        before = flow.state
        instructions = flow.handle(side, Tokens([], "abort"), 2.0)
        assert not any(isinstance(instruction, Forward | Fail) for instruction in instructions)
        assert (PlaceAgain() in instructions) == (flow.state is State.ORPHANED)
        needed = {State.WHOLE: {ALPHA}, State.BETA: {BETA}}.get(before, {ALPHA, BETA})
        assert (flow.state is before) == (side not in needed), (name, side)


@dataclass
class Fleet:
    """Instances a .. d that answer in their own time, and die and come back; each message carries its attempt. Tokens are 0, 1, 2 ..."""

    flow: RequestFlow
    outputs: int
    split: int
    rng: random.Random
    alive: set[str] = field(default_factory=lambda: set("abcd"))
    queue: dict[str, list[tuple[int, Side, Event | Tokens]]] = field(default_factory=lambda: {name: [] for name in "abcd"})
    work: dict[tuple[str, int, Side], list[Event | Tokens]] = field(default_factory=dict)
    forwarded: list[int] = field(default_factory=list)
    failed: bool = False

    def carry_out(self, instructions: list[Instruction], event: object = None) -> None:
        for instruction in instructions:
            match instruction:
                case Forward():
                    assert isinstance(event, Tokens)
                    self.forwarded += event.token_ids
                case Fail():
                    raise AssertionError(instruction.reason)
                case PlaceAgain():
                    if self.alive:
                        self.carry_out(self.flow.place_again(whole_on(self.rng.choice(sorted(self.alive))), 1.0))
                    else:
                        self.carry_out(self.flow.give_up("none left", 503, 1.0))
                case Unavailable():
                    self.failed = True
                case _:
                    if instruction.instance_id in self.alive:
                        self.obey(instruction)

    def answer(self, first: int, last: int, ends: bool) -> list[Event | Tokens]:
        tokens: list[Event | Tokens] = [Tokens([t], "length" if ends and t == last - 1 else None) for t in range(first, last)]
        return tokens + ([Ended("r", 0, 0)] if ends else [])

    def obey(self, instruction: Instruction) -> None:
        attempt = self.flow.attempt
        match instruction:
            case SendRun(instance_id=name, hand_off_at=None, output_token_ids=known):
                assert list(known) == list(range(len(known)))
                self.work[name, attempt, ALPHA] = self.answer(len(known), self.outputs, ends=True)
            case SendRun(instance_id=name):
                sampled = max(0, self.split - PROMPT + 1)
                self.work[name, attempt, ALPHA] = [
                    *self.answer(0, min(sampled, self.outputs), sampled >= self.outputs),
                    Parked("r", self.split),
                ]
            case SendAnnounce(instance_id=name):
                self.work[name, attempt, BETA] = [Granted("r", 0)]
            case SendContinue(instance_id=name, hand_off_at=at, output_token_ids=tokens):
                assert tokens == list(range(max(0, at - PROMPT + 1)))
                if (name, attempt, BETA) in self.work:
                    self.work[name, attempt, BETA] += [*self.answer(len(tokens), self.outputs, ends=True)]
                    self.work[name, attempt, BETA].insert(0, Resumed("r"))
            case SendMove(instance_id=name):
                self.work[name, attempt, ALPHA] = self.answer(self.flow.record.output_tokens, self.outputs, ends=True)
                self.work[name, attempt, ALPHA] = self.rest_of_alpha(name, attempt)
            case SendRelease(instance_id=name):
                self.work[name, attempt, ALPHA] = [Ended("r", 0, 0)]
            case SendAbort(instance_id=name):
                for key in [key for key in self.work if key[0] == name]:
                    self.work[key] = [Ended("r", 0, 0)]

    def rest_of_alpha(self, name: str, attempt: int) -> list[Event | Tokens]:
        said = [t for n, side, e in self.queue[name] if n == attempt and side is ALPHA and isinstance(e, Tokens) for t in e.token_ids]
        return self.answer(max([self.flow.record.output_tokens - 1, *said]) + 1, self.outputs, ends=True)

    def say(self, key: tuple[str, int, Side]) -> None:
        name, attempt, side = key
        self.queue[name].append((attempt, side, self.work[key].pop(0)))

    def hear(self, name: str) -> None:
        attempt, side, event = self.queue[name].pop(0)
        if attempt == self.flow.attempt:
            self.carry_out(self.flow.handle(side, event, 1.0), event)

    def kill(self, name: str) -> None:
        self.alive.discard(name)
        self.queue[name].clear()
        self.work = {key: rest for key, rest in self.work.items() if key[0] != name}
        self.carry_out(self.flow.handle(ALPHA, InstanceDied(name, "killed"), 1.0))


@settings(max_examples=1500, deadline=None)
@given(seed=st.integers(0, 2**32), outputs=st.integers(1, 10), split=st.integers(1, 108), deaths=st.integers(0, 4), back=st.booleans())
def test_every_order_of_deaths_forwards_each_token_once_and_ends(seed: int, outputs: int, split: int, deaths: int, back: bool) -> None:
    rng = random.Random(seed)
    flow = cut_flow(split)
    fleet = Fleet(flow, outputs, split, rng)
    fleet.carry_out(flow.start())
    asks = ["die"] * deaths
    while True:
        speakers = [key for key, rest in fleet.work.items() if rest]
        listeners = [name for name, queue in fleet.queue.items() if queue]
        able = ["say"] * bool(speakers) + ["hear"] * bool(listeners) + asks[:1] * bool(fleet.alive)
        if not able:
            break
        match rng.choice(able):
            case "say":
                fleet.say(rng.choice(speakers))
            case "hear":
                fleet.hear(rng.choice(listeners))
            case _:
                asks.pop()
                victim = rng.choice(sorted(fleet.alive))
                fleet.kill(victim)
                if back:
                    fleet.alive.add(victim)
    assert fleet.forwarded == list(range(len(fleet.forwarded))), "a token is missing, or came twice"
    assert fleet.failed == (flow.record.finish_reason == "error")
    assert fleet.failed or len(fleet.forwarded) == outputs
    assert not fleet.failed or deaths == 4
    assert flow.state is State.FINISHED
    assert flow.over
