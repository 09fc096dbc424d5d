"""What becomes of the steps of the local scheduler: how long each took, what is learnt from it, and what is told about it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from dynaserve.live_profile import LiveProfile
from dynaserve.messages import MeasuredStep, PromptProgress
from dynaserve.profile_keeper import ProfileKeeper
from dynaserve.step_latency import BatchShape, prefill_pairs
from dynaserve.step_planner import StepPlan, StepPlanner
from dynaserve.step_report import UNPROFILED, BatchReport, StepLog, StepReport, StepReporter
from dynaserve.token_deadlines import TokenDeadlines
from vllm_plugin.device import profile_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs

    from vllm_plugin.options import PluginOptions

logger = logging.getLogger("vllm.dynaserve.batching")

_UNPROFILED_PREFILL_TOKENS = 128
"""Of the first steps beside decodes: enough to learn from, and short on any machine that serves language models."""
_MOST_UNTOLD = 64
"""Steps in a row of which workers tell no times, which they do of the last but two otherwise."""


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step between its scheduling and its update."""

    output: SchedulerOutput
    shape: BatchShape
    plan: StepPlan
    predicted_ms: float | None
    began_s: float
    number: int


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step after its update, whose time on the device is not known yet. host_ms: from when its batch began to be formed."""

    step: _UnderWay
    at_s: float
    host_ms: float


@dataclass
class StepAccounts:
    """planner: learns. keeper: saves what it learnt; None: nobody does. log: gets each step; None: there is none. timed_on_device:
    workers tell how long steps took (`StepTimer`). left_decodes: that ended, or went on elsewhere, since tokens were counted."""

    planner: StepPlanner
    keeper: ProfileKeeper | None = None
    log: StepLog | None = None
    timed_on_device: bool = False
    deadlines: TokenDeadlines = field(default_factory=TokenDeadlines)
    left_decodes: int = 0
    _reporter: StepReporter = field(default_factory=StepReporter)
    _under_way: deque[_UnderWay] = field(default_factory=deque)
    _last_end_s: float = 0.0
    _began: int = 0
    _ended: deque[_Ended] = field(default_factory=deque)
    _device_ms: deque[tuple[int, float]] = field(default_factory=deque)

    @classmethod
    def of(cls, config: VllmConfig, options: PluginOptions, max_tokens: int) -> StepAccounts:
        """Raises ConfigError for a profile or a log that cannot be used."""
        keeper = ProfileKeeper(Path(options.profile), profile_key(config)) if options.profile else None
        planner = StepPlanner(
            keeper.profile if keeper else LiveProfile(),
            max_tokens,
            options.min_prefill_tokens,
            min(max_tokens, _UNPROFILED_PREFILL_TOKENS),
            speculated_tokens=config.num_speculative_tokens,
        )
        log = StepLog(Path(options.step_log)) if options.step_log else None
        launched_ahead = config.device_config.device_type == "cuda" and bool(config.scheduler_config.async_scheduling)
        return cls(planner, keeper, log, timed_on_device=launched_ahead)

    @property
    def steps_under_way(self) -> int:
        return len(self._under_way)

    def tokens_under_way(self, request_id: str) -> int:
        """Of the steps that are scheduled and not over; vLLM counts them as computed."""
        return sum(step.output.num_scheduled_tokens.get(request_id, 0) for step in self._under_way)

    @property
    def predicted_ms(self) -> float | None:
        """Of the step that began last; None: it is over, or nothing is known."""
        return self._under_way[-1].predicted_ms if self._under_way else None

    @property
    def next_number(self) -> int | None:
        """Of the step that begins next; None: workers need not tell how long it takes."""
        return self._began + 1 if self.timed_on_device else None

    def begin(self, output: SchedulerOutput, shape: BatchShape, plan: StepPlan, now_s: float) -> None:
        table = self.planner.profile.table
        predicted_ms = None if table is None else table.step_ms(shape)
        self._began += 1
        self._under_way.append(_UnderWay(output, shape, plan, predicted_ms, now_s, self._began))

    def end(self, output: SchedulerOutput, now_s: float) -> None:
        """A step lasts from when its batch begins to be formed, or from the end of the step before it when several are under way, to its
        update: decodes wait for all of that. Where steps are timed on the device, that tells when the one before it has ended."""
        if not self._under_way or self._under_way[0].output is not output:
            return
        step = self._under_way.popleft()
        if self.timed_on_device:
            self._ended.append(_Ended(step, now_s, 1e3 * (now_s - step.began_s)))
            self._settle()
            if len(self._ended) > _MOST_UNTOLD:
                self.timed_on_device = False
                self._ended.clear()
                logger.warning("workers have not told how long the last %d steps took: from now on the host's clock tells", _MOST_UNTOLD)
            return
        took_ms = 1e3 * (now_s - max(step.began_s, self._last_end_s))
        self._last_end_s = now_s
        self._account(step, took_ms, now_s)

    def told(self, device_ms: Iterable[tuple[int, float]]) -> None:
        """Of steps, by number, from the end of the one before on the device: after a rest longer than the step."""
        self._device_ms.extend(device_ms)

    def _settle(self) -> None:
        """Both are in order. Of the first step nothing is told, and of one that several pipeline stages compute more than once."""
        while self._ended and self._device_ms:
            ended, (number, device_ms) = self._ended[0], self._device_ms[0]
            if number <= ended.step.number:
                self._device_ms.popleft()
            if ended.step.number <= number:
                self._ended.popleft()
            if ended.step.number == number:
                self._account(ended.step, min(device_ms, ended.host_ms), ended.at_s)

    def _account(self, step: _UnderWay, took_ms: float, now_s: float) -> None:
        if took_ms <= 0 or step.output.scheduled_encoder_inputs:  # what encoders of images and sound take is on no table
            return
        report = _report_of(step, took_ms, now_s)
        self.planner.observe(step.shape, step.plan, step.predicted_ms, took_ms, report.measured.draft_tokens)
        self._reporter.add(report)
        if self.log is not None:
            self.log.add(report)

    def count_tokens(self, outputs: Iterable[EngineCoreOutputs], now_s: float) -> None:
        token, counts = self.deadlines.token, self.deadlines.counts
        late, gaps = counts.next_tokens - counts.next_tokens_in_time, 0
        for output in outputs:
            for answer in output.outputs:
                if answer.new_token_ids:
                    gaps += answer.request_id in self.deadlines.next_due_s
                    token(answer.request_id, len(answer.new_token_ids), now_s)
        left, self.left_decodes = self.left_decodes, 0
        self.planner.admission.observe(gaps, counts.next_tokens - counts.next_tokens_in_time - late, left)

    def take_report(self, now_s: float, prompts: Callable[[], list[PromptProgress]], *, resting: bool) -> BatchReport | None:
        """None: not now. prompts: asked if there is a report. resting: no step will follow soon."""
        steps = self._reporter.take(now_s, resting=resting)
        if steps is None:
            return None
        if self.log is not None:
            self.log.flush()
        if self.keeper is not None:
            self.keeper.save_now_and_then(now_s, resting=resting)
        return BatchReport(steps, self.deadlines.take_counts(), prompts(), self.planner.step_share, self.planner.admitting_share)

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
        if self.log is not None:
            self.log.close()


def shape_of(output: SchedulerOutput, requests: Mapping[str, Request]) -> BatchShape:
    """Of a batch that was just scheduled: vLLM has counted its tokens as computed already. A chunk of one token costs what a
    decode costs, and the tokens that a decode speculates what prefill does."""
    prefill_tokens, pairs, decodes, decode_context = 0, 0.0, 0, 0
    speculating = output.scheduled_spec_decode_tokens
    for request_id, tokens in output.num_scheduled_tokens.items():
        context = requests[request_id].num_computed_tokens - tokens
        if tokens == 1 or request_id in speculating:
            decodes += 1
            decode_context += context
            tokens, context = tokens - 1, context + 1
        prefill_tokens += tokens
        pairs += prefill_pairs(tokens, context)
    return BatchShape(prefill_tokens=prefill_tokens, prefill_pairs=pairs, decodes=decodes, decode_context_tokens=decode_context)


def draft_tokens(output: SchedulerOutput) -> int:
    """Of `shape_of`'s prefill, what decodes speculated."""
    return sum(output.num_scheduled_tokens[request_id] - 1 for request_id in output.scheduled_spec_decode_tokens)


def _report_of(step: _UnderWay, took_ms: float, now_s: float) -> StepReport:
    shape, plan = step.shape, step.plan
    return StepReport(
        at_s=now_s,
        measured=MeasuredStep(
            prefill_tokens=shape.prefill_tokens,
            prefill_pairs=shape.prefill_pairs,
            decodes=shape.decodes,
            decode_context_tokens=shape.decode_context_tokens,
            measured_ms=took_ms,
            draft_tokens=draft_tokens(step.output),
        ),
        predicted_ms=step.predicted_ms,
        limit_ms=None if math.isinf(plan.limit_ms) else plan.limit_ms,
        budget_tokens=plan.prefill_tokens,
        reason=UNPROFILED if plan.reason is None else plan.reason.name,
        late=plan.late,
    )
