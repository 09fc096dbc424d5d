"""How the benchmarks' command lines look."""

from __future__ import annotations

import argparse


def parser_of(name: str, description: str, options: str) -> argparse.ArgumentParser:
    """Of `python -m benchmarks.NAME`, whose --help ends with an example of these options."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        epilog=f"example:\n  python -m benchmarks.{name} {options}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
