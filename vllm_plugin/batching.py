"""SLO-aware batches: before each step, how many tokens of prefill join the decodes (the paper's Algorithm 2).

vLLM's own scheduler forms the batch; what it may take is set before: decodes come first (`resuming`),
`max_num_scheduled_tokens` holds the decodes and the prefill budget, `max_num_active_reqs` how many requests may run.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from dynaserve.messages import PromptProgress
from dynaserve.request_log import of_request
from dynaserve.step_latency import PrefillWork, prefill_pairs
from dynaserve.step_planner import RunningDecodes, StepPlan, StepPlanner
from dynaserve.token_deadlines import TokenSlo
from vllm_plugin.options import PluginOptions
from vllm_plugin.requests import TBT_ARG, TTFT_ARG, is_slo_ms
from vllm_plugin.resuming import ResumingFirst
from vllm_plugin.step_accounts import StepAccounts, shape_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

logger = logging.getLogger("vllm.dynaserve.batching")

REPORT_CARRIER = "\0steps"
"""Request id of the output that carries a `BatchReport` to the gateway (`kv_transfer_params`); no real id begins with a zero."""
REPORT_KEY = "dynaserve_steps"

_MOST_WAITING = 64
"""Waiting requests that one step looks at."""
_MOST_LOOKED_UP = 8
"""Of those, how many are looked up in the prefix cache: more of them hardly begin in one step beside decodes."""
_STEPS_A_LOOK = 8
"""For how many steps what was found there is taken for what is there."""
_PATIENCE_S = 10.0
"""A prompt without a TTFT SLO begins as if its first token were due so long after the prompt alone could have it: those with an
SLO overtake it for so long at most, and of those without one a short prompt overtakes a long one only as far as it is shorter."""
_ONLY_GROUP = [0]
_REQUEST_ID = attrgetter("request_id")
_COMPUTED_TOKENS = attrgetter("num_computed_tokens")


@dataclass(slots=True)
class _Batch:
    """What is ready to run. due_s: of the first decode. arrived: prompts with KV from elsewhere that have not begun here. draft_tokens,
    draft_pairs: what the decodes speculate.

    seats: for those that come with their KV, and run in this step. resuming: how many of them do so in the midst of their answer.
    arriving_due_s: when the next token is due of the first request that is to come in the midst of its answer, of arriving_tokens.
    """

    decodes: int
    context_tokens: int
    due_s: float
    prefills: list[Request]
    seats: int = 0
    arrived: list[Request] = field(default_factory=list)
    resuming: int = 0
    draft_tokens: int = 0
    draft_pairs: float = 0.0
    arriving_due_s: float = math.inf
    arriving_tokens: int = 0

    def running(self, planner: StepPlanner) -> RunningDecodes:
        # Beside decodes steps are short anyway; without them one may take a second.
        due_s = self.due_s if self.decodes else self.arriving_due_s - 1e-3 * planner.decodes_ms(1, self.arriving_tokens)
        return RunningDecodes(self.decodes, self.context_tokens, due_s, self.draft_tokens, self.draft_pairs)


class _Waiting(NamedTuple):
    """A request that could begin. work: its prefill; None: it has none. with_kv: from elsewhere."""

    request: Request
    work: PrefillWork | None
    with_kv: bool


class SloScheduler(ResumingFirst):
    """Mixin over vLLM's `Scheduler` or `AsyncScheduler`."""

    parked_slots: int = 0
    """Requests in `running` that take none of its slots (`AlphaScheduler`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = PluginOptions.from_config(self.vllm_config)
        self._slo = TokenSlo(options.tbt_slo_ms / 1e3, None if options.ttft_slo_ms is None else options.ttft_slo_ms / 1e3)
        self._most_scheduled_tokens = self.max_num_scheduled_tokens
        self._most_active_requests = self.max_num_active_reqs
        self._speculates = self.vllm_config.speculative_config is not None
        self.accounts = StepAccounts.of(self.vllm_config, options, self._most_scheduled_tokens)
        self.deadlines = self.accounts.deadlines
        self.clock: Callable[[], float] = time.monotonic
        # With speculation vLLM keeps and looks for other blocks than the first ones.
        self._one_hash_a_block = not self._speculates
        self._ended: list[str] = []
        self._held_back: set[str] = set()
        """Prompts with KV from elsewhere that may not begin in this step."""
        self._found_cached: dict[str, tuple[int, int]] = {}
        """Of waiting prompts: cached tokens, and for how many steps more that is believed."""

    def add_request(self, request: Request) -> None:
        self._forget_ended()
        cached = self._cached_tokens(request)
        own = max(1, self.tokens_to_compute(request) - cached)  # of an alpha its part only
        prefill_s = 1e-3 * self.accounts.planner.prefill_ms(PrefillWork(own, cached))
        self.deadlines.arrive(request.request_id, self._slo_of(request), self.clock(), prefill_s)
        super().add_request(request)
        if self.policy == SchedulingPolicy.FCFS and self.waiting and self.waiting[-1] is request:
            self._take_turn(request)

    def _take_turn(self, request: Request) -> None:
        """Moves the last of the waiting prompts to its turn: they begin by when their first tokens are due."""
        turn_s, waiting = self.deadlines.first_token_due_s, self.waiting
        due_s = turn_s(request.request_id, _PATIENCE_S)
        place = len(waiting) - 1
        while place and waiting[place - 1].status != RequestStatus.PREEMPTED and turn_s(waiting[place - 1].request_id, _PATIENCE_S) > due_s:
            place -= 1
        if place < len(waiting) - 1:
            waiting.pop()
            waiting.insert(place, request)

    def _slo_of(self, request: Request) -> TokenSlo:
        extra_args = (request.sampling_params and request.sampling_params.extra_args) or {}
        own_s: dict[str, float] = {}
        for name in (TBT_ARG, TTFT_ARG):
            slo_ms = extra_args.get(name)
            if name == TBT_ARG and is_slo_ms(slo_ms) and self._is_out_of_reach(request, slo_ms):
                told = "%s: no token can follow another within %s = %g ms here: the instance's SLO holds"
                logger.warning(told, request.request_id, name, slo_ms, extra=of_request(request.request_id))
            elif is_slo_ms(slo_ms):
                own_s[name] = slo_ms / 1e3
            elif slo_ms is not None:  # a front-end answers 400; here it is too late for that
                told = "%s: %s is %r, not a number of milliseconds above 0: the instance's SLO holds"
                logger.warning(told, request.request_id, name, slo_ms, extra=of_request(request.request_id))
        return TokenSlo(own_s.get(TBT_ARG, self._slo.tbt_s), own_s.get(TTFT_ARG, self._slo.ttft_s)) if own_s else self._slo

    def _is_out_of_reach(self, request: Request, tbt_slo_ms: float) -> bool:
        """Whether it would break its SLO alone here: such a one would only keep the prompts of others from being computed."""
        return tbt_slo_ms < 1e3 * self._slo.tbt_s and not self.accounts.planner.fits(1, request.num_tokens, tbt_slo_ms)

    # -- before a step -------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        began_s = self.clock()
        plan = self.prepare_step(began_s)
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens > 0:
            self.accounts.begin(output, shape_of(output, self.requests), plan, began_s)
        return output

    def prepare_step(self, now_s: float) -> StepPlan:
        """Sets what vLLM's scheduler may take for the next step."""
        self._forget_ended()
        batch = self._running_batch(now_s)
        batch.seats = self._most_active_requests + self.parked_slots - len(self.running) - self.num_waiting_for_streaming_input
        for request in self.kv_holding_waiting:
            self._look_at_arriving(request, batch, now_s)
        batch.arrived.sort(key=lambda request: (not self.is_decode(request), self._turn_s(request)))
        work = self._work_of(batch.prefills)
        waiting = self._look_at_waiting(batch.arrived, self._most_scheduled_tokens - sum(each.tokens for each in work))
        begin = waiting[: self._admissible(batch, [each.request for each in waiting])] or self._overdue(waiting, now_s)
        resuming = [each.request for each in begin if each.with_kv and self.is_decode(each.request)]
        if resuming:
            batch.decodes += len(resuming)
            batch.context_tokens += sum(request.num_computed_tokens for request in resuming)
            batch.due_s = min(batch.due_s, now_s + self._slo.tbt_s)  # as those that are not known yet (`_running_batch`)
        prompts = [each.work for each in begin if each.work is not None and not (each.with_kv and self.is_decode(each.request))]
        begun = [*work, *prompts]
        plan = self.accounts.planner.plan(batch.running(self.accounts.planner), begun, now_s)
        tokens = batch.decodes + batch.draft_tokens + plan.prefill_tokens
        if self._speculates and plan.prefill_tokens and any(each.tokens == 1 for each in prompts):
            tokens += self.num_spec_tokens  # to which vLLM pads one that begins with its last token, or lets it wait (scheduler.py:1149)
        self.max_num_scheduled_tokens = max(1, min(self._most_scheduled_tokens, tokens))
        begin_with_kv = {each.request.request_id for each in begin if each.with_kv}
        self._held_back = {request.request_id for request in batch.arrived} - begin_with_kv
        begins = len(begin) - len(begin_with_kv)
        # Sessions that wait for their next input keep their seats (scheduler.py:922).
        room = len(self.running) + self.num_waiting_for_streaming_input + batch.resuming + len(begin)
        most = self._most_active_requests + self.parked_slots
        self.max_num_active_reqs = min(most, room) if begins < len(self.waiting) else most
        return plan

    def _turn_s(self, request: Request) -> float:
        """By when it begins in any case."""
        return self.deadlines.first_token_due_s(request.request_id, _PATIENCE_S)

    def _overdue(self, waiting: Sequence[_Waiting], now_s: float) -> list[_Waiting]:
        """Of the first one with KV from elsewhere and the first one without, that whose turn came first; none: it has not come. It may not
        wait for ever, whatever becomes of the decodes."""
        firsts = (next((each for each in waiting if each.with_kv == with_kv), None) for with_kv in (True, False))
        due = [each for each in firsts if each is not None and self._turn_s(each.request) < now_s]
        return [min(due, key=lambda each: self._turn_s(each.request))] if due else []

    def may_begin(self, request: Request) -> bool:
        return request.request_id not in self._held_back

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether vLLM may run a request that waits. One that has resumed, and released its alpha, may still have to wait as prompts do."""
        if not self.may_begin(request) and not self._is_blocked_waiting_status(request.status):
            return False
        return bool(super()._handle_blocked_waiting_request(request))

    def _running_batch(self, now_s: float) -> _Batch:
        """Looks at every running request before every step: in loops of the interpreter's own, as there may be hundreds."""
        parked = self.parked_requests()
        ready = [request for request in self.running if request.request_id not in parked] if parked else self.running
        prefills = [request for request in ready if request.is_prefill_chunk]
        decodes, computed = ready, -sum(map(_COMPUTED_TOKENS, prefills))
        if any(request.num_output_tokens for request in prefills):  # computed again: its next token is not of this step
            decodes, computed = [request for request in ready if not request.is_prefill_chunk], 0
        # A prompt's first token is not due by this, and one that is not known yet has just come from elsewhere.
        dues_s = map(self.deadlines.next_due_s.get, map(_REQUEST_ID, decodes), repeat(now_s + self._slo.tbt_s))
        number = len(ready) - len(prefills)
        batch = _Batch(number, computed + sum(map(_COMPUTED_TOKENS, decodes)), min(dues_s) if number else math.inf, prefills)
        if self._speculates:
            self._count_drafts(batch, parked)
        return batch

    def _count_drafts(self, batch: _Batch, parked: Collection[str]) -> None:
        for request in self.running:
            if not request.is_prefill_chunk and request.request_id not in parked:
                drafts = max(0, self.tokens_to_compute(request) - 1)
                batch.draft_tokens += drafts
                batch.draft_pairs += prefill_pairs(drafts, request.num_computed_tokens + 1)

    def _look_at_arriving(self, request: Request, batch: _Batch, now_s: float) -> None:
        """A request whose KV comes from elsewhere: its clock runs since its tokens are known, and it runs as soon as its KV is here."""
        if request.num_output_tokens:
            self.deadlines.took_over(request.request_id, now_s - self.known_for_s(request))
        if not self.has_arrived(request):
            if (comes_s := self.hands_over_s(request, now_s)) is not None:
                due_s = comes_s + self.deadlines.tbt_s[request.request_id]
                if due_s < batch.arriving_due_s:
                    batch.arriving_due_s, batch.arriving_tokens = due_s, request.num_tokens
            return
        # Whoever has no token yet waits for room as prompts do.
        if not self.is_decode(request) or not request.num_output_tokens:
            batch.arrived.append(request)
            return
        if batch.seats <= 0 or not self.fits_adapters(request):
            return  # not in this step, however short it is
        batch.seats -= 1
        batch.resuming += 1
        batch.decodes += 1
        batch.context_tokens += request.num_computed_tokens
        batch.due_s = min(batch.due_s, self.deadlines.next_due_s.get(request.request_id, math.inf))

    def _work_of(self, prefills: Sequence[Request]) -> list[PrefillWork]:
        """Of running ones, no more than fits into any step."""
        works: list[PrefillWork] = []
        tokens = 0
        for request in prefills:
            if tokens >= self._most_scheduled_tokens:
                break
            if (own := self.tokens_to_compute(request)) > 0:
                works.append(PrefillWork(own, request.num_computed_tokens))
                tokens += own
        return works

    def _look_at_waiting(self, arrived: Sequence[Request], room_tokens: int) -> list[_Waiting]:
        """Those that a step with so much room for prefill could hold, and the first one of either kind in any case.

        arrived: with KV from elsewhere; they come before all others.
        """
        known, self._found_cached = self._found_cached, {}
        waiting: list[_Waiting] = []
        for with_kv, queue in ((True, arrived), (False, islice(self.waiting, _MOST_WAITING))):
            for request in queue:
                if self.waits_for_grammar(request) or not self.fits_adapters(request):
                    continue  # vLLM runs those behind it
                cached = self._believed_cached(request, known)
                own = self.tokens_to_compute(request) - cached
                work = PrefillWork(own, request.num_computed_tokens + cached) if own > 0 else None
                waiting.append(_Waiting(request, work, with_kv))
                room_tokens -= own
                if room_tokens <= 0 and not self.is_decode(request):
                    break
        return waiting

    def _believed_cached(self, request: Request, known: Mapping[str, tuple[int, int]]) -> int:
        """known: what was found before."""
        if request.num_computed_tokens or len(self._found_cached) >= _MOST_LOOKED_UP:
            return 0
        cached, steps = known.get(request.request_id, (0, 0))
        if not steps:
            cached, steps = self._cached_tokens(request), _STEPS_A_LOOK
        self._found_cached[request.request_id] = cached, steps - 1
        return cached

    def _cached_tokens(self, request: Request) -> int:
        """Of its prompt, what the prefix cache holds, as `KVCacheManager.get_computed_blocks` will find it. Its chunks attend to them.

        Blocks are freed from the end of a sequence, so those that are left are its first ones: a few probes tell how many.
        """
        manager = self.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        hashes, find = request.block_hashes, manager.block_pool.get_cached_block
        most = self.most_cached_tokens(request)
        if not self._one_hash_a_block or not hashes:
            return int(manager.coordinator.find_longest_cache_hit(hashes, most)[1])
        blocks = min(len(hashes), most // self.block_size)
        return int(self.block_size * bisect_left(range(blocks), True, key=lambda index: find(hashes[index], _ONLY_GROUP) is None))

    def _admissible(self, batch: _Batch, waiting: list[Request]) -> int:
        """How many of the waiting prompts may begin: those that become decodes must, alone, fit into the SLO."""
        if not waiting:
            return 0
        running = [request for request in batch.prefills if self.becomes_decode(request)]
        joining = [int(self.becomes_decode(request)) for request in waiting]
        # With the first k waiting ones. More decodes are slower but for short ones among long ones, which lower the mean context; whatever
        # number the bisection finds then fits as well.
        numbers = list(accumulate(joining, initial=batch.decodes + len(running)))
        own = (joins * request.num_tokens for joins, request in zip(joining, waiting, strict=True))
        contexts = list(accumulate(own, initial=batch.context_tokens + sum(request.num_tokens for request in running)))
        decoding = (request for request in self.running if not request.is_prefill_chunk or self.becomes_decode(request))
        slo_s = self.deadlines.tightest_tbt_s(map(_REQUEST_ID, decoding))
        own_s = (self.deadlines.tbt_s[request.request_id] if joins else math.inf for joins, request in zip(joining, waiting, strict=True))
        tightest_s = list(accumulate(own_s, min, initial=slo_s))

        def refused(index: int) -> bool:
            if numbers[index + 1] in (numbers[0], 1):
                return False  # none of them becomes a decode, or one that is alone
            return not self.accounts.planner.fits(numbers[index + 1], contexts[index + 1], 1e3 * tightest_s[index + 1])

        return bisect_left(range(len(waiting)), True, key=refused)

    # -- after a step --------------------------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        now_s = self.clock()
        self.accounts.end(scheduler_output, now_s)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        self.accounts.count_tokens(outputs.values(), now_s)
        self._forget_ended()
        report = self.accounts.take_report(now_s, self._begun_prompts, resting=not self.requests)
        if report is not None:
            carrier = EngineCoreOutput(REPORT_CARRIER, [], kv_transfer_params={REPORT_KEY: msgspec.to_builtins(report)})
            outputs.setdefault(0, EngineCoreOutputs()).outputs.append(carrier)
        return outputs

    def _begun_prompts(self) -> list[PromptProgress]:
        """Of those that are followed; also those that are computed again after a preemption, and those whose first token is under way."""
        parked = self.parked_requests()
        return [
            PromptProgress(request.request_id, request.num_computed_tokens - self.accounts.tokens_under_way(request.request_id))
            for request in self.running
            if (request.is_prefill_chunk or not request.num_output_tokens)
            and request.request_id not in parked
            and self.is_followed(request)
        ]

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._ended.append(request.request_id)  # its last tokens may still have to be counted
        self.accounts.left_decodes += request.num_output_tokens > 1
        return super()._free_request(request, *args, **kwargs)

    def _forget_ended(self) -> None:
        for request_id in self._ended:
            self.deadlines.forget(request_id)
        self._ended.clear()

    def shutdown(self) -> None:
        self.accounts.close()
        super().shutdown()
