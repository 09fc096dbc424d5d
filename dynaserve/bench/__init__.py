"""`dynaserve bench`: measures servers from the outside, ours or any other OpenAI-compatible one."""

from __future__ import annotations

from collections.abc import Sequence

from dynaserve.cli import run_command

COMMANDS = {
    "replay": ("dynaserve.bench.replay:main", "send a workload at fixed times and measure the answers"),
}


def main(arguments: Sequence[str]) -> None:
    run_command("dynaserve bench", COMMANDS, arguments)
