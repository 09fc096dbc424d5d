"""SLO-aware batches: before each step, how many tokens of prefill join the decodes (the paper's Algorithm 2).

vLLM's own scheduler forms the batch; what it may take is set before (VLLM_FACTS 2.4): decodes stand first in `running`,
`max_num_scheduled_tokens` holds the decodes and the prefill budget, `max_num_active_reqs` how many requests may run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from dynaserve.live_profile import LiveProfile
from dynaserve.profile_keeper import ProfileKeeper
from dynaserve.step_latency import BatchShape, PrefillWork, prefill_pairs
from dynaserve.step_planner import RunningDecode, StepPlanner
from vllm_plugin.device import profile_key
from vllm_plugin.options import PluginOptions
from vllm_plugin.requests import TBT_ARG, is_slo_ms

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

logger = logging.getLogger("vllm.dynaserve.batching")

_UNPROFILED_PREFILL_TOKENS = 128
"""Of the first steps beside decodes: enough to learn from, and short on any machine that serves language models."""
_MOST_WAITING = 64
"""Waiting requests that one step looks at."""
_SPARE_TOKENS = 1
"""A request whose KV came from elsewhere starts with a decode that vLLM takes from the same budget (VLLM_FACTS 2.4)."""


class SloScheduler(Scheduler):
    """Mixin over vLLM's `Scheduler` or `AsyncScheduler`."""

    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = PluginOptions.from_config(self.vllm_config)
        self._tbt_slo_s = options.tbt_slo_ms / 1e3
        self._most_scheduled_tokens = self.max_num_scheduled_tokens
        self._most_active_requests = self.max_num_active_reqs
        self._keeper = ProfileKeeper(Path(options.profile), profile_key(self.vllm_config)) if options.profile else None
        self.planner = StepPlanner(
            self._keeper.profile if self._keeper else LiveProfile(),
            self._most_scheduled_tokens,
            options.min_prefill_tokens,
            min(self._most_scheduled_tokens, _UNPROFILED_PREFILL_TOKENS),
        )
        self.clock: Callable[[], float] = time.monotonic
        self._last_token_s: dict[str, float] = {}
        self._under_way: deque[tuple[int, BatchShape, float]] = deque()
        self._last_update_s = 0.0

    def add_request(self, request: Request) -> None:
        slo_ms = ((request.sampling_params and request.sampling_params.extra_args) or {}).get(TBT_ARG)
        if slo_ms is not None and not is_slo_ms(slo_ms):  # a front-end answers 400; here it is too late for that
            logger.warning(
                "%s: %s is %r, not a number of milliseconds above 0: the instance's SLO holds", request.request_id, TBT_ARG, slo_ms
            )
        super().add_request(request)

    # -- before a step -------------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.prepare_step(self.clock())
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens > 0:
            self._under_way.append((id(output), self._shape_of(output), self.clock()))
        return output

    def prepare_step(self, now_s: float) -> None:
        """Sets what vLLM's scheduler may take for the next step."""
        # Stable, so that each part stays in order of arrival; vLLM preempts from the end.
        self.running.sort(key=lambda request: (self.tokens_to_compute(request) > 0, request.is_prefill_chunk))
        active = [request for request in self.running if self.tokens_to_compute(request) > 0]
        decodes = [request for request in active if not request.is_prefill_chunk]
        prefills = [request for request in active if request.is_prefill_chunk]
        waiting = list(islice(self.waiting, _MOST_WAITING))
        admitted = self._admissible(decodes, prefills, waiting)
        plan = self.planner.plan(
            [RunningDecode(request.num_computed_tokens, self._due_s(request, now_s)) for request in decodes],
            [
                PrefillWork(tokens, r.num_computed_tokens)
                for r in [*prefills, *waiting[:admitted]]
                if (tokens := self.tokens_to_compute(r)) > 0
            ],
            now_s,
        )
        decode_tokens = sum(self.tokens_to_compute(request) for request in decodes)
        self.max_num_scheduled_tokens = max(1, min(self._most_scheduled_tokens, decode_tokens + plan.prefill_tokens + _SPARE_TOKENS))
        room = len(self.running) + len(self.kv_holding_waiting) + admitted
        self.max_num_active_reqs = min(self._most_active_requests, room) if admitted < len(waiting) else self._most_active_requests

    def tokens_to_compute(self, request: Request) -> int:
        """Until the request samples its next token, or stops at its hand-off point (which is 0 for a parked one)."""
        tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return int(self._reserve_prefill_lookahead(request, request.num_computed_tokens, tokens))

    def _admissible(self, decodes: list[Request], prefills: list[Request], waiting: list[Request]) -> int:
        """How many of the waiting prompts may begin: each becomes a decode, and those alone must fit into the SLO."""
        ahead = [*decodes, *prefills]
        contexts = [request.num_tokens for request in ahead]
        slo_s = min((self._slo_s(request) for request in ahead), default=float("inf"))
        for admitted, request in enumerate(waiting):
            slo_s = min(slo_s, self._slo_s(request))
            if not self.planner.admits(contexts, request.num_tokens, 1e3 * slo_s):
                return admitted
            contexts.append(request.num_tokens)
        return len(waiting)

    def _slo_s(self, request: Request) -> float:
        extra_args = (request.sampling_params and request.sampling_params.extra_args) or {}
        slo_ms = extra_args.get(TBT_ARG)
        return slo_ms / 1e3 if is_slo_ms(slo_ms) else self._tbt_slo_s

    def _due_s(self, request: Request, now_s: float) -> float:
        return self._last_token_s.get(request.request_id, now_s) + self._slo_s(request)

    # -- after a step --------------------------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        now_s = self.clock()
        self._measure(scheduler_output, now_s)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for output in outputs.values():
            for answer in output.outputs:
                if answer.new_token_ids and answer.request_id in self.requests:
                    self._last_token_s[answer.request_id] = now_s
        return outputs

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._last_token_s.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        super().shutdown()

    def _measure(self, scheduler_output: SchedulerOutput, now_s: float) -> None:
        """A step lasts from the end of its scheduling, or of the step before it when several are under way, to its update."""
        if not self._under_way or self._under_way[0][0] != id(scheduler_output):
            return
        _, shape, scheduled_s = self._under_way.popleft()
        took_ms = 1e3 * (now_s - max(scheduled_s, self._last_update_s))
        self._last_update_s = now_s
        if took_ms > 0:
            self.planner.profile.observe(shape, took_ms)
        if self._keeper is not None:
            self._keeper.save_now_and_then(now_s)

    def _shape_of(self, output: SchedulerOutput) -> BatchShape:
        """A chunk of one token costs what a decode costs."""
        prefill_tokens, pairs, decodes, decode_context = 0, 0.0, 0, 0
        for tokens, context in self._scheduled(output):
            if tokens == 1:
                decodes += 1
                decode_context += context
            else:
                prefill_tokens += tokens
                pairs += prefill_pairs(tokens, context)
        return BatchShape(prefill_tokens=prefill_tokens, prefill_pairs=pairs, decodes=decodes, decode_context_tokens=decode_context)

    def _scheduled(self, output: SchedulerOutput) -> Iterator[tuple[int, int]]:
        """(tokens, tokens before them) of each request in the step; vLLM has counted them as computed already."""
        for request_id, tokens in output.num_scheduled_tokens.items():
            yield tokens, self.requests[request_id].num_computed_tokens - tokens
