"""`dynaserve serve`: its own options, and everything that can be refused before vLLM is even imported (which takes seconds)."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dynaserve import config_file, fleet, fleet_secret, instance_file, latency_profile, length_predictor
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable, read_entries
from dynaserve.fleet import Instance
from dynaserve.fleet_profile import FleetProfile
from dynaserve.fleet_secret import FleetSecret
from dynaserve.global_scheduler import GlobalScheduler, Options, Policy, parse_policy, predicts
from dynaserve.length_predictor import LengthPredictor
from dynaserve.request_placer import RequestPlacer, step_share

ENGINE = "vllm_plugin.frontend:serve"
"""The OpenAI server, by import string: this package does not import the engine's."""
MOST_WAITING = 4096
MOST_BODY_BYTES = 32 << 20
FLEET_SECRET_OPTION = "--fleet-secret-file"


@dataclass(frozen=True)
class FrontendConfig:
    """What the front-end starts with: a fleet whose instances fit together."""

    instances: list[Instance]
    placer: RequestPlacer
    transport: str
    length_history: Path | None = None
    request_timeout_s: float = math.inf
    api_keys: tuple[str, ...] = ()
    most_waiting: int = MOST_WAITING
    instances_file: Path | None = None
    secret: FleetSecret | None = None
    most_body_bytes: int = MOST_BODY_BYTES
    also_check: Callable[[Instance], None] = fleet.suits_any_policy
    """Raises ConfigError for an instance that the policy cannot use, now or when it joins later."""
    allow_stock: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Ours, as they were read, by their names in the parser."""

    def check_read(self, args: argparse.Namespace) -> None:
        """vLLM's parser, which reads the command line once more, takes abbreviations and its own `--config` as well: an option of ours that
        came so has no effect. Raises ConfigError."""
        for name, value in self.options.items():
            if (read := getattr(args, name)) != value:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{option} is {read}: it must be written in full, on the command line or in the file of {config_file.OPTION}"
                )


def add_arguments(parser: Any) -> None:
    """Adds the options of the front-end to an argparse parser."""
    group = parser.add_argument_group("DynaServe front-end")
    group.add_argument(
        config_file.OPTION,
        type=Path,
        metavar="FILE",
        help="TOML file of options, of these and of vLLM's server; the command line goes before it",
    )
    members = group.add_mutually_exclusive_group(required=True)
    members.add_argument("--instances", nargs="+", metavar="URL", help="instances (vllm serve MODEL --plugin dynaserve)")
    members.add_argument(
        "--instances-file",
        type=Path,
        metavar="FILE",
        help="their URLs, one a line; instances join and leave as the file changes, and those that do not answer join when they do",
    )
    group.add_argument(
        "--policy", default="dynamic", help="colocated | disaggregated[:xPyD] | fixed:RATIO | dynamic | paper (default: %(default)s)"
    )
    group.add_argument(
        "--latency-profile", type=Path, metavar="FILE", help="latency profile of the instances, for dynamic and paper (default: learnt)"
    )
    group.add_argument("--length-history", type=Path, metavar="FILE", help="keeps the learnt lengths of answers for the next start")
    group.add_argument("--fleet-tbt-slo-ms", type=float, default=100.0, help="for requests that name none (default: %(default)s)")
    group.add_argument("--fleet-ttft-slo-ms", type=float, default=math.inf, help="for requests that name none (default: none)")
    group.add_argument(
        "--request-timeout-s", type=float, default=math.inf, help="end a request with HTTP 504 after this time (default: never)"
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=MOST_WAITING,
        metavar="N",
        help="requests that may wait for their first token; more are answered 429 (default: %(default)s)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=int,
        default=MOST_BODY_BYTES,
        metavar="BYTES",
        help="a request with a longer body is answered 413 (default: %(default)s)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys beside those of --api-key, one a line; each opens /v1 and /dynaserve, and nothing opens them without one",
    )
    group.add_argument(
        FLEET_SECRET_OPTION,
        type=Path,
        metavar="FILE",
        help="a line of at least 32 characters, the same in the whole fleet; others must not read it, nor its group write it; "
        "instances that are not at loopback need it (default: none)",
    )
    group.add_argument(
        fleet.ALLOW_STOCK_OPTION,
        action=argparse.BooleanOptionalAction,
        default=False,
        help="instances may be vLLM servers without the plugin: they take whole requests, over HTTP without a key",
    )
    group.add_argument("--transport", default=None, metavar="NAME", help="how KV moves (default: the first that all instances offer)")


def configure(argv: list[str]) -> FrontendConfig:
    """Reads our options out of the command line, vLLM's aside, and asks the instances; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="dynaserve serve", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    args, _ = parser.parse_known_args(argv)
    urls = args.instances or instance_file.read(args.instances_file)
    policy = _policy(args.policy, None if args.allow_stock else len(urls))
    for name, unit in (("fleet_tbt_slo_ms", "milliseconds"), ("fleet_ttft_slo_ms", "milliseconds"), ("request_timeout_s", "seconds")):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}, not a number of {unit} above 0")
    if math.isinf(args.fleet_tbt_slo_ms):  # each request is shown with it as JSON, which has no such number
        raise ConfigError(f"--fleet-tbt-slo-ms is {args.fleet_tbt_slo_ms}, not a finite number of milliseconds above 0")
    if args.max_waiting < 1:
        raise ConfigError(f"--max-waiting is {args.max_waiting}, not a number of requests above 0")
    if args.max_body_bytes < 1:
        raise ConfigError(f"--max-body-bytes is {args.max_body_bytes}, not a number of bytes above 0")
    if args.length_history is not None:
        check_replaceable(args.length_history)
    placer = make_placer(policy, args.latency_profile, args.length_history, args.fleet_tbt_slo_ms, args.fleet_ttft_slo_ms)
    api_keys = read_api_keys(args.api_key_file) if args.api_key_file is not None else ()
    secret = fleet_secret.read(FLEET_SECRET_OPTION, args.fleet_secret_file) if args.fleet_secret_file is not None else None
    also_check = check_for(policy, args.latency_profile)

    def suits(instance: Instance, others: Sequence[Instance]) -> None:
        fleet.check_version(instance, version("vllm"))
        fleet.check_reach(instance, secret)
        also_check(instance)
        fleet.choose_transport([*others, instance], args.transport)

    join = fleet.join if args.instances_file is None else fleet.join_present
    instances = join(urls, suits, allow_stock=args.allow_stock)
    if args.allow_stock:
        _policy(args.policy, sum(not instance.description.stock for instance in instances))
    transport = fleet.choose_transport(instances, args.transport)
    return FrontendConfig(
        instances,
        placer,
        transport,
        args.length_history,
        args.request_timeout_s,
        api_keys,
        args.max_waiting,
        args.instances_file,
        secret,
        args.max_body_bytes,
        also_check,
        args.allow_stock,
        vars(args),
    )


