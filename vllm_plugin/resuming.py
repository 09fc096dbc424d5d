"""Requests whose KV came from elsewhere run as the decodes that they are: in each step, beside whatever prompt."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class ResumingFirst(Scheduler):
    """Mixin over vLLM's scheduler, next to it: what a step may take is settled by then.

    vLLM gives tokens to running requests in their order, and then to waiting ones; a prompt takes all that is left
    (scheduler.py:672). A request that resumes would wait for the end of every prompt that began before, in the middle of its answer.
    """

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_tokens: dict[str, int] = {}  # of the step that is being scheduled, for running prompts

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._most_tokens = self._shares_of_prompts()
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._most_tokens = {}

    def _shares_of_prompts(self) -> dict[str, int]:
        """What running prompts may take of the next step, in order, so that each decode gets its token; empty: all there is."""
        parked = self.parked_requests()
        prompts = [request for request in self.running if request.is_prefill_chunk and request.request_id not in parked]
        resuming = sum(self.has_arrived(request) and self.is_decode(request) for request in self.kv_holding_waiting)
        if not prompts or (not resuming and self.running[-len(prompts) :] == prompts):
            return {}
        left = self.max_num_scheduled_tokens - resuming
        left -= sum(self.tokens_to_compute(request) for request in self.running if not request.is_prefill_chunk)
        shares: dict[str, int] = {}
        for request in prompts:
            shares[request.request_id] = tokens = min(self.tokens_to_compute(request), max(0, left))
            left -= tokens
        return shares

    def parked_requests(self) -> Collection[str]:
        """Ids of running requests that have nothing to compute."""
        return ()

    def has_arrived(self, request: Request) -> bool:
        """All of its KV."""
        return request.status != RequestStatus.WAITING_FOR_REMOTE_KVS or request.request_id in self.finished_recving_kv_req_ids

    @staticmethod
    def is_decode(request: Request) -> bool:
        """Nothing but its last token is to be computed before it samples."""
        return bool(request.num_tokens - request.num_computed_tokens <= 1)

    def tokens_to_compute(self, request: Request) -> int:
        """Until the request samples its next token, or stops at its hand-off point."""
        tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return int(self._reserve_prefill_lookahead(request, request.num_computed_tokens, tokens))

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The last word on a request's tokens in vLLM's loop over the running ones."""
        tokens = int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))
        return min(tokens, self._most_tokens.get(request.request_id, tokens))
