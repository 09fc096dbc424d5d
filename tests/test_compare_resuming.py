"""`make bench-compare`: a run that goes on where it stopped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare import __main__ as command
from benchmarks.compare.campaign import Campaign
from dynaserve.errors import ConfigError
from tests.toy_campaign import ALL_PICTURES, MACHINE, PROVENANCE, Toys, headings, stopped_before_ours, toy_campaign


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    return toy_campaign(tmp_path, monkeypatch)


def test_a_campaign_goes_on_where_it_stopped_and_ends_in_a_table(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    toys = Toys()
    toys.broken_below_ms = 5500.0
    campaign.check(MACHINE)
    campaign.run(toys.system, PROVENANCE)
    assert toys.started == [("stock", 6000.0), ("dynamic", 6000.0), ("dynamic", 5000.0)]
    assert "bench-compare: dynamic: not measured: it does not start" in capsys.readouterr().err
    assert command.report(campaign, PROVENANCE) == ["fixed:20,5 at 5000 ms"]

    toys.started, toys.broken_below_ms = [], 0.0
    campaign.check(MACHINE)
    campaign.run(toys.system, {**PROVENANCE, "commit": "def5678"})
    assert toys.started == [("dynamic", 5000.0)]
    capsys.readouterr()
    assert command.report(campaign, PROVENANCE) == []
    printed = capsys.readouterr().out
    assert printed.strip() == (campaign.output / "table.md").read_text().strip()
    assert printed.lstrip().startswith(f"{command.SMOKE_TEST}\n\nmeasured at several commits: abc1234, def5678\n\nP99 TBT within 6000 ms")
    content = json.loads((campaign.output / "table.json").read_text())
    assert [content[name] for name in ("command", "seed", "commit", "missing")] == ["a command", 1, "abc1234", []]
    (loose, _) = content["slos"]
    over = loose["workloads"]["fixed:20,5"]["over"]["stock's default chunk"]
    assert over["baseline"] == "stock"
    assert over["ratio"]["value"] > 0

    measured = json.loads((campaign.folder("fixed:20,5", 6000.0) / "results.json").read_text())["systems"]
    for name, system in loose["workloads"]["fixed:20,5"]["systems"].items():
        runs = [run for turn in measured[name]["turns"] for run in turn["repetition"]["trials"]]
        summaries = [summary for run in runs for summary in (run["summary"], *run["others"])]
        lags_ms = [summary[lag]["p99"] for summary in summaries for lag in ("send_lag_ms", "loop_lag_ms") if summary[lag]]
        assert system["client_lag_p99_ms"] == max(lags_ms) > 0


def test_a_comparison_that_was_stopped_goes_on_with_the_turns_that_it_lacks(campaign: Campaign) -> None:
    campaign, toys = stopped_before_ours(campaign)
    path = campaign.folder("fixed:20,5", 6000.0) / "results.json"
    stopped = json.loads(path.read_text())
    assert not stopped["complete"]

    campaign.run(toys.system, {**PROVENANCE, "commit": "def5678"})
    assert [name for name, _ in toys.started] == ["dynamic"]
    results = json.loads(path.read_text())
    assert results["complete"]
    assert results["commit"] == "abc1234, def5678"
    assert results["systems"]["stock"]["turns"] == stopped["systems"]["stock"]["turns"]
    assert results["systems"]["stock"]["saturation_per_s"] == stopped["systems"]["stock"]["saturation_per_s"]
    assert results["systems"]["dynamic"]["capacity_per_s"] > 0


def test_turns_of_a_version_that_kept_no_courses_are_left_out_of_two_pictures(campaign: Campaign) -> None:
    campaign, toys = stopped_before_ours(campaign)
    folder = campaign.folder("fixed:20,5", 6000.0)
    results = json.loads((folder / "results.json").read_text())
    (turn,) = results["systems"]["stock"]["turns"]
    assert turn.pop("course")["rate_per_s"] == turn["repetition"]["passed_per_s"]
    (folder / "results.json").write_text(json.dumps(results))

    campaign.check(MACHINE)
    campaign.run(toys.system, PROVENANCE)
    assert toys.started == [("dynamic", 6000.0)]
    page = (folder / "report.html").read_text()
    assert headings(page) == ALL_PICTURES
    assert "<p>TBT and timeline lack stock: no sustained run is kept that has them.</p>" in page
    assert campaign.found()[1] == []


def test_turns_of_another_machine_are_neither_mixed_nor_overwritten(campaign: Campaign) -> None:
    campaign, _ = stopped_before_ours(campaign)
    with pytest.raises(ConfigError, match="holds turns of another machine, cores: 2 there, 4 here: take another --output"):
        campaign.check({"cores": 4})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "results.json: is not JSON: "),
        ("[]", "results.json: is no comparison of bench-compare, it lacks commit, machine, options, slo, systems, workload"),
        ('{"machine": {}, "workload": "", "slo": {}, "systems": {}}', "is no comparison of bench-compare, it lacks commit, options"),
        (
            '{"machine": {}, "workload": "", "slo": {"tbt_ms": 1}, "systems": [], "commit": "", "options": {}}',
            "is no comparison of bench-compare: Expected `object`, got `array` - at `$.systems`",
        ),
    ],
)
def test_results_of_something_else_are_named_and_not_overwritten(campaign: Campaign, content: str, told: str) -> None:
    pytest.importorskip("matplotlib")
    path = campaign.folder("fixed:20,5", 6000.0) / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(told)):
        campaign.check({"cores": 2})
    assert path.read_text() == content


def test_a_turn_that_failed_is_taken_with_its_own_seed(campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    campaign, toys = replace(campaign, tbt_slos_ms=(6000.0,), repetitions=3), Toys()
    toys.broken_starts = {2}  # of `dynamic`, its second
    campaign.run(toys.system, PROVENANCE)
    assert campaign.found()[1] == ["fixed:20,5 at 6000 ms"]
    toys.started = []
    campaign.run(toys.system, PROVENANCE)
    assert toys.started == [("dynamic", 6000.0)]
    (results,) = campaign.output.glob("*/results.json")
    for system in json.loads(results.read_text())["systems"].values():
        assert [turn["repetition"]["seed"] for turn in system["turns"]] == [1, 2, 3]
    assert campaign.found()[1] == []


def test_of_a_run_that_was_stopped_fewer_repetitions_have_a_report(campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    campaign, toys = replace(campaign, tbt_slos_ms=(6000.0,), repetitions=2), Toys()
    toys.broken_starts = {2}
    campaign.run(toys.system, PROVENANCE)
    page = campaign.folder("fixed:20,5", 6000.0) / "report.html"
    assert not page.exists()
    replace(campaign, repetitions=1).run(toys.system, PROVENANCE)
    assert "Capacity: median of 1 searches" in page.read_text()


def test_what_an_extension_that_was_stopped_had_begun_with_stays_whole(campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    campaign, toys = replace(campaign, tbt_slos_ms=(6000.0,)), Toys()
    campaign.run(toys.system, PROVENANCE)
    ((before,),) = campaign.found()[0]
    toys.broken = "stock"
    replace(campaign, repetitions=2).run(toys.system, PROVENANCE)
    ((after,),) = campaign.found()[0]
    assert after == before


def test_repetitions_can_be_added_to_what_was_measured(campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    toys = Toys()
    campaign.run(toys.system, PROVENANCE)
    once, toys.started = campaign.found(), []
    twice = replace(campaign, repetitions=2)
    assert len(twice.found()[1]) == 2
    twice.run(toys.system, PROVENANCE)
    # Another one begins; stock vLLM does not go by the SLO and is judged by both in one start.
    assert toys.started == [("dynamic", 6000.0), ("stock", 6000.0), ("dynamic", 5000.0)]
    for before, after in zip(once[0], twice.found()[0], strict=True):
        assert after[0].systems["stock"].rates_per_s[:1] == before[0].systems["stock"].rates_per_s
        assert len(after[0].systems["stock"].rates_per_s) == 2


def test_figures_of_other_options_are_neither_used_nor_overwritten(campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    campaign = replace(campaign, tbt_slos_ms=(6000.0,))
    campaign.run(Toys().system, PROVENANCE)
    other = replace(campaign, duration_s=0.4)
    assert other.found() == ([], ["fixed:20,5 at 6000 ms"])
    with pytest.raises(ConfigError, match=r"holds a comparison with other options, duration_s: 0\.3 there, 0\.4 here"):
        other.check(MACHINE)


def test_figures_of_other_options_are_not_overwritten_where_turns_are_lacking(campaign: Campaign) -> None:
    campaign, _ = stopped_before_ours(campaign)
    with pytest.raises(ConfigError, match="holds a comparison with other options, seed: 1 there, 2 here"):
        replace(campaign, seed=2).check(MACHINE)
