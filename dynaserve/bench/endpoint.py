"""The server under test: its model, and what it understands beyond OpenAI's own fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import httpx
import msgspec

from dynaserve.bench.stream import CompletionStream
from dynaserve.errors import ConfigError
from dynaserve.urls import http_url
from workloads.trace import TraceRequest

_PROBE_OUTPUT_TOKENS = 2
_REFUSES_A_FIELD = (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY)
_CERTAIN_BIAS = 100
"""The largest `logit_bias` there is: such a token is the next one, unless it may not come yet."""


@dataclass(frozen=True)
class HiddenLengths:
    """Answers of which the server does not know the length, as those of real clients: they end by a token, and not by max_tokens.

    eos_token_id: cannot come before (vLLM's `min_tokens`), and is certain then. longest_answer_tokens, longest_total_tokens: of the run.
    Each request asks for as much as the longest has, so that max_tokens tells its length to none but that one.
    """

    eos_token_id: int
    longest_answer_tokens: int
    longest_total_tokens: int

    @classmethod
    def of(cls, eos_token_id: int, requests: Sequence[TraceRequest]) -> Self:
        """requests: at least one."""
        longest_total_tokens = max(request.prompt_tokens + request.output_tokens for request in requests)
        return cls(eos_token_id, max(request.output_tokens for request in requests), longest_total_tokens)

    def fields(self, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Of the body of a request for an answer of so many tokens, the last of which is the end."""
        return {
            "max_tokens": min(self.longest_answer_tokens, self.longest_total_tokens - prompt_tokens),
            "min_tokens": output_tokens - 1,
            "stop_token_ids": [self.eos_token_id],
            "logit_bias": {str(self.eos_token_id): _CERTAIN_BIAS},
        }


@dataclass(frozen=True)
class Endpoint:
    """url: without `/v1`. usage_per_event: the server accepts `continuous_usage_stats`. extra_body: merged into each request."""

    url: str
    model: str
    usage_per_event: bool
    extra_body: dict[str, Any]

    @property
    def completions_url(self) -> str:
        return f"{self.url}/v1/completions"

    def body(self, prompt: list[int], output_tokens: int, hidden: HiddenLengths | None = None) -> bytes:
        """A greedy request for exactly that many tokens, streamed. hidden None: it says so itself."""
        usage = {"include_usage": True, "continuous_usage_stats": True} if self.usage_per_event else {"include_usage": True}
        length = {"max_tokens": output_tokens, "ignore_eos": True} if hidden is None else hidden.fields(len(prompt), output_tokens)
        fields = {
            "model": self.model,
            "prompt": prompt,
            **length,
            "temperature": 0,
            "stream": True,
            "stream_options": usage,
        }
        return msgspec.json.encode(fields | self.extra_body)


def base_url(url: str) -> str:
    """The part before `/v1`. Raises ConfigError for what is not an HTTP URL."""
    return http_url(url).removesuffix("/v1").rstrip("/")


def base_urls(urls: Iterable[str]) -> tuple[str, ...]:
    """Of servers that requests go to in turn. Raises ConfigError as `base_url`, and for one that is given twice."""
    found = tuple(map(base_url, urls))
    if twice := [url for number, url in enumerate(found) if url in found[:number]]:
        raise ConfigError(f"{twice[0]} is given twice: requests go to each server in turn")
    return found


async def find_all(
    http: httpx.AsyncClient,
    urls: Sequence[str],
    model: str | None,
    extra_body: dict[str, Any],
    probe: list[int],
    eos_token_id: int | None = None,
) -> list[Endpoint]:
    """`find` for each. Raises ConfigError also if they serve different models."""
    servers = [await find(http, url, model, extra_body, probe, eos_token_id) for url in urls]
    if len(models := {server.model for server in servers}) > 1:
        raise ConfigError(f"{', '.join(urls)} serve different models ({', '.join(sorted(models))}), while requests go to each in turn")
    return servers


async def find(
    http: httpx.AsyncClient,
    url: str,
    model: str | None,
    extra_body: dict[str, Any],
    probe: list[int],
    eos_token_id: int | None = None,
) -> Endpoint:
    """Asks the server for its model (LoRA adapters have a `parent` and do not count), unless it is named, and tries a short request.

    probe: the prompt of that request; the ends of the vocabulary in it show that the server knows them. `extra_body` is not part of
    it, as its values may fit the lengths of the workload only. eos_token_id: another request shows that answers end by it when
    they are wanted to. Raises ConfigError, with the server's own words, if it does not answer, serves several models, refuses a request,
    counts the prompt otherwise or ends the answer elsewhere.
    """
    try:
        endpoint = Endpoint(url, model or await _only_model(http, url), usage_per_event=True, extra_body={})
        response = await _try(http, endpoint, probe)
        if response.status_code in _REFUSES_A_FIELD:
            endpoint = replace(endpoint, usage_per_event=False)
            response = await _try(http, endpoint, probe)
        _check_count(endpoint, probe, response)
        if eos_token_id is not None:
            hidden = HiddenLengths(eos_token_id, 2 * _PROBE_OUTPUT_TOKENS, len(probe) + 2 * _PROBE_OUTPUT_TOKENS)
            _check_end(endpoint, eos_token_id, await _try(http, endpoint, probe, hidden))
    except httpx.HTTPError as error:
        raise ConfigError(f"{url} does not answer: {error or type(error).__name__}") from error
    return replace(endpoint, extra_body=extra_body)


def _check_count(endpoint: Endpoint, probe: list[int], response: httpx.Response) -> None:
    stream = _answer(endpoint, response)
    if stream.usage_prompt_tokens != len(probe):
        counted = "says no usage" if stream.usage_prompt_tokens is None else f"counted {stream.usage_prompt_tokens}"
        raise ConfigError(f"{endpoint.completions_url} was sent a prompt of {len(probe)} tokens and {counted}: {response.text[:300]}")


def _check_end(endpoint: Endpoint, eos_token_id: int, response: httpx.Response) -> None:
    if failure := _answer(endpoint, response).end(_PROBE_OUTPUT_TOKENS):
        raise ConfigError(
            f"{endpoint.completions_url} does not end an answer by token {eos_token_id} when it is told to by min_tokens, stop_token_ids"
            f" and logit_bias, as vLLM does (--eos-token-id): {failure.detail}"
        )


def _answer(endpoint: Endpoint, response: httpx.Response) -> CompletionStream:
    if response.is_error:
        raise ConfigError(f"{endpoint.completions_url} answers HTTP {response.status_code} to a short request: {response.text[:500]}")
    stream = CompletionStream()
    stream.feed(response.content, 0.0)
    return stream


async def _try(http: httpx.AsyncClient, endpoint: Endpoint, probe: list[int], hidden: HiddenLengths | None = None) -> httpx.Response:
    return await http.post(endpoint.completions_url, content=endpoint.body(probe, _PROBE_OUTPUT_TOKENS, hidden), timeout=60)


async def _only_model(http: httpx.AsyncClient, url: str) -> str:
    response = await http.get(f"{url}/v1/models", timeout=10)
    try:
        models = response.raise_for_status().json()["data"]
        names = [str(model["id"]) for model in models if model.get("parent") is None]
    except (httpx.HTTPStatusError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{url}/v1/models does not list models (HTTP {response.status_code}): {response.text[:200]!r}; name one with --model"
        ) from error
    if len(names) != 1:
        raise ConfigError(f"{url} serves {len(names)} models ({', '.join(names)}): name one with --model")
    return names[0]
