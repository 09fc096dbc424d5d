"""An instance's virtual batches, one step at a time: the oracle of the execution predictor, in its plainest form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dynaserve.execution_predictor import InstanceLimits, VirtualRequest
from dynaserve.step_latency import BatchLimits, BatchShape, PrefillWork, ProfileTable, choose_budget, leaves_room_for_decode


@dataclass
class Walked:
    """A request on its way. start_ms, prefill_end_ms, end_ms: None until then."""

    key: int
    context: int
    prefill: int
    decode: int
    ready_ms: float
    start_ms: float | None = None
    prefill_end_ms: float | None = None
    end_ms: float | None = None
    is_beta: bool = False

    @property
    def whole_context(self) -> int:
        return self.context + self.prefill

    @property
    def resumes(self) -> bool:
        return self.prefill == 0 or (self.is_beta and self.prefill == 1)


@dataclass
class SteppingInstance:
    """Walks every step. cost_scale: of the table's latencies."""

    table: ProfileTable
    limits: InstanceLimits
    cost_scale: float = 1.0
    now_ms: float = 0.0
    running: list[Walked] = field(default_factory=list)
    waiting: list[Walked] = field(default_factory=list)
    ended: list[Walked] = field(default_factory=list)

    def add(self, request: VirtualRequest, now_ms: float) -> Walked:
        ready_ms = max(request.ready_ms, now_ms)
        walked = Walked(
            request.key, request.context_tokens, request.prefill_tokens, request.decode_tokens, ready_ms, is_beta=request.is_beta
        )
        self.waiting.append(walked)
        self.waiting.sort(key=lambda r: (not r.is_beta, r.is_beta and not r.resumes))
        return walked

    def remove(self, key: int) -> bool:
        before = len(self.running) + len(self.waiting)
        self.running = [r for r in self.running if r.key != key]
        self.waiting = [r for r in self.waiting if r.key != key]
        return len(self.running) + len(self.waiting) < before

    def advance(self, until_ms: float) -> None:
        while self.now_ms < until_ms:
            if not self.step(until_ms):
                self.now_ms = until_ms

    def play_out(self) -> None:
        while self.step(math.inf):
            pass

    def step(self, until_ms: float) -> bool:
        admissible = self._admissible()
        if not self.running and not admissible:
            coming = [r.ready_ms for r in self.waiting if self.now_ms < r.ready_ms < until_ms]
            if coming:
                self.now_ms = min(coming)
            return bool(coming)
        for request in [r for r in admissible if r.resumes]:
            self._admit(request)
            request.prefill_end_ms = self.now_ms if request.prefill == 0 else None
            request.decode += request.prefill
            request.prefill = 0
        decodes = [r for r in self.running if r.prefill == 0]
        prefills = [r for r in self.running if r.prefill > 0] + [r for r in admissible if r.prefill > 0]
        shape = BatchShape(decodes=len(decodes), decode_context_tokens=sum(r.context for r in decodes))
        step_ms, budget = self.table.step_ms(shape), 0
        if prefills:
            work = [PrefillWork(r.prefill, r.context) for r in prefills]
            limits = BatchLimits(
                step_ms=self.limits.step_ms / self.cost_scale if decodes else math.inf,
                max_tokens=self.limits.max_step_tokens,
                min_prefill_tokens=self.limits.min_prefill_tokens,
            )
            chosen = choose_budget(self.table, shape, work, limits)
            step_ms, budget = chosen.step_ms, chosen.tokens
        self._compute(decodes, prefills, budget, step_ms * self.cost_scale)
        return True

    def _compute(self, decodes: list[Walked], prefills: list[Walked], budget: int, step_ms: float) -> None:
        ends_ms = self.now_ms + step_ms
        for request in prefills:
            taken = min(budget, request.prefill)
            if taken and request in self.waiting:
                self._admit(request)
            budget -= taken
            request.prefill -= taken
            request.context += taken
            if taken and request.prefill == 0:
                request.prefill_end_ms = ends_ms
        for request in decodes:
            request.context += 1
            request.decode -= 1
            request.prefill_end_ms = ends_ms if request.prefill_end_ms is None else request.prefill_end_ms
        self.now_ms = ends_ms
        for request in [r for r in self.running if r.prefill == 0 and r.decode == 0]:
            request.end_ms = ends_ms
            self.running.remove(request)
            self.ended.append(request)

    def _admit(self, request: Walked) -> None:
        self.waiting.remove(request)
        self.running.append(request)
        request.start_ms = self.now_ms

    def _admissible(self) -> list[Walked]:
        found: list[Walked] = []
        for request in self.waiting:
            if request.ready_ms > self.now_ms:
                continue
            ahead = [*self.running, *found]
            prefill = sum(r.prefill for r in self.running) + sum(r.prefill for r in found if not r.resumes)
            full = prefill >= self.limits.max_step_tokens
            if request.is_beta and request.resumes:
                full = False
            if ahead and (full or not self._fits(request, found)):
                break
            found.append(request)
        return found

    def _fits(self, request: Walked, found: list[Walked]) -> bool:
        """Beside what runs, and what is found to begin with it. The token that one samples from is computed with the step."""
        ahead = [(r.whole_context, r.decode > 0) for r in self.running]
        ahead += [(r.context if r.resumes else r.whole_context, r.decode > 0 or r.resumes) for r in found]
        own = request.context if request.resumes else request.whole_context
        decoding = [held for held, decodes in ahead if decodes]
        shape = BatchShape(decodes=len(decoding), decode_context_tokens=sum(decoding))
        limit_ms = (self.limits.admit_ms or self.limits.step_ms) / self.cost_scale
        return (
            len(ahead) < self.limits.max_requests
            and sum(held for held, _ in ahead) + own <= self.limits.kv_tokens
            and (request.decode == 0 or not decoding or leaves_room_for_decode(self.table, shape, own, limit_ms))
        )
