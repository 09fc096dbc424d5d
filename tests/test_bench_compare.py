"""Comparisons: ratios, systems that are started, and the whole command against two servers of known capacity."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from dynaserve.bench import compare, systems
from dynaserve.bench.ratios import paired_ratio
from dynaserve.bench.systems import CutCounts, System
from dynaserve.errors import ConfigError
from dynaserve.local.fleet import free_ports
from tests.completion_server import Act, running_server

_COUNTED = [("yes", "ratio", "3.0"), ("yes", "split", "4.0"), ("no", "policy", "5.0")]


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
    assert CutCounts(13, 17).since(CutCounts(10, 10)) == pytest.approx(0.3)
    assert CutCounts(3, 7).since(CutCounts(3, 7)) is None


def test_cuts_are_counted_over_all_reasons() -> None:
    lines = [f'dynaserve_requests_total{{cut="{cut}",reason="{reason}"}} {count}' for cut, reason, count in _COUNTED]
    assert systems.counts_in("# TYPE dynaserve_requests_total counter\n" + "\n".join(lines) + "\n") == CutCounts(7.0, 5.0)
    assert systems.counts_in("vllm:num_requests_running 3.0\n") is None


def test_a_system_is_started_for_its_turn_and_ended_after_it() -> None:
    (port,) = free_ports(1)
    code = (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        f"h.HTTPServer(('127.0.0.1', {port}), H).serve_forever()"
    )
    system = System("toy", f"http://127.0.0.1:{port}", [[sys.executable, "-c", code]])
    with systems.running(system):
        assert systems.cut_counts(system.url) is None
        with pytest.raises(ConfigError, match=r"something answers at .* before it is started"), systems.running(system):
            pass
    with pytest.raises(ConfigError, match="does not answer after 1 s"), systems.running(System("none", system.url, [["sleep", "60"]], 1.0)):
        pass
    with (
        pytest.raises(ConfigError, match="a command ended with status 3"),
        systems.running(System("bad", system.url, [["sh", "-c", "exit 3"]])),
    ):
        pass


def test_systems_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "systems.toml"
    path.write_text('[[system]]\nname = "a"\nurl = "http://x:1/v1"\ncommands = ["run --name \'two words\'"]\n')
    assert systems.from_toml(path) == [System("a", "http://x:1", [["run", "--name", "two words"]])]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("x", "cannot be read"),
        ("a = 1", "holds a; it must hold tables"),
        ('[[system]]\nname = "a"', "a system has no url"),
        ("[[system]]\nport = 1", "system key 'port' is unknown"),
        ("[[system]]\nname = 1", "system key name is 1"),
    ],
)
def test_a_bad_file_of_systems_is_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "systems.toml").write_text(content)
    with pytest.raises(ConfigError, match=named):
        systems.from_toml(tmp_path / "systems.toml")


def arguments(tmp_path: Path, *more: str) -> list[str]:
    options = ["--workload", "fixed:20,5", "--rate", "16", "--duration-s", "1", "--resolution", "0.8", "--repetitions", "2"]
    return [*options, "--tbt-slo-ms", "5000", "--max-client-lag-ms", "60000", "--output", str(tmp_path / "out"), *more]


def test_the_faster_of_two_servers_is_told_by_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with running_server() as slow, running_server() as fast:
        slow.act, fast.act = Act(slots=1, delay_s=0.02), Act(slots=4, delay_s=0.02)  # At most 10 and 40 requests per second.
        chosen = ("--system", f"slow={slow.url}", "--system", f"fast={fast.url}", "--most-rate", "48")
        with pytest.raises(SystemExit) as end:
            compare.main(arguments(tmp_path, *chosen))
    output = capsys.readouterr()
    assert end.value.code == 0, output.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["systems"]["fast"]["ratio"]["value"] > 1.5
    assert results["systems"]["slow"]["ratio"]["value"] == 1.0
    assert len(results["systems"]["fast"]["rates_per_s"]) == 2
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "src=http" not in page
    for name in ("capacity", "goodput", "tbt", "timeline"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "fast" in output.out


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
