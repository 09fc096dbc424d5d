"""The instances that a front-end serves with: asking them who they are, and whether they fit together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from dynaserve import direct_http, latency_profile, stock
from dynaserve.errors import ConfigError
from dynaserve.fleet_secret import FleetSecret, may_reach
from dynaserve.kv_transfer.transports import reach_each_other
from dynaserve.latency_profile import ProfileKey
from dynaserve.messages import PROTOCOL_VERSION, InstanceDescription, Load, MeasuredStep

logger = logging.getLogger("vllm.dynaserve.frontend")

_UNREADABLE = (ValueError, msgspec.MsgspecError, RecursionError)
"""What a decoder raises, the last of them for 2 kB that are nested too deeply."""

_MUST_BE_EQUAL = ("model", "vllm_version", "dtype", "block_size", "tensor_parallel_size", "reasoning_parser", "read_by_server")
_NOT_TOLD_BY_STOCK = ("vllm_version", "dtype", "device", "parallelism", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens")
"""Of the version: what names the build."""

_NEEDED_BY_BOTH = ("--watermark-config",)

RECENT_STEPS = 32
MOST_ASKED_AT_ONCE = 32
ALLOW_STOCK_OPTION = "--allow-stock"


@dataclass
class Instance:
    """instance_id: its URL, without a trailing slash; the same name everywhere (records, metrics, errors).

    load: as it said last; None: it has said nothing in this life. recent_steps: the newest last; none from vLLM's own batching.
    """

    instance_id: str
    description: InstanceDescription
    load: Load | None = None
    recent_steps: deque[MeasuredStep] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def take_load(self, load: Load) -> None:
        self.load = load
        self.recent_steps.extend(load.steps)


Check = Callable[[Instance, Sequence[Instance]], None]


def describe(url: str, timeout_s: float = 10.0, *, allow_stock: bool = False) -> InstanceDescription:
    """Asks an instance who it is; raises ConfigError in one sentence if it does not answer as one.

    allow_stock: a vLLM server without the plugin is one, too.
    """
    try:
        answer = direct_http.get(f"{url}/dynaserve/instance", timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # a host name may be no host name (UnicodeError)
        raise ConfigError(f"instance {url} does not answer: {error}") from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        if allow_stock:
            return _describe_stock(url, timeout_s)
        raise ConfigError(
            f"instance {url} is not a DynaServe instance: start it with `vllm serve MODEL --plugin dynaserve`, "
            f"or give {ALLOW_STOCK_OPTION} to have it take whole requests"
        )
    if answer.is_error:
        raise ConfigError(f"instance {url} answers HTTP {answer.status_code}: {answer.text[:200]}")
    try:
        description = msgspec.json.decode(answer.content, type=InstanceDescription)
    except _UNREADABLE as error:
        raise ConfigError(f"instance {url} describes itself in another format (version mismatch?): {error}") from error
    if description.stock:  # what has no plugin cannot say so: who says it would be spoken to without the fleet's secret
        raise ConfigError(f"instance {url} says that it has no plugin, in the words of one that has it")
    return description


def _describe_stock(url: str, timeout_s: float) -> InstanceDescription:
    try:
        return stock.describe(url, lambda path: direct_http.get(f"{url}{path}", timeout_s))
    except httpx.HTTPError as error:
        raise ConfigError(f"instance {url} does not answer: {error}") from error
    except RecursionError as error:  # nested too deeply
        raise ConfigError(f"instance {url} is neither a DynaServe instance nor a vLLM server: {error}") from error


def suits_any(instance: Instance, others: Sequence[Instance]) -> None:
    """The check of who only looks."""


def join(urls: Sequence[str], also_check: Check = suits_any, *, allow_stock: bool = False) -> list[Instance]:
    """The fleet of these URLs, in their order; raises ConfigError, naming both values, where two do not fit.

    also_check: raises ConfigError for an instance that cannot join those that are there already.
    """
    names = [url.rstrip("/") for url in urls]
    if len(set(names)) != len(names):
        raise ConfigError(f"an instance is named twice: {' '.join(names)}")
    instances, faults = _together(names, also_check, allow_stock=allow_stock)
    if faults:
        raise faults[0]
    return instances


def join_present(urls: Sequence[str], also_check: Check = suits_any, *, allow_stock: bool = False) -> list[Instance]:
    """As `join`, of those that answer and fit, of which there must be one: the others may come later."""
    instances, faults = _together(urls, also_check, allow_stock=allow_stock)
    if not instances:
        raise ConfigError(f"none of {len(urls)} instances answers and fits; the first: {faults[0]}")
    for fault in faults:
        logger.warning("%s; it joins when that is over", fault)
    return instances


def _together(names: Sequence[str], also_check: Check, *, allow_stock: bool) -> tuple[list[Instance], list[ConfigError]]:
    """Those that answer and fit the first one with the plugin that does, in this order, and what keeps the others out."""

    def ask(name: str) -> Instance | ConfigError:
        try:
            return Instance(name, describe(name, allow_stock=allow_stock))
        except ConfigError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(len(names), MOST_ASKED_AT_ONCE)) as pool:
        answers = list(pool.map(ask, names))
    faults = [answer for answer in answers if isinstance(answer, ConfigError)]
    fitting: list[Instance] = []
    present = [answer for answer in answers if isinstance(answer, Instance)]
    for instance in sorted(present, key=lambda one: one.description.stock):  # what others must fit has the plugin
        try:
            first = reference_of([*fitting, instance])
            check(instance, first)
            check_distinct(instance, fitting)
            whole = completed(instance, first)
            also_check(whole, fitting)
        except ConfigError as error:
            faults.append(error)
        else:
            fitting.append(whole)
    return sorted(fitting, key=lambda one: names.index(one.instance_id)), faults


def reference_of(instances: Collection[Instance]) -> Instance:
    """The first one with the plugin, which all others must fit. Raises ConfigError where there is none."""
    for instance in instances:
        if not instance.description.stock:
            return instance
    raise ConfigError(
        "none of the instances is a DynaServe instance: start one at least with `vllm serve MODEL --plugin dynaserve`, "
        f"{', '.join(instance.instance_id for instance in instances)} have no plugin"
    )


def completed(instance: Instance, first: Instance) -> Instance:
    """With what a server without the plugin does not tell, as `first` has it."""
    if not instance.description.stock:
        return instance
    told_by_none = {name: getattr(first.description, name) for name in _NOT_TOLD_BY_STOCK}
    return Instance(instance.instance_id, msgspec.structs.replace(instance.description, **told_by_none))


def check(instance: Instance, first: Instance) -> None:
    """Raises ConfigError, naming both values, if `instance` cannot serve and exchange KV beside `first`, which has the plugin."""
    name, ours, theirs = instance.instance_id, first.description, instance.description
    if theirs.protocol_version != PROTOCOL_VERSION:
        raise ConfigError(f"instance {name} speaks protocol {theirs.protocol_version}, this front-end {PROTOCOL_VERSION}")
    if theirs.stock:
        _check_stock(instance, first)
        return
    for attribute in _MUST_BE_EQUAL:
        if (mine := getattr(ours, attribute)) != (other := getattr(theirs, attribute)):
            raise ConfigError(f"{attribute} differs: {first.instance_id} has {mine}, {name} has {other}")
    if len(theirs.workers) != len(ours.workers):
        raise ConfigError(f"workers differ: {first.instance_id} has {len(ours.workers)}, {name} has {len(theirs.workers)}")
    for mine, other in zip(ours.workers, theirs.workers, strict=True):
        if mine.kv_layout != other.kv_layout:
            raise ConfigError(f"KV layout differs: {first.instance_id} has {mine.kv_layout}; {name} has {other.kv_layout}")


def check_distinct(instance: Instance, others: Iterable[Instance]) -> None:
    """Raises ConfigError, naming both, if one of the others is the same process at another URL: a gateway has one session with a front-end,
    so each would end the other's."""
    name, epoch = instance.instance_id, instance.description.instance_epoch
    for other in others:
        if epoch and other.instance_id != name and other.description.instance_epoch == epoch:
            raise ConfigError(f"{name} and {other.instance_id} are the same instance")


