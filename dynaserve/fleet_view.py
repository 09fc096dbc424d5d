"""What the front-end knows now, as one bounded value: the answer of `GET /dynaserve/snapshot`.

The live page, `dynaserve top` and the gauges of `/metrics` all show this. Pure: time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from dynaserve.fleet import Instance
from dynaserve.messages import MeasuredStep
from dynaserve.records import MicroRecord, RequestRecord

MOST_REQUESTS = 100
MOST_CHUNKS = 32
MOST_CHARACTERS = 200
"""Of a request's id or reason, which may come from a client."""


@dataclass(frozen=True, slots=True)
class StepView:
    """One step of an engine: tokens of prompts, sequences that decoded one token, tokens that these attended to, and its time in ms."""

    prefill_tokens: int
    decodes: int
    decode_context_tokens: int
    measured_ms: float


@dataclass(frozen=True, slots=True)
class InstanceView:
    """health: up, suspect, dead, draining or loading. kv_usage: share of its KV blocks that are taken, 0 to 1. kv_tokens: that fit.

    Requests and kv_usage are None where it has not said. recent_steps: the newest last; empty under vLLM's own batching.
    """

    name: str
    health: str
    model: str
    device: str
    kv_tokens: int
    running_requests: int | None
    waiting_requests: int | None
    kv_usage: float | None
    recent_steps: list[StepView]


@dataclass(frozen=True, slots=True)
class MicroView:
    """lost: its instance has died. computed_tokens: None until it has ended."""

    instance: str
    output_tokens: int
    computed_tokens: int | None
    lost: bool


@dataclass(frozen=True, slots=True)
class ChunkView:
    """KV that arrived together. at_ms: from the request's arrival."""

    at_ms: float
    bytes: int


@dataclass(frozen=True, slots=True)
class KvView:
    """The KV transfer. early_bytes: of what left while the alpha was computing. chunks: joined where there are very many."""

    transport: str
    bytes: int
    early_bytes: int
    chunks: list[ChunkView]


@dataclass(frozen=True, slots=True)
class GapsView:
    """Gaps between tokens (TBT): their number, those within slo_ms, and the longest, in ms."""

    slo_ms: float
    count: int
    in_slo: int
    longest_ms: float


@dataclass(frozen=True, slots=True)
class RequestView:
    """One sequence of a request. state: whole, alpha, handing_over, beta, orphaned or finished. reason: why it was cut or not.

    split_token: where its alpha stopped, or is to stop; None: it is not cut. age_ms: since it arrived. marks_ms: from its arrival to
    each phase. lost_at_ms: when it lost an instance that it needed. ttft_slo_ms: None where it has none.
    """

    request_id: str
    state: str
    reason: str
    finish_reason: str | None
    lifted: str | None
    prompt_tokens: int
    output_tokens: int
    split_token: int | None
    age_ms: float
    alpha: MicroView | None
    beta: MicroView | None
    kv: KvView | None
    gaps: GapsView | None
    ttft_slo_ms: float | None
    marks_ms: dict[str, float]
    lost_at_ms: list[float]


@dataclass(frozen=True, slots=True)
class FlowView:
    """KV that went from one instance to another, in bytes, of so many requests."""

    sender: str
    receiver: str
    bytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class SloView:
    """Of the requests of this snapshot. gaps: between tokens. first_tokens: that have come, of requests with a TTFT SLO."""

    gaps: int
    gaps_in_slo: int
    first_tokens: int
    first_tokens_in_slo: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """at_s: Unix time, in seconds. running_requests: sequences that are not over. waiting_requests: for their first token.

    requests: the last `MOST_REQUESTS` sequences, the newest first; flows and slo are about these.
    """

    frontend_id: str
    at_s: float
    running_requests: int
    waiting_requests: int
    instances: list[InstanceView]
    requests: list[RequestView]
    flows: list[FlowView]
    slo: SloView


def snapshot(
    frontend_id: str,
    instances: Iterable[Instance],
    health: Callable[[str], str],
    records: Sequence[RequestRecord],
    *,
    running: int,
    waiting: int,
    now_s: float,
) -> Snapshot:
    """health: of an instance, by its name. records: the newest first. now_s: Unix time."""
    return Snapshot(
        frontend_id,
        round(now_s, 3),
        running,
        waiting,
        [_instance(instance, health(instance.instance_id)) for instance in instances],
        [_request(record, now_s) for record in records],
        _flows(records),
        _slo(records),
    )


