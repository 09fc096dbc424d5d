"""Decodes come first, also those that resume here with KV from elsewhere: each gets its token in each step, beside whatever prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class ResumingFirst(Scheduler):
    """Mixin over vLLM's scheduler, next to it: what a step may take is settled by then.

    vLLM gives tokens to running requests in their order, and then to waiting ones; a prompt takes all that is left
    (scheduler.py:710). A request that resumes would wait for the end of every prompt that began before, in the middle of its answer.
    """

    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_tokens: dict[str, int] = {}  # of the step that is being scheduled, for running prompts
        self._was_empty = False

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        prompts = self._put_decodes_first()
        ready = self._put_resuming_first()
        # What was left for those that resume may not fit them: a step for nothing is followed by one that leaves them nothing.
        self._most_tokens = self._shares_of(prompts, ready) if prompts and not self._was_empty else {}
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._most_tokens = {}
        self._was_empty = not output.total_num_scheduled_tokens
        return output

    def _put_decodes_first(self) -> list[Request]:
        """Each part keeps its order; vLLM preempts from the end. Returns the running prompts."""
        parked = self.parked_requests()
        prompts = [request for request in self.running if request.is_prefill_chunk and request.request_id not in parked]
        if prompts and self.running[-len(prompts) :] != prompts:
            self.running.sort(key=lambda request: (request.request_id not in parked, request.is_prefill_chunk))
        return prompts

    def _put_resuming_first(self) -> int:
        """Of those that wait with KV, decodes: a prompt that comes before them would take all that is left of the step, and so would the
        next one. Not where priorities say who comes first. Returns how many decodes are ready."""
        queue = self.kv_holding_waiting
        ready = [request for request in queue if self._is_ready_decode(request)]
        if ready and len(ready) < len(queue):
            queue.remove_requests(ready)
            queue.prepend_requests(reversed(ready))  # which vLLM puts in front one after the other
        return len(ready)

    def _is_ready_decode(self, request: Request) -> bool:
        return self.has_arrived(request) and self.is_decode(request) and self.may_begin(request) and self.fits_adapters(request)

    def _shares_of(self, prompts: Sequence[Request], ready: int) -> dict[str, int]:
        """What running prompts may take of the next step, in order, so that each decode that resumes gets its token; empty: all.

        ready: how many could resume.
        """
        slots = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input
        resuming = min(ready, max(0, slots))
        if not resuming:
            return {}
        parked = self.parked_requests()  # a preempted one is not running
        decodes = sum(request.request_id not in parked for request in self.running) - len(prompts)
        left = max(0, self.max_num_scheduled_tokens - decodes - resuming)
        most = self.scheduler_config.long_prefill_token_threshold or left
        shares: dict[str, int] = {}
        for request in prompts:
            shares[request.request_id] = tokens = min(self.tokens_to_compute(request), most, left)
            left -= tokens
        return shares

    def parked_requests(self) -> Collection[str]:
        """Ids of running requests that have nothing to compute."""
        return ()

    def is_followed(self, request: Request) -> bool:
        """Whether somebody hears how far its prompt is."""
        return True

    def becomes_decode(self, request: Request) -> bool:
        """Whether it samples here, once its prompt is computed."""
        return True

    def most_cached_tokens(self, request: Request) -> int:
        """Which it may take from the prefix cache: one at least is computed."""
        return int(request.num_tokens) - 1

    def may_begin(self, request: Request) -> bool:
        """In the step that is being scheduled."""
        return True

    def fits_adapters(self, request: Request) -> bool:
        """Whether its LoRA adapter has room beside those of all that run. vLLM counts those of a step's requests (scheduler.py:889), which
        are all that run, but where a prompt gets no share; and asserts that they fit as soon as it has one again."""
        adapter = request.lora_request
        if self.lora_config is None or adapter is None:
            return True
        parked = self.parked_requests()
        running = {r.lora_request.lora_int_id for r in self.running if r.lora_request is not None and r.request_id not in parked}
        return adapter.lora_int_id in running or len(running) < self.lora_config.max_loras

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether vLLM may run a request that waits. One whose KV has come resumes, and releases its alpha, in any case."""
        resumes = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return bool(super()._handle_blocked_waiting_request(request)) and (resumes or self.fits_adapters(request))

    def has_arrived(self, request: Request) -> bool:
        """All that it waited for: its KV, the next input of a session, its grammar."""
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ or self.waits_for_grammar(request):
            return False
        return request.status != RequestStatus.WAITING_FOR_REMOTE_KVS or request.request_id in self.finished_recving_kv_req_ids

    @staticmethod
    def waits_for_grammar(request: Request) -> bool:
        """It is being compiled."""
        return bool(request.use_structured_output) and request.structured_output_request.grammar is None

    def hands_over_s(self, request: Request, now_s: float) -> float | None:
        """About when a request comes from another instance that has a part of its answer: from then on its client waits for its next
        token. None: it does not, or nobody has told."""
        return None

    def known_for_s(self, request: Request) -> float:
        """How long this instance had known the newest token of such a request when its engine learnt of it."""
        return 0.0

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
        share = self._most_tokens.get(request.request_id, num_new_tokens)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, min(num_new_tokens, share)))