def _check_stock(instance: Instance, first: Instance) -> None:
    mine, other = first.description, instance.description
    if mine.model != other.model:
        raise ConfigError(f"model differs: {first.instance_id} has {mine.model}, {instance.instance_id} has {other.model}")
    # `/version` says nothing of the build: 0.32.0 for 0.32.0+cpu.
    if mine.vllm_version.partition("+")[0] != other.vllm_version.partition("+")[0]:
        versions = f"{first.instance_id} has {mine.vllm_version}, {instance.instance_id} has {other.vllm_version}"
        raise ConfigError(f"vllm_version differs: {versions}")


def check_version(instance: Instance, ours: str) -> None:
    """Raises ConfigError if the front-end has another vLLM, of which only the build may differ: requests go to instances in vLLM's own
    encoding."""
    theirs = instance.description.vllm_version
    if theirs.partition("+")[0] != ours.partition("+")[0]:
        raise ConfigError(f"vllm_version differs: this front-end has {ours}, {instance.instance_id} has {theirs}")


def check_reach(instance: Instance, secret: FleetSecret | None) -> None:
    """Raises ConfigError if a front-end with this secret, or without one, may not open a connection to the instance's gateway."""
    name, description = instance.instance_id, instance.description
    if description.stock:
        return  # docs/security.md
    if description.secured and secret is None:
        raise ConfigError(f"instance {name} has a fleet secret, this front-end has none: give --fleet-secret-file")
    if not description.secured and secret is not None:
        raise ConfigError(f"this front-end has a fleet secret, instance {name} has none: give it --dynaserve-fleet-secret-file")
    if not may_reach(description.gateway, secret):
        raise ConfigError(
            f"the gateway {description.gateway} of instance {name} is not at a loopback address, and there is no --fleet-secret-file"
        )


