"""`dynaserve profile MODEL`: its options, the sweep, the profile and the picture."""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dynaserve import latency_profile
from dynaserve.command_lines import without_secrets
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable
from dynaserve.latency_profile import ProfileKey
from dynaserve.messages import MeasuredStep
from dynaserve.profiling import picture
from dynaserve.profiling.sweep import NO_LIMITS, Limits, Point, PointFile, PointRecord, grid, table_of

ENGINE = "vllm_plugin.sweep_engine:SweepEngine"
"""Runs the steps, by import string: this package does not import the engine's."""
REPETITIONS = 4
"""Of each point; the first is not kept, as it may compile or allocate."""
SPARE_TOKENS = 256
"""What the decodes of a group produce while it is measured; then their contexts are filled anew."""
EXAMPLE = """\
example:
  dynaserve profile MODEL --output profile.json --dtype bfloat16 --max-model-len 4096

Steps that the engine cannot take (tokens and requests of one step, KV memory, the model's length) are left out. What was measured
is kept beside the profile until that is complete (profile.points.jsonl): the same command goes on where it was interrupted."""
SECRETS = ("--hf-token",)
"""Options whose values stand in no file: profiles are copied."""


class Engine(Protocol):
    """Runs one step of a given composition. Not thread-safe."""

    key: ProfileKey
    limits: Limits

    def measure(self, point: Point, times: int) -> list[MeasuredStep]:
        """Takes a step of a `grid` of its limits that often, one after the other."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class SweepOptions:
    """engine_args: of `vllm serve`."""

    model: str
    output: Path
    picture: Path | None
    slo_ms: float
    prefills: tuple[int, ...]
    decodes: tuple[int, ...]
    contexts: tuple[int, ...]
    engine_args: tuple[str, ...]


def main(arguments: Sequence[str]) -> None:
    try:
        options = parse(arguments)
        for path in (options.output, options.picture):
            if path is not None:
                check_replaceable(path)
        module, _, name = ENGINE.partition(":")
        engine: Engine = getattr(import_module(module), name)(options.model, options.engine_args)
        try:
            run(
                options,
                engine,
                Console(stderr=True, highlight=False),
                shlex.join(["dynaserve", "profile", *without_secrets(arguments, SECRETS)]),
            )
        finally:
            engine.close()
    except ConfigError as error:
        print(f"dynaserve profile: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        print("dynaserve profile: interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise SystemExit(130) from None


def run(options: SweepOptions, engine: Engine, console: Console, command: str) -> None:
    """Measures what is missing, then writes the profile and the picture."""
    points = _points(options, engine.limits, console)
    done = PointFile(options.output.with_suffix(".points.jsonl"), engine.key, without_secrets(options.engine_args, SECRETS))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        missing = done.missing(points)
        task = progress.add_task("measuring", total=len(points), completed=len(points) - len(missing))
        _measure(missing, engine, done, lambda point: progress.update(task, advance=1, description=_words(point)))
    provenance = f"{command}; {platform.node()}; {time.strftime('%Y-%m-%d', time.gmtime())}"
    latency_profile.save(options.output, table_of(done.records, random.Random(1)), engine.key, provenance)
    done.remove()  # the next call measures anew: what it finds here may be of another driver, and would be told as of today
    console.print(f"{options.output}: {len(done.records)} kinds of steps of {engine.key.model} on {engine.key.device}", soft_wrap=True)
    if options.picture is not None:
        picture.draw(options.picture, done.records, options.slo_ms, f"{engine.key.model} on {engine.key.device}")
        console.print(f"{options.picture}: the stars are the latency-constrained-utilization points at {options.slo_ms:g} ms")


def _points(options: SweepOptions, limits: Limits, console: Console) -> list[Point]:
    """Raises ConfigError if nothing fits; tells how much does not."""
    wanted, points = (grid(options.prefills, options.decodes, options.contexts, most, SPARE_TOKENS) for most in (NO_LIMITS, limits))
    if not points:
        sizes = f"prefill {options.prefills}, decodes {options.decodes} and context {options.contexts}"
        raise ConfigError(f"no step of {sizes} fits into {limits}")
    if len(points) < len(wanted):
        console.print(f"{len(wanted) - len(points)} of {len(wanted)} kinds of steps do not fit into {limits}", soft_wrap=True)
    return points


def _measure(points: Sequence[Point], engine: Engine, done: PointFile, tell: Callable[[Point], None]) -> None:
    for point in points:
        steps = engine.measure(point, REPETITIONS)
        done.add(PointRecord(point, steps[1:]))
        tell(point)


def _words(point: Point) -> str:
    return f"prefill {point.prefill_tokens}, {point.decodes} decodes of {point.context_tokens}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


def parse(arguments: Sequence[str]) -> SweepOptions:
    """Raises ConfigError in one sentence."""
    parser = _Parser(
        prog="dynaserve profile",
        description="Measures how long the steps of a model take here, for --dynaserve-profile and the simulator.\n"
        "Options that are not listed are those of vllm serve.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, default=Path("profile.json"), metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="latency and throughput, as .png or .svg (needs matplotlib)")
    parser.add_argument("--tbt-slo-ms", type=float, default=100.0, metavar="MS", help="line of the picture (default: %(default)s)")
    sizes: dict[str, Any] = {"nargs": "+", "type": int, "metavar": "N"}
    parser.add_argument("--prefill", default=[0, 32, 64, 128, 256, 512, 1024, 2048], help="tokens (default: %(default)s)", **sizes)
    parser.add_argument("--decodes", default=[0, 1, 2, 4, 8, 16, 32, 64], help="(default: %(default)s)", **sizes)
    parser.add_argument("--context", default=[128, 1024], help="tokens of each decode (default: %(default)s)", **sizes)
    args, engine_args = parser.parse_known_args(arguments)
    for name in ("prefill", "decodes", "context"):
        if wrong := [value for value in getattr(args, name) if value < (name == "context")]:
            raise ConfigError(f"--{name} {wrong[0]} is too small")
    if args.picture is not None and import_spec("matplotlib") is None:
        raise ConfigError("--picture needs matplotlib: pip install 'dynaserve[plots]'")
    return SweepOptions(
        args.model,
        args.output,
        args.picture,
        args.tbt_slo_ms,
        tuple(args.prefill),
        tuple(args.decodes),
        tuple(args.context),
        tuple(engine_args),
    )


def import_spec(name: str) -> Any:
    from importlib.util import find_spec

    return find_spec(name)
