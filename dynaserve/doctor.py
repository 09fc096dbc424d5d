"""`dynaserve doctor`: is this installation, and is a fleet, as it should be, and what is to be changed?"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynaserve import direct_http, fleet
from dynaserve.errors import ConfigError, NoInstance
from dynaserve.frontend_at import TIMEOUT_S, add_key_arguments, frontend_at
from dynaserve.messages import InstanceDescription, Load

EXAMPLE = """\
example:
  dynaserve doctor --instances http://a:8000 http://b:8000 --url http://127.0.0.1:8000

exit status: 0 no fault; 1 a fault; 2 bad option."""
VLLM_CHECK = "vllm_plugin.patches:check_vllm"
"""By import string: this package does not import the engine's."""
ENOUGH_FILES = 65_536
ENOUGH_SHM_BYTES = 1 << 30
MOST_KV_USAGE = 0.95
_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


@dataclass(frozen=True)
class Finding:
    """level: ok, warning or fault. advice: what to change; empty where nothing is."""

    level: str
    what: str
    advice: str = ""


class Member(msgspec.Struct):
    """One instance in the answer of `GET /dynaserve/fleet`."""

    health: str
    description: InstanceDescription
    load: Load | None


class FleetAnswer(msgspec.Struct):
    instances: dict[str, Member]


# -- the installation ----------------------------------------------------------------------------------------------------


def check_installation() -> Iterator[Finding]:
    yield check_core()
    yield check_engine()
    yield check_entry_point(os.environ.get("VLLM_PLUGINS"))
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_shared_memory()
    yield Finding("ok", f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} usable cores")


def check_core() -> Finding:
    try:
        import_module("dynaserve._core")
    except ImportError as error:
        return Finding("fault", f"the C++ core cannot be imported: {error}", "install dynaserve again, with a C++20 compiler on the path")
    return Finding("ok", f"dynaserve {metadata.version('dynaserve')} with its C++ core")


def check_engine() -> Finding:
    module, _, function = VLLM_CHECK.partition(":")
    try:
        getattr(import_module(module), function)()
        version = metadata.version("vllm")
    except ConfigError as error:
        return Finding("fault", str(error), "install the vLLM version that it names")
    except metadata.PackageNotFoundError:
        return Finding("fault", "no distribution named vllm", "pip install '.[vllm]' in a checkout, or see the README for vLLM's CPU build")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # what an incomplete installation raises when it is imported
        return Finding("fault", f"vLLM cannot be imported: {type(error).__name__}: {error}", "pip install '.[vllm]' in a checkout")
    return Finding("ok", f"vLLM {version} is one that the plugin fits")


def check_entry_point(allowed: str | None) -> Finding:
    """allowed: the variable VLLM_PLUGINS, which vLLM takes as the complete list of plugins; None: it is not set."""
    names = {point.name for point in metadata.entry_points(group="vllm.general_plugins")}
    if "dynaserve" not in names:
        return Finding("fault", "vLLM does not see the plugin", "install dynaserve into the environment that runs vLLM")
    if allowed is not None and "dynaserve" not in allowed.split(","):
        return Finding("fault", f"VLLM_PLUGINS={allowed} leaves the plugin out", "add dynaserve to VLLM_PLUGINS, or unset it")
    return Finding("ok", "vLLM loads the plugin")


def check_open_files(soft_limit: int) -> Finding:
    if soft_limit != resource.RLIM_INFINITY and soft_limit < ENOUGH_FILES:
        return Finding("warning", f"at most {soft_limit} open files", f"ulimit -n {ENOUGH_FILES}: every client is a socket")
    return Finding("ok", f"at most {'any number of' if soft_limit == resource.RLIM_INFINITY else soft_limit} open files")


