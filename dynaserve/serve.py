"""`dynaserve serve`: its own options, and everything that can be refused before vLLM is even imported (which takes seconds)."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dynaserve import fleet
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.global_scheduler import Options, parse_policy

ENGINE = "vllm_plugin.frontend:serve"
"""The OpenAI server, by import string: this package does not import the engine's."""


@dataclass(frozen=True)
class FrontendConfig:
    """What the front-end starts with: a fleet whose instances fit together."""

    instances: list[Instance]
    policy: Options
    transport: str


def add_arguments(parser: Any) -> None:
    """Adds the options of the front-end to an argparse parser."""
    group = parser.add_argument_group("DynaServe front-end")
    group.add_argument("--instances", nargs="+", required=True, metavar="URL", help="instances (vllm serve MODEL --plugin dynaserve)")
    group.add_argument("--policy", default="colocated", help="colocated | disaggregated | fixed:RATIO (default: %(default)s)")
    group.add_argument("--transport", default=None, metavar="NAME", help="how KV moves (default: the first that all instances offer)")


def configure(argv: list[str]) -> FrontendConfig:
    """Reads our options out of the command line, vLLM's aside, and asks the instances; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="dynaserve serve", add_help=False, allow_abbrev=False)
    add_arguments(parser)
    args, _ = parser.parse_known_args(argv)
    try:
        policy = parse_policy(args.policy)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    instances = fleet.join(args.instances)
    return FrontendConfig(instances, policy, fleet.choose_transport(instances, args.transport))


def main(argv: list[str]) -> None:
    """Runs until SIGTERM or SIGINT. Exit status 2, with one sentence, where an option or an instance does not fit."""
    try:
        config = None if {"-h", "--help"} & set(argv) else configure(argv)
        module, _, function = ENGINE.partition(":")
        getattr(import_module(module), function)(argv, config)
    except ConfigError as error:
        print(f"dynaserve serve: {error}", file=sys.stderr)
        raise SystemExit(2) from error