def check_for(policy: Options, profile: Path | None) -> Callable[[Instance], None]:
    """What raises ConfigError for an instance that the policy cannot work with."""
    if not predicts(policy.policy):
        return fleet.suits_any_policy
    if profile is not None:
        return fleet.profile_check(profile)
    # Algorithm 1 is a baseline: it is not to be measured while something else is done. The default has to serve any fleet.
    return fleet.must_tell_steps if policy.policy is Policy.paper else fleet.should_tell_steps


def _policy(text: str, num_instances: int | None = None) -> Options:
    try:
        return parse_policy(text, num_instances)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def read_api_keys(path: Path) -> tuple[str, ...]:
    """One key a line. Raises ConfigError where there is none."""
    keys = tuple(read_entries("--api-key-file", path))
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key")
    return keys


def make_placer(policy: Options, profile: Path | None, history: Path | None, tbt_slo_ms: float, ttft_slo_ms: float) -> RequestPlacer:
    """Raises ConfigError where a file cannot be read. A new history may be missing. Where the policy needs a profile, it is learnt,
    beginning with the one that is given: that may be of another day."""
    lengths = length_predictor.load(history) if history is not None and history.exists() else LengthPredictor()
    if not predicts(policy.policy):
        return RequestPlacer(GlobalScheduler(policy), lengths, tbt_slo_ms=tbt_slo_ms, ttft_slo_ms=ttft_slo_ms)
    table = None if profile is None else latency_profile.load(profile)
    return RequestPlacer(
        GlobalScheduler(policy, table),
        lengths,
        predicts=True,
        tbt_slo_ms=tbt_slo_ms,
        ttft_slo_ms=ttft_slo_ms,
        step_share=1.0 if table is None else step_share(table.sigma),
        profile=FleetProfile(table),
    )


def main(argv: list[str]) -> None:
    """Runs until SIGTERM or SIGINT. Exit status 2, with one sentence, where an option or an instance does not fit."""
    try:
        argv = config_file.expand(argv)
        config = None if {"-h", "--help"} & set(argv) else configure(argv)
        module, _, function = ENGINE.partition(":")
        getattr(import_module(module), function)(argv, config)
    except ConfigError as error:
        print(f"dynaserve serve: {error}", file=sys.stderr)
        raise SystemExit(2) from error
