"""The examples of operating a fleet name options that exist, and the files say what the formats ask for."""

from __future__ import annotations

import re
import tomllib
from argparse import ArgumentParser
from functools import cache
from pathlib import Path

import pytest
import yaml

from dynaserve.bench.systems import from_toml
from dynaserve.config_file import expand
from vllm_plugin import options
from vllm_plugin.frontend import make_parser

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = [*(path for path in sorted(EXAMPLES.rglob("*")) if path.suffix in (".service", ".yaml")), EXAMPLES / "compare.toml"]


@cache
def known_options() -> set[str]:
    """Of `dynaserve serve`, which has those of vLLM's server, and of `vllm serve --plugin dynaserve`."""
    ours = ArgumentParser()
    options.add_arguments(ours)
    return set(make_parser()._option_string_actions) | set(ours._option_string_actions)


def test_the_toml_file_is_one_that_the_front_end_takes() -> None:
    args = make_parser().parse_args(expand(["--config-file", str(EXAMPLES / "fleet.toml")]))
    assert args.model_tag == tomllib.loads((EXAMPLES / "fleet.toml").read_text())["model"]
    assert str(args.instances_file) == "/etc/dynaserve/instances"


def test_the_help_of_the_front_end_has_an_example() -> None:
    parser = make_parser()
    example = parser.format_help().partition("example:\n  dynaserve serve ")[2].partition("\n")[0]
    args = parser.parse_args(example.split())
    assert args.model_tag == "MODEL"
    assert len(args.instances) == 2


def test_the_systems_to_compare_are_ones_that_the_comparison_takes() -> None:
    systems = from_toml(EXAMPLES / "compare.toml")
    assert [len(system.commands) for system in systems] == [2, 3]
    started = [" ".join(command) for system in systems for command in system.commands]
    for system in systems:
        for url in system.urls:
            port = url.rpartition(":")[2]
            assert port == "8000" or any(f"--port {port}" in command for command in started)


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_commands_name_options_that_exist(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", "\n".join(lines)))
    assert named <= known_options(), named - known_options()


@pytest.mark.parametrize("path", [path for path in COMMANDS if path.suffix == ".yaml"], ids=lambda path: path.name)
def test_yaml_files_are_yaml(path: Path) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))
