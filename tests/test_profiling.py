"""`dynaserve profile`: which steps are measured, how an interrupted sweep goes on, and what is made of it."""

from __future__ import annotations

import random
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dynaserve import latency_profile
from dynaserve.command_lines import without_secrets
from dynaserve.errors import ConfigError
from dynaserve.latency_profile import ProfileKey
from dynaserve.messages import MeasuredStep
from dynaserve.profiling import command, picture
from dynaserve.profiling.picture import Mark
from dynaserve.profiling.sweep import Limits, Point, PointFile, PointRecord, grid, shape_of, table_of
from dynaserve.step_latency import Roofline, prefill_pairs

KEY = ProfileKey("m", "float32", "a machine", "tp1", "0.32.0")
MACHINE = Roofline(overhead_ms=8.0, token_ms=0.25, knee_tokens=16.0, pair_ms=2e-5, decode_ms=0.3, context_ms=5e-4)
LIMITS = Limits(step_tokens=1024, requests=64, kv_tokens=50_000, model_tokens=4096)


class KnownMachine:
    """Counts what it measures; fails after `patience` points."""

    key, limits = KEY, LIMITS

    def __init__(self, patience: int = 10**6) -> None:
        self.measured: list[Point] = []
        self.patience = patience

    def measure(self, point: Point, times: int) -> list[MeasuredStep]:
        if len(self.measured) == self.patience:
            raise KeyboardInterrupt
        self.measured.append(point)
        pairs = prefill_pairs(point.prefill_tokens, 0)
        step = MeasuredStep(point.prefill_tokens, pairs, point.decodes, point.decodes * point.context_tokens, 1.0)
        return [msgspec.structs.replace(step, measured_ms=MACHINE.step_ms(shape_of(step)))] * times

    def close(self) -> None:
        """Nothing runs."""


def options(folder: Path, *more: str) -> command.SweepOptions:
    return command.parse(["m", "--output", str(folder / "p.json"), "--tbt-slo-ms", "60", *more, "--dtype", "float32"])


def sweep(folder: Path, engine: KnownMachine, *more: str) -> None:
    command.run(options(folder, *more), engine, Console(quiet=True), "dynaserve profile m")


def test_steps_that_do_not_fit_are_left_out() -> None:
    points = grid([0, 1000, 5000], [0, 32, 64], [100, 1000], LIMITS, spare_tokens=100)
    assert Point(0, 0, 1000) in points
    assert Point(100, 64, 0) in points
    assert not any(point.prefill_tokens + point.decodes > 1024 for point in points), "of one step"
    assert Point(100, 64, 100) not in grid([100], [64], [100], LIMITS, 100), "requests of one step"
    assert not any(point.context_tokens == 1000 and point.decodes == 64 for point in points), "KV memory"
    assert Point(0, 0, 0) not in points
    assert len(points) == len(set(points))


def test_what_the_model_s_length_does_not_hold_is_left_out() -> None:
    short = LIMITS._replace(step_tokens=8192, kv_tokens=10**6, model_tokens=2048)
    points = grid([0, 2047, 2048], [0, 4], [1500, 1900], short, spare_tokens=256)
    assert Point(0, 0, 2047) in points, "its prompt and a token of its answer"
    assert Point(1500, 4, 2047) in points
    assert not any(point.prefill_tokens == 2048 for point in points)
    assert not any(point.context_tokens == 1900 for point in points), "with what its decodes produce meanwhile"


def test_decodes_that_run_while_others_are_filled_need_room_for_that() -> None:
    slow = LIMITS._replace(step_tokens=100)
    assert Point(3000, 1, 0) in grid([0], [1, 60], [3000], slow, spare_tokens=256)
    assert grid([0], [60], [3000], slow._replace(kv_tokens=10**6), spare_tokens=256) == [], "they would produce 2,700 tokens meanwhile"


def test_a_group_begins_with_the_most_decodes() -> None:
    points = grid([0, 64], [1, 8, 32], [100, 500], LIMITS, spare_tokens=10)
    contexts = [point.context_tokens for point in points]
    assert contexts == sorted(contexts)
    of_500 = [point.decodes for point in points if point.context_tokens == 500]
    assert of_500 == sorted(of_500, reverse=True)


def test_the_profile_predicts_the_machine_that_was_measured(tmp_path: Path) -> None:
    sweep(tmp_path, KnownMachine())
    table = latency_profile.load(tmp_path / "p.json", KEY)
    for tokens, decodes, context in [(0, 5, 300), (200, 0, 0), (100, 20, 700), (700, 3, 100)]:
        shape = shape_of(MeasuredStep(tokens, prefill_pairs(tokens, 0), decodes, decodes * context, 1.0))
        assert table.step_ms(shape) == pytest.approx(MACHINE.step_ms(shape), rel=0.05)


