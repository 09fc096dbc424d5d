"""A streamed answer, and in words what the front-end's record says about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.chat import ChatCompletionChunk

from dynaserve.errors import DynaServeError

Record = dict[str, Any]  # JSON of `dynaserve.records.RequestRecord`


class Unequal(DynaServeError):
    """A cut request was answered in another way than the uncut one, or was not cut as asked."""


@dataclass
class Answer:
    """split_token: where the request was to be cut, None for nowhere."""

    split_token: int | None
    request_id: str = ""
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add(self, chunk: ChatCompletionChunk) -> str:
        """Takes in one chunk of the stream; returns its text."""
        self.request_id = chunk.id
        if chunk.usage is not None:
            self.prompt_tokens, self.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        text = ""
        for choice in chunk.choices:
            text += choice.delta.content or ""
            self.finish_reason = choice.finish_reason or self.finish_reason
        self.text += text
        return text


def check_equal(uncut: Answer, cut: Answer) -> None:
    """Raises Unequal, naming the first field that differs."""
    for name in ("text", "finish_reason", "prompt_tokens", "output_tokens"):
        ours, theirs = getattr(cut, name), getattr(uncut, name)
        if ours != theirs:
            raise Unequal(f"cut at token {cut.split_token} the answer has {name} {ours!r}, uncut {theirs!r}")


def check_cut(answer: Answer, record: Record) -> None:
    """Raises Unequal if the request ran otherwise than cut at its split token."""
    if record["beta"] is None or record["split_token"] != answer.split_token:
        raise Unequal(f"asked to be cut at token {answer.split_token}, the request was not: {record}")


def describe_record(record: Record, urls: Sequence[str]) -> list[str]:
    """Who computed what and what crossed, a line each; instances are A, B, ... in the order of `urls`."""
    names = {url: f"instance {chr(ord('A') + index)}" for index, url in enumerate(urls)}
    lines = [_describe_micro(names, record[side]) for side in ("alpha", "beta") if record[side] is not None]
    if record["kv"] is not None:
        lines += _describe_kv(record["kv"])
    return lines


def _describe_micro(names: dict[str, str], micro: dict[str, Any]) -> str:
    name = names.get(micro["instance"], micro["instance"])
    return f"{name}: computed {micro['computed_tokens']} tokens, wrote {micro['output_tokens']} tokens of the answer"


def _describe_kv(kv: dict[str, Any]) -> list[str]:
    early = kv["bytes_before_alpha_end"] / kv["bytes"] if kv["bytes"] else 0.0
    lines = [
        f"KV cache: {kv['blocks']} blocks of {_kib(kv['block_bytes'])} crossed over {kv['transport']}, {_kib(kv['bytes'])} in all, "
        f"{early:.0%} of it while the first instance was still computing"
    ]
    if kv["chunks"]:
        lines.append("  chunks: " + ", ".join(f"{_kib(chunk['bytes'])} at {chunk['at_ms']:.0f} ms" for chunk in kv["chunks"]))
    return lines


def _kib(size_bytes: float) -> str:
    return f"{size_bytes / 1024:.0f} KiB"
