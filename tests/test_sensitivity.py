"""The sensitivity scripts: one command, one CSV, one plot."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest

from benchmarks import provenance
from benchmarks.checkout import commit
from benchmarks.paper import __main__ as paper
from benchmarks.sensitivity import __main__ as sensitivity
from benchmarks.sensitivity import balance
from dynaserve.bench import simulate
from dynaserve.bench.report import machine

SAMPLE = ("--roofline", "10,0.2,16,0.00002,0.2,0.0005", "--workload", "sample", "--rate", "4", "--requests", "100", "--repetitions", "1")


def test_a_sweep_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sensitivity.main(["chunk", "--output", str(tmp_path / "chunk"), "--", *SAMPLE])
    with (tmp_path / "chunk.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 6
    assert (tmp_path / "chunk.png").read_bytes().startswith(b"\x89PNG")
    assert any(float(row["capacity_per_s"]) > 0 for row in rows)
    assert all(float(row["least_per_s"]) <= float(row["capacity_per_s"]) <= float(row["most_per_s"]) for row in rows)


def test_bad_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        sensitivity.main(["slo", "--output", str(tmp_path / "slo"), "--", "--workload", "sample"])
    assert end.value.code == 2
    assert "one of --profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sweep", "options", "told"),
    [
        ("slo", ("--batching", "slo"), "'--batching slo' cannot be among the options of sweep slo: --batching makes its systems"),
        ("slo", ("--policy=dynamic",), "'--policy=dynamic' cannot be among the options of sweep slo: --policy makes its systems"),
        ("split", ("--policy", "paper"), "'--policy paper' cannot be among the options of sweep split: --policy is what it is over"),
        ("chunk", ("--chunk=64",), "'--chunk=64' cannot be among the options of sweep chunk: --chunk is what it is over"),
        ("mix", (), "'--workload sample' cannot be among the options of sweep mix: --workload is what it is over"),
        ("kv-transfer", (), "sweep kv-transfer needs --kv-gbytes-per-s among its options: without it blocks and end are the same"),
    ],
)
def test_options_that_would_mislabel_a_sweep_are_refused_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sweep: str, options: tuple[str, ...], told: str
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        sensitivity.main([sweep, "--output", str(tmp_path / "swept"), "--", *SAMPLE, *options])
    assert end.value.code == 2
    # Nothing else: the seeds and rates of a search are told there, too.
    assert capsys.readouterr() == ("", f"benchmarks.sensitivity: {told}\n")
    assert list(tmp_path.iterdir()) == []


def test_streaming_is_swept_over_a_link_with_a_rate() -> None:
    planned = sensitivity.points("kv-transfer", (*SAMPLE, "--kv-gbytes-per-s=1"))
    assert [(point.system, point.value) for point in planned] == list(product(sensitivity.SYSTEMS, ("blocks", "end")))


def test_each_system_says_how_it_makes_batches() -> None:
    batching = {system: options[options.index("--batching") + 1] for system, options in sensitivity.SYSTEMS.items()}
    assert [system for system, how in batching.items() if how == "vllm"] == ["fixed chunk", "chunk 384", "disaggregated"]


def interrupt_after(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does in the search after so many."""
    capacities = simulate.capacities
    measured: list[Sequence[str]] = []

    def interrupted(arguments: Sequence[str]) -> list[float | None]:
        if len(measured) == points:
            raise KeyboardInterrupt
        measured.append(arguments)
        return capacities(arguments)

    monkeypatch.setattr(simulate, "capacities", interrupted)


