"""Child processes of a local fleet: none is left, whoever dies first. The children are real process trees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from dynaserve.local.children import Child, start_child, stop_children
from dynaserve.local.fleet import free_ports

# A web server that starts two more: one in a session of its own, and one orphaned at birth.
TREE = """
import http.server, os, subprocess, sys
port = int(sys.argv[1])
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleeper, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    subprocess.Popen(sleeper)
    os._exit(0)
os.wait()
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('serving', flush=True); time.sleep(600)"
PARENT = """
import signal, sys, time
from pathlib import Path
from dynaserve.local.children import start_child
signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background ignores it
child = start_child("tree", sys.argv[2:], Path(sys.argv[1]), grace_s=1.0)
time.sleep(600)
"""


def tree_command() -> list[str]:
    return [sys.executable, "-c", TREE, str(free_ports(1)[0])]


def start(command: Sequence[str], log: Path, grace_s: float = 5.0) -> Child:
    child = start_child("tree", command, log, grace_s=grace_s)
    wait_until_serving(log)
    return child


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Child]:
    child = start(tree_command(), tmp_path / "tree.log")
    yield child
    stop_children([child])


def wait_until_serving(log: Path) -> None:
    deadline = time.monotonic() + 60
    while not (log.exists() and "serving" in log.read_text()):
        assert time.monotonic() < deadline, f"the child does not start: {log}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids: Sequence[int]) -> None:
    assert pids
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


def test_pids_name_the_command_first_and_all_its_descendants(tree: Child) -> None:
    assert len(tree.pids) == 3
    assert psutil.Process(tree.pids[0]).cmdline()[2] == TREE


def test_stop_leaves_no_descendant(tree: Child) -> None:
    pids = [tree.guard.pid, *tree.pids]
    stop_children([tree])
    wait_until_gone(pids)


def test_stop_twice_is_stop_once(tree: Child) -> None:
    stop_children([tree])
    status = tree.exit_status
    stop_children([tree])
    assert tree.exit_status == status == 128 + signal.SIGTERM


def test_command_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    child = start([sys.executable, "-c", DEAF], tmp_path / "deaf.log", grace_s=0.2)
    pids = child.pids
    stop_children([child])
    wait_until_gone(pids)
    assert child.exit_status == 128 + signal.SIGKILL


def test_killed_command_takes_its_descendants_along(tree: Child) -> None:
    pids = tree.pids
    os.kill(pids[0], signal.SIGKILL)
    wait_until_gone(pids)


def test_killed_guard_leaves_no_descendant_after_stop(tree: Child) -> None:
    pids = tree.pids
    tree.guard.send_signal(signal.SIGSTOP)  # it can do nothing until it is killed
    tree = Child(tree.name, tree.log, tree.guard, grace_s=-14.0)
    stop_children([tree])
    wait_until_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_parent_that_ends_leaves_no_child(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "tree.log"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(log), *tree_command()], stderr=subprocess.DEVNULL) as parent:
        wait_until_serving(log)
        pids = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        parent.send_signal(number)
    assert len(pids) == 4
    wait_until_gone(pids)


def test_ctrl_c_at_the_terminal_reaches_the_parent_only(tree: Child) -> None:
    assert os.getpgid(tree.guard.pid) == os.getpgid(tree.pids[0]) != os.getpgid(0)


def test_children_share_processor_time_with_their_parent_process_by_process(tree: Child) -> None:
    assert os.getsid(tree.guard.pid) == os.getsid(0)


def test_errors_are_the_first_different_ones_of_the_log(tmp_path: Path) -> None:
    lines = [
        "(Worker pid=1) ERROR [worker.py:7] ModuleNotFoundError: No module named 'x'",
        "Traceback",
        "a.b.OtherError: why",
        "no Error: said",
    ]
    child = start_child("failing", [sys.executable, "-c", f"print(*{[*lines, lines[0]]}, sep='\\n')"], tmp_path / "failing.log")
    child.guard.wait()
    assert child.errors() == ["ModuleNotFoundError: No module named 'x'", "a.b.OtherError: why"]
    stop_children([child])


def test_command_that_fails_shows_its_status_and_last_lines(tmp_path: Path) -> None:
    child = start_child("failing", [sys.executable, "-c", "print('one'); print('two'); raise SystemExit(7)"], tmp_path / "failing.log")
    child.guard.wait()
    assert (child.exit_status, child.last_lines(1)) == (7, "two")
    stop_children([child])
