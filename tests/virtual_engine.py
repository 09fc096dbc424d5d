"""An engine of vLLM's real scheduler with ours over it, without weights: a machine of known speed on a virtual clock."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from dynaserve.kv_transfer.results import TransferReport
from dynaserve.step_latency import BatchShape, Roofline
from vllm_plugin.batching import SloScheduler
from vllm_plugin.connector import WorkerReports
from vllm_plugin.options import PLUGIN, PluginOptions
from vllm_plugin.resuming import ResumingFirst
from vllm_plugin.scheduler import CutScheduler
from vllm_plugin.step_accounts import shape_of
from vllm_plugin.step_timer import Event, StepTimer

BLOCK = 32
MACHINE = Roofline(overhead_ms=8.0, token_ms=0.25, knee_tokens=16.0, pair_ms=2e-5, decode_ms=0.3, context_ms=5e-4)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 4096,
    "torch_dtype": "float32",
}


@dataclass
class VirtualEvent:
    """Behind the step that the engine started last, on its clock."""

    engine: Engine
    at_s: float = math.inf

    def record(self) -> None:
        self.at_s = self.engine.last_ends_s

    def query(self) -> bool:
        return self.at_s <= self.engine.now_s

    def elapsed_time(self, end_event: Event) -> float:
        assert isinstance(end_event, VirtualEvent)
        return 1e3 * (end_event.at_s - self.at_s)


@dataclass
class _UnderWay:
    output: SchedulerOutput
    tokens: dict[str, int]
    answer: ModelRunnerOutput
    ends_s: float


class Engine:
    """Runs the scheduler's batches on the virtual machine.

    pipelined: as vLLM does with asynchronous scheduling, the next batch is formed while one runs. draft_tokens: that each decode
    speculates, all of which are accepted. cuts: the instance of a fleet, without workers. slo: with SLO-aware batches.
    stock: vLLM's scheduler alone. machine: what its steps take. launch_ms: pipelined only, how long the engine's thread takes to launch a
    step on a GPU, which tells how long it took. folder: gets the model's config. window: of its attention, in tokens; None: it is full.
    """

    def __init__(
        self,
        folder: Path,
        blocks: int = 2000,
        options: PluginOptions | None = None,
        *,
        pipelined: bool = False,
        draft_tokens: int = 0,
        cuts: bool = False,
        slo: bool = True,
        stock: bool = False,
        machine: Roofline = MACHINE,
        launch_ms: Callable[[BatchShape], float] | None = None,
        window: int | None = None,
        **engine_args: Any,
    ) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        if draft_tokens:
            ngram = {"method": "ngram", "num_speculative_tokens": draft_tokens, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
            engine_args["speculative_config"] = ngram
        if cuts:
            engine_args["kv_transfer_config"] = KVTransferConfig(
                kv_connector="DynaServeConnector", kv_connector_module_path="vllm_plugin.connector", kv_role="kv_both"
            )
        args = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=4096,
            enforce_eager=True,
            block_size=BLOCK,
            additional_config={PLUGIN: (options or PluginOptions()).to_config()},
            **{"max_num_batched_tokens": 2048, "max_num_seqs": 64} | engine_args,
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec: AttentionSpec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
        if window is not None:
            spec = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=window)
        base = AsyncScheduler if pipelined else Scheduler
        self.blocks, self.pipelined, self.draft_tokens, self.machine = blocks, pipelined, draft_tokens, machine
        mixins: tuple[type, ...] = () if stock else (*[CutScheduler] * cuts, *[SloScheduler] * slo, ResumingFirst)
        self.scheduler: Any = type("SchedulerUnderTest", (*mixins, base), {})(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.now_s = 0.0
        self.slowness = 1.0
        self.scheduler.clock = lambda: self.now_s
        self.launch_ms = launch_ms
        self.last_ends_s = 0.0
        self._timer = StepTimer(lambda: VirtualEvent(self))
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.token_times_s: dict[str, list[float]] = {}
        self.order: list[str] = []
        self.carriers: list[Any] = []
        self.steps_ms: list[float] = []
        self.arrived: set[str] = set()
        """Betas whose transfers are over; told with the next step."""
        self.sent_back: set[str] = set()
        """Alphas whose blocks are not read any more."""
        self.reports: list[TransferReport] = []
        """Of the worker."""
        self._under_way: deque[_UnderWay] = deque()

    def add(
        self,
        name: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        like: str | None = None,
        priority: int = 0,
        adapter: int | None = None,
        **extra: Any,
    ) -> None:
        """like: the name of a request whose prompt this one shares as far as it goes. adapter: of LoRA. extra: its extra arguments."""
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=extra or None)
        params.update_from_generation_config({}, 2)
        salt = sum(map(ord, like or name))
        prompt = [(salt * 31 + i) % 4000 + 3 for i in range(prompt_tokens)]
        lora = None if adapter is None else LoRARequest(f"adapter {adapter}", adapter, "/nowhere")
        self.scheduler.add_request(Request(name, prompt, params, None, lora_request=lora, priority=priority, block_hasher=self.hasher))

    def step(self) -> dict[str, int]:
        """Schedules a batch and ends the oldest that runs; the tokens of each request in the one that was scheduled."""
        scheduler = self.scheduler
        decodes = {r.request_id for r in scheduler.running if self._decodes(r)}
        output = scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        kept = {r.request_id for r in scheduler.running}
        assert decodes & kept <= scheduled.keys(), "a decode waited"
        if scheduled or not self._under_way:
            self._start(output, scheduled)
        if len(self._under_way) > self.pipelined or not scheduled:
            self._end(self._under_way.popleft())
        return scheduled

    def _decodes(self, request: Request) -> bool:
        done = request.num_output_tokens + request.num_output_placeholders >= request.max_tokens
        parked = self.scheduler.parked_requests() if isinstance(self.scheduler, ResumingFirst) else ()
        return not (done or request.is_prefill_chunk or request.request_id in parked)

    def _start(self, output: SchedulerOutput, scheduled: dict[str, int]) -> None:
        scheduler = self.scheduler
        shape = shape_of(output, scheduler.requests)
        took_ms = self.machine.step_ms(shape) * self.slowness if scheduled else 1.0
        self.steps_ms.append(took_ms)
        starts_s = max([self.now_s, *(step.ends_s for step in self._under_way)])
        if self.launch_ms is not None and scheduled:
            self.now_s += 1e-3 * self.launch_ms(shape)
        self.last_ends_s = max(starts_s + 1e-3 * took_ms, self.now_s)
        ids = list(scheduled)
        sampled = []
        for name in ids:
            request, drafts = scheduler.requests[name], output.scheduled_spec_decode_tokens.get(name, [])
            sampled.append([] if request.is_prefill_chunk else [7] * (1 + len(drafts)))
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self._told_by_worker(),
        )
        self._under_way.append(_UnderWay(output, scheduled, answer, self.last_ends_s))
        if self.launch_ms is not None and scheduled and output.kv_connector_metadata.number is not None:
            self._timer.launched(output.kv_connector_metadata.number)

    def _told_by_worker(self) -> KVConnectorOutput | None:
        device_ms = self._timer.take()
        meta = WorkerReports(self.reports, device_ms)
        told = KVConnectorOutput(finished_recving=self.arrived, finished_sending=self.sent_back, kv_connector_worker_meta=meta)
        something = bool(self.arrived or self.sent_back or self.reports or device_ms)
        self.arrived, self.sent_back, self.reports = set(), set(), []
        return told if something else None

    def _end(self, step: _UnderWay) -> None:
        self.now_s = max(self.now_s, step.ends_s)
        outputs = self.scheduler.update_from_output(step.output, step.answer)
        for answer in (answer for output in outputs.values() for answer in output.outputs):
            if answer.kv_transfer_params:
                self.carriers.append(answer)
            for _ in answer.new_token_ids:
                self.token_times_s.setdefault(answer.request_id, []).append(self.now_s)
                if len(self.token_times_s[answer.request_id]) == 1:
                    self.order.append(answer.request_id)
        if self.draft_tokens:
            names = [name for name in step.tokens if name in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[7] * self.draft_tokens for _ in names]))

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.requests and not self._under_way:
                return
            self.step()
        raise AssertionError(f"not finished: {list(self.scheduler.requests)}")

    def learn(self) -> None:
        """Steps of many kinds, so that the table knows the machine."""
        for i in range(30):
            self.add(f"learn-{i}", 40 + 61 * i % 900, 3 + i % 17)
        self.run()
        self.token_times_s.clear()
        self.order.clear()
        self.steps_ms.clear()

    def gaps_ms(self, since_s: float = 0.0) -> list[float]:
        """All gaps between tokens."""
        pairs = (pair for times in self.token_times_s.values() for pair in itertools.pairwise(times))
        return [1e3 * (after - before) for before, after in pairs if before >= since_s]

    def check_empty(self) -> None:
        assert not self.scheduler.requests
        assert not self.scheduler.deadlines.next_due_s
        assert not self.scheduler.deadlines.first_due_s
        assert not self.scheduler.accounts.steps_under_way
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.blocks - 1
