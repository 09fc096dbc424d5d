"""`dynaserve bench replay` over real sockets, against a server that does what no engine can be made to do."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dynaserve.bench import client, replay
from dynaserve.bench.options import whole
from dynaserve.bench.records import RequestRecord
from dynaserve.local.fleet import free_ports
from tests.completion_server import Act, CompletionServer, running_server
from workloads.trace import TraceRequest

LAX = ("--max-client-lag-ms", "60000")
"""The server shares this process and this machine; how late the client is is not what these tests are about."""


@pytest.fixture
def server() -> Iterator[CompletionServer]:
    with running_server() as server:
        yield server


@dataclass
class Run:
    status: int
    raw: dict[str, Any] | None
    stdout: str
    stderr: str

    @property
    def requests(self) -> list[dict[str, Any]]:
        assert self.raw is not None, self.stderr
        requests: list[dict[str, Any]] = self.raw["requests"]
        return requests

    @property
    def reasons(self) -> set[str]:
        return {request["failure"]["reason"] for request in self.requests if request["failure"]}


class Bench:
    """Runs the command in this process."""

    def __init__(self, server: CompletionServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.server, self.output, self._capsys = server, folder / "raw.json", capsys

    def replay(self, *options: str, url: str | None = None, workload: str = "fixed:20,5", act: Act | None = None) -> Run:
        """Sends eight requests unless the options say otherwise."""
        self.server.act = act or Act()
        arguments = ["--url", url or self.server.url, "--workload", workload, "--rate", "200", "--requests", "8"]
        arguments += ["--output", str(self.output), *LAX, *options]
        with pytest.raises(SystemExit) as end:
            replay.main(arguments)
        assert isinstance(end.value.code, int)
        captured = self._capsys.readouterr()
        raw = json.loads(self.output.read_text()) if self.output.exists() else None
        return Run(end.value.code, raw, captured.out, captured.err)


@pytest.fixture
def bench(server: CompletionServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(server, tmp_path, capsys)


def test_a_replay_reports_every_measure(bench: Bench) -> None:
    run = bench.replay()
    assert run.status == 0, run.stderr
    for word in ("TTFT", "TBT", "E2E", "p99", "throughput", "goodput", "attainment", "8 of 8 finished"):
        assert word in run.stdout
    assert "sent 8/8" in run.stderr or run.stderr == ""


def test_tokens_are_told_while_their_answers_run(bench: Bench) -> None:
    run = bench.replay(act=Act(delay_s=0.5))
    assert run.status == 0, run.stderr
    assert any(int(told) > 0 for told in re.findall(r" finished 0 .* (\d+) output tokens", run.stderr)), run.stderr


def test_raw_data_tell_what_was_asked_for_and_every_gap(bench: Bench) -> None:
    run = bench.replay("--seed", "5", act=Act(delay_s=0.01))
    assert run.raw is not None
    assert run.raw["run"]["seed"] == 5
    assert run.raw["run"]["workload"] == "fixed:20,5"
    assert run.raw["run"]["url"] == bench.server.url
    assert run.raw["run"]["command"].startswith("dynaserve bench replay --url ")
    assert run.raw["machine"]["cores"] >= 1
    assert run.raw["not_trusted_because"] is None
    for request in run.requests:
        assert len(request["gaps_ms"]) == 4
        assert request["ttft_ms"] >= 10
        assert request["e2e_ms"] >= 50
        assert request["e2e_ms"] == pytest.approx(request["ttft_ms"] + sum(request["gaps_ms"]), abs=0.01)


def test_what_is_sent_is_exact_and_every_prompt_is_another(bench: Bench) -> None:
    assert bench.replay(workload="sample").status == 0
    first = bench.server.prompts
    assert bench.replay(workload="sample").status == 0
    both = bench.server.prompts
    # Those that leave within milliseconds come in any order.
    assert sorted(map(len, first)) == sorted(map(len, both[8:]))
    assert {93, 616, 383} <= set(map(len, first))
    assert len({tuple(prompt[:2]) for prompt in both}) == 16
    (body,) = (body for body in bench.server.bodies[:9] if len(body["prompt"]) == 93)
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("toy", 253, True, 0)


def test_a_server_is_not_told_the_lengths_that_an_end_token_makes(bench: Bench) -> None:
    run = bench.replay("--eos-token-id", "2", workload="sample")
    assert run.status == 0, run.stderr
    assert run.raw is not None
    assert run.raw["run"]["eos_token_id"] == 2
    assert {request["finish_reason"] for request in run.requests} == {"stop"}
    bodies = {len(body["prompt"]): body for body in bench.server.bodies if len(body["prompt"]) > 2}
    longest = max(request["output_tokens"] for request in run.requests)
    total = max(request["prompt_tokens"] + request["output_tokens"] for request in run.requests)
    for request in run.requests:
        body = bodies[request["prompt_tokens"]]
        assert "ignore_eos" not in body
        assert body["max_tokens"] == min(longest, total - request["prompt_tokens"])
        assert (body["min_tokens"], body["stop_token_ids"], body["logit_bias"]) == (request["output_tokens"] - 1, [2], {"2": 100})
        assert len(request["gaps_ms"]) == request["output_tokens"] - 1


def test_an_end_token_that_comes_when_it_will_is_refused(bench: Bench) -> None:
    run = bench.replay("--eos-token-id", "2", act=Act(holds_back=False))
    assert run.status == 2
    assert "does not end an answer by token 2 when it is told to" in run.stderr
    assert "1 output tokens instead of 2, finish_reason stop" in run.stderr
    assert not bench.server.prompts


def test_prompts_repeat_with_a_prompt_seed(bench: Bench) -> None:
    for _ in range(2):
        assert bench.replay("--prompt-seed", "3", "--requests", "1").status == 0
    one, two = bench.server.prompts
    assert one == two


def test_sending_never_waits_for_answers(bench: Bench) -> None:
    run = bench.replay("--requests", "20", act=Act(gather=20))
    assert run.status == 0, run.stderr
    assert run.raw is not None
    assert run.raw["summary"]["finished"] == 20


def test_requests_are_sent_when_they_are_due(bench: Bench) -> None:
    run = bench.replay(act=Act(delay_s=0.05))
    for request in run.requests:
        assert request["sent_s"] >= request["due_s"]
    due = [request["due_s"] for request in run.requests]
    assert due == sorted(due)
    assert len(set(due)) == len(due)


def test_requests_go_to_several_servers_in_turn(bench: Bench) -> None:
    with running_server() as other:
        run = bench.replay("--url", other.url, workload="sample")
    assert run.status == 0, run.stderr
    assert run.raw is not None
    assert run.raw["run"]["url"] == f"{bench.server.url},{other.url}"
    for first, server in enumerate((bench.server, other)):
        assert sorted(map(len, server.prompts)) == sorted(request["prompt_tokens"] for request in run.requests[first::2])


def test_several_servers_of_different_models_are_refused(bench: Bench) -> None:
    with running_server() as other:
        other.models = ["another"]
        run = bench.replay("--url", other.url)
    assert run.status == 2
    assert f"{bench.server.url}, {other.url} serve different models (another, toy), while requests go to each in turn" in run.stderr
    assert bench.server.prompts == []


def test_a_server_that_is_named_twice_is_refused(bench: Bench) -> None:
    run = bench.replay("--url", f"{bench.server.url}/v1")
    assert run.status == 2
    assert f"{bench.server.url} is given twice: requests go to each server in turn" in run.stderr


def test_several_tokens_in_one_event_have_one_gap(bench: Bench) -> None:
    run = bench.replay(act=Act(per_event=2, delay_s=0.02))
    assert run.status == 0, run.stderr
    for request in run.requests:
        gaps = request["gaps_ms"]
        assert len(gaps) == 4
        assert (gaps[0], gaps[2]) == (0, 0)


def test_several_tokens_in_one_event_are_not_reported_if_the_server_does_not_say_so(bench: Bench) -> None:
    run = bench.replay(act=Act(per_event=2, usage="end"))
    assert run.status == 3
    assert "3 tokens were seen in the stream (counted by events), but the server counted 5" in run.stderr
    assert "TTFT" not in run.stdout
    assert len(run.requests) == 8


def test_a_server_without_vllms_fields_is_measured_by_events(bench: Bench) -> None:
    run = bench.replay(act=Act(strict=True, usage="end"))
    assert run.status == 0, run.stderr
    assert {request["tokens_counted_by"] for request in run.requests} == {"events"}


def test_a_prompt_that_the_server_counts_otherwise_is_not_reported(bench: Bench) -> None:
    run = bench.replay(act=Act(lose=1))
    assert run.status == 3
    assert "the server counted 19 prompt tokens, but 20 were sent" in run.stderr
    assert "TTFT" not in run.stdout
    assert run.raw is not None
    assert "counted 19" in run.raw["not_trusted_because"]


def test_a_server_that_does_not_count_is_refused_before_the_run(bench: Bench) -> None:
    run = bench.replay(act=Act(usage="never"))
    assert run.status == 2
    assert "says no usage" in run.stderr
    assert bench.server.prompts == []


def test_a_late_client_does_not_report(bench: Bench) -> None:
    run = bench.replay("--max-client-lag-ms", "0.000001")
    assert run.status == 3
    assert run.stderr.splitlines()[-1].startswith("dynaserve bench replay: not reported: the client itself was late")
    assert "TTFT" not in run.stdout
    assert len(run.requests) == 8


@pytest.mark.parametrize(
    ("act", "reason", "tokens"),
    [
        (Act(status=500), "HTTP 500", 0),
        (Act(status=429), "HTTP 429", 0),
        (Act(cut_after=2), "connection lost", 2),
        (Act(error_after=2), "error in the stream", 2),
        (Act(stop_after=3), "wrong output length", 3),
        (Act(delay_s=30.0), "timed out", 0),
    ],
)
def test_a_failure_is_counted_by_its_reason_with_the_tokens_that_came(bench: Bench, act: Act, reason: str, tokens: int) -> None:
    run = bench.replay("--timeout-s", "1" if act.delay_s else "60", act=act)
    assert run.status == 1
    assert f"8: {reason}" in run.stdout
    assert run.reasons == {reason}
    for request in run.requests:
        assert len(request["gaps_ms"]) == max(0, tokens - 1)
        assert (request["ttft_ms"] is None) == (tokens == 0)


def test_a_server_that_does_not_answer_is_refused(bench: Bench) -> None:
    (port,) = free_ports(1)
    run = bench.replay(url=f"http://127.0.0.1:{port}")
    assert run.status == 2
    assert f"http://127.0.0.1:{port} does not answer" in run.stderr
    assert list(bench.output.parent.iterdir()) == [], "no empty file is left"


@pytest.mark.usefixtures("unreachable_proxy")
def test_a_server_is_measured_without_the_proxy_of_the_environment(bench: Bench) -> None:
    run = bench.replay()
    assert run.status == 0, run.stderr


def test_a_request_to_a_server_that_has_gone_is_a_failure() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/v1/completions"

    async def send() -> RequestRecord:
        async with client.http_client(None) as http:
            return await client.send(http, client.Planned(0, 0.0, TraceRequest(0.0, 2, 2), url, b"{}"), 0.0, 60.0)

    failure = asyncio.run(send()).failure
    assert failure is not None
    assert failure.reason == "no connection"


def test_fields_are_added_to_each_request_but_the_probe(bench: Bench) -> None:
    assert bench.replay("--extra-body", '{"vllm_xargs": {"dynaserve_split": 10}, "temperature": 1}').status == 0
    probe, *others = bench.server.bodies
    assert "vllm_xargs" not in probe
    assert [(body["vllm_xargs"], body["temperature"]) for body in others] == [({"dynaserve_split": 10}, 1)] * 8


def test_warm_up_requests_are_sent_before_and_not_counted(bench: Bench) -> None:
    run = bench.replay("--warmup", "3")
    assert len(run.requests) == 8
    assert len(bench.server.prompts) == 11
    assert len({tuple(prompt) for prompt in bench.server.prompts}) == 11


def test_a_failed_warm_up_ends_the_run(bench: Bench) -> None:
    run = bench.replay("--warmup", "1", act=Act(status=500))
    assert run.status == 2
    assert "warm-up request 0 of 1 failed" in run.stderr
    assert len(bench.server.prompts) == 1


def test_the_model_must_be_named_where_there_are_several(bench: Bench) -> None:
    bench.server.models += ["other"]
    run = bench.replay()
    assert run.status == 2
    assert "serves 2 models (toy, other): name one with --model" in run.stderr
    assert bench.replay("--model", "other").status == 0
    assert bench.server.bodies[-1]["model"] == "other"


def test_adapters_of_the_one_model_do_not_count_as_models(bench: Bench) -> None:
    bench.server.adapters += ["an-adapter"]
    assert bench.replay().status == 0
    assert {body["model"] for body in bench.server.bodies} == {"toy"}


def test_the_key_is_sent_and_not_recorded(bench: Bench) -> None:
    assert bench.replay("--api-key", "secret").status == 0
    assert set(bench.server.authorizations) == {"Bearer secret"}
    assert "secret" not in bench.output.read_text()


def test_the_key_may_come_from_the_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    assert bench.replay(url=f"{bench.server.url}/v1/").status == 0
    assert set(bench.server.authorizations) == {"Bearer from-env"}


@pytest.mark.parametrize("key", ["schl\u00fcssel", "secret\n"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(bench: Bench, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    run = bench.replay("--api-key", key)
    assert (run.status, key in run.stderr) == (2, False)
    assert "--api-key: a key has printable ASCII characters only" in run.stderr
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert "the environment variable OPENAI_API_KEY: a key has" in bench.replay().stderr


def test_lengths_are_scaled_and_limited(bench: Bench) -> None:
    run = bench.replay("--scale", "0.25", "--max-total-tokens", "60", workload="sample")
    assert run.status == 0, run.stderr
    lengths = [(request["prompt_tokens"], request["output_tokens"]) for request in run.requests]
    assert all(prompt + output <= 60 for prompt, output in lengths)
    # Two that leave close to each other may arrive in either order.
    assert sorted(lengths) == sorted((len(body["prompt"]), body["max_tokens"]) for body in bench.server.bodies[1:])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rate", "0"], "argument --rate: '0' is not a number above 0"),
        (["--requests", "x"], "argument --requests: 'x'"),
        (["--workload", "nosuch"], "no workload 'nosuch'"),
        (["--workload", "azure-code"], "--traces"),
        (["--arrivals", "gamma:0"], "arrivals 'gamma:0': 0 is not between 0.001 and 1000"),
        (["--arrivals", "trace"], "no arrival times of its own"),
        (["--vocabulary", "5:5"], "'5:5' is not LOW:HIGH"),
        (["--vocabulary", f"0:{'9' * 20}"], f"'0:{'9' * 20}' is not LOW:HIGH with LOW < HIGH, at most 9223372036854775807"),
        (["--seed", "18446744073709551616"], "argument --seed: '18446744073709551616' is more than 18446744073709551615"),
        (["--prompt-seed", "18446744073709551616"], "is more than 18446744073709551615"),
        (["--warmup", "9223372036854775808"], "argument --warmup: '9223372036854775808' is more than 9223372036854775807"),
        (["--workload", f"fixed:{'9' * 20},1"], f"{'9' * 20} tokens are more than 1099511627776"),
        (["--scale", "1e308"], "workload fixed:20,5 has a length of 20 tokens, which times 1e+308 is more than 1099511627776"),
        (["--extra-body", "[]"], "'[]' is not a JSON object"),
        (["--extra-body", "{"], "is not JSON"),
        (["--url", "ftp://a"], "'ftp://a' is not a URL"),
        (["--output", "/dev/null/raw.json"], "/dev/null/raw.json: cannot be written: Not a directory"),
        (["--nosuch"], "unrecognized arguments: --nosuch"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_anything_is_sent(bench: Bench, options: list[str], named: str) -> None:
    run = bench.replay(*options)
    assert run.status == 2
    assert named in run.stderr
    assert len(run.stderr.splitlines()) == 1
    assert bench.server.bodies == []


def test_a_number_of_a_million_digits_is_refused_without_all_of_them() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^'9{40}\.\.\.' is more than 7$"):
        whole(1, 7)("9" * 1_000_000)
    assert whole(1, 7)("0" * 1_000_000 + "7") == 7


@pytest.mark.parametrize("arguments", [["--help"], ["bench"], ["bench", "--help"], ["bench", "replay", "--help"], ["bench", "nosuch"]])
def test_the_command_tells_how_it_is_used(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "dynaserve.cli", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if "--help" in arguments else 2)
    assert ("bench" if arguments == ["--help"] else "replay") in done.stdout + done.stderr
    assert ("example:" in done.stdout) == ("nosuch" not in arguments)


def test_the_command_line_stays_light() -> None:
    code = "import sys, dynaserve.cli; print(sorted({'numpy', 'httpx', 'rich', 'asyncio', 'workloads'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
