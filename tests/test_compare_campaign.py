"""`make bench-compare`: the table over all workloads, its aims, and a run that goes on where it stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pairs
from benchmarks.checkout import commit
from benchmarks.compare import __main__ as command
from benchmarks.compare import candidates, table
from benchmarks.compare.aims import judged
from benchmarks.compare.campaign import Campaign
from benchmarks.compare.candidates import CANDIDATES, Site
from benchmarks.compare.outcome import Compared, Outcome
from dynaserve.bench import trial
from dynaserve.bench.systems import Running, System
from dynaserve.errors import ConfigError
from dynaserve.files import only_writer
from dynaserve.local.fleet import FleetFailed, LocalFleet, health_in
from tests.completion_server import Act, running_server


def outcome(
    *rates: float | None, saturation: float = 10.0, front_cores: float | None = None, client_lag_p99_ms: float | None = 4.0
) -> Outcome:
    """Its capacity is the middle one of the rates."""
    capacity = sorted(rate or 0.0 for rate in rates)[len(rates) // 2] or None
    goodput, ttft_ms = (50.0, 1500.0) if capacity else (None, None)
    return Outcome(rates, capacity, saturation, goodput, ttft_ms, front_cores, None, client_lag_p99_ms)


def compared(workload: str = "azure-code", tbt_slo_ms: float = 100.0, **systems: Outcome) -> Compared:
    """Names with _ for -."""
    return Compared(workload, tbt_slo_ms, "abc1234", {name.replace("_", "-"): one for name, one in systems.items()})


def test_a_system_below_a_tenth_of_its_saturation_is_not_servable_and_left_out_of_the_mean() -> None:
    found = [
        compared("azure-code", stock=outcome(0.9), slo_colocated=outcome(2.0), dynamic=outcome(3.0)),
        compared("azure-conv", stock=outcome(1.0), slo_colocated=outcome(2.0), dynamic=outcome(4.0)),
        compared("hybrid", stock=outcome(None), slo_colocated=outcome(2.0), dynamic=outcome(1.0)),
    ]
    lines = table.markdown(found).splitlines()
    assert "| stock | not servable, 10 at once | 1 / 50 / 1.5 | not servable, 10 at once | 4.0 |" in lines
    assert "| stock's default chunk | - | 4.00 | - | 4.00 |" in lines
    assert "| SLO-aware colocation | 1.50 | 2.00 | 0.50 | 1.14 |" in lines
    assert table.data(found)["mean_over"]["stock's default chunk"] == pytest.approx(4.0)


def test_the_best_of_several_baselines_is_named() -> None:
    one = compared(stock_256=outcome(2.0), stock_384=outcome(2.5), disaggregated=outcome(1.0), dynamic=outcome(3.0, front_cores=0.25))
    lines = table.markdown([one]).splitlines()
    assert "| dynamic | 3 / 50 / 1.5 / 0.25 | 4.0 |" in lines
    assert "| the best of chunks 64, 128, 256, 512, 1024 and disaggregation | 1.50 (stock-256) | 1.50 |" in lines
    assert "| the best of all baselines | 1.20 (stock-384) | 1.20 |" in lines
    assert "| SLO-aware colocation | - | - |" in lines


def test_the_table_tells_how_late_the_client_was_with_each_system() -> None:
    found = [
        compared("azure-code", stock=outcome(1.0, client_lag_p99_ms=2.5), dynamic=outcome(2.0, client_lag_p99_ms=None)),
        compared("azure-conv", stock=outcome(1.0, client_lag_p99_ms=5.8), dynamic=outcome(2.0, client_lag_p99_ms=None)),
    ]
    lines = table.markdown(found).splitlines()
    assert lines[0].endswith("; client lag: the greatest P99 of the runs that count, in ms")
    assert "|  | azure-code | azure-conv | client lag |" in lines
    assert "| stock | 1 / 50 / 1.5 | 1 / 50 / 1.5 | 5.8 |" in lines
    assert "| dynamic | 2 / 50 / 1.5 | 2 / 50 / 1.5 | - |" in lines
    systems = table.data(found)["workloads"]["azure-conv"]["systems"]
    assert [systems[name]["client_lag_p99_ms"] for name in ("stock", "dynamic")] == [5.8, None]


def test_a_ratio_has_an_interval_over_the_repetitions_unless_one_found_no_rate() -> None:
    over = compared(stock=outcome(1.0, 1.0, 1.0), dynamic=outcome(2.0, 4.0, 8.0)).over_worst(["stock"])
    assert over is not None
    assert over.ratio.value == pytest.approx(4.0)
    assert over.ratio.low is not None
    lucky = compared(stock=outcome(1.0, 1.0, 1.0), dynamic=outcome(None, None, 8.0)).over_worst(["stock"])
    assert lucky is not None
    assert (lucky.ratio.value, lucky.ratio.low) == (0.0, None)


def test_of_several_baselines_the_one_beside_which_ours_looks_worst_counts() -> None:
    """Of pairs: the one with the higher median had it easy."""
    one = compared(stock=outcome(1.0, 2.0, 9.0), stock_256=outcome(1.8, 1.9, 18.0), dynamic=outcome(1.0, 2.0, 9.0))
    over = one.over_worst(["stock", "stock-256"])
    assert over is not None
    assert over.baseline == "stock-256"
    assert over.ratio.value == pytest.approx((1.0 / 1.8 * 2.0 / 1.9 * 9.0 / 18.0) ** (1 / 3))


def test_aims_are_met_or_missed_or_not_measured() -> None:
    found = [
        compared("azure-code", stock=outcome(1.0), slo_colocated=outcome(3.0), dynamic=outcome(3.0)),
        compared("mini-reasoning", stock=outcome(2.0), slo_colocated=outcome(2.0), dynamic=outcome(1.95)),
    ]
    told = list(map(str, judged(found)))
    assert "MISSED: at least 4 times stock's default chunk, mean of azure-code: 3.00" in told
    assert "met: at least 0.97 times stock's default chunk, each of mini-reasoning: 0.97" in told
    assert "MISSED: at least 1.08 times SLO-aware colocation, each of azure-code: 1.00" in told
    tuned = "the best of chunks 64, 128, 256, 512, 1024 and disaggregation"
    assert f"not measured, or no baseline is servable: at least 1.15 times {tuned}" in told
    assert any(line.startswith("met: at least 0.97 times the best of all baselines, each of azure-code, mini-reasoning") for line in told)
    assert all("1.2 times" not in line for line in told)
    tight = [replace(one, tbt_slo_ms=50.0) for one in found]
    assert "MISSED: at least 1.2 times SLO-aware colocation, mean of azure-code, mini-reasoning: 0.99" in map(str, judged(tight))


class Toys:
    """Small servers in place of engines. started: which of them, and by which SLO; up_together: the same, from none that is up to none."""

    def __init__(self) -> None:
        self.started: list[tuple[str, float]] = []
        self.up_together: list[list[tuple[str, float]]] = []
        self._up = 0
        self.broken_below_ms = 0.0
        self.broken = ""
        self.broken_starts: set[int] = set()

    def system(self, name: str, tbt_slo_ms: float, _: Path) -> System:
        @contextmanager
        def start() -> Iterator[Running]:
            self.started.append((name, tbt_slo_ms))
            number = sum(one == name for one, _ in self.started)
            if tbt_slo_ms < self.broken_below_ms or name == self.broken or (name == "dynamic" and number in self.broken_starts):
                raise ConfigError("it does not start")
            with running_server() as server:
                server.act = Act(slots=1 if name == "stock" else 4, delay_s=0.005)
                if not self._up:
                    self.up_together.append([])
                self.up_together[-1].append((name, tbt_slo_ms))
                self._up += 1
                try:
                    yield Running((server.url,))
                finally:
                    self._up -= 1

        return System(name, start=start)


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    monkeypatch.setattr("benchmarks.compare.campaign.MOST_SHARE", 2.0)  # toys sustain far more: a search would climb and climb
    return Campaign(
        workloads=("fixed:20,5",),
        systems=("stock", "dynamic"),
        tbt_slos_ms=(6000.0, 5000.0),
        layers=30,
        together=1,
        scale=0.5,
        traces=None,
        duration_s=0.3,
        repetitions=1,
        resolution=0.7,
        most_runs=2,
        seed=1,
        max_client_lag_ms=60000.0,
        output=tmp_path / "out",
    )


MACHINE = {"cores": 2}
PROVENANCE: dict[str, Any] = {"command": "a command", "seed": 1, "machine": MACHINE, "commit": "abc1234", "smoke_test": True}


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


def stopped_before_ours(campaign: Campaign) -> tuple[Campaign, Toys]:
    """One comparison, of which there is the turn of stock only; nothing is broken any more."""
    pytest.importorskip("matplotlib")
    campaign, toys = replace(campaign, tbt_slos_ms=(6000.0,)), Toys()
    toys.broken = "dynamic"
    campaign.run(toys.system, PROVENANCE)
    toys.started, toys.broken = [], ""
    return campaign, toys


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


def headings(page: str) -> list[str]:
    """Of its pictures."""
    return re.findall(r"<h2>(\w+)</h2><img ", page)


ALL_PICTURES = ["capacity", "goodput", "tbt", "timeline"]


def test_a_report_has_all_pictures_without_a_start_for_them(campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    campaign, toys = replace(campaign, tbt_slos_ms=(6000.0,)), Toys()
    campaign.run(toys.system, PROVENANCE)
    assert toys.started == [("stock", 6000.0), ("dynamic", 6000.0)]
    folder = campaign.folder("fixed:20,5", 6000.0)
    page = (folder / "report.html").read_text()
    assert headings(page) == ALL_PICTURES
    assert sorted(path.name for path in folder.glob("*.png")) == [f"{name}.png" for name in ALL_PICTURES]
    assert "TBT and timeline: of each system its sustained run at the highest rate" in page
    assert "TBT and timeline lack" not in page


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


def test_a_client_that_is_always_late_costs_turns_and_not_the_campaign(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    toys, late = Toys(), replace(campaign, tbt_slos_ms=(6000.0,), max_client_lag_ms=1e-6)
    late.run(toys.system, PROVENANCE)
    assert toys.started == [("stock", 6000.0), ("dynamic", 6000.0)]
    told = capsys.readouterr().err
    for name in late.systems:
        assert f"bench-compare: {name}, fixed:20,5, 6000 ms: not measured: {trial.ATTEMPTS} times in a row at " in told
    assert told.count("the client itself was late") == 2
    assert late.found() == ([], ["fixed:20,5 at 6000 ms"])

    replace(late, max_client_lag_ms=60000.0).run(toys.system, PROVENANCE)
    (results,) = campaign.output.glob("*/results.json")
    assert json.loads(results.read_text())["complete"]


@pytest.mark.parametrize("main", [command.main, pairs.main])
def test_a_client_may_be_late_by_a_quarter_of_the_usual_slo(main: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "repeated, up to 3 in all, and then not measured (default: 25.0)" in told


def test_systems_that_are_up_together_have_their_runs_in_turns(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    toys = Toys()
    both = replace(campaign, together=2, tbt_slos_ms=(6000.0,), resolution=0.2)
    both.run(toys.system, PROVENANCE)
    assert sorted(toys.started) == [("dynamic", 6000.0), ("stock", 6000.0)]
    told = [line for line in capsys.readouterr().err.splitlines() if "requests/s" in line and "all are sent at once" not in line]
    runs = [line.split(":")[0] for line in told]
    shorter = 2 * min(runs.count("stock"), runs.count("dynamic"))
    assert shorter >= 4
    assert runs[:shorter] == (shorter // 2) * ["stock", "dynamic"]
    assert both.found()[1] == []


def test_only_what_is_judged_by_one_slo_is_up_together(campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    toys = Toys()
    systems = ("stock", "slo-colocated", "dynamic")
    replace(campaign, together=3, systems=systems).run(toys.system, PROVENANCE)
    assert toys.up_together == [
        [("stock", 6000.0), ("slo-colocated", 6000.0), ("dynamic", 6000.0)],
        [("slo-colocated", 5000.0), ("dynamic", 5000.0)],
    ]


def test_a_system_that_breaks_leaves_the_others_their_turns(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    toys = Toys()
    toys.broken = "stock"
    both = replace(campaign, together=2, tbt_slos_ms=(6000.0,))
    both.run(toys.system, PROVENANCE)
    assert "stock: not measured: it does not start" in capsys.readouterr().err
    (results,) = campaign.output.glob("*/results.json")
    assert len(json.loads(results.read_text())["systems"]["dynamic"]["turns"]) == 1


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


def test_each_system_is_two_instances_of_the_same_kind(tmp_path: Path) -> None:
    site = Site(tmp_path / "model", tmp_path / "profile.json")
    commands = {}
    for name, candidate in CANDIDATES.items():
        fleet = site.fleet(candidate, 50.0, tmp_path / name)
        assert fleet.instances == 2
        commands[name] = " ".join(fleet.instance_command(1))
        assert ("--plugin dynaserve" in commands[name]) == (not name.startswith("stock"))
    assert "--max-num-batched-tokens" not in commands["stock"] + commands["colocated"]
    assert commands["stock-384"].endswith("--max-num-batched-tokens 384")
    assert "--dynaserve-batching" not in commands["colocated"]
    assert "--dynaserve-batching slo --tbt-slo-ms 50" in commands["dynamic"]


def test_every_start_begins_with_the_same_latencies(tmp_path: Path) -> None:
    site = Site(tmp_path / "model", tmp_path / "profile.json")
    own = [tmp_path / "logs" / f"profile-{index}.json" for index in range(2)]
    before = site.fleet(CANDIDATES["dynamic"], 100.0, tmp_path / "logs").frontend_command()
    assert before[-4:] == ["--policy", "dynamic", "--fleet-tbt-slo-ms", "100"]
    assert not any(path.exists() for path in own)
    site.profile.write_text("learnt")
    for _ in range(2):
        fleet = site.fleet(CANDIDATES["dynamic"], 100.0, tmp_path / "logs")
        assert [path.read_text() for path in own] == ["learnt", "learnt"]
        for index, path in enumerate(own):
            assert fleet.instance_command(index)[-2:] == ["--dynaserve-profile", str(path)]
            path.write_text("refined")
    assert fleet.frontend_command()[-2:] == ["--latency-profile", str(site.profile)]
    assert "--latency-profile" not in site.fleet(CANDIDATES["disaggregated"], 100.0, tmp_path).frontend_command()


@dataclass(frozen=True)
class ToySite(Site):
    """Its servers keep a profile when they stop, as instances do; or not."""

    keeps: bool = True

    def system(self, name: str, tbt_slo_ms: float, logs: Path) -> System:
        folder = logs / f"{name}-tbt-{tbt_slo_ms:g}"
        folder.mkdir(parents=True)

        @contextmanager
        def start() -> Iterator[Running]:
            with running_server() as server:
                server.act = Act(slots=4)
                yield Running((server.url,))
            if self.keeps:
                (folder / "profile-0.json").write_text("learnt")

        return System(name, start=start)


def test_latencies_are_learnt_once_before_all_turns(tmp_path: Path, campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    site = ToySite(tmp_path / "model", tmp_path / "profile.json")
    for _ in range(2):
        site.learn(5000.0, tmp_path / "logs", campaign.teach)
    assert site.profile.read_text() == "learnt"
    assert capsys.readouterr().err.count("learning the latency of steps: fixed:20,5") == 1


def test_nothing_is_measured_by_latencies_that_could_not_be_learnt(tmp_path: Path, campaign: Campaign) -> None:
    site = ToySite(tmp_path / "model", tmp_path / "profile.json", keeps=False)
    with pytest.raises(FleetFailed, match="an instance was taught, and has not left"):
        campaign.learn(site)
    assert not site.profile.exists()


HEALTH = """\
dynaserve_instance_deaths_total{instance="a"} 0.0
dynaserve_instance_deaths_total{instance="b"} DEATHS.0
dynaserve_instance_health{instance="a",health="up"} 1.0
dynaserve_instance_health{instance="a",health="dead"} 0.0
dynaserve_instance_health{instance="b",health="dead"} DEAD.0
"""


def test_a_fleet_is_whole_only_where_no_instance_is_or_was_dead_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Site(tmp_path / "model", tmp_path / "profile.json").fleet(CANDIDATES["dynamic"], 100.0, tmp_path / "logs")
    told = [(0, 0), (1, 0), (1, 0), (1, 1), (1, 0)]
    monkeypatch.setattr(LocalFleet, "health", lambda _: health_in(page(*told.pop(0))))

    def page(deaths: int, dead: int) -> str:
        return HEALTH.replace("DEATHS", str(deaths)).replace("DEAD", str(dead))

    check = candidates._whole_fleet(fleet)
    check()
    with pytest.raises(FleetFailed, match="declared dead 1 times during a run, and 0 are so now"):
        check()
    check()
    with pytest.raises(FleetFailed, match="declared dead 0 times during a run, and 1 are so now"):
        check()
    check()


def test_a_run_of_a_fleet_that_lost_an_instance_is_no_figure(campaign: Campaign, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    toys, both = Toys(), replace(campaign, tbt_slos_ms=(6000.0,))

    def check() -> None:
        raise FleetFailed("an instance was declared dead 1 times during a run")

    def system(name: str, tbt_slo_ms: float, logs: Path) -> System:
        whole = toys.system(name, tbt_slo_ms, logs)
        assert whole.start is not None
        start = whole.start

        @contextmanager
        def loses() -> Iterator[Running]:
            with start() as running:
                yield replace(running, check=check) if name == "dynamic" else running

        return System(name, start=loses)

    both.run(system, PROVENANCE)
    assert "dynamic, fixed:20,5, 6000 ms: not measured: an instance was declared dead 1 times during a run" in capsys.readouterr().err
    assert both.found()[1] == ["fixed:20,5 at 6000 ms"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--systems", "stock"), "--systems has stock only: a comparison needs at least two"),
        (("--systems", "stock", "stock"), "--systems has a value twice: stock stock"),
        (("--tbt-slo-ms", "50", "50"), "--tbt-slo-ms has a value twice: 50 50"),
        (("--workloads", "azure-code"), "workload azure-code is not part of the package"),
        (("--duration-s", "0"), "'0' is not a number above 0"),
        (("--layers", "31"), "has 30 layers, of which 31 cannot be taken"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    options: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        command.main([*options, "--output", str(tmp_path / "out")])
    assert end.value.code == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_comparisons_do_not_write_into_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with only_writer(tmp_path / "out"), pytest.raises(SystemExit) as end:
        command.main(["--layers", "30", "--output", str(tmp_path / "out")])  # the whole model, which other tests need too
    assert end.value.code == 2
    assert "out: another process is writing into this folder" in capsys.readouterr().err
    with only_writer(tmp_path / "out"):  # the one before is done
        pass


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == 0
    assert "example:\n  python -m benchmarks.compare " in capsys.readouterr().out


def test_a_commit_is_told() -> None:
    assert commit()
