"""The front-end is vLLM's own OpenAI server: what works there works here, cut or not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.fleet import FleetUnderTest, alike, prompt_of

pytestmark = pytest.mark.engine

MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea, the ships upon it, and of the light at the end of the pier."}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def client(fleet: FleetUnderTest) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none")


def xargs(split: int) -> dict[str, Any]:
    return {"vllm_xargs": {"dynaserve_split": split}, "ignore_eos": True}


def metric(fleet: FleetUnderTest, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(fleet.frontend.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


@pytest.mark.parametrize("split", [20, 60])
def test_chat_streams_the_same_text(fleet: FleetUnderTest, client: openai.OpenAI, split: int) -> None:
    def chat(at: int) -> tuple[str, str | None, str]:
        stream = client.chat.completions.create(
            model=fleet.model, messages=MESSAGES, temperature=0, max_tokens=50, stream=True, extra_body=xargs(at)
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return text, chunks[-1].choices[0].finish_reason, chunks[0].id

    whole, cut = chat(0), chat(split)
    assert cut[:2] == whole[:2]
    (record,) = fleet.frontend.get(f"/dynaserve/requests/{cut[2]}").json()["sequences"]
    assert record["split_token"] == split


def test_chat_logprobs_are_the_same(fleet: FleetUnderTest, client: openai.OpenAI) -> None:
    def logprobs(at: int) -> Any:
        answer = client.chat.completions.create(
            model=fleet.model, messages=MESSAGES, temperature=0, max_tokens=30, logprobs=True, top_logprobs=3, extra_body=xargs(at)
        )
        assert answer.choices[0].logprobs is not None
        return answer.choices[0].logprobs.model_dump()

    assert alike(logprobs(55), logprobs(0))


def test_a_tool_is_called(fleet: FleetUnderTest, client: openai.OpenAI) -> None:
    """A named tool constrains the output; the grammar crosses the cut."""
    before = metric(fleet, "dynaserve_requests_total", cut="yes", reason="forced")
    answer = client.chat.completions.create(
        model=fleet.model,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=60,
        temperature=0,
        extra_body={"vllm_xargs": {"dynaserve_split": 30}},
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "weather"
    assert call.function.arguments
    assert metric(fleet, "dynaserve_requests_total", cut="yes", reason="forced") == before + 1


def test_what_cannot_be_cut_exactly_runs_whole_and_is_counted(fleet: FleetUnderTest) -> None:
    reason = "prompt_logprobs"
    before = metric(fleet, "dynaserve_requests_total", cut="no", reason=reason)
    record = fleet.record(fleet.complete(prompt_of(60), split=30, prompt_logprobs=1))
    assert (record["split_token"], record["reason"]) == (None, reason)
    assert metric(fleet, "dynaserve_requests_total", cut="no", reason=reason) == before + 1


def test_what_is_cut_is_counted(fleet: FleetUnderTest) -> None:
    before = metric(fleet, "dynaserve_requests_total", cut="yes", reason="forced")
    fleet.complete(prompt_of(60), split=30)
    assert metric(fleet, "dynaserve_requests_total", cut="yes", reason="forced") == before + 1


def test_models_health_metrics_and_documentation(fleet: FleetUnderTest) -> None:
    assert fleet.frontend.get("/v1/models").json()["data"][0]["id"] == fleet.model
    assert fleet.frontend.get("/health").status_code == 200
    assert metric(fleet, "vllm:generation_tokens_total") > 0
    paths = fleet.frontend.get("/openapi.json").json()["paths"]
    assert {"/dynaserve/requests/{request_id}", "/dynaserve/fleet", "/v1/chat/completions"} <= paths.keys()


def test_the_fleet_tells_how_it_is(fleet: FleetUnderTest) -> None:
    fleet.complete(prompt_of(40), split=20)
    instances = fleet.frontend.get("/dynaserve/fleet").json()["instances"]
    assert sorted(instances) == sorted(fleet.instance_urls)
    for instance in instances.values():
        assert instance["description"]["model"] == fleet.model
        assert 0 <= instance["load"]["kv_cache_usage"] <= 1


def test_an_instance_stays_a_complete_vllm_server(fleet: FleetUnderTest) -> None:
    body = {"model": fleet.model, "prompt": prompt_of(40), "max_tokens": 8, "temperature": 0}
    for instance in fleet.instances:
        assert instance.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 8
        assert instance.get("/health").status_code == 200


@pytest.mark.parametrize("policy", ["disaggregated", "fixed:0.4"])
def test_policies_cut_by_themselves_and_a_front_end_that_leaves_frees_everything(
    fleet: FleetUnderTest, policy: str, tmp_path: Path
) -> None:
    """A second front-end over the same instances; it is stopped in the middle of an answer."""
    with fleet.another_frontend(tmp_path, "--policy", policy) as other:
        answer = other.complete(prompt_of(100), max_tokens=51)
        assert answer.same_as(fleet.complete(prompt_of(100), split=0, max_tokens=51))
        record = other.record(answer)
        assert (record["split_token"], record["reason"]) == ({"disaggregated": 100, "fixed:0.4": 60}[policy], "policy")
        stream = other.stream(other.body(prompt_of(100), max_tokens=1000))
        other.read(stream, 1)
    fleet.wait_until_empty()


def test_vllm_bench_serve_runs_without_an_error(fleet: FleetUnderTest, tmp_path: Path) -> None:
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai", "--model", fleet.model),
        *("--base-url", fleet.url, "--dataset-name", "random", "--num-prompts", "200"),
        *("--random-input-len", "64", "--random-output-len", "16", "--max-concurrency", "8", "--seed", "1"),
        *("--extra-body", '{"vllm_xargs": {"dynaserve_split": 48}}'),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (200, 0)
    fleet.wait_until_empty()


def test_where_keys_are_asked_for_nothing_is_answered_without_one(fleet: FleetUnderTest, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of clients\nsecret\n")
    keys.chmod(0o600)
    with fleet.another_frontend(tmp_path, "--api-key-file", str(keys)) as guarded:
        body = guarded.body(prompt_of(20), max_tokens=2)
        for headers, status in (({}, 401), ({"Authorization": "Bearer another"}, 401), ({"Authorization": "Bearer secret"}, 200)):
            assert guarded.frontend.post("/v1/completions", json=body, headers=headers).status_code == status
            assert guarded.frontend.get("/dynaserve/fleet", headers=headers).status_code == status
