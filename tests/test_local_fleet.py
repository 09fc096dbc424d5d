"""The local fleet: what it starts, and what it says when a process ends or never serves."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from dynaserve.local.children import start_child
from dynaserve.local.fleet import FIXED_PORTS, FleetFailed, LocalFleet, free_ports


def test_ports_are_free_and_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert set(ports) <= set(FIXED_PORTS)


def test_urls_are_those_of_the_ports() -> None:
    fleet = LocalFleet("model", ports=(7001, 7002, 7000))
    assert fleet.urls == ["http://127.0.0.1:7001", "http://127.0.0.1:7002"]
    assert fleet.frontend_url == "http://127.0.0.1:7000"
    assert fleet.frontend_command()[1:6] == ["serve", "model", "--instances", *fleet.urls]


def test_a_wrong_number_of_ports_is_refused() -> None:
    with pytest.raises(ValueError, match="need 3 ports"):
        LocalFleet("model", ports=(7001, 7002))


def test_the_plugin_can_be_left_out() -> None:
    assert "--plugin" in LocalFleet("model").instance_command(0)
    assert "--plugin" not in LocalFleet("model", plugin=None).instance_command(0)


def test_arguments_may_name_the_instance() -> None:
    fleet = LocalFleet("model", vllm_args=("--dynaserve-step-log", "steps-INDEX.csv"))
    assert [fleet.instance_command(index)[-1] for index in range(2)] == ["steps-0.csv", "steps-1.csv"]


@pytest.mark.vllm
def test_an_instance_that_cannot_start_shows_its_last_lines_and_leaves_nothing(tmp_path: Path) -> None:
    fleet = LocalFleet(tmp_path / "no-such-model", instances=1, plugin=None, log_dir=tmp_path, stop_timeout_s=5)
    with pytest.raises(FleetFailed, match=r"instance-0 ended with status 1; the end of .*instance-0.log:\n(.*\n)*.*no-such-model"), fleet:
        raise AssertionError("it started")
    assert not [process for process in psutil.Process().children(recursive=True) if "no-such-model" in " ".join(process.cmdline())]


def test_a_process_that_never_serves_is_named(tmp_path: Path) -> None:
    fleet = LocalFleet("model", instances=1, log_dir=tmp_path)
    log = tmp_path / "instance-0.log"
    fleet.children["instance-0"] = start_child("instance-0", [sys.executable, "-c", "import time; time.sleep(600)"], log)
    try:
        with pytest.raises(FleetFailed, match="instance-0 is not healthy"):
            fleet.wait_healthy({"instance-0": fleet.urls[0]}, deadline=time.monotonic())
    finally:
        fleet.stop()
    assert fleet.pids == {}
