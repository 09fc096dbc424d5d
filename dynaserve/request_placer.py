"""What the front-end asks about each request: where it runs. Joins the scheduler with the length predictor.

Not thread-safe; the caller says what time it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dynaserve.cached_prefixes import CachedPrefixes, Prefix, prefix_of
from dynaserve.deadline_margin import DeadlineMargin
from dynaserve.execution_predictor import InstanceLimits
from dynaserve.fleet_profile import FleetProfile
from dynaserve.global_scheduler import (
    CachedPrefix,
    GlobalScheduler,
    InstanceState,
    OtherRequest,
    Placement,
    Progress,
    RequestSpec,
    Revision,
    Slo,
)
from dynaserve.length_predictor import LengthForecast, LengthPredictor, LengthQuery
from dynaserve.messages import InstanceDescription, Load, Reserved
from dynaserve.step_latency import BatchShape, ProfileTable

logger = logging.getLogger("vllm.dynaserve.placement")

REPORT_EVERY_MS = 200.0
_TRANSFER_MEMORY = 0.98
"""What a KV transfer still counts after the next one."""
_SHARE_GAIN, _SHARE_TOLD = 0.1, 0.03
"""Of an instance's step shares: how fast a new one counts, and from which change on its timeline is told."""
_PREDICTED = ("ttft_ms", "hand_off_ms", "decode_step_ms", "objective_ms", "whole_objective_ms", "probes", "gathering")
_CANDIDATE = ("alpha", "beta", "split_token", "ttft_ms", "objective_ms")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A request as the front-end knows it at its arrival. tbt_ms, ttft_ms: its own SLOs; None: the fleet's. cache_key: what a
    cached prefix must be equal in beside its tokens. fits_stock: a server without the plugin computes exactly this."""

    request_id: str
    lengths: LengthQuery
    forced_split: int | None = None
    may_cut: bool = True
    tbt_ms: float | None = None
    ttft_ms: float | None = None
    token_ids: Sequence[int] = ()
    cache_key: Hashable = None
    fits_stock: bool = False
    _prefixes: dict[int, Prefix] = field(default_factory=dict, init=False, compare=False, repr=False)

    def prefix(self, block_size: int) -> Prefix:
        """Hashed once, however often it is asked for, as while no instance takes requests."""
        if block_size not in self._prefixes:
            self._prefixes[block_size] = prefix_of(self.token_ids, block_size, self.cache_key)
        return self._prefixes[block_size]


@dataclass(frozen=True, slots=True)
class Held:
    """What an instance has computed of a sequence, or was sent; cached_tokens: what it had of it before."""

    instance_id: str
    tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    placement: Placement
    lengths: LengthForecast
    prompt_tokens: int

    @property
    def kind(self) -> str:
        """`whole`, or which part of the request the cut lies in."""
        if self.placement.beta is None:
            return "whole"
        beyond = self.placement.split_token - self.prompt_tokens
        return "in_prompt" if beyond < 0 else "at_prompt_end" if beyond == 0 else "in_answer"

    def to_json(self) -> dict[str, Any]:
        """What was expected of the request, for its record. Of policies that do not predict: its length only."""
        prediction = self.placement.prediction
        if prediction is None:
            return asdict(self.lengths)
        times = {name: getattr(prediction, name) for name in _PREDICTED}
        candidates = [{name: getattr(one, name) for name in _CANDIDATE} for one in prediction.candidates]
        return asdict(self.lengths) | times | {"candidates": candidates}


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """Of a request on an instance. computed_tokens: prompt and output tokens whose KV is there. begun: False while it waits there."""

    request_id: str
    computed_tokens: int
    output_tokens: int
    begun: bool = True


@dataclass(frozen=True, slots=True)
class StepShares:
    """As `messages.Load` tells them. mixed: of steps that mix prefill and decodes. admitting: for who may begin."""

    mixed: float
    admitting: float

    def toward(self, other: StepShares, gain: float) -> StepShares:
        return StepShares(
            self.mixed + gain * (other.mixed - self.mixed),
            self.admitting + gain * (other.admitting - self.admitting),
        )

    def differ(self, other: StepShares) -> bool:
        """By more than is worth telling."""
        return any(abs(own / others - 1.0) > _SHARE_TOLD for own, others in ((self.mixed, other.mixed), (self.admitting, other.admitting)))


@dataclass
class RequestPlacer:
    """tbt_slo_ms, ttft_slo_ms: of requests that name none. step_share: how much of its TBT SLO a predicted step of an instance may take
    that has not told.

    predicts: whether the policy works with expected lengths; otherwise a request counts with its max_tokens. profile: learns the
    latency table on.
    """

    scheduler: GlobalScheduler
    lengths: LengthPredictor
    predicts: bool = False
    tbt_slo_ms: float = 100.0
    ttft_slo_ms: float = math.inf
    step_share: float = 1.0
    profile: FleetProfile | None = None
    _described: dict[str, tuple[InstanceDescription, bool]] = field(default_factory=dict)
    _told_shares: dict[str, StepShares] = field(default_factory=dict)
    """Smoothed, by instance."""
    _used_shares: dict[str, StepShares] = field(default_factory=dict)
    _queries: dict[str, LengthQuery] = field(default_factory=dict)
    _slos: dict[str, Slo] = field(default_factory=dict)
    _replayed_tokens: dict[str, int] = field(default_factory=dict)
    """Of a request that was placed again: output tokens that it had by then, which are prompt to the scheduler."""
    _reported_ms: dict[str, float] = field(default_factory=dict)
    _moved_tokens: float = 0.0
    _moved_ms: float = 0.0
    _caches: dict[str, CachedPrefixes] = field(default_factory=dict)
    _block_size: int = 1

    def observe(self, instance_id: str, description: InstanceDescription, *, accepts_new: bool = True) -> None:
        """Adds an instance, with the limits that it describes, or says whether it takes new requests."""
        self._described[instance_id] = description, accepts_new
        untold = StepShares(self.step_share, self.step_share)
        shares = self._used_shares[instance_id] = self._told_shares.get(instance_id, untold)
        slo_ms = math.inf if description.tbt_slo_ms is None else description.tbt_slo_ms
        limits = InstanceLimits(
            max_requests=description.max_num_seqs,
            max_step_tokens=description.max_num_batched_tokens,
            kv_tokens=description.num_blocks * description.block_size,
            min_prefill_tokens=description.min_prefill_tokens,
            step_ms=slo_ms * shares.mixed,
            admit_ms=slo_ms * shares.admitting,
        )
        self.scheduler.observe(InstanceState(instance_id, accepts_new, limits, description.stock))
        # A whole-only instance is chosen by its load alone (cpp_scheduler, `ChooseWholeOnly`).
        if self.predicts and description.prefix_caching and not description.stock and instance_id not in self._caches:
            self._caches[instance_id] = CachedPrefixes(description.num_blocks)
            self._block_size = description.block_size

    def remove(self, instance_id: str) -> None:
        """The instance takes nothing any more; what is placed on it stays so until it is finished, or placed again."""
        self.scheduler.remove(instance_id)
        for known in (self._described, self._told_shares, self._used_shares, self._reported_ms):
            known.pop(instance_id, None)
        self._caches.pop(instance_id, None)

    def place(self, facts: RequestFacts, now_ms: float) -> Decision | None:
        """None: no instance takes new requests. Raises ValueError as the scheduler's `place`."""
        forecast = self.lengths.predict(facts.lengths)
        slo = Slo(ttft_ms=facts.ttft_ms or self.ttft_slo_ms, tbt_ms=facts.tbt_ms or self.tbt_slo_ms)
        placement = self.scheduler.place(
            RequestSpec(
                request_id=facts.request_id,
                prompt_tokens=facts.lengths.prompt_tokens,
                max_output_tokens=facts.lengths.max_tokens,
                expected_output_tokens=forecast.expected_tokens if self.predicts else facts.lengths.max_tokens,
                forced_split=facts.forced_split,
                may_cut=facts.may_cut,
                likely_output_tokens=forecast.likely_tokens,
                slo=slo,
                cached=self._cached(facts),
                fits_whole_only=facts.fits_stock,
            ),
            now_ms,
        )
        if placement is None:
            return None
        self._queries[facts.request_id], self._slos[facts.request_id] = facts.lengths, slo
        return Decision(placement, forecast, facts.lengths.prompt_tokens)

    def _cached(self, facts: RequestFacts) -> list[CachedPrefix]:
        if not self._caches:
            return []
        prefix = facts.prefix(self._block_size)
        known = {name: cache.tokens_of(prefix) for name, cache in self._caches.items()}
        return [CachedPrefix(name, tokens) for name, tokens in known.items() if tokens]

    def learn_prefix(self, token_ids: Sequence[int], cache_key: Hashable, holders: Iterable[Held]) -> None:
        """Of a request that is over: what its instances keep of it in their prefix caches."""
        if not self._caches:
            return
        prefix = prefix_of(token_ids, self._block_size, cache_key)
        for held in holders:
            if (cache := self._caches.get(held.instance_id)) is not None:
                if held.cached_tokens is not None:
                    cache.correct(prefix, held.cached_tokens)
                cache.remember(prefix, held.tokens)

    def predict_end_ms(self, request_id: str, now_ms: float) -> float | None:
        """Until a placed request ends, if others come as they did lately; None under policies that do not predict."""
        end_ms = self.scheduler.predict_end_ms(request_id, now_ms)
        return None if end_ms is None else end_ms - now_ms

    def predict_hand_off_ms(self, request_id: str, now_ms: float) -> float | None:
        """Until the alpha of a placed request reaches its cut, as instances are now; None under policies that do not predict, or where it
        is not cut."""
        at_ms = self.scheduler.predict_hand_off_ms(request_id, now_ms)
        return None if at_ms is None else at_ms - now_ms

    def place_again(self, request_id: str, output_tokens: int, now_ms: float) -> Placement | None:
        """A request that has lost its instance after `output_tokens` of its answer: where it runs whole, as what is left of it.

        None: no instance takes it; it may be asked for again. Raises KeyError for a request that is not placed.
        """
        query = self._queries[request_id]
        self.scheduler.finish(request_id, now_ms)
        forecast = self.lengths.predict(query, output_tokens)
        left = max(0, query.max_tokens - output_tokens)
        expected = max(0, forecast.expected_tokens - output_tokens) if self.predicts else left
        self._replayed_tokens[request_id] = output_tokens
        return self.scheduler.place(
            RequestSpec(
                request_id=request_id,
                prompt_tokens=query.prompt_tokens + output_tokens,
                max_output_tokens=left,
                expected_output_tokens=min(expected, left),
                may_cut=False,
                slo=self._slos[request_id],
            ),
            now_ms,
        )

    def learn_transfer(self, tokens: int, took_ms: float, *, on_host: bool) -> None:
        """took_ms: to send the KV of so many tokens, with what it waited for its receiver and for others that were sent there: the
        links of a busy fleet seem slower than they are. Larger transfers say more; older ones fade. on_host: what moves it is what
        computes the steps of either instance, too (`InstanceDescription.computes_on_host`)."""
        self._moved_tokens = _TRANSFER_MEMORY * self._moved_tokens + tokens
        self._moved_ms = _TRANSFER_MEMORY * self._moved_ms + took_ms
        if self.predicts and self._moved_tokens > 0:
            kv_token_ms = self._moved_ms / self._moved_tokens
            self.scheduler.set_kv_token_ms(kv_token_ms, work_ms=kv_token_ms if on_host else 0.0)

    def finish(self, request_id: str, output_tokens: int | None, now_ms: float) -> None:
        """output_tokens: of an answer that ended by itself or at its max_tokens; None teaches nothing about lengths."""
        self.scheduler.finish(request_id, now_ms)
        query = self._queries.pop(request_id, None)
        self._slos.pop(request_id, None)
        self._replayed_tokens.pop(request_id, None)
        if query is not None and output_tokens:
            # By what is known by now: a history that has only begun corrects itself, a caller's guesses do not.
            self.scheduler.learn_length(output_tokens, self.lengths.predict(query).expected_tokens)
            self.lengths.learn(query, output_tokens)

    def revise(self, request_id: str, now_ms: float) -> Revision | None:
        """Whether a hand-off that is still to come should come elsewhere or not at all, and then counts with it."""
        return self.scheduler.revise(request_id, now_ms)

    def recut(self, request_id: str, hand_off_at: int | None, now_ms: float) -> None:
        """Somebody else moved the hand-off, or lifted it: it is not revised any more."""
        self.scheduler.recut(request_id, hand_off_at, now_ms)

    def cut(self, request_id: str, beta: str, hand_off_at: int, now_ms: float) -> None:
        """Somebody cut a request that runs whole."""
        self.scheduler.cut_whole(request_id, beta, hand_off_at, now_ms)

    def parked(self, request_id: str, computed_tokens: int, now_ms: float) -> None:
        """The alpha stands at its hand-off point."""
        self.scheduler.parked(request_id, computed_tokens, now_ms)

    def learn_steps(self, instance_id: str, load: Load, now_ms: float) -> None:
        """What an instance measured since its last report, and how it forms its steps."""
        if load.step_share is not None:
            mixed = load.step_share
            self._hear_shares(instance_id, StepShares(mixed, mixed if load.admitting_share is None else load.admitting_share))
        for step in load.steps:
            shape = BatchShape(
                prefill_tokens=step.prefill_tokens,
                prefill_pairs=step.prefill_pairs,
                decodes=step.decodes,
                decode_context_tokens=step.decode_context_tokens,
            )
            self.scheduler.observe_step(instance_id, shape, step.measured_ms, now_ms)
            if self.profile is None:
                continue
            if (table := self.profile.observe(shape, step.measured_ms, now_ms, step.draft_tokens)) is not None:
                logger.info("placing requests by the latencies of %d measured steps", self.profile.steps)
                self._learn(table, now_ms)

    def _hear_shares(self, instance_id: str, shares: StepShares) -> None:
        """An instance follows the errors of its predictions, step by step; its timeline is told what has lasted."""
        known = self._described.get(instance_id)
        if known is None:
            return
        before = self._told_shares.get(instance_id, shares)
        told = self._told_shares[instance_id] = before.toward(shares, _SHARE_GAIN)
        if told.differ(self._used_shares[instance_id]):
            description, accepts_new = known
            self.observe(instance_id, description, accepts_new=accepts_new)

    def _learn(self, table: ProfileTable, now_ms: float) -> None:
        self.scheduler.learn(table, now_ms)
        self.step_share = step_share(table.sigma)
        for instance_id, (description, accepts_new) in self._described.items():
            self.observe(instance_id, description, accepts_new=accepts_new)

    def hear_of_others(self, instance_id: str, others: Sequence[Reserved], now_ms: float) -> None:
        """All that other front-ends have on an instance now."""
        known = [
            OtherRequest(
                computed_tokens=other.computed_tokens,
                prompt_tokens=other.prompt_tokens,
                end_token=other.end_token,
                waits=other.waits,
            )
            for other in others
        ]
        self.scheduler.report_others(instance_id, known, now_ms)

    def wants_progress(self, instance_id: str, now_ms: float, *, told: bool = False) -> bool:
        """Whether to report how far the requests of an instance are; never under policies that do not predict. told: it has just told of
        its prompts, as those with SLO-aware batches do now and then; of others, what tokens tell is reported each `REPORT_EVERY_MS`."""
        if told or not self.predicts:
            return self.predicts
        known = self._described.get(instance_id)
        tells = known is not None and known[0].tbt_slo_ms is not None
        return not tells and now_ms - self._reported_ms.get(instance_id, -math.inf) >= REPORT_EVERY_MS

    def report(self, instance_id: str, requests: Iterable[RequestProgress], now_ms: float) -> None:
        """Actual progress replaces predicted; how long each answer will be is asked again, by what it has emitted."""
        self._reported_ms[instance_id] = now_ms
        progress = [
            Progress(
                request_id=request.request_id,
                computed_tokens=request.computed_tokens,
                # Of what has not begun nobody asks it again.
                expected_output_tokens=self._expected_tokens(query, request) if request.begun else 0,
                begun=request.begun,
            )
            for request in requests
            if (query := self._queries.get(request.request_id)) is not None
        ]
        self.scheduler.report(instance_id, progress, now_ms)

    def _expected_tokens(self, query: LengthQuery, request: RequestProgress) -> int:
        """Of the answer, as far as the scheduler takes it for one."""
        expected = self.lengths.predict(query, request.output_tokens).expected_tokens
        return max(0, expected - self._replayed_tokens.get(request.request_id, 0))


def step_share(sigma: float) -> float:
    """Of a limit, what a predicted step may take so that 4 in a thousand are over it. sigma: of the predictor's log error."""
    return DeadlineMargin().share(sigma)