def test_a_sweep_tells_how_much_does_not_fit(tmp_path: Path) -> None:
    told = StringIO()
    machine = KnownMachine()
    machine.limits = LIMITS._replace(model_tokens=700)
    command.run(options(tmp_path, "--prefill", "0", "64", "--decodes", "1", "2"), machine, Console(file=told), "dynaserve profile m")
    assert "4 of 8 kinds of steps do not fit into Limits(step_tokens=1024" in told.getvalue().replace("\n", "")
    assert {point.context_tokens for point in machine.measured} == {128}
    machine.limits = LIMITS._replace(model_tokens=64)
    with pytest.raises(ConfigError, match=r"no step of prefill \(64,\), decodes \(0,\) and context \(128, 1024\) fits into Limits"):
        command.run(options(tmp_path, "--prefill", "64", "--decodes", "0"), machine, Console(file=told), "dynaserve profile m")


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second = KnownMachine(patience=7), KnownMachine()
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, first)
    sweep(tmp_path, second)
    opts = options(tmp_path)
    assert not set(first.measured) & set(second.measured)
    assert {*first.measured, *second.measured} == {*grid(opts.prefills, opts.decodes, opts.contexts, LIMITS, command.SPARE_TOKENS)}


def test_points_of_another_machine_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.points.jsonl"
    PointFile(path, KEY, ["--enforce-eager"]).add(PointRecord(Point(0, 0, 5), [MeasuredStep(5, 15.0, 0, 0, 9.0)]))
    assert PointFile(path, KEY, ["--enforce-eager"]).missing([Point(0, 0, 5), Point(0, 0, 6)]) == [Point(0, 0, 6)]
    with pytest.raises(ConfigError, match="measured on"):
        PointFile(path, ProfileKey("m", "float32", "another machine", "tp1", "0.32.0"), ["--enforce-eager"])
    with pytest.raises(ConfigError, match="measured with the options --enforce-eager, not none"):
        PointFile(path, KEY, [])
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="is not a file of measured points"):
        PointFile(path, KEY, [])


def test_what_a_complete_sweep_has_measured_is_measured_anew(tmp_path: Path) -> None:
    for _ in range(2):
        machine = KnownMachine()
        sweep(tmp_path, machine)
        assert machine.measured
        assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_token_that_opens_a_model_stands_in_no_profile() -> None:
    given = ["m", "--hf-token", "hf_x", "--hf_token=hf_y", "--dtype", "float32", "--hf-token"]
    assert without_secrets(given, command.SECRETS) == ["m", "--hf-token", "***", "--hf_token=***", "--dtype", "float32", "--hf-token"]


def test_nothing_measured_is_no_profile() -> None:
    with pytest.raises(ValueError, match="at least one"):
        table_of([], random.Random(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["m", "--prefill", "-1"], "--prefill -1"), (["m", "--context", "0"], "--context 0"), (["m", "--decodes", "x"], "invalid int")],
)
def test_bad_options_are_refused_in_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.parse(arguments)


@pytest.mark.parametrize("option", ["--output", "--picture"])
def test_a_file_that_cannot_be_written_is_refused_before_the_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file" / "p", "Not a directory"), (tmp_path, "it is a folder")):
        with pytest.raises(SystemExit) as ended:
            command.main(["no-such-model", "--output", str(tmp_path / "p.json"), option, str(path)])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"dynaserve profile: {path}: cannot be written: {why}\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "example:\n  dynaserve profile MODEL" in capsys.readouterr().out


def test_options_of_the_engine_are_passed_on(tmp_path: Path) -> None:
    assert options(tmp_path, "--prefill", "0", "64").engine_args == ("--dtype", "float32")
    assert options(tmp_path, "--prefill", "0", "64").prefills == (0, 64)


def test_the_utilization_point_lies_where_the_line_crosses_the_slo() -> None:
    marks = [Mark(0, 20.0, 100.0), Mark(10, 40.0, 500.0), Mark(20, 80.0, 700.0)]
    assert picture.utilization_point(marks, 60.0) == Mark(15, 60.0, 600.0)
    assert picture.utilization_point(marks, 10.0) is None
    assert picture.utilization_point(marks, 90.0) is None


def test_the_picture_has_a_line_for_each_prefill_size_of_a_context() -> None:
    machine = KnownMachine()
    records = [PointRecord(point, machine.measure(point, 3)) for point in grid([0, 64], [0, 1, 8], [100, 500], LIMITS, 10)]
    drawn = picture.lines(records, 500)
    assert {prefill: [mark.decodes for mark in marks] for prefill, marks in drawn.items()} == {0: [1, 8], 64: [0, 1, 8]}
    one, eight = drawn[0]
    assert one.latency_ms < eight.latency_ms
    assert eight.tokens_per_s == pytest.approx(8e3 / eight.latency_ms)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep(tmp_path, KnownMachine(), "--picture", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
