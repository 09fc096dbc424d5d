"""The local scheduler where the engine's thread launches a step before it takes the answer of the one before, as on a GPU: over vLLM's
real scheduler, on a virtual machine whose speed is that of Llama-3-8B on an H200 (`docs/results/gpu.md`)."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from dynaserve.step_latency import BatchShape, Roofline
from dynaserve.step_report import StepReport, read_log
from tests.device import DEVICE
from tests.virtual_engine import Engine
from vllm_plugin.options import PluginOptions
from vllm_plugin.step_timer import Event, StepTimer

H200 = Roofline(overhead_ms=4.5, token_ms=0.03, knee_tokens=16.0, pair_ms=3e-7, decode_ms=0.04, context_ms=1e-5)
SLO_MS = 50.0
NOISE, PAUSES = 0.05, 0.002
"""Sigma of a step's time; the share of steps that take three times as long."""
CHUNK_TOKENS = 512
"""The best of 512, 1024 and vLLM's default at this SLO."""


class Host:
    """What launching takes: a step with prefill is no single CUDA graph. For some thirty steps it is fast, then slow, as was measured."""

    def __init__(self) -> None:
        self._rng, self._prefill_ms = random.Random(1), 11.0

    def launch_ms(self, shape: BatchShape) -> float:
        if self._rng.random() < 0.03:
            self._prefill_ms = 30.0 - self._prefill_ms
        return self._prefill_ms if shape.prefill_tokens else 1.2


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(timed_on_device: bool = True, log: str | None = None, **how: Any) -> Engine:
        options = PluginOptions(tbt_slo_ms=SLO_MS, step_log=log)
        launch_ms = how.pop("launch_ms", None) or Host().launch_ms
        engine = Engine(
            tmp_path, 4000, options, pipelined=True, cuts=True, machine=H200, launch_ms=launch_ms, enable_prefix_caching=False, **how
        )
        if how.get("slo", True):
            engine.scheduler.accounts.timed_on_device = timed_on_device
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.scheduler.shutdown()


def serve(engine: Engine, per_s: float, seconds: float) -> float:
    """Prompts of some 2,000 tokens and answers of some 30, as azure-code has them, come at this rate. Returns the mean TTFT, s."""
    rng, at_s = random.Random(2), engine.now_s
    arrivals_s: dict[str, float] = {}
    end_s = engine.now_s + seconds
    while (at_s := at_s + rng.expovariate(per_s)) < end_s:
        arrivals_s[f"r{len(arrivals_s)}"] = at_s
    coming = deque(arrivals_s.items())
    while coming or engine.scheduler.requests:
        while coming and coming[0][1] <= engine.now_s:
            engine.add(coming.popleft()[0], rng.randint(100, 3800), rng.randint(2, 58))
        if engine.scheduler.requests:
            engine.slowness = rng.lognormvariate(0.0, NOISE) * (3.0 if rng.random() < PAUSES else 1.0)
            engine.step()
        else:
            engine.now_s = coming[0][1]
    engine.run()
    return fmean(engine.token_times_s[name][0] - at_s for name, at_s in arrivals_s.items())


@pytest.mark.parametrize("per_s", [6.0, 8.0])
def test_prompts_wait_no_longer_than_with_the_best_chunk(make: Callable[..., Engine], per_s: float) -> None:
    """By the host's clock steps with prefill seem to take no time, errors grow, and steps shrink to nothing."""
    fixed, ours = make(slo=False, max_num_batched_tokens=CHUNK_TOKENS), make()
    fixed_s, ours_s = serve(fixed, per_s, 60.0), serve(ours, per_s, 60.0)
    assert ours_s <= fixed_s
    gaps = ours.gaps_ms()
    assert sum(gap <= SLO_MS for gap in gaps) >= 0.99 * len(gaps)


@pytest.mark.parametrize("timed_on_device", [False, True])
def test_the_time_to_launch_prefill_is_of_its_own_step(make: Callable[..., Engine], tmp_path: Path, timed_on_device: bool) -> None:
    log = tmp_path / "steps.csv"
    engine = make(timed_on_device, str(log), launch_ms=lambda shape: 15.0 if shape.prefill_tokens else 1.2)
    serve(engine, 4.0, 40.0)
    engine.scheduler.shutdown()
    steps = list(read_log(log))
    alone = [(step, after) for step, after in itertools.pairwise(steps) if is_decode(step) and after.measured.decodes]
    before_prefill = [step.measured.measured_ms for step, after in alone if after.measured.prefill_tokens]
    before_decodes = [step.measured.measured_ms for step, after in alone if not after.measured.prefill_tokens]
    assert len(before_prefill) > 10
    assert (median(before_prefill) == pytest.approx(median(before_decodes), rel=0.1)) is timed_on_device


def test_where_no_worker_tells_the_host_does(make: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    engine.launch_ms = None
    with caplog.at_level("WARNING", logger="vllm.dynaserve.batching"):
        engine.learn()
    assert caplog.messages.count("workers have not told how long the last 64 steps took: from now on the host's clock tells") == 1
    assert engine.scheduler.accounts.planner.profile.table is not None


def is_decode(step: StepReport) -> bool:
    return step.measured.decodes > 0 and not step.measured.prefill_tokens


# -- the timer ---------------------------------------------------------------------------------------------------------------------------


@dataclass
class GpuEvent:
    """On a GPU whose clock the test sets."""

    gpu: Gpu
    at_ms: float | None = None

    def record(self) -> None:
        self.gpu.recorded.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end_event: Event) -> float:
        assert isinstance(end_event, GpuEvent)
        assert self.at_ms is not None
        assert end_event.at_ms is not None, "asked before it was over"
        return end_event.at_ms - self.at_ms


class Gpu:
    def __init__(self) -> None:
        self.recorded: list[GpuEvent] = []

    def event(self) -> Event:
        return GpuEvent(self)


def test_a_step_is_told_once_when_it_is_over() -> None:
    gpu = Gpu()
    timer = StepTimer(gpu.event)
    assert timer.take() == []
    for number in (3, 4, 7):
        timer.launched(number)
    assert timer.take() == []
    gpu.recorded[0].at_ms = 100.0
    assert timer.take() == [], "when it began is not known"
    gpu.recorded[1].at_ms = 105.0
    assert timer.take() == [(4, 5.0)]
    assert timer.take() == []
    timer.launched(8)
    gpu.recorded[2].at_ms, gpu.recorded[3].at_ms = 120.0, 124.0
    assert timer.take() == [(7, 15.0), (8, 4.0)]
    assert timer.take() == []


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: DYNASERVE_TEST_DEVICE=cuda")
def test_a_gpu_times_steps_that_the_host_only_launches() -> None:
    torch = pytest.importorskip("torch")
    timer = StepTimer()
    cycles = [20_000_000, 40_000_000, 80_000_000]
    for number, spins in enumerate([1, *cycles]):
        torch.cuda._sleep(spins)
        timer.launched(number)
    torch.cuda.synchronize()
    told = timer.take()
    assert [number for number, _ in told] == [1, 2, 3]
    assert [took_ms / told[0][1] for _, took_ms in told] == pytest.approx([1, 2, 4], rel=0.2)