def check_shared_memory(path: str = "/dev/shm") -> Finding:
    """vLLM's executor talks to its workers through it."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding("warning", f"{path}: {error.strerror}", "tensor parallel workers need it")
    if free < ENOUGH_SHM_BYTES:
        return Finding("warning", f"{path} has {free >> 20} MiB free", "tensor parallel workers need 1 GiB: docker run --shm-size=2g")
    return Finding("ok", f"{path} has {free >> 20} MiB free")


# -- a fleet -------------------------------------------------------------------------------------------------------------


def check_instances(urls: Sequence[str], *, allow_stock: bool) -> Iterator[Finding]:
    """As a front-end would join them."""
    try:
        instances = fleet.join(urls, allow_stock=allow_stock)
        transport = fleet.choose_transport(instances, None)
    except ConfigError as error:
        yield Finding("fault", str(error), "start the instance as the front-end needs it")
        return
    yield Finding("ok", f"{len(instances)} instances fit together; KV moves by {transport}")
    for instance in instances:
        yield from check_description(instance.instance_id, instance.description)


def check_description(name: str, description: InstanceDescription) -> Iterator[Finding]:
    if description.stock:
        yield Finding("warning", f"{name} takes whole requests only: {description.cut_obstacle}", "start it with --plugin dynaserve")
    elif description.cut_obstacle is not None:
        yield Finding("warning", f"{name} runs all requests whole: {description.cut_obstacle}", "start it without, to have requests cut")
    if not description.stock and description.tbt_slo_ms is None:
        advice = "start it with --dynaserve-batching slo"
        yield Finding("warning", f"{name} runs with vLLM's own batches: no TBT SLO is kept, and --policy dynamic learns nothing", advice)
    if not description.prefix_caching:
        yield Finding("warning", f"{name} has no prefix cache", "start it without --no-enable-prefix-caching")


def check_frontend(url: str, args: argparse.Namespace) -> Iterator[Finding]:
    """args: with a key, see `frontend_at`."""
    try:
        with direct_http.client(TIMEOUT_S) as http:
            instances = frontend_at(url, args).ask(http, "/dynaserve/fleet", FleetAnswer).instances
    except (ConfigError, NoInstance) as error:
        yield Finding("fault", str(error), "start a front-end there (dynaserve serve), or name where it listens, and its key")
        return
    yield Finding("ok", f"front-end {url} has {len(instances)} instances")
    for name, member in instances.items():
        yield from check_state(name, member.health, member.load)
        yield from check_description(name, member.description)


def check_state(name: str, health: str, load: Load | None) -> Iterator[Finding]:
    if health == "dead":
        yield Finding("fault", f"{name} is dead", "look at its log and start it again: the front-end takes it back by itself")
    elif health != "up":
        yield Finding("warning", f"{name} is {health}")
    else:
        yield Finding("ok", f"{name} is up")
    if load is not None and load.kv_cache_usage > MOST_KV_USAGE:
        advice = "more instances, a larger --gpu-memory-utilization, or a smaller --max-num-seqs"
        yield Finding("warning", f"{name} uses {load.kv_cache_usage:.0%} of its KV cache", advice)


# -- the command ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> None:
    """Exit status 1 where there is a fault."""
    parser = argparse.ArgumentParser(
        prog="dynaserve doctor",
        description="Checks an installation and a fleet, and says what to change.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--instances", nargs="+", default=[], metavar="URL", help="instances that are to make a fleet")
    parser.add_argument(fleet.ALLOW_STOCK_OPTION, action="store_true", help="these may be vLLM servers without the plugin")
    parser.add_argument("--url", help="a running front-end")
    add_key_arguments(parser)
    args = parser.parse_args(argv)
    groups: list[tuple[str, Callable[[], Iterator[Finding]]]] = [("this installation", check_installation)]
    if args.instances:
        groups.append(("instances", lambda: check_instances(args.instances, allow_stock=args.allow_stock)))
    if args.url is not None:
        groups.append(("front-end", lambda: check_frontend(args.url, args)))
    findings = [(title, finding) for title, check in groups for finding in check()]
    Console().print(_table(findings))
    raise SystemExit(1 if any(finding.level == "fault" for _, finding in findings) else 0)


def _table(findings: Sequence[tuple[str, Finding]]) -> Table:
    table = Table(box=None)
    for column in ("of", "", "found", "to do"):
        table.add_column(column, overflow="fold")
    for title, finding in findings:
        # Text: what is found may have brackets, which are rich's markup.
        table.add_row(title, Text(finding.level, _COLOURS[finding.level]), Text(finding.what), Text(finding.advice))
    return table
