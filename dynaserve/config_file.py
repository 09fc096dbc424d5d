"""The options of `dynaserve serve` as a TOML file: each key is an option without its dashes, with `_` or `-` inside.

    model = "Qwen/Qwen3-8B"
    instances = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    policy = "dynamic"
    enable-auto-tool-choice = true

Options of vLLM's server are meant as well.  What the command line says again counts.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynaserve.errors import ConfigError

OPTION = "--config-file"
_FLEET = ("--instances", "--instances-file")


def expand(argv: Sequence[str]) -> list[str]:
    """The command line, with dashes in its options, and the file's options before them. Raises ConfigError where the file cannot be read or
    says nothing usable."""
    rest, paths = _take([_with_dashes(word) for word in argv])
    if not paths:
        return rest
    if len(paths) > 1:
        raise ConfigError(f"{OPTION} is given {len(paths)} times: {' '.join(paths)}")
    path = Path(paths[0])
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{OPTION} {path} cannot be read: {error}") from error
    if any(word.partition("=")[0] in _FLEET for word in rest):  # one of them only may be given
        values = {name: value for name, value in values.items() if _flag(name) not in _FLEET}
    model = values.pop("model", None)
    # The model is vLLM's positional argument: behind an option with several values it would be taken for one of them.
    first, rest = _split_model(rest)
    if not first and model is not None and not any(word == "--model" or word.startswith("--model=") for word in rest):
        first = [model]
    return [*first, *(text for name, value in values.items() for text in _option(path, name, value)), *rest]


def _with_dashes(word: str) -> str:
    """vLLM's parser takes `--max_waiting` as well, and names inside of its options as they are."""
    if not word.startswith("--"):
        return word
    name = re.match(r"[^.=]*", word)
    assert name is not None
    return name[0].replace("_", "-") + word[name.end() :]


def _take(argv: list[str]) -> tuple[list[str], list[str]]:
    rest, paths = [], []
    words = iter(argv)
    for word in words:
        if word == OPTION:
            path = next(words, None)
            if path is None:
                raise ConfigError(f"{OPTION} needs a file")
            paths.append(path)
        elif word.startswith(f"{OPTION}="):
            paths.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, paths


def _split_model(argv: list[str]) -> tuple[list[str], list[str]]:
    """The model that the command line begins with, if it does, and what follows."""
    return (argv[:1], argv[1:]) if argv and not argv[0].startswith("-") else ([], argv)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option(path: Path, name: str, value: Any) -> list[str]:
    flag = _flag(name)
    match value:
        case True:
            return [flag]
        case False:
            return [f"--no-{flag.removeprefix('--')}"]
        case str() | int() | float():
            return [f"{flag}={value}"]
        case list() if value and all(isinstance(item, str | int | float) for item in value):
            return [flag, *map(str, value)]
        case dict():
            return [f"{flag}={json.dumps(value)}"]
        case _:
            raise ConfigError(f"{OPTION} {path}: {name} = {value!r} is no text, number, truth value, table or list of these")
