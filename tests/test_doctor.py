"""What is found wrong, and what is advised. The installation that runs the tests is sound."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynaserve import doctor
from dynaserve.doctor import check_core, check_engine, check_entry_point, check_frontend, check_instances, check_open_files, main
from dynaserve.messages import Load
from tests.test_fleet_links import description


@contextmanager
def frontend(status: int, body: dict[str, Any], key: str | None = None) -> Iterator[str]:
    """An HTTP server that answers this, or 401 to whoever lacks the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(status if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def instance(health: str, kv_cache_usage: float = 0.5, cut_obstacle: str | None = None, tbt_slo_ms: float | None = 100.0) -> dict[str, Any]:
    known = msgspec.structs.replace(description("tcp://127.0.0.1:1", "epoch"), cut_obstacle=cut_obstacle, tbt_slo_ms=tbt_slo_ms)
    return {"health": health, "load": msgspec.to_builtins(Load(1, 0, kv_cache_usage)), "description": msgspec.to_builtins(known)}


def levels(url: str, key_file: Path | None = None) -> list[tuple[str, str]]:
    key = Namespace(api_key_file=key_file, api_key_env=None)
    return [(finding.level, finding.what) for finding in check_frontend(url, key)]


def test_this_installation_is_sound() -> None:
    assert {finding.level for finding in (check_core(), check_engine(), check_entry_point(None))} == {"ok"}


def test_a_list_of_plugins_that_leaves_ours_out_is_a_fault() -> None:
    assert check_entry_point("other").level == "fault"
    assert check_entry_point("other,dynaserve").level == "ok"


def test_few_open_files_are_a_warning_that_says_how_many_are_needed() -> None:
    finding = check_open_files(1024)
    assert finding.level == "warning"
    assert "65536" in finding.advice
    assert check_open_files(1 << 20).level == "ok"


def test_a_missing_engine_is_a_fault_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "VLLM_CHECK", "no_such_engine:check")
    finding = check_engine()
    assert finding.level == "fault"
    assert "no_such_engine" in finding.what
    assert "pip install" in finding.advice


def test_each_instance_of_a_front_end_is_judged() -> None:
    instances = {
        "a": instance("up"),
        "b": instance("dead"),
        "c": instance("draining", 0.99),
        "d": instance("up", cut_obstacle="draft model"),
        "e": instance("up", tbt_slo_ms=None),
    }
    with frontend(200, {"instances": instances}) as url:
        assert levels(url) == [
            ("ok", f"front-end {url} has 5 instances"),
            ("ok", "a is up"),
            ("fault", "b is dead"),
            ("warning", "c is draining"),
            ("warning", "c uses 99% of its KV cache"),
            ("ok", "d is up"),
            ("warning", "d runs all requests whole: draft model"),
            ("ok", "e is up"),
            ("warning", "e runs with vLLM's own batches: no TBT SLO is kept, and --policy dynamic learns nothing"),
        ]


def test_a_front_end_that_wants_a_key_is_asked_with_it(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("secret\n")
    with frontend(200, {"instances": {"a": instance("up")}}, key="secret") as url:
        assert levels(url) == [("fault", f"{url} wants an API key: name one with --api-key-file or --api-key-env")]
        assert [level for level, _ in levels(url, key_file)] == ["ok", "ok"]


@pytest.mark.usefixtures("unreachable_proxy")
def test_a_front_end_is_asked_without_the_proxy_of_the_environment() -> None:
    with frontend(200, {"instances": {}}) as url:
        assert [level for level, _ in levels(url)] == ["ok"]


def test_what_is_no_front_end_is_a_fault() -> None:
    with frontend(404, {}) as url:
        assert levels(url) == [("fault", f"{url} is not a front-end (dynaserve serve), or one of an older version")]
    with frontend(200, {"hello": "world"}) as url:
        ((level, what),) = levels(url)
        assert (level, "in another format" in what) == ("fault", True)
    ((level, what),) = levels(url)
    assert (level, "does not answer" in what) == ("fault", True)


def test_instances_that_are_not_there_are_a_fault() -> None:
    (finding,) = check_instances(["http://127.0.0.1:9"], allow_stock=False)
    assert finding.level == "fault"


def test_the_exit_status_says_whether_there_is_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "check_installation", lambda: iter([check_core()]))
    with frontend(200, {"instances": {"a": instance("dead")}}) as url, pytest.raises(SystemExit) as ended:
        main(["--url", url])
    assert ended.value.code == 1
    assert "a is dead" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0


def test_advice_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "VLLM_CHECK", "no_such_engine:check")
    monkeypatch.setattr(doctor, "check_installation", lambda: iter([check_engine()]))
    with pytest.raises(SystemExit):
        main([])
    assert "'.[vllm]'" in "".join(capsys.readouterr().out.split())


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "example:\n  dynaserve doctor --instances" in capsys.readouterr().out
