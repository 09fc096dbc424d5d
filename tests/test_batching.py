"""The local scheduler over vLLM's real one, on a virtual machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from dynaserve.messages import PromptProgress
from dynaserve.step_latency import AdmissionMargin, BatchShape, Roofline, prefill_pairs
from dynaserve.step_report import BatchReport, read_log
from dynaserve.token_deadlines import TokenCounts
from tests.virtual_engine import BLOCK, MACHINE, Engine
from vllm_plugin import batching
from vllm_plugin.batching import REPORT_KEY
from vllm_plugin.options import PluginOptions

SLOW_ATTENTION = Roofline(overhead_ms=8.0, token_ms=0.25, knee_tokens=16.0, pair_ms=5e-4, decode_ms=0.3, context_ms=5e-4)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(blocks: int = 2000, tbt_slo_ms: float = 100.0, ttft_slo_ms: float | None = None, **how: Any) -> Engine:
        engines.append(Engine(tmp_path, blocks, PluginOptions(tbt_slo_ms=tbt_slo_ms, ttft_slo_ms=ttft_slo_ms), **how))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_empty()


def test_tokens_come_within_the_slo_while_long_prompts_arrive(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
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
    engine.learn()
    engine.add("decode", 20, 300)
    engine.step()
    engine.add("first", 1200, 1)
    engine.add("second", 1200, 1)
    engine.run()
    assert engine.order == ["decode", "first", "second"]


def test_a_short_prompt_goes_first_if_it_alone_would_be_ready_first(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
    engine.add("decode", 20, 300)
    engine.step()
    engine.add("under way", 1200, 1)
    engine.step()
    engine.add("long", 1200, 1)
    engine.add("middle", 600, 1)
    engine.add("short", 100, 1)
    engine.run()
    assert engine.order == ["decode", "under way", "short", "middle", "long"]


def test_short_prompts_overtake_a_long_one_for_as_long_as_it_computes_only(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
    for i in range(25):
        engine.add(f"decode-{i}", 20, 400)
    engine.step()
    engine.add("under way", 1200, 1)
    engine.step()
    came_s = engine.now_s
    engine.add("long", 1200, 1)
    alone_s = MACHINE.step_ms(BatchShape(prefill_tokens=1200, prefill_pairs=prefill_pairs(1200, 0))) / 1e3
    shorts: dict[str, float] = {}
    while "long" in {request.request_id for request in engine.scheduler.waiting}:
        if len(engine.scheduler.waiting) < 4:
            shorts[f"short-{len(shorts)}"] = engine.now_s
            engine.add(f"short-{len(shorts) - 1}", 100, 1)
        engine.step()
    engine.run()
    after = {name for name in shorts if engine.order.index(name) > engine.order.index("long")}
    assert 0 < len(after) < len(shorts)
    assert all(shorts[name] < came_s + 1.2 * alone_s for name in shorts.keys() - after)


def test_prefill_progresses_when_decodes_alone_take_too_long(make: Callable[..., Engine]) -> None:
    engine = make(tbt_slo_ms=5.0)
    engine.learn()
    engine.add("decode", 20, 100)
    engine.step()
    engine.add("prompt", 64, 2)
    engine.run()
    assert len(engine.token_times_s["prompt"]) == 2


@pytest.mark.parametrize("decodes", [0, 3])
def test_a_prompt_of_which_one_token_is_not_cached_begins_where_decodes_speculate(make: Callable[..., Engine], decodes: int) -> None:
    """vLLM pads such a one to as many tokens as a decode computes, and lets it wait where the step has no room for these."""
    engine = make(draft_tokens=3)
    engine.learn()
    engine.add("first", BLOCK + 1, 2)
    engine.run()
    for i in range(decodes):
        engine.add(f"decode-{i}", 20, 400)
    engine.step()
    engine.add("again", BLOCK + 1, 2, like="first")
    for _ in range(20):
        engine.step()
    assert len(engine.token_times_s["again"]) == 2
    engine.run()


def test_a_request_with_a_loose_slo_leaves_large_steps(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
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


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """By the batches: vLLM decides, when it configures the log, whether pytest hears of it."""
    told: list[str] = []
    monkeypatch.setattr(batching.logger, "warning", lambda text, *args, **_: told.append(text % args))
    return told


def test_an_impossible_slo_that_reached_the_engine_is_told_and_ignored(make: Callable[..., Engine], warned: list[str]) -> None:
    engine = make()
    engine.add("r", 20, 3, dynaserve_tbt_ms="fast")
    (told,) = warned
    assert "dynaserve_tbt_ms is 'fast'" in told
    engine.run()
    assert len(engine.token_times_s["r"]) == 3


def test_an_slo_that_no_step_can_keep_does_not_hold_up_the_prompts_of_others(make: Callable[..., Engine], warned: list[str]) -> None:
    engine = make()
    engine.learn()
    engine.add("impatient", 20, 100, dynaserve_tbt_ms=0.001)
    engine.add("tight", 20, 100, dynaserve_tbt_ms=30.0)
    (told,) = warned
    assert told.startswith("impatient: no token can follow another within dynaserve_tbt_ms = 0.001 ms here")
    engine.step()
    came_s = engine.now_s
    engine.add("prompt", 1000, 1)
    while "prompt" not in engine.token_times_s:
        engine.step()
    assert engine.now_s - came_s < 2.0
    engine.run()


def test_a_prompt_waits_while_its_decode_would_break_the_slo(make: Callable[..., Engine]) -> None:
    engine = make(tbt_slo_ms=20.0)
    engine.learn()
    for i in range(60):
        engine.add(f"r{i}", 30, 60)
    running = 0
    while engine.scheduler.requests:
        engine.step()
        running = max(running, len(engine.scheduler.running))
    assert 1 < running < 60
    gaps = engine.gaps_ms()
    assert sum(gap <= 20.0 for gap in gaps) >= 0.9 * len(gaps)


class Heard:
    """What the margin of admission is told."""

    def __init__(self, margin: AdmissionMargin) -> None:
        self.gaps = self.late = self.left = 0
        self._margin = margin

    def share(self, sigma: float) -> float:
        return self._margin.share(sigma)

    def observe(self, gaps: int, late: int, left: int) -> None:
        self.gaps, self.late, self.left = self.gaps + gaps, self.late + late, self.left + left
        self._margin.observe(gaps, late, left)


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_margin_of_admission_hears_of_each_gap_and_of_each_decode_that_left(make: Callable[..., Engine], *, pipelined: bool) -> None:
    engine = make(tbt_slo_ms=100.0, pipelined=pipelined)
    engine.learn()
    planner = engine.scheduler.accounts.planner
    assert planner.admission.sigmas < AdmissionMargin.MOST_SIGMAS, "none was late"
    heard = planner.admission = Heard(planner.admission)
    for name, tokens in (("three", 3), ("five", 5), ("one", 1), ("aborted", 500)):
        engine.add(name, 30, tokens)
    while len(engine.token_times_s.get("aborted", [])) < 9:
        engine.step()
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.add("next", 30, 2)
    engine.run()
    assert heard.gaps == 2 + 4 + 0 + len(engine.token_times_s["aborted"]) - 1 + 1
    assert (heard.late, heard.left) == (0, 4)
    engine.slowness = 50.0
    engine.add("late", 30, 4)
    engine.run()
    assert heard.late == 3


def test_of_tokens_that_come_together_the_margin_of_admission_hears_one_gap(make: Callable[..., Engine]) -> None:
    engine = make(draft_tokens=3)
    engine.learn()
    planner = engine.scheduler.accounts.planner
    heard = planner.admission = Heard(planner.admission)
    engine.add("r", 20, 200)
    engine.run()
    assert heard.gaps == len(set(engine.token_times_s["r"])) - 1 < 100
    assert heard.left == 1


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


def test_chunks_behind_a_cached_prefix_keep_the_slo(make: Callable[..., Engine]) -> None:
    engine = make(machine=SLOW_ATTENTION)
    engine.learn()
    for i in range(5):
        engine.add(f"decode-{i}", 20, 300)
    engine.step()
    engine.add("first", 3000, 1)
    while "first" in engine.scheduler.requests:
        engine.step()
    since_s = engine.now_s
    for i in range(6):
        engine.add(f"again-{i}", 3000 + 100 * (i + 1), 1, like="first")
        while f"again-{i}" in engine.scheduler.requests:
            engine.step()
    gaps = engine.gaps_ms(since_s)
    assert max(gaps) > 50.0
    assert all(gap <= 100.0 for gap in gaps)
    engine.run()


def test_priorities_are_kept(make: Callable[..., Engine]) -> None:
    engine = make(scheduling_policy="priority")
    engine.learn()
    engine.add("decode", 20, 200)
    engine.step()
    engine.add("later", 800, 1, priority=5)
    engine.add("urgent", 800, 1, priority=1)
    engine.run()
    assert engine.order == ["decode", "urgent", "later"]


def test_a_prompt_that_would_overtake_waits_behind_those_that_are_due_earlier(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
    engine.add("decode", 20, 200)
    engine.step()
    engine.add("patient", 800, 1)
    engine.add("urgent", 800, 1, dynaserve_ttft_ms=500)
    engine.run()
    assert engine.order == ["decode", "urgent", "patient"]


def test_a_patient_prompt_is_overtaken_for_a_while_only(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
    engine.add("decode", 20, 3000)
    engine.step()
    engine.add("patient", 800, 1)
    number, began_s = 0, engine.now_s
    while "patient" not in engine.token_times_s:
        if sum(request.num_prompt_tokens == 800 for request in engine.scheduler.waiting) < 3:
            number += 1
            engine.add(f"urgent-{number}", 800, 1, dynaserve_ttft_ms=2000)
        engine.step()
    assert number > 3
    assert engine.token_times_s["patient"][0] - began_s < 15
    engine.run()


def test_first_tokens_are_counted_against_the_ttft_slo(make: Callable[..., Engine]) -> None:
    engine = make(ttft_slo_ms=300.0)
    engine.learn()
    reported(engine)
    engine.add("short", 100, 1)
    engine.run()
    engine.add("long", 2000, 1)
    engine.add("long, but patient", 2000, 1, dynaserve_ttft_ms=60_000)
    engine.run()
    tokens = reported(engine).tokens
    assert (tokens.first_tokens, tokens.first_tokens_in_time) == (3, 2)


def reported(engine: Engine) -> BatchReport:
    """Everything that was reported since the last call."""
    reports = [msgspec.convert(carrier.kv_transfer_params[REPORT_KEY], BatchReport) for carrier in engine.carriers]
    if not reports:
        return BatchReport([], TokenCounts(), [], None, None)
    engine.carriers.clear()
    tokens = TokenCounts(*(sum(getattr(r.tokens, f.name) for r in reports) for f in dataclasses.fields(TokenCounts)))
    steps = [step for report in reports for step in report.steps]
    return BatchReport(steps, tokens, reports[-1].prompts, reports[-1].step_share, reports[-1].admitting_share)


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_prompts_that_have_begun_are_told_and_no_others(make: Callable[..., Engine], *, pipelined: bool) -> None:
    engine = make(pipelined=pipelined)
    engine.learn()
    engine.add("decoding", 20, 100)
    while len(engine.token_times_s.get("decoding", [])) < 3:
        engine.step()
    reported(engine)
    engine.add("long", 4000, 2)
    engine.add("behind it", 4000, 2)
    told: list[PromptProgress] = []
    while "long" not in engine.token_times_s:
        engine.step()
        told += reported(engine).prompts
    computed = [prompt.computed_tokens for prompt in told if prompt.request_id == "long"]
    assert len(computed) > 2
    assert computed == sorted(set(computed))
    assert 0 < computed[0] < 4000
    assert not [prompt for prompt in told if prompt.request_id == "decoding"]
    assert not [prompt for prompt in told if prompt.request_id == "behind it" and prompt.computed_tokens == 0]
    engine.run()
    assert reported(engine).prompts == []


def test_every_step_and_every_token_is_reported_once(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
    report = reported(engine)
    assert len(report.steps) > 20
    assert report.tokens.next_tokens == sum(2 + i % 17 for i in range(30))
    engine.add("a", 300, 5)
    engine.run()
    report = reported(engine)
    assert [step.measured.prefill_tokens for step in report.steps] == [300, 0, 0, 0, 0]
    assert [step.measured.decodes for step in report.steps] == [0, 1, 1, 1, 1]
    assert [step.measured.measured_ms for step in report.steps] == pytest.approx(engine.steps_ms)
    assert {step.reason for step in report.steps} == {"all_work"}
    assert report.tokens == TokenCounts(next_tokens=4, next_tokens_in_time=4)


def test_tokens_beyond_the_slo_and_late_steps_are_reported(make: Callable[..., Engine]) -> None:
    engine = make(tbt_slo_ms=5.0)
    engine.learn()
    engine.add("decode", 20, 50)
    engine.step()
    reported(engine)
    engine.add("prompt", 64, 2)
    engine.run()
    report = reported(engine)
    assert report.tokens.next_tokens == 50
    assert report.tokens.next_tokens_in_time == 0
    assert sum(step.late for step in report.steps) > 40


def test_a_prompt_begins_when_its_first_token_is_due_even_if_decodes_alone_are_late(make: Callable[..., Engine]) -> None:
    engine = make(tbt_slo_ms=5.0)
    engine.learn()
    engine.add("decode", 20, 300)
    engine.step()
    engine.add("prompt", 64, 1, dynaserve_ttft_ms=400)
    began_s = engine.now_s
    reasons = set()
    while "prompt" in engine.scheduler.requests:
        engine.step()
        reasons |= {step.reason for step in reported(engine).steps}
    assert 0.4 < engine.token_times_s["prompt"][0] - began_s < 0.8
    assert "minimum_share" in reasons
    engine.run()


def test_a_slow_spell_of_the_machine_is_followed(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
    for i in range(4):
        engine.add(f"decode-{i}", 20, 800)
    for i in range(40):
        engine.add(f"long-{i}", 800, 3)
    for slowness in (1.0, 1.8):
        engine.slowness = slowness
        for _ in range(60):
            engine.step()
        since_s = engine.now_s
        for _ in range(100):
            engine.step()
        gaps = engine.gaps_ms(since_s)
        assert sum(gap <= 100.0 for gap in gaps) >= 0.97 * len(gaps), slowness
    engine.run()


def test_batches_that_are_formed_while_one_runs_keep_the_slo_too(make: Callable[..., Engine]) -> None:
    engine = make(pipelined=True)
    engine.learn()
    for i in range(8):
        engine.add(f"decode-{i}", 20, 400)
    for i in range(10):
        for _ in range(30):
            engine.step()
        engine.add(f"long-{i}", 2000, 5)
    engine.run()
    gaps = engine.gaps_ms()
    assert sum(gap <= 100.0 for gap in gaps) >= 0.99 * len(gaps)
    assert {len(times) for times in engine.token_times_s.values()} == {400, 5}


def test_pipelined_steps_are_measured_one_by_one(make: Callable[..., Engine]) -> None:
    engine = make(pipelined=True)
    engine.learn()
    reported(engine)
    for i in range(4):
        engine.add(f"r{i}", 50, 30)
    engine.run()
    measured = [step.measured.measured_ms for step in reported(engine).steps]
    assert sum(measured) == pytest.approx(sum(engine.steps_ms), rel=0.05)


def test_tokens_that_decodes_speculate_are_counted(make: Callable[..., Engine]) -> None:
    engine = make(draft_tokens=3)
    engine.learn()
    for i in range(5):
        engine.add(f"decode-{i}", 20, 200)
    while any(len(engine.token_times_s.get(f"decode-{i}", ())) < 2 for i in range(5)):
        engine.step()
    engine.add("long", 2000, 1)
    shares = []
    while "long" in engine.scheduler.requests:
        scheduled = engine.step()
        shares.append(scheduled.get("long", 0))
        decoding = [tokens for name, tokens in scheduled.items() if name.startswith("decode") and name in engine.scheduler.requests]
        assert decoding == [4] * len(decoding), "a decode lost what it speculates"
    assert len(shares) > 1
    engine.run()


def test_a_step_with_an_encoder_teaches_nothing(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.learn()
    profile = engine.scheduler.accounts.planner.profile
    engine.add("picture", 50, 2)
    for encodes, learnt in ((True, 0), (False, 1)):
        before = profile.steps
        output = engine.scheduler.schedule()
        output.scheduled_encoder_inputs = {"picture": [0]} if encodes else {}
        engine._start(output, dict(output.num_scheduled_tokens))
        engine._end(engine._under_way.popleft())
        assert profile.steps == before + learnt


def test_steps_of_decodes_that_speculate_are_learnt_as_such(make: Callable[..., Engine]) -> None:
    engine = make(draft_tokens=3)
    engine.learn()
    reported(engine)
    sigmas = engine.scheduler.accounts.planner.margin.sigmas
    for i in range(5):
        engine.add(f"decode-{i}", 20, 200)
        engine.add(f"long-{i}", 2000, 1)
    engine.run()
    steps = reported(engine).steps
    assert any(step.measured.decodes == 5 and step.measured.prefill_tokens == 15 for step in steps)
    assert any(step.measured.draft_tokens == 15 < step.measured.prefill_tokens for step in steps), "beside a chunk"
    beside = [step for step in steps if step.limit_ms is not None and step.measured.prefill_tokens > 100]
    assert beside
    assert all(step.predicted_ms == pytest.approx(step.measured.measured_ms, rel=0.2) for step in beside)
    assert engine.scheduler.accounts.planner.margin.sigmas != sigmas, "it is learnt from these steps, too"


@pytest.mark.parametrize("pipelined", [False, True])
def test_every_prompt_gets_its_turn_however_many_come(make: Callable[..., Engine], pipelined: bool) -> None:
    engine = make(tbt_slo_ms=40.0, pipelined=pipelined)
    engine.learn()
    for i in range(150):
        engine.add(f"r{i}", 30 + 37 * i % 400, 1 + 7 * i % 60)
        for _ in range(2):
            engine.step()
    engine.run()
    assert len(engine.token_times_s) == 150
    assert engine.order[0] == "r0"


def test_the_steps_of_a_run_can_be_written_to_a_file(tmp_path: Path) -> None:
    engine = Engine(tmp_path, options=PluginOptions(step_log=str(tmp_path / "steps.csv")))
    engine.add("a", 300, 5)
    engine.run()
    engine.scheduler.shutdown()
    written, told = list(read_log(tmp_path / "steps.csv")), reported(engine).steps
    assert [step.measured for step in written] == [step.measured for step in told]
    assert [(step.predicted_ms, step.limit_ms, step.budget_tokens, step.reason, step.late) for step in written] == [
        (step.predicted_ms, step.limit_ms, step.budget_tokens, step.reason, step.late) for step in told
    ]
    assert [step.at_s for step in written] == pytest.approx([step.at_s for step in told], abs=1e-6)
