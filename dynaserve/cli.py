"""The `dynaserve` command; each subcommand is imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

COMMANDS = {
    "serve": ("dynaserve.serve:main", "serve an OpenAI-compatible endpoint over a fleet of instances"),
    "profile": ("dynaserve.profiling.command:main", "measure how long a model's steps take on this machine"),
    "top": ("dynaserve.top:main", "show instances and recent requests of a running fleet"),
    "bench": ("dynaserve.bench:main", "measure a server"),
    "doctor": ("dynaserve.doctor:main", "check an installation and a fleet, and say what to change"),
    "simulate": ("dynaserve.bench.simulate:main", "simulate a fleet on a virtual clock"),
}


EXAMPLE = "dynaserve simulate --profile profile.json --workload sample --rate 2 --batching slo --policy dynamic"


def main() -> None:
    run_command("dynaserve", COMMANDS, EXAMPLE, sys.argv[1:])


def run_command(program: str, commands: Mapping[str, tuple[str, str]], example: str, arguments: Sequence[str]) -> None:
    """Calls the command that the first argument names with the others. commands: `module:function` and a line of help, by name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(program, commands, example))
        raise SystemExit(0 if arguments else 2)
    command, *rest = arguments
    if command not in commands:
        print(f"{program}: no command {command!r}; there is {', '.join(commands)}", file=sys.stderr)
        raise SystemExit(2)
    module, _, function = commands[command][0].partition(":")
    getattr(import_module(module), function)(rest)


def _help(program: str, commands: Mapping[str, tuple[str, str]], example: str) -> str:
    lines = [f"  {name:10s} {text}" for name, (_, text) in commands.items()]
    told = f"{program} COMMAND --help tells the options of a command."
    return "\n".join([f"usage: {program} COMMAND ...", "", *lines, "", told, "", "example:", f"  {example}"])


if __name__ == "__main__":
    main()