def check_model(model: str, instances: Sequence[Instance]) -> None:
    """Raises ConfigError if an instance serves something else than `model`."""
    for instance in instances:
        if instance.description.model != model:
            raise ConfigError(f"instance {instance.instance_id} serves model {instance.description.model}, this front-end {model}")


def check_reasoning_parser(parser: str | None, instances: Sequence[Instance]) -> None:
    """Raises ConfigError if an instance finds the end of reasoning in another way than this front-end's server, or in none."""
    for instance in instances:
        theirs = instance.description.reasoning_parser
        if not instance.description.stock and theirs != parser:
            parsers = f"instance {instance.instance_id} has the reasoning parser {theirs}, this front-end {parser}"
            raise ConfigError(f"{parsers}: give both the same --reasoning-parser")


def check_read_by_server(ours: Mapping[str, str], usual: Mapping[str, str], instances: Sequence[Instance]) -> None:
    """Raises ConfigError if an instance was started with an option that acts here, and this front-end was not: it would do nothing. usual:
    the values of those that are not given. A front-end that is given one goes by it, but for what needs both."""
    for instance in instances:
        theirs = instance.description.read_by_server
        for option, value in ours.items():
            is_lost = value == usual[option] or option in _NEEDED_BY_BOTH
            if not instance.description.stock and is_lost and (its := theirs.get(option)) != value:
                raise ConfigError(f"instance {instance.instance_id} has {option} {its}, this front-end {value}: give both the same")


def profile_key(description: InstanceDescription) -> ProfileKey:
    """What a latency profile has to be measured on to say something about this instance."""
    return ProfileKey(description.model, description.dtype, description.device, description.parallelism, description.vllm_version)


def suits_any_policy(instance: Instance) -> None:
    """The check of policies that predict nothing."""


def must_tell_steps(instance: Instance) -> None:
    """Raises ConfigError for an instance from whose steps no latency profile can be learnt; a stock server is never asked for any."""
    if _is_silent(instance):
        raise ConfigError(_silence(instance))


def should_tell_steps(instance: Instance) -> None:
    """Warns of such an instance: a policy that does without places requests as `colocated` while no instance tells."""
    if _is_silent(instance):
        logger.warning("%s; requests are placed as by --policy colocated while no instance tells", _silence(instance))


def _is_silent(instance: Instance) -> bool:
    return not instance.description.stock and instance.description.tbt_slo_ms is None


def _silence(instance: Instance) -> str:
    return (
        f"instance {instance.instance_id} runs with vLLM's own batches, which tell nothing of their steps: run it with "
        "--dynaserve-batching slo, or give a --latency-profile FILE to a policy that predicts"
    )


def profile_check(profile: Path) -> Callable[[Instance], None]:
    """What raises ConfigError, naming file, field and instance, for an instance that is something else than the profile was measured on.

    Raises ConfigError itself where the file cannot be read.
    """
    measured = latency_profile.key_of(profile)

    def check_measured(instance: Instance) -> None:
        try:
            latency_profile.compare(profile, measured, profile_key(instance.description))
        except ConfigError as error:
            raise ConfigError(f"{error} (instance {instance.instance_id})") from error

    return check_measured


def choose_transport(instances: Sequence[Instance], wanted: str | None) -> str:
    """The transport for hand-offs: `wanted`, or the first one of the first instance that all others offer as well, and over which they
    reach each other."""
    instances = [instance for instance in instances if not instance.description.stock]
    workers = [worker.endpoint.transports for instance in instances for worker in instance.description.workers]
    offered = [name for name in workers[0] if all(name in names for names in workers)]
    common = [name for name in offered if reach_each_other(name, [addresses[name] for addresses in workers])]
    if wanted is None and common:
        return common[0]
    if wanted is None or wanted not in common:
        per_instance = "; ".join(f"{i.instance_id}: {', '.join(i.description.workers[0].endpoint.transports)}" for i in instances)
        apart = " that reaches from each machine to the others" if wanted in offered else ""
        raise ConfigError(f"no common transport{f' {wanted}' if wanted else ''}{apart}: {per_instance}")
    return wanted
