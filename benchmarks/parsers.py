"""How the benchmarks' command lines look."""

from __future__ import annotations

import argparse

from dynaserve.bench.options import whole
from dynaserve.local.model import LAYERS


def parser_of(name: str, description: str, options: str) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, whose --help ends with an example of these options."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=f"example:\n  python -m benchmarks.{name} {options}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_layers(parser: argparse.ArgumentParser) -> None:
    """The option --layers."""
    why = "for a core on which steps of all of them take too long for the SLO"
    parser.add_argument(
        "--layers", type=whole(1), default=LAYERS, metavar="N", help=f"the first N of the model, {why} (default: %(default)s)"
    )
