"""What a front-end shows of itself: the snapshot, and the records that it is made of."""

from __future__ import annotations

import json
from collections import deque

import msgspec
import pytest

from dynaserve import fleet_view
from dynaserve.fleet import Instance
from dynaserve.fleet_view import MOST_CHUNKS, Snapshot, StepView
from dynaserve.flow_events import InstanceDied, Side, Tokens
from dynaserve.global_scheduler import MicroRequest, Placement, PlacementReason
from dynaserve.messages import Granted, MeasuredStep, Parked, Resumed
from dynaserve.records import RecordBook, RequestRecord, TokenGaps
from dynaserve.request_flow import RequestFlow, new_flow
from tests import looked_at
from tests.looked_at import NOW_S, A, B
from tests.test_fleet_links import description


def test_a_snapshot_survives_json() -> None:
    now = looked_at.snapshot()
    assert msgspec.json.decode(msgspec.json.encode(now), type=Snapshot) == now


def test_an_instance_that_has_said_nothing_has_no_numbers() -> None:
    first, second = looked_at.snapshot().instances
    assert (first.running_requests, first.kv_usage, first.kv_tokens, [step.measured_ms for step in first.recent_steps]) == (
        3,
        0.25,
        50 * 32,
        [41.5, 12.25],
    )
    assert (second.health, second.running_requests, second.kv_usage, second.recent_steps) == ("suspect", None, None, [])


def test_reports_that_come_while_another_thread_looks_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = deque([MeasuredStep(1, 1.0, 1, 1, 5.0)] * 3, maxlen=10)

    def meanwhile(step: MeasuredStep) -> fleet_view.StepView:
        steps.append(step)
        return StepView(step.prefill_tokens, step.decodes, step.decode_context_tokens, step.measured_ms)

    monkeypatch.setattr(fleet_view, "_step", meanwhile)
    instance = Instance(A, description("tcp://127.0.0.1:1", "epoch"), None, steps)
    now = fleet_view.snapshot("f", [instance], lambda _: "up", [], running=0, waiting=0, now_s=NOW_S)
    assert len(now.instances[0].recent_steps) == 3


def test_slo_and_flows_are_summed_over_the_requests() -> None:
    now = looked_at.snapshot()
    assert (now.slo.gaps, now.slo.gaps_in_slo, now.slo.first_tokens, now.slo.first_tokens_in_slo) == (39 + 4 + 39, 36 + 4 + 36, 2, 2)
    (flow,) = now.flows
    assert (flow.sender, flow.receiver, flow.bytes, flow.requests) == (A, B, 8000, 2)


def test_a_snapshot_is_bounded() -> None:
    record = looked_at.cut()
    record.request_id = "r" * 100_000
    assert record.kv is not None
    record.kv.chunks = [{"blocks": 1, "bytes": 10, "at_ms": float(at)} for at in range(1000)]
    now = fleet_view.snapshot("f", [], lambda _: "up", [record] * 100, running=0, waiting=0, now_s=NOW_S)
    kv = now.requests[0].kv
    assert kv is not None
    assert len(kv.chunks) <= MOST_CHUNKS
    assert (sum(chunk.bytes for chunk in kv.chunks), kv.chunks[-1].at_ms) == (10_000, 999.0)
    assert len(msgspec.json.encode(now)) < 1_000_000


def test_the_newest_requests_come_first() -> None:
    book = RecordBook()
    for name, reason in (("a", "first"), ("a", "second"), ("b", "third")):
        book.add(RequestRecord(name, 1, None, reason))
    assert [record.reason for record in book.recent(2)] == ["third", "second"]


def test_sequences_of_an_id_that_is_used_again_age_each_by_itself() -> None:
    book = RecordBook(capacity=3)
    for name, reason in (("again", "first"), ("b", "second"), ("again", "third")):
        book.add(RequestRecord(name, 1, None, reason))
    assert [record.reason for record in book.recent(3)] == ["third", "second", "first"]
    book.add(RequestRecord("c", 1, None, "fourth"))
    assert [record.reason for record in book.recent(3)] == ["fourth", "third", "second"]
    book.add(RequestRecord("d", 1, None, "fifth"))
    assert [[record.reason for record in book.find(name)] for name in ("again", "b", "c")] == [["third"], [], ["fourth"]]


@pytest.mark.parametrize(
    ("steps", "count", "in_slo", "longest_ms"),
    [
        ([(1, 50.0)], 0, 0, 0.0),
        ([(1, 50.0), (1, 150.0), (1, 251.0)], 2, 1, 101.0),
        ([(3, 50.0), (0, 100.0), (2, 200.0)], 4, 3, 150.0),  # the gap before tokens that come together is that of the first
    ],
)
def test_gaps_are_counted(steps: list[tuple[int, float]], count: int, in_slo: int, longest_ms: float) -> None:
    gaps = TokenGaps(slo_ms=100.0)
    for tokens, now_ms in steps:
        gaps.add(tokens, now_ms)
    assert (gaps.count, gaps.in_slo, gaps.longest_ms) == (count, in_slo, longest_ms)


def flow_of(*, cut: bool) -> RequestFlow:
    beta = MicroRequest("b", 105, 120) if cut else None
    return new_flow("r", 100, Placement(MicroRequest("a", 0, 105), beta, PlacementReason.policy), "policy", "torch", 1000)


@pytest.mark.parametrize("cut", [False, True])
def test_the_state_of_a_record_is_that_of_its_flow(cut: bool) -> None:
    flow = flow_of(cut=cut)
    events = [
        (Side.ALPHA, Tokens([1], None)),
        (Side.BETA, Granted("r", 0)),
        (Side.ALPHA, Parked("r", 105)),
        (Side.BETA, Resumed("r")),
        (Side.BETA, InstanceDied("b", "killed")),
    ]
    whole = [(Side.ALPHA, Tokens([1], None)), (Side.ALPHA, InstanceDied("a", "killed"))]
    flow.start()
    seen = [flow.record.state]
    for side, event in events if cut else whole:
        flow.handle(side, event, 1.0)  # type: ignore[arg-type]
        assert flow.record.state == flow.state.value
        seen.append(flow.record.state)
    flow.place_again(Placement(MicroRequest("c", 0, 120), None, PlacementReason.policy), 2.0)
    assert flow.record.state == flow.state.value == "whole"
    flow.handle(Side.ALPHA, Tokens([2], "length"), 3.0)
    assert flow.record.state == flow.state.value == "finished"
    assert seen == (["alpha", "alpha", "alpha", "handing_over", "beta", "orphaned"] if cut else ["whole", "whole", "orphaned"])


def test_a_lifted_request_is_whole() -> None:
    flow = flow_of(cut=True)
    flow.start()
    flow.lift(1.0)
    assert flow.record.state == flow.state.value == "whole"


def test_what_has_no_number_is_null() -> None:
    assert json.loads(msgspec.json.encode(looked_at.snapshot()))["requests"][0]["ttft_slo_ms"] is None


def test_a_client_that_names_all_its_requests_alike_does_not_fill_the_book() -> None:
    book = RecordBook(capacity=3)
    for tokens in range(10):
        book.add(RequestRecord("always the same", tokens, None, "colocated"))
    assert [record.prompt_tokens for record in book.find("always the same")] == [7, 8, 9]


def test_requests_of_many_sequences_do_not_fill_the_book_either() -> None:
    book = RecordBook(capacity=5)
    for request in "abc":
        for tokens in range(3):
            book.add(RequestRecord(request, tokens, None, "colocated"))
    assert [[record.prompt_tokens for record in book.find(request)] for request in "abc"] == [[], [1, 2], [0, 1, 2]]