def _instance(instance: Instance, health: str) -> InstanceView:
    description, load = instance.description, instance.load
    return InstanceView(
        name=instance.instance_id,
        health=health,
        model=description.model,
        device=description.device,
        kv_tokens=description.num_blocks * description.block_size,
        running_requests=None if load is None else load.running_requests,
        waiting_requests=None if load is None else load.waiting_requests,
        kv_usage=None if load is None else load.kv_cache_usage,
        # Copied in one go: vLLM serves /metrics from another thread, while reports come.
        recent_steps=[_step(step) for step in tuple(instance.recent_steps)],
    )


def _step(step: MeasuredStep) -> StepView:
    return StepView(step.prefill_tokens, step.decodes, step.decode_context_tokens, round(step.measured_ms, 3))


def _request(record: RequestRecord, now_s: float) -> RequestView:
    kv, gaps = record.kv, record.gaps
    return RequestView(
        request_id=record.request_id[:MOST_CHARACTERS],
        state=record.state,
        reason=record.reason,
        finish_reason=record.finish_reason,
        lifted=None if record.lifted is None else record.lifted[:MOST_CHARACTERS],
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        split_token=record.split_token,
        age_ms=round(1e3 * (now_s - record.arrived_s), 3),
        alpha=_micro(record.alpha),
        beta=_micro(record.beta),
        kv=None if kv is None else KvView(kv.transport, kv.bytes, kv.bytes_before_alpha_end, _chunks(kv.chunks)),
        gaps=None if gaps is None else GapsView(gaps.slo_ms, gaps.count, gaps.in_slo, gaps.longest_ms),
        ttft_slo_ms=record.ttft_slo_ms,
        marks_ms=dict(record.timeline_ms),
        lost_at_ms=[lost.at_ms for lost in record.lost_attempts],
    )


def _micro(micro: MicroRecord | None) -> MicroView | None:
    return None if micro is None else MicroView(micro.instance, micro.output_tokens, micro.computed_tokens, micro.lost)


def _chunks(chunks: Sequence[dict[str, float]]) -> list[ChunkView]:
    """Neighbours are joined where there are more than `MOST_CHUNKS`: at the time of the last, with the bytes of all."""
    size = max(1, ceil(len(chunks) / MOST_CHUNKS))
    joined = [chunks[start : start + size] for start in range(0, len(chunks), size)]
    return [ChunkView(group[-1]["at_ms"], int(sum(chunk["bytes"] for chunk in group))) for group in joined]


def _flows(records: Iterable[RequestRecord]) -> list[FlowView]:
    moved: Counter[tuple[str, str]] = Counter()
    requests: Counter[tuple[str, str]] = Counter()
    for record in records:
        alpha, beta = _last_pair(record)
        if record.kv is not None and record.kv.bytes and alpha is not None and beta is not None:
            moved[alpha.instance, beta.instance] += record.kv.bytes
            requests[alpha.instance, beta.instance] += 1
    return [FlowView(sender, receiver, moved[sender, receiver], requests[sender, receiver]) for sender, receiver in sorted(moved)]


def _last_pair(record: RequestRecord) -> tuple[MicroRecord | None, MicroRecord | None]:
    """Who moved its KV: once it is placed again it runs uncut, and moves none."""
    pairs = [(record.alpha, record.beta), *((lost.alpha, lost.beta) for lost in reversed(record.lost_attempts))]
    return next(((alpha, beta) for alpha, beta in pairs if beta is not None), (record.alpha, None))


def _slo(records: Iterable[RequestRecord]) -> SloView:
    gaps = [record.gaps for record in records if record.gaps is not None]
    first_ms = [(record.timeline_ms.get("first_token"), record.ttft_slo_ms) for record in records]
    in_slo = [ttft_ms <= slo_ms for ttft_ms, slo_ms in first_ms if ttft_ms is not None and slo_ms is not None]
    return SloView(sum(gap.count for gap in gaps), sum(gap.in_slo for gap in gaps), len(in_slo), sum(in_slo))
