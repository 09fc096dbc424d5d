"""What the demo says of an answer, and when it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaserve.local.answers import Answer, Unequal, check_cut, check_equal, describe_record

UNCUT = Answer(None, "chatcmpl-1", "The light.", "stop", prompt_tokens=100, output_tokens=4)
CUT = replace(UNCUT, split_token=50, request_id="chatcmpl-2")
URLS = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"]
RECORD: dict[str, Any] = {
    "split_token": 50,
    "alpha": {"instance": URLS[1], "computed_tokens": 50, "cached_tokens": 0, "output_tokens": 0},
    "beta": {"instance": URLS[0], "computed_tokens": 53, "cached_tokens": 0, "output_tokens": 4},
    "kv": {
        "transport": "torch",
        "block_bytes": 1024,
        "blocks": 4,
        "bytes": 4096,
        "bytes_before_alpha_end": 1024,
        "chunks": [{"blocks": 1, "bytes": 1024, "at_ms": 12.0}, {"blocks": 3, "bytes": 3072, "at_ms": 25.0}],
    },
}


def test_equal_answers_pass() -> None:
    check_equal(UNCUT, CUT)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (replace(CUT, text="The lamp."), "The lamp."),
        (replace(CUT, finish_reason="length"), "length"),
        (replace(CUT, output_tokens=5), "output_tokens 5"),
    ],
)
def test_a_difference_is_named(other: Answer, named: str) -> None:
    with pytest.raises(Unequal, match=named):
        check_equal(UNCUT, other)


def test_a_cut_at_the_asked_token_passes() -> None:
    check_cut(CUT, RECORD)


@pytest.mark.parametrize("record", [RECORD | {"beta": None}, RECORD | {"split_token": 49}, RECORD | {"split_token": None}])
def test_a_request_that_was_not_cut_as_asked_is_an_error(record: dict[str, Any]) -> None:
    with pytest.raises(Unequal, match="50"):
        check_cut(CUT, record)


def test_a_record_in_words_tells_who_computed_what_and_what_crossed_when() -> None:
    assert describe_record(RECORD, URLS) == [
        "instance B: computed 50 tokens, wrote 0 tokens of the answer",
        "instance A: computed 53 tokens, wrote 4 tokens of the answer",
        "KV cache: 4 blocks of 1 KiB crossed over torch, 4 KiB in all, 25% of it while the first instance was still computing",
        "  chunks: 1 KiB at 12 ms, 3 KiB at 25 ms",
    ]


def test_a_record_of_an_uncut_request_has_one_line() -> None:
    assert len(describe_record(RECORD | {"beta": None, "kv": None}, URLS)) == 1
