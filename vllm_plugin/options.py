"""The options that `--plugin dynaserve` adds to `vllm serve`, and how they reach the engine's processes."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLUGIN = "dynaserve"


@dataclass(frozen=True)
class PluginOptions:
    """host: where the gateway and the KV plane listen. port: of the gateway; 0 takes a free one.

    transports: the ways to move KV that this instance offers, best first (names of `dynaserve.kv_transfer.transports`,
    or `module:Class`).
    """

    host: str = "127.0.0.1"
    port: int = 0
    transports: tuple[str, ...] = field(default=("torch",))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PluginOptions:
        return cls(args.dynaserve_host, args.dynaserve_port, tuple(args.dynaserve_transports))

    @classmethod
    def from_config(cls, vllm_config: VllmConfig) -> PluginOptions:
        """The child processes of an engine get its pickled config, not the command line (VLLM_FACTS 1.3)."""
        stored: dict[str, Any] = vllm_config.additional_config[PLUGIN]
        return cls(stored["host"], stored["port"], tuple(stored["transports"]))

    def to_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds our group to vLLM's parser; idempotent, since vLLM builds it more than once."""
    if "--plugin" in parser._option_string_actions:
        return
    group = parser.add_argument_group("DynaServe", "Serve micro-requests of a DynaServe fleet (needs --plugin dynaserve).")
    group.add_argument("--plugin", action="append", default=[], choices=[PLUGIN], help="turn on DynaServe in this server")
    group.add_argument(
        "--dynaserve-host",
        default=PluginOptions.host,
        help="address that the gateway and the KV plane bind to and that the other instances reach (default: %(default)s)",
    )
    group.add_argument(
        "--dynaserve-port", type=int, default=PluginOptions.port, help="port of the gateway; 0 takes a free one (default: %(default)s)"
    )
    group.add_argument(
        "--dynaserve-transports",
        nargs="+",
        default=list(PluginOptions().transports),
        metavar="NAME",
        help="ways to move KV, best first: torch (torch.distributed: Gloo or NCCL), mooncake",
    )


def is_on(args: argparse.Namespace) -> bool:
    return PLUGIN in getattr(args, "plugin", [])
