"""The options that `--plugin dynaserve` adds to `vllm serve`, and how they reach the engine's processes."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaserve import fleet_secret
from dynaserve.errors import ConfigError
from dynaserve.fleet_secret import FleetSecret

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PLUGIN = "dynaserve"
FLEET_SECRET_OPTION = "--dynaserve-fleet-secret-file"


@dataclass(frozen=True)
class PluginOptions:
    """host: where the gateway and the KV plane listen. port: of the gateway; 0 takes a free one.

    transports: the ways to move KV that this instance offers, best first (names of `dynaserve.kv_transfer.transports`,
    or `module:Class`).
    batching: "vllm", or "slo", which the rest is about. tbt_slo_ms, ttft_slo_ms: of requests that name none; None: the first token
    may come at any time. min_prefill_tokens: of a step whose decodes leave no time for a single one. profile: file that keeps the
    learnt latency of steps; None: it is forgotten. step_log: file that gets a line per step; None: none.
    fleet_secret_file: of the secret that opens the sockets; None: there is none, and `host` is a loopback address.
    """

    host: str = "127.0.0.1"
    port: int = 0
    transports: tuple[str, ...] = field(default=("torch",))
    batching: str = "vllm"
    tbt_slo_ms: float = 100.0
    min_prefill_tokens: int = 16
    profile: str | None = None
    ttft_slo_ms: float | None = None
    step_log: str | None = None
    max_parked: int = 64
    park_timeout_ms: float = 10_000.0
    """Of alphas at their hand-off points: how many, and how long, before the instance goes on with one alone."""
    fleet_secret_file: str | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> PluginOptions:
        return cls(
            args.dynaserve_host,
            args.dynaserve_port,
            tuple(args.dynaserve_transports),
            args.dynaserve_batching,
            args.tbt_slo_ms,
            args.dynaserve_min_prefill_tokens,
            args.dynaserve_profile,
            args.ttft_slo_ms,
            args.dynaserve_step_log,
            max_parked=args.dynaserve_max_parked,
            park_timeout_ms=args.dynaserve_park_timeout_ms,
            fleet_secret_file=args.dynaserve_fleet_secret_file,
        )

    @classmethod
    def from_config(cls, vllm_config: VllmConfig) -> PluginOptions:
        """The child processes of an engine get its pickled config, not the command line."""
        stored: dict[str, Any] = vllm_config.additional_config[PLUGIN]
        return cls(**stored | {"transports": tuple(stored["transports"])})

    def to_config(self) -> dict[str, Any]:
        """Of the secret only the file's name: every process reads it itself."""
        return dataclasses.asdict(self)

    def read_secret(self) -> FleetSecret | None:
        """Raises ConfigError where the file holds none, or there is none and the sockets would be open to a network."""
        if self.fleet_secret_file is not None:
            return fleet_secret.read(FLEET_SECRET_OPTION, Path(self.fleet_secret_file))
        if not fleet_secret.is_loopback(self.host):
            raise ConfigError(f"--dynaserve-host {self.host} is not a loopback address, and there is no {FLEET_SECRET_OPTION}")
        return None


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
        FLEET_SECRET_OPTION,
        type=_absolute,
        metavar="FILE",
        help="a line of at least 32 characters, the same in the whole fleet; others must not read it, nor its group write it; "
        "a --dynaserve-host that is not loopback needs it (default: none)",
    )
    group.add_argument(
        "--dynaserve-transports",
        nargs="+",
        default=list(PluginOptions().transports),
        metavar="NAME",
        help="ways to move KV, best first: torch (torch.distributed's Gloo, through the host's memory), mooncake, "
        "same-host (CPU instances on one machine; nothing of the KV takes time of the one that receives)",
    )

    group.add_argument(
        "--dynaserve-batching",
        choices=["vllm", "slo"],
        default=PluginOptions.batching,
        help="slo: as much prefill beside the decodes as the learnt latency of steps leaves under --tbt-slo-ms (default: %(default)s)",
    )
    group.add_argument(
        "--tbt-slo-ms",
        type=_positive,
        default=PluginOptions.tbt_slo_ms,
        metavar="MS",
        help="most time between two tokens; a request may name its own as vllm_xargs dynaserve_tbt_ms (default: %(default)s)",
    )
    group.add_argument(
        "--ttft-slo-ms",
        type=_positive,
        default=PluginOptions.ttft_slo_ms,
        metavar="MS",
        help="most time until the first token; a request may name its own as vllm_xargs dynaserve_ttft_ms (default: none)",
    )
    group.add_argument(
        "--dynaserve-min-prefill-tokens",
        type=_positive_count,
        default=PluginOptions.min_prefill_tokens,
        metavar="TOKENS",
        help="at least 1: prefill of a step whose decodes leave no time for a single token of it; where they alone would be in time, of"
        " each tenth such step (default: %(default)s)",
    )
    group.add_argument(
        "--dynaserve-profile",
        metavar="FILE",
        help="keep the learnt latency of steps here, and begin with it (default: it is learnt anew at each start)",
    )
    group.add_argument(
        "--dynaserve-step-log", metavar="FILE", help="write a line of CSV per step: batch, predicted and measured time (default: none)"
    )
    group.add_argument(
        "--dynaserve-max-parked",
        type=_count,
        default=PluginOptions.max_parked,
        metavar="REQUESTS",
        help="alphas that may stand at their hand-off points; the instance finishes the oldest of more alone (default: %(default)s)",
    )
    group.add_argument(
        "--dynaserve-park-timeout-ms",
        type=_positive,
        default=PluginOptions.park_timeout_ms,
        metavar="MS",
        help="how long an alpha may stand at its hand-off point before the instance finishes it alone (default: %(default)s)",
    )


def _absolute(path: str) -> str:
    """The engine's processes need not share this one's folder."""
    return str(Path(path).absolute())


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive_count(text: str) -> int:
    if (value := _count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def is_on(args: argparse.Namespace) -> bool:
    return PLUGIN in getattr(args, "plugin", [])
