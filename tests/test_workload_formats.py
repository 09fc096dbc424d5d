"""Public traces in their authors' own formats, generated lengths and the named workloads that are made of others."""

from __future__ import annotations

import gzip
import json
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from workloads import arrivals, catalog, formats, lengths
from workloads.catalog import Workload
from workloads.lengths import JointLengths, LogNormal
from workloads.trace import TraceRequest, WorkloadError

TRACES = Path(__file__).parents[2] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the trace files are not part of the repository")


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_azure_times_are_seconds_since_the_first_request(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.5000000,374,44",
        "2023-11-17 00:00:03.7500000,396,109",
    )
    assert formats.read("azure", path) == [TraceRequest(0.0, 374, 44), TraceRequest(4.25, 396, 109)]


def test_burstgpt_leaves_out_failed_requests_and_keeps_the_model_as_label(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    failed = ("45,GPT-4,9,0,9,API log", "46,GPT-4,0,0,0,API log")
    path = write(tmp_path / "b.csv", header, "5,ChatGPT,472,18,490,Conversation log", *failed, "47.5,GPT-4,30,2,32,API log")
    assert formats.read("burstgpt", path) == [TraceRequest(0.0, 472, 18, label="ChatGPT"), TraceRequest(42.5, 30, 2, label="GPT-4")]


def test_mooncake_milliseconds_and_prefix_blocks_are_read(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}]
    rows.append({"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]})
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert formats.read("mooncake-jsonl", path) == [TraceRequest(0.0, 600, 5, (0, 1)), TraceRequest(3.0, 700, 6, (0, 2))]


def test_length_files_have_no_times(tmp_path: Path) -> None:
    path = write(tmp_path / "v.csv", "num_prefill_tokens,num_decode_tokens,pd_ratio", "3772,54,69.9", "2015.0,156.0,12.9")
    assert formats.read("vidur", path) == [TraceRequest(None, 3772, 54), TraceRequest(None, 2015, 156)]


def test_sharegpt_counts_the_first_question_and_answer(tmp_path: Path) -> None:
    def turns(*pairs: tuple[str, str]) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in pairs]}

    conversations = [turns(("human", "a b c"), ("gpt", "d e"), ("human", "f")), turns(("gpt", "a"), ("human", "b")), turns(("human", "a"))]
    path = write(tmp_path / "s.json", json.dumps(conversations))
    assert formats.read("sharegpt", path, lambda text: len(text.split())) == [TraceRequest(None, 3, 2)]
    with pytest.raises(WorkloadError, match="--tokenizer"):
        catalog.load(f"sharegpt:{path}")


@pytest.mark.parametrize(
    ("conversations", "named"),
    [
        ([{"conversations": ["hello", "world"]}], "conversation 0: turn 0: 'hello' is not a JSON object"),
        ([{"conversations": [{"from": "human"}, None]}], "conversation 0: turn 1: 'None' is not a JSON object"),
        ([{"conversations": []}, {"conversations": "x"}], "conversation 1: has no list of conversations"),
        ({}, "is not a JSON list of conversations"),
    ],
)
def test_a_bad_sharegpt_file_is_refused_with_conversation_and_value(tmp_path: Path, conversations: object, named: str) -> None:
    path = write(tmp_path / "s.json", json.dumps(conversations))
    with pytest.raises(WorkloadError) as refusal:
        formats.read("sharegpt", path, len)
    assert str(refusal.value) == f"{path}: {named}"


def test_sharegpt_is_counted_by_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.enable_truncation(1)  # As some models' files have it, for their training.
    model.enable_padding(length=64)
    model.save(str(tmp_path / "tokenizer.json"))
    turns = [{"from": "human", "value": "a b \ud800"}, {"from": "gpt", "value": "b"}]
    path = write(tmp_path / "s.json", json.dumps([{"conversations": turns}]))
    loaded = catalog.load(f"sharegpt:{path}", tokenizer=tmp_path / "tokenizer.json")
    assert loaded.requests == (TraceRequest(None, 3, 1),)
    with pytest.raises(WorkloadError, match=r"s\.json: is no tokenizer"):
        catalog.load(f"sharegpt:{path}", tokenizer=path)


