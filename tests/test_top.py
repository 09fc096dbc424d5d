"""`dynaserve top`, run as a command against a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from rich.console import Console

from dynaserve import fleet_view
from dynaserve.errors import NoInstance
from dynaserve.fleet_view import Snapshot
from dynaserve.local.fleet import free_ports
from dynaserve.top import follow, frame, main
from tests import looked_at

KEY = "sesame"


class Frontend(BaseHTTPRequestHandler):
    """Has a snapshot, which a key opens."""

    def do_GET(self) -> None:
        allowed = self.headers.get("authorization") == f"Bearer {KEY}"
        if self.path != "/dynaserve/snapshot":
            return self.answer(404, b"{}")
        return self.answer(200, msgspec.json.encode(looked_at.snapshot())) if allowed else self.answer(401, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing of this belongs into the output of the tests."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Frontend) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_one_frame_shows_instances_and_requests(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# of operators\n{KEY}\n")
    monkeypatch.setenv("A_KEY", KEY)
    for option in (["--api-key-file", str(keys)], ["--api-key-env", "A_KEY"]):
        main(["--url", url, "--once", *option])
        lines = capsys.readouterr().out.splitlines()
        assert "2 running, 1 wait for their first token" in lines[0]
        assert "TBT 92.7%, TTFT 100.0%" in lines[0]
        assert any(line.split()[:5] == ["http://a:8000", "up", "3", "1", "25.0%"] for line in lines)
        assert any(line.split()[:6] == ["cut", "finished", "100", "+", "40", "110"] for line in lines)


def test_what_a_client_has_named_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    record = looked_at.cut()
    record.request_id = "[red]x[/red]\x1b[2Jy"
    now = fleet_view.snapshot("f", [], lambda _: "up", [record], running=0, waiting=0, now_s=looked_at.NOW_S)
    Console(width=200).print(frame(now))
    shown = capsys.readouterr().out
    assert "[red]x[/red]?[2Jy" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (["--url", "URL"], 2, "wants an API key: name one with --api-key-file or --api-key-env"),
        (["--url", "URL", "--api-key-env", "WRONG"], 2, "wants another API key"),
        (["--url", "URL", "--api-key-env", "UNSET"], 2, "the environment variable UNSET has no key"),
        (["--url", "URL", "--api-key-file", "nowhere"], 2, "--api-key-file nowhere cannot be read"),
        (["--url", "URL/other"], 2, "is not a front-end"),
        (["--url", "nonsense"], 2, "'nonsense' is not a URL"),
        (["--url", "AWAY"], 1, "does not answer"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    options: list[str], status: int, sentence: str, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WRONG", "wrong")
    monkeypatch.delenv("UNSET", raising=False)
    away = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(SystemExit) as ended:
        main([option.replace("URL", url).replace("AWAY", away) for option in [*options, "--once"]])
    told = capsys.readouterr().err
    assert ended.value.code == status
    assert sentence in told
    assert len(told.splitlines()) == 1


def test_a_frame_says_why_it_is_old(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=120).print(frame(looked_at.snapshot(), "http://f does not answer: refused"))
    away, now, *_ = capsys.readouterr().out.splitlines()
    assert away == "http://f does not answer: refused"
    assert "2 running" in now


def test_it_waits_for_a_front_end_that_is_away() -> None:
    class Frontend:
        """Is away, is back, and then who looks presses Ctrl-C."""

        answers: ClassVar[list[Snapshot | BaseException]] = [NoInstance("away"), looked_at.snapshot(), KeyboardInterrupt()]

        def ask(self) -> Snapshot:
            if isinstance(answer := self.answers.pop(0), BaseException):
                raise answer
            return answer

    with pytest.raises(KeyboardInterrupt):
        follow(Frontend().ask, looked_at.snapshot(), 0.01)
    assert not Frontend.answers


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "example:\n  dynaserve top --url" in capsys.readouterr().out
