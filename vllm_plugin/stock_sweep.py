"""Steps of given compositions by stock vLLM, without DynaServe: a grid for machines where only another vLLM than ours runs.

    python -m vllm_plugin.stock_sweep FOLDER --name qwen2.5-14b --system h200 --output steps.csv --load-format dummy

Run with vLLM 0.25.1 and with the pinned release. It writes what `dynaserve simulate --gpu-grid` reads, with the least and the most
beside the median of each step. A step is one `EngineCore.step`: scheduled, executed, sampled, on the host's clock; async scheduling is
off. Contexts are not computed but claimed, as by a KV connector that has loaded them, over a cache of random numbers.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request, RequestStatus

from vllm_plugin.sweep_requests import sweep_request

REPETITIONS = 4
"""Of each step; the first is not kept."""
_SPARE_TOKENS = 256
"""What a decode may answer before its group is begun anew."""
_COLUMNS = (
    "model",
    "system",
    "backend_version",
    "tp",
    "prefill_new",
    "prefill_cached",
    "decode_n",
    "decode_ctx",
    "ms",
    "ms_least",
    "ms_most",
)


class Composition(NamedTuple):
    """Of a step: a prefill of `new` tokens after `cached` ones, beside `decodes` of about `context` tokens each."""

    new: int
    cached: int
    decodes: int
    context: int


def compositions(most_new: int) -> list[Composition]:
    """Prefills alone, decodes alone and both, by group of decodes. most_new: tokens of the longest prefill."""
    prefills = [new for new in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if new <= most_new]
    beside = [new for new in prefills if new in (64, 256, 512, 1024, 2048)]
    groups = [(decodes, context) for context in (512, 1024, 2048, 4096, 8192) for decodes in (1, 8, 16, 32, 64, 128, 256)]
    steps = [Composition(new, cached, 0, 0) for new in prefills for cached in (0, 2048, 8192)]
    for decodes, context in groups:
        steps.append(Composition(0, 0, decodes, context))
        if context in (1024, 4096):
            steps += [Composition(new, 0, decodes, context) for new in beside]
            steps += [Composition(new, 2048, decodes, context) for new in beside if new in (256, 1024) and decodes in (8, 64)]
    return steps


class ClaimingConnector(KVConnectorBase_V1, SupportsHMA):
    """Says that the first `claimed[request_id]` tokens of a request are in the cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.claimed: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return self.claimed.pop(request.request_id, 0), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for cache in kv_caches.values():
            cache.normal_(std=0.5)  # zeros would run faster than numbers do

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


class Sweep:
    """core: of a scheduler with a `ClaimingConnector`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler: Any = core.scheduler
        self._most_tokens: int = self._scheduler.max_num_scheduled_tokens
        self._kv_tokens: int = core.vllm_config.cache_config.num_gpu_blocks * core.vllm_config.cache_config.block_size
        self._most_requests: int = core.vllm_config.scheduler_config.max_num_seqs
        self._most_context: int = core.vllm_config.model_config.max_model_len
        self._added = 0
        self._group: tuple[int, int] = (0, 0)
        self._held: list[str] = []
        self._steps_left = 0

    def fits(self, step: Composition) -> bool:
        longest = max(step.new + step.cached + 1, step.context + 1 + _SPARE_TOKENS)
        tokens = step.decodes * (step.context + 1 + _SPARE_TOKENS) + step.new + step.cached + 1
        return (
            step.new + step.decodes <= self._most_tokens
            and step.decodes + (step.new > 0) <= self._most_requests
            and longest <= self._most_context
            and tokens <= int(0.95 * self._kv_tokens)
        )

    def measure(self, step: Composition) -> list[float]:
        """Milliseconds of each repetition that is kept."""
        self._hold(step.decodes, step.context)
        return [self._timed(step) for _ in range(REPETITIONS)][1:]

    def _timed(self, step: Composition) -> float:
        if step.new:
            self._add(step.cached, step.new, answer=1)
        self._scheduler.max_num_scheduled_tokens = step.decodes + step.new
        self._steps_left -= 1
        before = time.perf_counter()
        self._core.step_fn()
        took_ms = 1e3 * (time.perf_counter() - before)
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        assert (running, waiting) == (step.decodes, 0), f"{step} was not taken in one step: {running} run and {waiting} wait"
        return took_ms

    def _hold(self, decodes: int, context: int) -> None:
        if self._group == (decodes, context) and self._steps_left >= REPETITIONS:
            return
        self._scheduler.finish_requests(self._held, RequestStatus.FINISHED_ABORTED)
        self._held = [self._add(context, 1, answer=_SPARE_TOKENS) for _ in range(decodes)]
        self._scheduler.max_num_scheduled_tokens = self._most_tokens
        if self._held:
            self._core.step_fn()
        computed = {self._scheduler.requests[name].num_computed_tokens for name in self._held}
        assert computed <= {context + 1}, f"decodes of {context} tokens have {computed}"
        self._group, self._steps_left = (decodes, context), _SPARE_TOKENS - 1

    def _add(self, claimed: int, computed: int, answer: int) -> str:
        self._added += 1
        request = sweep_request(self._added, claimed + computed, answer)
        self._scheduler.connector.claimed[request.request_id] = claimed
        self._core.add_request(request)
        return str(request.request_id)


def rows(sweep: Sweep, steps: Iterable[Composition], labels: Sequence[Any]) -> Iterable[list[Any]]:
    for step in steps:
        if not sweep.fits(step):
            print(f"{step} does not fit", flush=True)
            continue
        ms = sweep.measure(step)
        yield [*labels, *step, *(f"{value:.4f}" for value in (statistics.median(ms), min(ms), max(ms)))]


def main(arguments: Sequence[str]) -> None:
    parser = FlexibleArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--name", required=True, help="of the model, in the grid")
    parser.add_argument("--system", required=True, help="of the machine, in the grid")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--most-new", type=int, default=8192, help="tokens of the longest prefill (default: %(default)s)")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(arguments)
    args.model = args.folder
    engine_args: Any = EngineArgs.from_cli_args(args)
    engine_args.enable_prefix_caching, engine_args.async_scheduling, engine_args.skip_tokenizer_init = False, False, True
    engine_args.kv_transfer_config = KVTransferConfig(
        kv_connector="ClaimingConnector", kv_connector_module_path="vllm_plugin.stock_sweep", kv_role="kv_both"
    )
    began = time.monotonic()
    config = engine_args.create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    print(f"{args.name}: ready after {time.monotonic() - began:.0f} s", flush=True)
    try:
        steps = compositions(args.most_new)
        random.Random(1).shuffle(steps)
        steps.sort(key=lambda step: (step.context, step.decodes))
        labels = (args.name, args.system, vllm.__version__, config.parallel_config.tensor_parallel_size)
        with args.output.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(_COLUMNS)
            for row in rows(Sweep(core), steps, labels):
                lines.writerow(row)
                file.flush()
    finally:
        core.shutdown()
    print(f"{args.name}: {args.output} is complete after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
