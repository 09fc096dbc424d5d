"""A front-end's state for those who look at it: two instances, and requests of every kind."""

from __future__ import annotations

from dynaserve import fleet_view
from dynaserve.fleet import Instance
from dynaserve.fleet_view import Snapshot
from dynaserve.messages import Load, MeasuredStep
from dynaserve.records import KvRecord, LostAttempt, MicroRecord, RequestRecord, TokenGaps
from tests.test_fleet_links import description

A, B = "http://a:8000", "http://b:8000"
NOW_S = 1_700_000_000.0
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
HEALTH = {A: "up", B: "suspect"}


def instances() -> list[Instance]:
    first, second = (Instance(name, description("tcp://127.0.0.1:1", "epoch")) for name in (A, B))
    first.take_load(Load(3, 1, 0.25, [MeasuredStep(64, 0.0, 2, 900, 41.5), MeasuredStep(0, 0.0, 3, 950, 12.25)]))
    return [first, second]


def cut() -> RequestRecord:
    """Handed over 20 ms after its alpha stood."""
    record = RequestRecord("cut", 100, 110, "balanced", 40, "length", arrived_s=NOW_S - 2, ttft_slo_ms=500.0)
    record.alpha, record.beta = MicroRecord(A, 110, 0, 10), MicroRecord(B, 30, 0, 30)
    record.kv = KvRecord("torch", 1000, 4, 4000, 3000, chunks=[{"blocks": 2, "bytes": 2000, "at_ms": at} for at in (300.0, 780.0)])
    record.timeline_ms = {"first_token": 250.0, "alpha_parked": 800.0, "continue_sent": 801.0, "beta_resumed": 820.0, "finished": 1900.0}
    record.gaps = TokenGaps(100.0, 39, 36, 140.0, 1900.0)
    return record


def whole() -> RequestRecord:
    record = RequestRecord(HOSTILE, 30, None, "colocated", 5, arrived_s=NOW_S - 0.5)
    record.alpha = MicroRecord(A, output_tokens=5)
    record.timeline_ms = {"first_token": 100.0}
    record.gaps = TokenGaps(100.0, 4, 4, 50.0, 400.0)
    return record


def placed_again() -> RequestRecord:
    """Its beta's instance died after the hand-over."""
    record = cut()
    record.request_id, record.finish_reason = "placed again", None
    del record.timeline_ms["finished"]
    record.lost_attempts = [LostAttempt("instance b was lost", 20, 1000.0, record.alpha, record.beta)]
    record.alpha, record.beta = MicroRecord(A), None
    record.timeline_ms["placed_again"] = 1010.0
    return record


def records() -> list[RequestRecord]:
    return [whole(), cut(), placed_again()]


def snapshot() -> Snapshot:
    return fleet_view.snapshot("frontend", instances(), HEALTH.__getitem__, records(), running=2, waiting=1, now_s=NOW_S)
