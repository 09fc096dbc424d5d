"""Options of `dynaserve serve` that vLLM's parser would take in other spellings."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from dynaserve.config_file import expand
from dynaserve.errors import ConfigError
from dynaserve.serve import configure
from tests.test_fleet_client import described
from tests.test_fleet_links import Gateway
from vllm_plugin.frontend import serve


@pytest.fixture(autouse=True)
def _an_instance_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    gateway.address = "tcp://127.0.0.1:1"
    monkeypatch.setattr("dynaserve.fleet.describe", lambda url, *_, **__: described(url, gateway))
    monkeypatch.setattr("dynaserve.serve.version", lambda _: described("", gateway).vllm_version)


BEGINNING = ["m", "--instances", "http://127.0.0.1:9"]


def test_an_underscore_is_a_dash(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sesame\n")
    config = configure(expand([*BEGINNING, "--api_key_file", str(tmp_path / "keys"), "--max_waiting=7"]))
    assert (config.api_keys, config.most_waiting) == (("sesame",), 7)


@pytest.mark.parametrize("words", [["--max-wait", "7"], ["--api-key-fil", "keys"], ["--config-fil", "f"]], ids=" ".join)
def test_an_option_of_ours_that_only_vllm_has_read_is_refused(words: list[str]) -> None:
    argv = expand([*BEGINNING, *words])
    with pytest.raises(ConfigError, match=r"must be written in full, on the command line or in the file of --config-file$"):
        serve(argv, configure(argv))


def test_more_than_one_api_server_is_refused() -> None:
    argv = [*BEGINNING, "--api-server-count", "2"]
    with pytest.raises(ConfigError, match=r"^--api-server-count is 2: a front-end is one process"):
        serve(argv, configure(argv))


def test_an_instance_with_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaserve.serve.version", lambda _: "0.32.9")
    with pytest.raises(ConfigError, match=r"^vllm_version differs: this front-end has 0\.32\.9, http://127\.0\.0\.1:9 has 0$"):
        configure(BEGINNING)


def test_one_in_vllms_own_file_of_options_too(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("max-waiting: 7\n")
    argv = expand([*BEGINNING, "--config", str(tmp_path / "options.yaml")])
    with pytest.raises(ConfigError, match=r"^--max-waiting is 7: it must be written in full"):
        serve(argv, configure(argv))