@pytest.mark.parametrize(
    ("kind", "lines", "named"),
    [
        ("azure", ["TIMESTAMP,ContextTokens", "x,1"], "no column GeneratedTokens"),
        ("azure", ["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"], "line 2: TIMESTAMP: 'noon'"),
        ("azure", ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 00:00:00,0,1"], "line 2: ContextTokens: '0'"),
        ("azure", ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 00:00:00,1"], "line 2: not 3 values"),
        ("burstgpt", ["Timestamp,Model,Request tokens,Response tokens", "1,m,2.5,1"], "line 2: Request tokens: '2.5'"),
        ("burstgpt", ["Timestamp,Model,Request tokens,Response tokens", "1,m,0,1"], "line 2: Request tokens: '0' is not a whole number"),
        ("mooncake-jsonl", ["[]"], "line 1: is not a JSON object"),
        ("mooncake-jsonl", ['{"timestamp": 0}'], "line 1: input_length: None"),
        ("mooncake-jsonl", ['{"timestamp": 0, "hash_ids": 3}'], "line 1: hash_ids: 3"),
        ("mooncake-jsonl", [f'{{"timestamp": {"9" * 5000}}}'], "line 1: is not JSON: Exceeds the limit"),
        ("mooncake-jsonl", ["[" * 100_000], "line 1: is not JSON: maximum recursion depth"),
        (
            "mooncake-jsonl",
            ['{"timestamp": 0, "hash_ids": [4, -1]}'],
            "line 1: hash_ids: [4, -1] is not a list of whole numbers of at least 0",
        ),
        (
            "mooncake-jsonl",
            ['{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [4, 5]}'],
            "line 1: hash_ids: 2 ids, but 512 prompt tokens are 1 blocks",
        ),
        ("mooncake-jsonl", ['{"timestamp": 0, "input_length": 0}'], "line 1: input_length: 0"),
        ("mooncake-jsonl", [f'{{"timestamp": 0, "input_length": {10**20}}}'], f"input_length: {10**20} is not a whole number from 1 to"),
        ("mooncake-jsonl", [f'{{"timestamp": 0, "input_length": {10**400}}}'], "line 1: input_length: 1000"),
        ("vidur", ["num_prefill_tokens,num_decode_tokens", "5,0"], "holds no request"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_value(tmp_path: Path, kind: str, lines: list[str], named: str) -> None:
    path = write(tmp_path / "bad", *lines)
    with pytest.raises(WorkloadError) as refusal:
        catalog.load(f"{kind}:{path}")
    assert str(refusal.value).startswith(str(path))
    assert named in str(refusal.value)


def test_a_fit_finds_the_distribution_that_lengths_were_drawn_from() -> None:
    truth = JointLengths(LogNormal(6.0, 0.8), LogNormal(4.5, 0.6), 0.4)
    fitted = lengths.fit(truth.draw(20_000, rng()))
    assert (fitted.prompt.mu, fitted.prompt.sigma) == pytest.approx((6.0, 0.8), rel=0.02)
    assert (fitted.output.mu, fitted.output.sigma) == pytest.approx((4.5, 0.6), rel=0.02)
    assert fitted.correlation == pytest.approx(0.4, abs=0.03)


def test_drawn_lengths_stay_between_the_shortest_and_the_longest_seen() -> None:
    seen = [TraceRequest(None, 10, 5), TraceRequest(None, 4000, 90), TraceRequest(None, 200, 900)]
    drawn = lengths.fit(seen).draw(5000, rng())
    assert {10, 4000} <= {request.prompt_tokens for request in drawn}
    assert all(10 <= request.prompt_tokens <= 4000 and 5 <= request.output_tokens <= 900 for request in drawn)


def test_a_length_beyond_all_numbers_is_the_longest() -> None:
    assert LogNormal(14.0, 14.0, 1, 1 << 40).tokens(np.array([3.0, -3.0])).tolist() == [1 << 40, 1]


def test_lengths_that_never_differ_are_drawn_as_they_are() -> None:
    assert set(lengths.fit([TraceRequest(None, 10, 5)] * 3).draw(9, rng())) == {TraceRequest(None, 10, 5)}
    with pytest.raises(WorkloadError, match="at least 2 requests, not to 1"):
        catalog.load("fitted:fixed:5,5")


def test_mini_reasoning_has_the_papers_means() -> None:
    requests = catalog.load("mini-reasoning").requests
    assert np.mean([request.prompt_tokens for request in requests]) == pytest.approx(219, rel=0.02)
    assert np.mean([request.output_tokens for request in requests]) == pytest.approx(1467, rel=0.02)


def test_generated_workloads_are_the_same_each_time() -> None:
    assert catalog.load("mini-reasoning") == catalog.load("mini-reasoning")
    assert catalog.load("fitted:sample").requests == catalog.load("fitted:sample").requests


def test_the_shapes_of_table_1_are_named() -> None:
    shapes = {name: catalog.load(name).requests[0] for name in catalog.SHAPES}
    assert [(row.prompt_tokens, row.output_tokens) for row in shapes.values()] == [(8192, 32), (2048, 512), (219, 1467)]


def test_binned_arrivals_are_spread_inside_their_bin_in_their_order() -> None:
    binned = [TraceRequest(at_s, number + 1, 1) for number, at_s in enumerate([0.0] * 50 + [3.0] * 50 + [9.0] * 50)]
    smooth = arrivals.spread(binned, rng())
    times = [request.arrived_at_s or 0.0 for request in smooth]
    assert times == sorted(times)
    assert all(before.arrived_at_s <= time < before.arrived_at_s + 3 for before, time in zip(binned, times, strict=True))  # type: ignore[operator]
    assert len(set(times)) == 150
    assert [request.prompt_tokens for request in smooth] == [request.prompt_tokens for request in binned]


def test_the_bin_of_a_sparse_trace_is_its_resolution() -> None:
    binned = [TraceRequest(at_s, 1, 1) for at_s in (0.0, 0.0, 7.0, 7.0, 8.0, 14.0, 14.0, 21.0, 21.0)]
    smooth = arrivals.spread(binned, rng())
    assert all(before.arrived_at_s <= after.arrived_at_s < before.arrived_at_s + 1 for before, after in zip(binned, smooth, strict=True))  # type: ignore[operator]


def test_arrivals_that_are_not_binned_are_left_alone() -> None:
    rows = [TraceRequest(0.0, 1, 1), TraceRequest(0.5, 1, 1)]
    assert arrivals.spread(rows, rng()) == rows
    lone = [TraceRequest(None, 1, 1)]
    assert arrivals.spread(lone, rng()) == lone


def test_a_trace_can_be_entered_later() -> None:
    workload = Workload("w", tuple(TraceRequest(at_s, 1, 1) for at_s in (0.0, 5.0, 9.0)))
    assert [request.arrived_at_s for request in catalog.since(workload, 5.0).requests] == [5.0, 9.0]
    with pytest.raises(WorkloadError, match="no request that arrives at 10 s"):
        catalog.since(workload, 10.0)
    with pytest.raises(WorkloadError, match="workload mini-reasoning has no arrival times of its own"):
        catalog.since(catalog.load("mini-reasoning"), 1.0)


def test_requests_are_drawn_from_a_workload_by_the_seed() -> None:
    sample = catalog.load("sample")
    first, again, other = (catalog.drawn(sample, 1000, rng(seed)).requests for seed in (1, 1, 2))
    assert first == again != other
    shapes = {(row.prompt_tokens, row.output_tokens) for row in sample.requests}
    assert {(row.prompt_tokens, row.output_tokens) for row in first} <= shapes


@needs_traces
def test_hybrid_is_half_chat_and_half_code() -> None:
    requests = catalog.load("hybrid", TRACES).requests
    assert len(requests) == 2 * 7048
    for first, second in zip(requests[::2], requests[1::2], strict=True):
        assert {first.label, second.label} == {"bursty-chat", "azure-code"}
    ahead = sum(request.label == "azure-code" for request in requests[::2])
    assert 0.45 * 7048 < ahead < 0.55 * 7048, "servers that take turns get both"


@needs_traces
def test_mooncake_arrivals_come_in_bins_of_three_seconds_and_can_be_spread() -> None:
    requests = catalog.load("mooncake", TRACES).requests
    assert {round(request.arrived_at_s or 0.0, 1) % 3 for request in requests} == {0.0}
    smooth = arrivals.spread(requests, rng())
    assert len({request.arrived_at_s for request in smooth}) == len(requests)


@needs_traces
def test_lengths_fitted_to_a_real_trace_have_its_medians() -> None:
    real, drawn = (catalog.load(name, TRACES).requests for name in ("azure-conv", "fitted:azure-conv"))
    for of in (attrgetter("prompt_tokens"), attrgetter("output_tokens")):
        assert np.median([*map(of, drawn)]) == pytest.approx(np.median([*map(of, real)]), rel=0.35)
