"""Bad input gets one clear sentence, and disturbs nobody else."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from dynaserve.messages import Continue, Hello, Run
from tests.e2e.fleet import FleetUnderTest, prompt_of, wait_for

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _still_serving(fleet: FleetUnderTest) -> Iterator[None]:
    yield
    assert len(fleet.complete(prompt_of(40), split=20).token_ids) == 40
    fleet.wait_until_empty()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("split", [-1, 91, 10**12, "first"])
def test_split_outside_the_request(fleet: FleetUnderTest, split: Any, stream: bool) -> None:
    response = fleet.frontend.post("/v1/completions", json=fleet.body(prompt_of(50), split=split, stream=stream))
    assert response.status_code == 400
    assert f"dynaserve_split is {split!r}, not a token index in [0, 90]" in response.json()["error"]["message"]


def test_responses_tell_what_is_wrong(fleet: FleetUnderTest) -> None:
    asked = {"model": fleet.model, "input": "Hello", "max_output_tokens": 8}
    refused = fleet.frontend.post("/v1/responses", json={**asked, "vllm_xargs": {"dynaserve_split": -1}})
    assert (refused.status_code, "dynaserve_split is -1, not a token index" in refused.text) == (400, True)
    served = fleet.frontend.post("/v1/responses", json={**asked, "stream": True, "vllm_xargs": {"dynaserve_split": 4}})
    assert "event: response.completed" in served.text


def test_unknown_transport(fleet: FleetUnderTest) -> None:
    response = fleet.frontend.post("/v1/completions", json=fleet.body(prompt_of(50), transport="pigeon"))
    assert response.status_code == 400
    assert "dynaserve_transport is 'pigeon', this fleet offers torch" in response.json()["error"]["message"]


@pytest.mark.parametrize("slo_ms", [0, -3.5, "fast"])
def test_an_impossible_slo(fleet: FleetUnderTest, slo_ms: Any) -> None:
    body = fleet.body(prompt_of(50)) | {"vllm_xargs": {"dynaserve_tbt_ms": slo_ms}}
    response = fleet.frontend.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert f"dynaserve_tbt_ms is {slo_ms!r}, not a number of milliseconds above 0" in response.json()["error"]["message"]


def test_record_of_an_unknown_request(fleet: FleetUnderTest) -> None:
    response = fleet.frontend.get("/dynaserve/requests/cmpl-never")
    assert response.status_code == 404
    assert "cmpl-never" in response.text


def dropped(fleet: FleetUnderTest, reason: str) -> float:
    text = fleet.instances[0].get("/metrics").text
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    return sum(s.value for s in samples if s.name == "dynaserve_dropped_messages_total" and s.labels["reason"] == reason)


@contextmanager
def gateway_socket(fleet: FleetUnderTest) -> Iterator[zmq.Socket[bytes]]:
    address = fleet.instances[0].get("/dynaserve/instance").json()["gateway"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(address)
        yield socket


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1 no msgpack"],
        [b"\x80" * 100_000],
        [msgspec.msgpack.encode({"type": "Run", "request_id": 7})],
        [msgspec.msgpack.encode({"type": "Explode"})],
        [msgspec.msgpack.encode(Run("r")), b"not an engine request"],
        [msgspec.msgpack.encode(Run("r"))],
    ],
    ids=["empty", "no msgpack", "long", "wrong type", "unknown message", "bad payload", "no payload"],
)
def test_malformed_messages_are_dropped_and_counted(fleet: FleetUnderTest, frames: list[bytes]) -> None:
    before = dropped(fleet, "malformed")
    with gateway_socket(fleet) as socket:
        socket.send_multipart([msgspec.msgpack.encode(Hello("tester"))])
        socket.send_multipart(frames)
        wait_for(lambda: dropped(fleet, "malformed") == before + 1, "the message to be counted")


def test_messages_without_a_hello_are_dropped_and_counted(fleet: FleetUnderTest) -> None:
    before = dropped(fleet, "no hello")
    with gateway_socket(fleet) as socket:
        socket.send_multipart([msgspec.msgpack.encode(Continue("somebody else's", 10, [1]))])
        wait_for(lambda: dropped(fleet, "no hello") == before + 1, "the message to be counted")


# -- the command ---------------------------------------------------------------------------------------------------------


def serve(*arguments: str) -> tuple[int, str]:
    """Exit status and last line of a front-end that does not start."""
    command = [sys.executable, "-m", "dynaserve.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("dynaserve")]
    return done.returncode, lines[-1] if lines else done.stderr


@contextmanager
def impostor(status: int, body: bytes) -> Iterator[str]:
    """An HTTP server that answers every GET the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_unknown_policy(fleet: FleetUnderTest) -> None:
    status, sentence = serve(fleet.model, "--instances", *fleet.instance_urls, "--policy", "best")
    assert status == 2
    assert "'best'" in sentence
    assert "'colocated'" in sentence


def test_instance_that_does_not_answer(fleet: FleetUnderTest) -> None:
    status, sentence = serve(fleet.model, "--instances", fleet.instance_urls[0], "http://127.0.0.1:9")
    assert (status, "instance http://127.0.0.1:9 does not answer" in sentence) == (2, True), sentence


def test_instance_without_the_plugin(fleet: FleetUnderTest) -> None:
    with impostor(404, b"") as url:
        status, sentence = serve(fleet.model, "--instances", url)
    assert (status, "--plugin dynaserve" in sentence) == (2, True), sentence


def test_instance_of_another_model(fleet: FleetUnderTest) -> None:
    status, sentence = serve("other/model", "--instances", *fleet.instance_urls)
    assert status == 2
    assert f"serves model {fleet.model}, this front-end other/model" in sentence


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "bfloat16"), ("block_size", 128), ("vllm_version", "0.31.0"), ("protocol_version", 99)]
)
def test_instance_that_does_not_fit(fleet: FleetUnderTest, field: str, value: Any) -> None:
    description = fleet.instances[1].get("/dynaserve/instance").json()
    with impostor(200, json.dumps(description | {field: value}).encode()) as url:
        status, sentence = serve(fleet.model, "--instances", fleet.instance_urls[0], url)
    assert status == 2
    assert str(value) in sentence
    assert str(description[field]) in sentence


def test_instance_with_another_kv_layout(fleet: FleetUnderTest) -> None:
    description = fleet.instances[1].get("/dynaserve/instance").json()
    layout = description["workers"][0]["kv_layout"]
    description["workers"][0]["kv_layout"] = layout.replace("cpu vec", "cpu amx")
    assert description["workers"][0]["kv_layout"] != layout
    with impostor(200, json.dumps(description).encode()) as url:
        status, sentence = serve(fleet.model, "--instances", fleet.instance_urls[0], url)
    assert status == 2
    assert layout in sentence
    assert "cpu amx" in sentence
