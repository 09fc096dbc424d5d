"""The plugin in vLLM's processes: absent without its flag, and never on a vLLM that it does not fit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from dynaserve.environment import NO_BUSY_WAIT
from dynaserve.errors import ConfigError

pytest.importorskip("vllm")
from vllm_plugin import patches
from vllm_plugin.options import PluginOptions

pytestmark = pytest.mark.vllm

_PROGRAM = """
import json, sys
import vllm_plugin
vllm_plugin.register(); vllm_plugin.register()
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.worker.gpu_input_batch import InputBatch
import vllm.plugins
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
engine_args = AsyncEngineArgs.from_cli_args(args)
print(json.dumps({
    "scheduler": engine_args.scheduler_cls,
    "connector": getattr(engine_args.kv_transfer_config, "kv_connector", None),
    "additional": engine_args.additional_config,
    "outputs_hook": hasattr(AsyncMPClient, "process_engine_outputs"),
    "endpoints": vllm.plugins.load_endpoint_plugins.__module__,
    "wrapped": hasattr(vllm.plugins.load_endpoint_plugins, "__wrapped__"),
    "input_batch": hasattr(InputBatch, "_dynaserve_installed"),
}))
"""


def parse(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_without_the_flag_nothing_changes() -> None:
    done = parse("some-model")
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout.splitlines()[-1])
    assert state == {
        "scheduler": None,
        "connector": None,
        "additional": {},
        "outputs_hook": False,
        "endpoints": "vllm.plugins",
        "wrapped": False,
        "input_batch": False,
    }
    assert "dynaserve" not in (done.stdout + done.stderr).lower()


def test_the_flag_turns_the_instance_on() -> None:
    done = parse("some-model", "--plugin", "dynaserve", "--dynaserve-port", "7777", "--dynaserve-transports", "mooncake", "torch")
    assert done.returncode == 0, done.stderr
    state = json.loads(done.stdout.splitlines()[-1])
    assert state["scheduler"] == "vllm_plugin.scheduler.make_scheduler"
    assert state["connector"] == "DynaServeConnector"
    expected = PluginOptions(port=7777, transports=("mooncake", "torch")).to_config()
    assert state["additional"] == {"dynaserve": json.loads(json.dumps(expected))}
    assert state["outputs_hook"]
    assert state["wrapped"]


_REFUSED = [
    (["--plugin", "other"], "invalid choice: 'other' (choose from 'dynaserve')"),
    (["--plugin", "dynaserve", "--api-server-count", "2"], "--api-server-count 2 is not supported with --plugin dynaserve; use 1"),
    (["--plugin", "dynaserve", "--decode-context-parallel-size", "2"], "--decode-context-parallel-size 2 is not supported with --plugin"),
    (["--plugin", "dynaserve", "--enable-scale-out"], "--enable-scale-out is not supported with --plugin dynaserve"),
    (["--plugin", "dynaserve", "--kv-offloading-size", "16"], "--kv-offloading-size is not supported with --plugin dynaserve"),
    (["--plugin", "dynaserve", "--tokens-only"], "--tokens-only is not supported with --plugin dynaserve"),
    (["--plugin", "dynaserve", "--watermark", "0.02"], "--watermark is not supported with --plugin dynaserve"),
    (["--plugin", "dynaserve", "--enable-return-routed-experts"], "--enable-return-routed-experts is not supported with --plugin"),
    (["--plugin", "dynaserve", "--disable-log-stats"], "--disable-log-stats is not supported with --plugin dynaserve"),
    (["--plugin", "dynaserve", "--scheduler-cls", "my.Scheduler"], "--scheduler-cls my.Scheduler conflicts with --plugin dynaserve"),
]
_REFUSALS = """
import contextlib, io, json, sys
import vllm_plugin
vllm_plugin.register()
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(["some-model", *arguments]))
            status = 0
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, said.getvalue().splitlines()[-1:]]))
"""


def test_options_that_do_not_fit_end_with_one_sentence() -> None:
    arguments = json.dumps([arguments for arguments, _ in _REFUSED])
    done = subprocess.run([sys.executable, "-c", _REFUSALS, arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()[-len(_REFUSED) :]]
    for (status, last_line), (_, sentence) in zip(ends, _REFUSED, strict=True):
        assert status == 2
        assert sentence in last_line[0]


def test_this_vllm_fits() -> None:
    patches.check_vllm()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.33.1")
    with pytest.raises(ConfigError, match=r"works with vLLM 0\.32\.\*, this is vLLM 0\.33\.1"):
        patches.check_vllm()


@pytest.mark.parametrize(
    ("path", "found"),
    [("vllm.v1.request:Request.append_output_token_ids", "'token_ids'"), ("vllm.v1.request:Request.never_existed", "no such function")],
)
def test_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch, path: str, found: str) -> None:
    monkeypatch.setitem(patches._EXPECTED, path, ("self", "something_else"))
    with pytest.raises(ConfigError, match=f"something_else.*{found}"):
        patches.check_vllm()


def test_what_workers_replace_is_checked_where_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patches._EXPECTED_BY_WORKERS, "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample", ("self", "something_else"))
    monkeypatch.delattr("vllm.v1.worker.gpu_input_batch.InputBatch._dynaserve_installed", raising=False)
    with pytest.raises(ConfigError, match=r"something_else.*'logits'"):
        patches.install_worker_patches()


def test_the_front_end_keeps_its_own_slos_beside_the_options_of_an_instance() -> None:
    from vllm.entrypoints.serve.utils.api_utils import get_non_default_args

    from vllm_plugin.frontend import make_parser

    args = make_parser().parse_args(["m", "--instances", "http://a", "--tbt-slo-ms", "50", "--fleet-tbt-slo-ms", "70"])
    assert (args.tbt_slo_ms, args.fleet_tbt_slo_ms) == (50.0, 70.0)
    assert get_non_default_args(args)["tbt_slo_ms"] == 50.0, "vLLM builds its parser a second time"


_WAITS = """
import threading
import vllm_plugin
vllm_plugin.register(); vllm_plugin.register()
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

def refuse():
    raise AssertionError("a wait that polls")

queue = MessageQueue(1, 1)
reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
heard = []
def read():
    reader.wait_until_ready()
    while (message := reader.dequeue(indefinite=True)) is not None:
        heard.append(message)
thread = threading.Thread(target=read)
thread.start()
queue.wait_until_ready()
shm_broadcast.sched_yield = refuse
for number in range(500):
    while thread.is_alive() and len(heard) < number:  # the reader waits for each
        threading.Event().wait(1e-4)
    if thread.is_alive():
        queue.enqueue(number)
if thread.is_alive():
    queue.enqueue(None)
thread.join()
print(heard == list(range(500)))
"""


@pytest.mark.parametrize(("environment", "status"), [({NO_BUSY_WAIT: "1"}, 0), ({}, 1)])
def test_processes_of_an_engine_that_are_told_to_sleep_hear_everything(environment: dict[str, str], status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WAITS], capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )
    said = "True" if status == 0 else "a wait that polls"
    assert said in done.stdout + done.stderr, done.stderr
