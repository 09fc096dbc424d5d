"""`make bench-compare`: whose turn it is, what is learnt before, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pairs, provenance
from benchmarks.checkout import commit
from benchmarks.compare import __main__ as command
from benchmarks.compare import candidates, lesson
from benchmarks.compare.campaign import Campaign
from benchmarks.compare.candidates import CANDIDATES, Site
from dynaserve.bench import trial
from dynaserve.bench.report import machine
from dynaserve.bench.systems import Running, System
from dynaserve.errors import ConfigError
from dynaserve.files import only_writer
from dynaserve.local.fleet import FleetFailed, LocalFleet, health_in
from tests.completion_server import Act, running_server
from tests.toy_campaign import ALL_PICTURES, MACHINE, PROVENANCE, Toys, headings, toy_campaign


@pytest.fixture
def campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    return toy_campaign(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"workloads": ("fixed:20,5", "fixed:20:5")}, "fixed:20,5 at 6000.0 ms and fixed:20:5 at 6000.0 ms"),
        ({"tbt_slos_ms": (100.0, 100.0001)}, "fixed:20,5 at 100.0 ms and fixed:20,5 at 100.0001 ms"),
    ],
)
def test_two_comparisons_have_two_folders(campaign: Campaign, changed: dict[str, Any], names: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=f"^{names} would have the same folder: compare them in two runs$"):
        replace(campaign, **changed).check(MACHINE)


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


def test_latencies_are_of_the_workloads_and_the_machine_of_a_campaign(tmp_path: Path, campaign: Campaign) -> None:
    pytest.importorskip("matplotlib")
    campaign = replace(campaign, systems=("slo-colocated", "dynamic"), output=tmp_path / "out")
    site = ToySite(tmp_path / "model", campaign.output / f"profile-{campaign.layers}-layers.json")
    campaign.learn(site)
    campaign.check(machine())
    told = lesson.of(site.profile)
    assert told is not None
    assert (told["workloads"], told["machine"]) == (["fixed:20,5"], machine())
    for other, reason in (
        (replace(campaign, workloads=("fixed:20,5", "fixed:900,1")), "was learnt without fixed:900,1"),
        (replace(campaign, scale=0.25), r"was learnt otherwise, scale: 0\.5 there, 0\.25 here"),
    ):
        with pytest.raises(ConfigError, match=f"profile-.*json {reason}: take another --output, or delete it"):
            other.check(machine())
    with pytest.raises(ConfigError, match=r"was learnt otherwise, machine: .*'cpu': 'another'"):
        campaign.check({**machine(), "cpu": "another"})
    provenance.beside(site.profile).unlink()
    with pytest.raises(ConfigError, match=r"has no profile-.*\.provenance\.json that says what it was learnt from"):
        campaign.check(machine())


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

    check = candidates.whole_fleet(fleet)
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


def test_a_campaign_hides_lengths_from_all_its_systems_and_is_another_one_then(campaign: Campaign) -> None:
    hidden = replace(campaign, eos_token_id=2)
    workload, tbt_slo_ms = campaign.workloads[0], campaign.tbt_slos_ms[0]
    assert campaign.replay(workload, tbt_slo_ms).eos_token_id is None
    assert hidden.replay(workload, tbt_slo_ms).eos_token_id == 2
    assert "eos_token_id" not in campaign._options(workload, tbt_slo_ms)
    assert hidden._options(workload, tbt_slo_ms)["eos_token_id"] == 2
