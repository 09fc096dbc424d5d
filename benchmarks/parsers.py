"""How the benchmarks' command lines look."""

from __future__ import annotations

import argparse
import shlex

from dynaserve.bench.options import positive, whole
from dynaserve.bench.trial import ATTEMPTS
from dynaserve.local.model import LAYERS

MAX_CLIENT_LAG_MS = 25.0
"""At P99, of a client on the cores of the engines: some four times as late as it is there (docs/workloads.md), a quarter of the usual
TBT SLO."""


def parser_of(name: str, description: str, options: str) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, whose --help ends with an example of these options."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=f"example:\n  python -m benchmarks.{name} {options}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def words(text: str) -> tuple[str, ...]:
    """A parser's type: arguments of another command, split as a shell would."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be split into words: {error}") from error


def add_layers(parser: argparse.ArgumentParser) -> None:
    """The option --layers."""
    why = "for a core on which steps of all of them take too long for the SLO"
    parser.add_argument(
        "--layers", type=whole(1), default=LAYERS, metavar="N", help=f"the first N of the model, {why} (default: %(default)s)"
    )


def add_max_client_lag(parser: argparse.ArgumentParser) -> None:
    """The option --max-client-lag-ms, for runs of `dynaserve.bench.trial`."""
    told = f"at P99; a run of a client that was later is repeated, up to {ATTEMPTS} in all, and then not measured"
    parser.add_argument(
        "--max-client-lag-ms", type=positive, default=MAX_CLIENT_LAG_MS, metavar="MS", help=f"{told} (default: %(default)s)"
    )
