"""Comparisons: ratios, systems that are started, and the whole command against two servers of known capacity."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dynaserve.bench import compare, compare_plots, compare_report, systems, trial
from dynaserve.bench.capacity import Repetition
from dynaserve.bench.comparison import Comparison, Turn
from dynaserve.bench.course import PARTS, Course
from dynaserve.bench.measures import Slo, summarize
from dynaserve.bench.ratios import paired_ratio
from dynaserve.bench.systems import CutCounts, Running, System
from dynaserve.bench.trial import Trial
from dynaserve.errors import ConfigError, NotTrusted
from dynaserve.local.fleet import free_ports
from tests.completion_server import Act, CompletionServer, running_server
from tests.test_bench_measures import RECORD, SLO

_NAMED = '[[system]]\nname = "a"\nurl = "http://x"\n'
_COUNTED = [("yes", "ratio", "3.0"), ("yes", "split", "4.0"), ("no", "policy", "5.0")]


def _server_code(port: int, status: int) -> str:
    """Of a program that answers every GET with that status."""
    return (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        f"    def do_GET(self): self.send_response({status}); self.end_headers()\n"
        f"h.HTTPServer(('127.0.0.1', {port}), H).serve_forever()"
    )


def test_a_ratio_is_the_geometric_mean_with_students_interval() -> None:
    ratio = paired_ratio([2.0, 4.0, 8.0], [1.0, 1.0, 1.0])
    assert ratio is not None
    assert ratio.value == pytest.approx(4.0)
    half = 4.303 * math.log(2) / math.sqrt(3)
    assert (ratio.low, ratio.high) == pytest.approx((4 * math.exp(-half), 4 * math.exp(half)))


def test_a_ratio_has_no_interval_from_one_repetition_and_no_value_from_a_system_that_cannot_serve() -> None:
    assert str(paired_ratio([3.0], [2.0])) == "1.50"
    assert paired_ratio([3.0, None], [2.0, 2.0]) is None


def test_the_share_of_cut_requests_is_of_those_in_between() -> None:
    assert CutCounts(13, 17, 0).since(CutCounts(10, 10, 0)) == pytest.approx(0.3)
    assert CutCounts(13, 17, 2).since(CutCounts(10, 10, 1)) == pytest.approx(0.2), "one of the three came to no hand-off"
    assert CutCounts(3, 7, 0).since(CutCounts(3, 7, 0)) is None


def test_cuts_are_counted_over_all_reasons() -> None:
    lines = [f'dynaserve_requests_total{{cut="{cut}",reason="{reason}"}} {count}' for cut, reason, count in _COUNTED]
    assert systems.counts_in("# TYPE dynaserve_requests_total counter\n" + "\n".join(lines) + "\n") == CutCounts(7.0, 5.0, 0.0)
    lines.append("dynaserve_lifted_hand_offs_total 2.0")
    assert systems.counts_in("\n".join(lines) + "\n") == CutCounts(7.0, 5.0, 2.0)
    late = 'dynaserve_revised_hand_offs_total{reason="gathers_decodes"} 3.0'
    assert systems.counts_in("\n".join([*lines, late]) + "\n") == CutCounts(10.0, 2.0, 2.0), "some were cut on the way"
    assert systems.counts_in("vllm:num_requests_running 3.0\n") is None


def test_a_system_is_started_for_its_turn_and_ended_after_it() -> None:
    (port,) = free_ports(1)
    urls = (f"http://127.0.0.1:{port}",)
    system = System("toy", urls, [[sys.executable, "-c", _server_code(port, 200)]])
    with systems.running(system) as running:
        assert running.urls == urls
        running.check()
        assert systems.cut_counts(urls) is None
        with pytest.raises(ConfigError, match=r"something answers at .* before it is started"), systems.running(system):
            pass
    with pytest.raises(ConfigError, match="does not answer after 1 s"), systems.running(System("none", urls, [["sleep", "60"]], 1.0)):
        pass
    with (
        pytest.raises(ConfigError, match="a command ended with status 3"),
        systems.running(System("bad", urls, [["sh", "-c", "exit 3"]])),
    ):
        pass


def test_a_system_of_which_a_command_ends_during_its_turn_is_not_measured_on(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    ends = f"while ! test -e {tmp_path}/end; do sleep 0.05; done; echo out of memory; exit 3"
    system = System("half", (f"http://127.0.0.1:{port}",), [[sys.executable, "-c", _server_code(port, 200)], ["sh", "-c", ends]])
    with systems.running(system) as running:
        running.check()
        (tmp_path / "end").touch()
        fault = None
        while fault is None:  # until the timeout of all tests
            try:
                running.check()
            except ConfigError as error:
                fault = str(error)
            time.sleep(0.05)
    assert fault == "system half: a command ended with status 3: out of memory"


@pytest.mark.parametrize("status", [401, 403])
def test_a_system_that_asks_for_a_key_has_started(status: int) -> None:
    (port,) = free_ports(1)
    urls = (f"http://127.0.0.1:{port}",)
    with systems.running(System("locked", urls, [[sys.executable, "-c", _server_code(port, status)]], 20.0)):
        pass


@pytest.mark.usefixtures("unreachable_proxy")
def test_a_system_is_asked_without_the_proxy_of_the_environment() -> None:
    with (
        running_server() as server,
        pytest.raises(ConfigError, match="something answers at"),
        systems.running(System("up", (server.url,), [["true"]])),
    ):
        pass


def test_systems_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "systems.toml"
    path.write_text('[[system]]\nname = "a"\nurl = "http://x:1/v1"\ncommands = ["run --name \'two words\'"]\n')
    assert systems.from_toml(path) == [System("a", ("http://x:1",), [["run", "--name", "two words"]])]
    path.write_text('[[system]]\nname = "a"\nurls = ["http://x:1/v1", "http://x:2"]\n')
    assert [system.urls for system in systems.from_toml(path)] == [("http://x:1", "http://x:2")]
    assert systems.from_url("a=http://x:1,http://x:2/v1") == System("a", ("http://x:1", "http://x:2"))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("x", "cannot be read"),
        ("a = 1", "holds a; it must hold tables"),
        ('[[system]]\nname = "a"', "a system has no url"),
        ("[[system]]\nport = 1", "system key 'port' is unknown"),
        ("[[system]]\nname = 1", "system key name is 1"),
        ('system = ["x"]', "system has 'x', which is no table"),
        ('[[system]]\nname = "a"\nurls = []', "a system has no url"),
        (_NAMED + "start_timeout_s = 0", "system key start_timeout_s is 0, not a number above 0"),
        (_NAMED + "start_timeout_s = nan", "system key start_timeout_s is nan, not a number above 0"),
        (_NAMED + "start_timeout_s = inf", "system key start_timeout_s is inf, not a number above 0"),
        (_NAMED + "start_timeout_s = true", "system key start_timeout_s is True"),
        (_NAMED + """commands = ["serve 'x"]""", "system key commands has .*, which is no command line: No closing quotation"),
        (_NAMED + 'commands = [["serve"]]', "system key commands has .*, which is no command line"),
        (_NAMED + 'commands = [""]', "system key commands has '', which is no command line"),
        ('[[system]]\nname = "a"\nurls = [1]', "'1' is not a URL"),
        ('[[system]]\nname = "a"\nurls = ["http://x", "http://x/v1"]', "http://x is given twice"),
        ('[[system]]\nname = "a"\nurl = "http://x"\nurls = ["http://y"]', "system a has url and urls: it needs one of them"),
    ],
)
def test_a_bad_file_of_systems_is_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "systems.toml").write_text(content)
    with pytest.raises(ConfigError, match=f"systems.toml: .*{named}"):
        systems.from_toml(tmp_path / "systems.toml")


def arguments(tmp_path: Path, *more: str) -> list[str]:
    options = ["--workload", "fixed:20,5", "--rate", "16", "--duration-s", "1", "--resolution", "0.8", "--repetitions", "2"]
    return [*options, "--tbt-slo-ms", "5000", "--max-client-lag-ms", "60000", "--output", str(tmp_path / "out"), *more]


def test_the_faster_of_two_servers_is_told_by_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with running_server() as slow, running_server() as fast:
        slow.act, fast.act = Act(slots=1, delay_s=0.02), Act(slots=4, delay_s=0.02)  # At most 10 and 40 requests per second.
        chosen = ("--system", f"slow={slow.url}", "--system", f"fast={fast.url}", "--most-rate", "100")
        with pytest.raises(SystemExit) as end:
            compare.main(arguments(tmp_path, *chosen))
    output = capsys.readouterr()
    assert end.value.code == 0, output.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["systems"]["fast"]["ratio"]["value"] > 1.5
    assert results["complete"]
    assert results["systems"]["slow"]["ratio"]["value"] == 1.0
    assert len(results["systems"]["fast"]["rates_per_s"]) == 2
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "TBT and timeline: each system at" in page
    assert "src=http" not in page
    for name in ("capacity", "goodput", "tbt", "timeline"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "fast" in output.out


def test_systems_that_python_starts_are_saturated_and_searched_in_turns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    started: list[str] = []
    unequal: list[int] = []

    def of(name: str, slots: int, *front_pids: int) -> System:
        @contextmanager
        def start() -> Iterator[Running]:
            started.append(name)
            with running_server() as one, running_server() as other:
                one.act = other.act = Act(slots=slots, delay_s=0.02)
                yield Running((one.url, other.url), front_pids)
                unequal.append(len(one.prompts) - len(other.prompts))

        return System(name, start=start)

    options = compare.parse(arguments(tmp_path, "--system", "a=http://x", "--system", "b=http://y", "--requests", "12", "--rate", "0.5"))
    chosen = replace(options, systems=[of("slow", 1), of("fast", 4, os.getpid())], side_by_side=False, saturates=True)
    assert compare.run(chosen, {"command": "a command", "machine": {}, "seed": 1}) == 0
    assert started == ["slow", "fast", "fast", "slow"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["seed"] == 1
    slow, fast = (results["systems"][name] for name in ("slow", "fast"))
    trials = [trial for system in (slow, fast) for turn in system["turns"] for trial in turn["repetition"]["trials"]]
    runs = len(started) + sum(1 + len(trial["others"]) for trial in trials)
    assert min(unequal) >= 0
    assert sum(unequal) <= runs, "of each run the first server has one more at most"
    assert 0 < slow["saturation_per_s"] < fast["saturation_per_s"]
    first = slow["turns"][0]["repetition"]["trials"][0]
    assert first["rate_per_s"] == pytest.approx(0.5 * slow["saturation_per_s"])
    assert first["front_cores"] is None
    assert fast["at_capacity"]["front_cores"] > 0
    assert fast["at_capacity"]["rate_per_s"] == fast["capacity_per_s"]
    assert fast["at_capacity"] in [trial for turn in fast["turns"] for trial in turn["repetition"]["trials"]]
    for turn in (*slow["turns"], *fast["turns"]):
        course, passed_per_s = turn["course"], turn["repetition"]["passed_per_s"]
        assert passed_per_s == (course and course["rate_per_s"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4


def test_nothing_more_is_sent_once_the_slo_cannot_be_kept(tmp_path: Path) -> None:
    options = compare.parse(arguments(tmp_path, "--system", "a=http://x", "--system", "b=http://y", "--requests", "40", "--rate", "50"))
    with running_server() as server:
        server.act = Act(delay_s=0.02)
        hopeless = replace(options.replay, urls=(server.url,), duration_s=None, slo=Slo(1.0))
        whole, cut_short = (trial.run(hopeless, 20.0, 1, gives_up=gives_up) for gives_up in (False, True))
    assert whole.summary.requests == 40
    assert cut_short.summary.requests < 40
    for run in (whole, cut_short):
        assert run.summary.finished == run.summary.requests
        assert (run.not_sustained or "").startswith("P99 TBT")


def test_where_one_run_leaves_it_open_others_decide_with_it(tmp_path: Path) -> None:
    options = compare.parse(arguments(tmp_path, "--system", "a=http://x", "--system", "b=http://y", "--requests", "20", "--rate", "50"))
    with running_server() as server:
        replay = replace(options.replay, urls=(server.url,), duration_s=None, slo=Slo(1000.0), workload="fixed:8,6")
        server.act = Act(pause_s=2.0)
        run = trial.run(replay, 5.0, 1, most_runs=4)
        assert run.not_sustained is None
        assert (run.summary.token_attainment, *(other.token_attainment for other in run.others)) == (0.99, 1.0, 1.0)
        hopeless = trial.run(replace(replay, slo=Slo(0.01)), 5.0, 1, gives_up=True, most_runs=4)
        assert not hopeless.others
        assert (hopeless.not_sustained or "").startswith("P99 TBT")


def test_a_run_of_a_client_that_is_late_is_tried_as_often_as_asked(tmp_path: Path) -> None:
    systems_named = ("--system", "a=http://x", "--system", "b=http://y")
    options = compare.parse(arguments(tmp_path, *systems_named, "--requests", "2", "--max-client-lag-ms", "0.000001"))
    with running_server() as server:
        late = replace(options.replay, urls=(server.url,), duration_s=None)
        for attempts, often in ((1, ""), (2, "2 times in a row ")):
            server.bodies.clear()
            with pytest.raises(NotTrusted, match=f"^{often}at 50 requests/s the client itself was late"):
                trial.run(late, 50.0, 1, attempts=attempts)
            assert len(server.prompts) == 2 * attempts


def test_a_comparison_that_has_measured_nothing_leaves_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    silent = [part for name, port in zip("ab", free_ports(2), strict=True) for part in ("--system", f"{name}=http://127.0.0.1:{port}")]
    with pytest.raises(SystemExit) as end:
        compare.main(arguments(tmp_path, *silent))
    assert end.value.code == 2
    assert "does not answer" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "out").write_text("")
    with pytest.raises(SystemExit) as end:
        compare.main(arguments(tmp_path, "--system", "a=http://x", "--system", "b=http://y"))
    assert end.value.code == 2
    assert f"{tmp_path / 'out' / 'results.json'}: cannot be written: Not a directory" in capsys.readouterr().err


def test_what_was_measured_before_an_error_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with running_server() as sound, running_server() as wrong:
        wrong.act = Act(lose=1)
        with pytest.raises(SystemExit) as end:
            compare.main(arguments(tmp_path, "--system", f"sound={sound.url}", "--system", f"wrong={wrong.url}", "--most-rate", "16"))
    path = tmp_path / "out" / "results.json"
    assert end.value.code == 3
    assert f"; turns measured before it: 1, in {path}\n" in capsys.readouterr().err
    results = json.loads(path.read_text())
    assert not results["complete"]
    sound_rates, wrong_rates = (results["systems"][name]["rates_per_s"] for name in ("sound", "wrong"))
    assert len(sound_rates) == 1
    assert sound_rates[0] in [trial["rate_per_s"] for trial in results["systems"]["sound"]["turns"][0]["repetition"]["trials"]]
    assert wrong_rates == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ((), "at least two systems of different names, not none"),
        (("--system", "a=http://x", "--system", "a=http://y"), "not a, a"),
        (("--system", "http://x"), "is not NAME=URL"),
        (("--systems", "nosuch.toml"), "nosuch.toml: cannot be read: No such file"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], named: str) -> None:
    with pytest.raises(SystemExit) as end:
        compare.main(arguments(tmp_path, *more))
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    assert "example:\n  dynaserve bench compare --system" in capsys.readouterr().out


def test_a_last_run_that_fails_leaves_the_report_of_all_searches(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    starts: list[str] = []

    def of(name: str) -> System:
        @contextmanager
        def start() -> Iterator[Running]:
            starts.append(name)
            if len(starts) > 2:
                raise ConfigError(f"{name} does not start again")
            with running_server() as server:
                yield Running((server.url,))

        return System(name, start=start)

    options = compare.parse(arguments(tmp_path, "--system", "a=http://x", "--system", "b=http://y", "--most-rate", "16"))
    chosen = replace(options, systems=[of("a"), of("b")], search=replace(options.search, repetitions=1))
    with pytest.raises(ConfigError, match="a does not start again; turns measured before it: 2"):
        compare.run(chosen, {"command": "a command", "machine": {}, "seed": 1})
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["complete"]
    of_b = results["systems"]["b"]
    assert (of_b["capacity_per_s"], of_b["capacity_is_least"], of_b["ratio"]) == (16.0, True, None), "even the highest rate tried passed"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert page.count("<td>≥ 16</td>") == 2
    assert "TBT and timeline: of each system its sustained run at the highest rate" in page


def test_a_course_has_the_gaps_and_the_tokens_in_time_of_a_run() -> None:
    course = Course.of(2.0, [RECORD], SLO)
    middle = len(course.gap_quantiles_ms) // 2
    assert [course.gap_quantiles_ms[place] for place in (0, middle, -1)] == pytest.approx([0.0, 50.0, 200.0])
    assert (course.rate_per_s, course.ended_s, len(course.goodput_tokens_per_s)) == (2.0, RECORD.ended_s, PARTS)
    part_s = RECORD.ended_s / PARTS
    in_time = {int(at_s / part_s): pytest.approx(1 / part_s, abs=1e-3) for at_s in (1.502, 1.552, 1.752)}  # the third one came after 200 ms
    assert {place: goodput for place, goodput in enumerate(course.goodput_tokens_per_s) if goodput} == in_time
    of_two = sum(Course.of(2.0, [RECORD], Slo(SLO.tbt_ms, ttft_ms=499.0)).goodput_tokens_per_s)
    assert of_two == pytest.approx(2 / part_s, abs=1e-2), "the first one is late, too"


def test_a_run_without_gaps_has_a_course() -> None:
    silent = Course.of(2.0, [replace(RECORD, token_times_s=())], SLO)
    assert silent.gap_quantiles_ms == []
    assert set(silent.goodput_tokens_per_s) == {0.0}


def turn(rate_per_s: float, *, keeps_course: bool = True, seed: int = 1) -> Turn:
    """Of one run, which was sustained."""
    run = Trial(rate_per_s, seed, "model", summarize([RECORD], [], SLO), None)
    return Turn(
        Repetition(seed, rate_per_s, 1.05 * rate_per_s, [run]), None, Course.of(rate_per_s, [RECORD], SLO) if keeps_course else None
    )


def test_the_pictures_of_runs_show_the_highest_rate_that_is_kept_and_name_it() -> None:
    turns = {"old": [turn(9.0, keeps_course=False)], "new": [turn(2.0), turn(3.5, seed=2), turn(4.0, keeps_course=False, seed=3)]}
    courses = Comparison("sample", SLO, turns, {}, {}).courses
    assert {system: course.rate_per_s for system, course in courses.items()} == {"new": 3.5}
    assert compare_plots.label("new", courses["new"]) == "new, 3.5 requests/s"


def test_runs_side_by_side_are_shown_only_if_every_system_had_its_own() -> None:
    turns = {"a": [turn(2.0)], "b": [turn(3.0)]}
    at_one_rate = {name: Trial(1.0, 1, "model", summarize([RECORD], [], SLO), None, [RECORD]) for name in turns}
    for runs, rates in ((at_one_rate, {"a": 1.0, "b": 1.0}), ({"a": at_one_rate["a"]}, {"a": 2.0, "b": 3.0})):
        courses = Comparison("sample", SLO, turns, runs, {}).courses
        assert {system: course.rate_per_s for system, course in courses.items()} == rates


def test_a_report_of_turns_without_courses_says_which_pictures_it_lacks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    turns = {name: [turn(2.0, keeps_course=False)] for name in ("a", "<b>")}
    compare_report.write(tmp_path, Comparison("sample", SLO, turns, {}, {}), {"command": "a command", "machine": {}})
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "<p>TBT and timeline lack a, &lt;b&gt;: no sustained run is kept that has them.</p>" in page
    assert "at the highest rate" not in page


def test_a_report_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html: cannot be written: it is a folder"):
        compare_report.prepare(tmp_path)


@contextmanager
def held_up_once(server: CompletionServer, for_s: float) -> Iterator[None]:
    """Once a request has come, the main thread, which is the client's, sleeps for so long."""
    main_thread, is_over = threading.get_ident(), threading.Event()

    def hold_up() -> None:
        while not is_over.wait(0.005):
            if server.prompts:
                signal.pthread_kill(main_thread, signal.SIGUSR1)
                return

    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(for_s))
    watcher = threading.Thread(target=hold_up)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_run_in_which_the_client_was_late_is_repeated_and_does_not_count(tmp_path: Path) -> None:
    systems_named = ("--system", "a=http://x", "--system", "b=http://y")
    options = compare.parse(arguments(tmp_path, *systems_named, "--requests", "2", "--max-client-lag-ms", "1000"))
    with running_server() as server, held_up_once(server, 2.5):
        server.act = Act(delay_s=0.1)  # The first request is under way for half a second: it is seen to come, and to be held up.
        run = trial.run(replace(options.replay, urls=(server.url,), duration_s=None), 50.0, 1)
    assert len(server.prompts) == 2 * 2
    assert (run.summary.client_lag_p99_ms or 0.0) <= 1000.0
