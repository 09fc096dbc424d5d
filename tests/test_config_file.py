"""Options out of a TOML file: equal to the same flags, and overridden by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaserve.config_file import expand
from dynaserve.errors import ConfigError

EXAMPLE = """
model = "tiny"
instances = ["http://a:8000", "http://b:8000"]
policy = "dynamic"
request_timeout_s = 2.5
port = 8001
enable-auto-tool-choice = true
enable-log-requests = false
chat-template-kwargs = { thinking = false }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(EXAMPLE)
    return path


def test_each_key_is_the_flag_of_its_name(path: Path) -> None:
    assert expand(["--config-file", str(path)]) == [
        "tiny",
        "--instances",
        "http://a:8000",
        "http://b:8000",
        "--policy=dynamic",
        "--request-timeout-s=2.5",
        "--port=8001",
        "--enable-auto-tool-choice",
        "--no-enable-log-requests",
        '--chat-template-kwargs={"thinking": false}',
    ]


def test_the_command_line_comes_after_the_file(path: Path) -> None:
    expanded = expand([f"--config-file={path}", "--policy", "colocated"])
    assert expanded.index("--policy=dynamic") < expanded.index("--policy")
    assert expanded[-1] == "colocated"


@pytest.mark.parametrize("given", [["--instances-file", "other"], ["--instances-file=other"], ["--instances", "http://c"]])
def test_a_fleet_on_the_command_line_replaces_the_files(path: Path, given: list[str]) -> None:
    expanded = expand([f"--config-file={path}", *given])
    assert "http://a:8000" not in expanded
    assert expanded[-len(given) :] == given
    assert "--policy=dynamic" in expanded


def test_a_model_on_the_command_line_replaces_the_files(path: Path) -> None:
    assert expand(["other", "--config-file", str(path), "--port", "1"])[:2] == ["other", "--instances"]
    assert "tiny" not in expand(["--config-file", str(path), "--model", "other"])


def test_a_command_line_without_a_file_is_left_as_it_is() -> None:
    assert expand(["tiny", "--port", "1"]) == ["tiny", "--port", "1"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("port = ", "cannot be read"),
        ("instances = []", r"instances = \[\] is no text"),
        ("port = 2026-01-01", "port = .* is no text"),
    ],
)
def test_a_file_that_says_nothing_usable_is_refused(path: Path, text: str, sentence: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        expand(["--config-file", str(path)])


def test_files_that_are_missing_or_named_twice_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be read"):
        expand(["--config-file", "nowhere"])
    with pytest.raises(ConfigError, match="given 2 times"):
        expand(["--config-file", str(path), "--config-file", str(path)])
    with pytest.raises(ConfigError, match="needs a file"):
        expand(["--config-file"])


def test_names_may_have_underscores_as_in_vllms_parser(path: Path) -> None:
    words = ["m", "--max_waiting=a_b", "--api_key_file", "my_keys", "--kv_transfer_config.kv_role", "x_y"]
    assert expand(words) == ["m", "--max-waiting=a_b", "--api-key-file", "my_keys", "--kv-transfer-config.kv_role", "x_y"]
    assert expand(["--config_file", str(path)]) == expand(["--config-file", str(path)])
