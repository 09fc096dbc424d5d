"""A streamed completion as bytes arrive: counts the tokens and stamps each. Knows no socket and no clock."""

from __future__ import annotations

from typing import Any

import msgspec

from dynaserve.bench.records import Failure


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class CompletionStream:
    """Reads the server-sent events of one `/v1/completions` answer with one choice.

    How many tokens an event carries is told by its cumulative `usage` (vLLM's and SGLang's `continuous_usage_stats`), or by
    `token_ids`; without either, an event with text counts as one token. The first event that carries a token decides which;
    `usage_output_tokens`, from the last usage seen, shows whether the count was right.
    """

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.counted_by: str | None = None
        self.usage_prompt_tokens: int | None = None
        self.usage_output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.failure: Failure | None = None
        self._rest = b""

    def feed(self, data: bytes, at_s: float) -> None:
        """Takes the bytes that arrived at that time; they may end anywhere."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                self._event(payload, at_s)

    def end(self, expected_output_tokens: int) -> Failure | None:
        """Called when the server has closed the answer; what is wrong with it, if anything is."""
        counted = len(self.token_times_s)
        if self.failure is not None:
            return self.failure
        if self.finish_reason is None:
            return Failure("answer cut off", f"the stream ended after {counted} tokens without a finish_reason")
        produced = counted if self.usage_output_tokens is None else self.usage_output_tokens
        if produced != expected_output_tokens:
            detail = f"{produced} output tokens instead of {expected_output_tokens}, finish_reason {self.finish_reason}"
            return Failure("wrong output length", detail)
        return None

    def _event(self, payload: bytes, at_s: float) -> None:
        try:
            event = _decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.failure = self.failure or Failure("not a completion", f"{error} in the event {payload[:200]!r}")
            return
        if event.error is not None:
            self.failure = self.failure or Failure("error in the stream", str(event.error)[:500])
        for choice in event.choices:
            self.token_times_s.extend([at_s] * self._new_tokens(choice, event.usage))
            self.finish_reason = choice.finish_reason or self.finish_reason
        if event.usage is not None:
            self.usage_prompt_tokens = event.usage.prompt_tokens
            self.usage_output_tokens = event.usage.completion_tokens

    def _new_tokens(self, choice: _Choice, usage: _Usage | None) -> int:
        total = usage.completion_tokens if usage is not None else None
        if self.counted_by is None and (total or choice.token_ids or choice.text):
            self.counted_by = "usage" if total is not None else "token_ids" if choice.token_ids is not None else "events"
        match self.counted_by:
            case "usage":
                return max(0, (total or 0) - len(self.token_times_s))
            case "token_ids":
                return len(choice.token_ids or ())
            case "events":
                return 1 if choice.text else 0
            case _:
                return 0
