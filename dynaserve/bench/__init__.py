"""`dynaserve bench`: measures servers from the outside, ours or any other OpenAI-compatible one."""

from __future__ import annotations

from collections.abc import Sequence

from dynaserve.cli import run_command

COMMANDS = {
    "replay": ("dynaserve.bench.replay:main", "send a workload at fixed times and measure the answers"),
    "capacity": ("dynaserve.bench.capacity:main", "search for the highest rate that a server sustains within the SLO"),
    "compare": ("dynaserve.bench.compare:main", "compare the capacities of several systems, in turns, with a report"),
}

EXAMPLE = "dynaserve bench replay --url http://localhost:8000 --workload sample --rate 2 --tbt-slo-ms 100"


def main(arguments: Sequence[str]) -> None:
    run_command("dynaserve bench", COMMANDS, EXAMPLE, arguments)