def test_an_interrupted_sweep_keeps_its_points_and_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    interrupt_after(2, monkeypatch)
    (tmp_path / "chunk.png").write_bytes(b"of an earlier sweep")
    arguments = ["chunk", "--output", str(tmp_path / "chunk"), "--", *SAMPLE, "--seed", "7"]
    with pytest.raises(SystemExit) as end:
        sensitivity.main(arguments)
    assert end.value.code == 130
    told = capsys.readouterr()
    table = tmp_path / "chunk.csv"
    assert told.err.splitlines()[-1] == f"benchmarks.sensitivity: interrupted; points measured before it: 2 of 30, in {table}"
    with table.open() as file:
        assert [(row["system"], row["chunk"]) for row in csv.DictReader(file)] == [("fixed chunk", "128"), ("fixed chunk", "256")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunk.csv", "chunk.provenance.json"]
    kept = json.loads((tmp_path / "chunk.provenance.json").read_text())
    command = shlex.join(["python", "-m", "benchmarks.sensitivity", *arguments])
    assert kept == {"command": command, "seed": 7, "commit": commit(), "machine": machine()}
    assert told.out.startswith(f"{provenance.text(kept)}\n")


def test_a_sweep_that_comes_to_a_point_without_a_capacity_says_which_rate_was_too_low_and_what_it_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        sensitivity.main(["slo", "--output", str(tmp_path / "slo"), "--", *SAMPLE, "--most-rate", "8", "--resolution", "0.5"])
    assert end.value.code == 2
    kept = r"even 8 requests/s passed, the highest rate tried: .*; points measured before it: \d+ of 36, in "
    assert re.search(kept, capsys.readouterr().err.splitlines()[-1])
    assert (tmp_path / "slo.csv").exists()


def test_a_sweep_that_is_interrupted_at_once_leaves_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    interrupt_after(0, monkeypatch)
    earlier = {tmp_path / f"chunk.{kind}": f"the {kind} of an earlier sweep" for kind in ("csv", "provenance.json", "png")}
    for path, content in earlier.items():
        path.write_text(content)
    with pytest.raises(SystemExit) as end:
        sensitivity.main(["chunk", "--output", str(tmp_path / "chunk"), "--", *SAMPLE])
    assert end.value.code == 130
    assert capsys.readouterr().err == "benchmarks.sensitivity: interrupted\n"
    assert {path: path.read_text() for path in tmp_path.iterdir()} == earlier


@pytest.mark.parametrize(
    ("table", "file"),
    [("a/chunk.csv", "a/chunk.provenance.json"), ("table4", "table4.provenance.json"), ("x.json", "x.json.provenance.json")],
)
def test_provenance_lies_beside_its_table(table: str, file: str) -> None:
    assert provenance.beside(Path(table)) == Path(file)


@pytest.mark.parametrize("sweep", ["split", "burstiness", "step-noise"])
def test_each_system_of_a_sweep_has_a_capacity_at_each_of_its_values(tmp_path: Path, sweep: str) -> None:
    pytest.importorskip("matplotlib")
    sensitivity.main([sweep, "--output", str(tmp_path / "swept"), "--", *SAMPLE])
    with (tmp_path / "swept.csv").open() as file:
        rows = list(csv.DictReader(file))
    _, values = sensitivity.SWEEPS[sweep]
    assert [(row["system"], row[sweep]) for row in rows] == list(product(sensitivity.systems_of(sweep), values))
    assert all(float(row["capacity_per_s"]) > 0 for row in rows if "chunk" not in row["system"])


def test_the_balance_of_a_trace_is_told_by_the_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at_s,prompt_tokens,output_tokens\n0,2048,1\n1,2048,1\n70,1,3200\n200,10,10\n")
    arguments = [f"file:{trace}", "--roofline", "0,0.1,1,0,1,0", "--output", str(tmp_path / "balance")]
    balance.main(arguments)
    told = capsys.readouterr().out
    assert "prefill takes more than decoding in 1 of 3 minutes" in told
    kept = json.loads((tmp_path / "balance.provenance.json").read_text())
    command = shlex.join(["python", "-m", "benchmarks.sensitivity.balance", *arguments])
    assert kept == {"command": command, "commit": commit(), "machine": machine()}
    assert told.startswith(f"{provenance.text(kept)}\n")
    with (tmp_path / "balance.csv").open() as file:
        rows = {row["minute"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["0", "1", "3"]
    # Each token of a step costs 0.1 ms, and a decode 1 ms beside that.
    assert float(rows["0"]["prefill_ms"]) == pytest.approx(409.6, rel=1e-6)
    assert float(rows["0"]["decode_ms"]) == pytest.approx(2.2, rel=0.01)
    assert float(rows["1"]["decode_ms"]) == pytest.approx(3520, rel=0.01)
    assert float(rows["3"]["prefill_share"]) == pytest.approx(1 / 12, rel=0.01)
    assert (tmp_path / "balance.png").read_bytes().startswith(b"\x89PNG")


def test_the_values_of_a_mix_are_named_by_their_share() -> None:
    assert [sensitivity.label_of(value) for value in sensitivity.MIXES] == ["0", "0.25", "0.5", "0.75", "1"]
    assert sensitivity.label_of("gamma:2") == "gamma:2"


@pytest.mark.parametrize(
    ("workload", "roofline", "told"),
    [
        ("mini-reasoning", "0,0.1,1,0,1,0", "workload mini-reasoning has no arrival times of its own"),
        ("sample", "0,0,1,0,0,0", "neither prefill nor decoding takes any time"),
    ],
)
def test_what_has_no_balance_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workload: str, roofline: str, told: str
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        balance.main([workload, "--roofline", roofline, "--output", str(tmp_path / "balance")])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("main", [sensitivity.main, balance.main, paper.main])
def test_the_help_has_an_example(main: Callable[[Sequence[str]], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert "    python -m benchmarks." in capsys.readouterr().out
