"""The local scheduler over vLLM's real one, without weights: a machine of known speed on a virtual clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs  # noqa: E402 - only where vLLM is
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from dynaserve.step_latency import Roofline  # noqa: E402
from vllm_plugin.batching import SloScheduler  # noqa: E402
from vllm_plugin.options import PLUGIN, PluginOptions  # noqa: E402

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


class Engine:
    """Runs the scheduler's batches on the virtual machine; `gaps_ms` are all gaps between tokens."""

    def __init__(self, folder: Path, blocks: int, options: PluginOptions, **engine_args: Any) -> None:
        args = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=4096,
            enforce_eager=True,
            block_size=BLOCK,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            additional_config={PLUGIN: options.to_config()},
            **engine_args,
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
        self.blocks = blocks
        self.scheduler = SloScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.now_s = 0.0
        self.scheduler.clock = lambda: self.now_s
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.token_times_s: dict[str, list[float]] = {}
        self.order: list[str] = []

    def add(self, name: str, prompt_tokens: int, output_tokens: int, *, like: str | None = None, priority: int = 0, **extra: Any) -> None:
        """like: the name of a request whose prompt this one shares as far as it goes."""
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args=extra or None)
        params.update_from_generation_config({}, 2)
        salt = sum(map(ord, like or name))
        prompt = [(salt * 31 + i) % 4000 + 3 for i in range(prompt_tokens)]
        self.scheduler.add_request(Request(name, prompt, params, None, priority=priority, block_hasher=self.hasher))

    def step(self) -> dict[str, int]:
        """Tokens of each request in the step."""
        scheduler = self.scheduler
        decodes = {r.request_id for r in scheduler.running if not r.is_prefill_chunk}
        output = scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        kept = {r.request_id for r in scheduler.running}
        assert decodes & kept <= scheduled.keys(), "a decode waited"
        shape = scheduler._shape_of(output)
        self.now_s += MACHINE.step_ms(shape) / 1e3 if scheduled else 0.001
        ids = list(scheduled)
        sampled = [[7] if scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_tokens else [] for i in ids]
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        scheduler.update_from_output(output, answer)
        for name, tokens in zip(ids, sampled, strict=True):
            if tokens:
                self.token_times_s.setdefault(name, []).append(self.now_s)
                if len(self.token_times_s[name]) == 1:
                    self.order.append(name)
        return scheduled

    def run(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"not finished: {list(self.scheduler.requests)}")

    def gaps_ms(self, since_s: float = 0.0) -> list[float]:
        pairs = (pair for times in self.token_times_s.values() for pair in itertools.pairwise(times))
        return [1e3 * (after - before) for before, after in pairs if before >= since_s]

    def check_empty(self) -> None:
        assert not self.scheduler.requests
        assert not self.scheduler._last_token_s
        assert not self.scheduler._under_way
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.blocks - 1


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engines: list[Engine] = []

    def make(blocks: int = 2000, tbt_slo_ms: float = 100.0, **engine_args: Any) -> Engine:
        engines.append(Engine(tmp_path, blocks, PluginOptions(tbt_slo_ms=tbt_slo_ms), **engine_args))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_empty()


def learn(engine: Engine) -> None:
    """Steps of many kinds, so that the table knows the machine."""
    for i in range(30):
        engine.add(f"learn-{i}", 40 + 61 * i % 900, 3 + i % 17)
    engine.run()
    engine.token_times_s.clear()
    engine.order.clear()


def test_tokens_come_within_the_slo_while_long_prompts_arrive(make: Callable[..., Engine]) -> None:
    engine = make()
    learn(engine)
    for i in range(8):
        engine.add(f"decode-{i}", 20, 400)
    for i in range(10):
        for _ in range(30):
            engine.step()
        engine.add(f"long-{i}", 2000, 5)
    engine.run()
    gaps = sorted(engine.gaps_ms())
    assert gaps[int(0.99 * len(gaps))] <= 100.0
    assert sum(gap <= 100.0 for gap in gaps) >= 0.99 * len(gaps)


def test_without_decodes_the_whole_prompt_goes_into_one_step(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add("a", 1500, 1)
    assert engine.step() == {"a": 1500}


def test_prompts_share_what_is_left_in_order_of_arrival(make: Callable[..., Engine]) -> None:
    engine = make()
    learn(engine)
    engine.add("decode", 20, 300)
    engine.step()
    engine.add("first", 1200, 1)
    engine.add("second", 1200, 1)
    engine.run()
    assert engine.order == ["decode", "first", "second"]


def test_prefill_progresses_when_decodes_alone_take_too_long(make: Callable[..., Engine]) -> None:
    engine = make(tbt_slo_ms=5.0)
    learn(engine)
    engine.add("decode", 20, 100)
    engine.step()
    engine.add("prompt", 64, 2)
    engine.run()
    assert len(engine.token_times_s["prompt"]) == 2


def test_a_request_with_a_loose_slo_leaves_large_steps(make: Callable[..., Engine]) -> None:
    engine = make()
    learn(engine)
    largest = {}
    for name, slo_ms in (("tight", 60.0), ("loose", 5000.0)):
        engine.add(f"{name}-decode", 20, 40, dynaserve_tbt_ms=slo_ms)
        engine.step()
        engine.add(f"{name}-prompt", 1800, 1)
        sizes = []
        while engine.scheduler.requests:
            sizes.append(max(engine.step().values()))
        largest[name] = max(sizes)
    assert largest["loose"] > 2 * largest["tight"]


def test_an_impossible_slo_that_reached_the_engine_is_told_and_ignored(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    with caplog.at_level("WARNING", "vllm.dynaserve.batching"):
        engine.add("r", 20, 3, dynaserve_tbt_ms="fast")
    assert "dynaserve_tbt_ms is 'fast'" in caplog.text
    engine.run()
    assert len(engine.token_times_s["r"]) == 3


def test_a_prompt_waits_while_its_decode_would_break_the_slo(make: Callable[..., Engine]) -> None:
    engine = make(tbt_slo_ms=20.0)
    learn(engine)
    for i in range(60):
        engine.add(f"r{i}", 30, 60)
    running = 0
    while engine.scheduler.requests:
        engine.step()
        running = max(running, len(engine.scheduler.running))
    assert 1 < running < 60
    gaps = engine.gaps_ms()
    assert sum(gap <= 20.0 for gap in gaps) >= 0.9 * len(gaps)


def test_little_memory_preempts_and_loses_nothing(make: Callable[..., Engine]) -> None:
    engine = make(blocks=40)
    for i in range(12):
        engine.add(f"r{i}", 100 + 13 * i, 150)
    preempted = 0
    while engine.scheduler.requests:
        engine.step()
        preempted = max(preempted, *(r.num_preemptions for r in engine.scheduler.requests.values()), 0)
    assert preempted > 0
    assert {len(times) for times in engine.token_times_s.values()} == {150}


def test_a_cached_prefix_is_not_computed_again(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.add("a", 640, 2)
    engine.run()
    engine.add("b", 700, 2, like="a")
    assert engine.step() == {"b": 60}
    engine.run()


def test_priorities_are_kept(make: Callable[..., Engine]) -> None:
    engine = make(scheduling_policy="priority")
    learn(engine)
    engine.add("decode", 20, 200)
    engine.step()
    engine.add("later", 800, 1, priority=5)
    engine.add("urgent", 800, 1, priority=1)
    engine.run()
    assert engine.order == ["decode", "urgent", "later"]
