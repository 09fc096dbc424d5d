"""The `dynaserve` command; each subcommand is imported only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "serve": ("dynaserve.serve:main", "serve an OpenAI-compatible endpoint over a fleet of instances"),
}


def main() -> None:
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        raise SystemExit(0 if arguments else 2)
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"dynaserve: no command {command!r}; there is {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    module, _, function = COMMANDS[command][0].partition(":")
    getattr(import_module(module), function)(rest)


def _help() -> str:
    lines = [f"  {name:10s} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: dynaserve COMMAND ...", "", *lines, "", "dynaserve COMMAND --help tells the options of a command."])


if __name__ == "__main__":
    main()
