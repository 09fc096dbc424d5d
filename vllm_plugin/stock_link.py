"""The front-end's link to a vLLM server without the plugin: what an instance would be told, as HTTP requests, and what it would say.

The server gets whole requests at `/v1/completions`, their prompts as token ids.  Its answers come as token ids, too, so that the
front-end makes the text, the stop strings and the tool calls as it does for all others.  `carries` says which requests that keeps
exact; the global scheduler gives the others to instances with the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import msgspec
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynaserve import direct_http, stock
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.instance_link import LinkLost
from dynaserve.messages import Abort, Beat, Ended, FromInstance, Pulse, Run, Step, ToInstance
from dynaserve.request_log import of_request

logger = logging.getLogger("vllm.dynaserve.frontend")

LOOK_EVERY_S = 0.25
LOADS_EVERY = 4
"""So many looks whether it is there go with one at its load, for which it has to write a long page."""
NO_ANSWER_S = 1.4
"""Then it is asked anew."""

_SENT = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "allowed_token_ids",
    "watermarking",
)
"""Sampling parameters that `/v1/completions` takes by the same name."""
_OURS = ("n", "stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "extra_args")
"""What the front-end does itself: text out of tokens, several answers as requests of their own, and DynaServe's own arguments."""
_INTERNAL = ("output_kind", "stream_interval", "skip_clone", "output_text_buffer_length")
_DEFAULT = SamplingParams()
_NOT_SAID = {
    name: getattr(_DEFAULT, name)
    for name in _DEFAULT.__struct_fields__
    if not name.startswith("_") and name not in {*_SENT, *_OURS, *_INTERNAL}
}
"""What cannot be said over HTTP: the other parameters, with the values that need not be."""
_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(msgspec.Struct):
    """Of the stream; one with an error has no choices."""

    choices: list[_Choice] = []
    error: Any = None


def carries(request: EngineCoreRequest) -> bool:
    """Whether such a server computes exactly this: every parameter that differs from its default can be said over HTTP."""
    params = request.sampling_params
    if params is None or not request.prompt_token_ids or request.prompt_embeds is not None:
        return False
    if request.mm_features or request.lora_request is not None or request.resumable or request.priority:
        return False
    if any(not name.startswith("dynaserve_") for name in params.extra_args or {}):
        return False
    return all(_same(getattr(params, name), default) for name, default in _NOT_SAID.items())


def _same(value: object, default: object) -> bool:
    """Some of the values are arrays, whose == is no bool."""
    return value is default or (type(value) is type(default) and bool(value == default))


def body_of(request: EngineCoreRequest, model: str) -> dict[str, Any]:
    """For `/v1/completions`, of a request that it carries."""
    params = request.sampling_params
    assert params is not None
    sampling = {name: value for name in _SENT if (value := getattr(params, name)) is not None}
    own = {"model": model, "prompt": request.prompt_token_ids, "stream": True, "return_token_ids": True}
    return sampling | own | ({} if request.cache_salt is None else {"cache_salt": request.cache_salt})


class StockLink:
    """A `Link`: its messages are those of an instance whose engine core is never silent while its server answers."""

    def __init__(self, instance: Instance) -> None:
        self.closed = False
        self._url = instance.instance_id
        self._model = instance.description.served_model_names[0]
        self._max_model_len = instance.description.max_model_len
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        timeout = httpx.Timeout(NO_ANSWER_S, read=None)
        self._http = direct_http.async_client(self._url, timeout, limits)
        self._said: asyncio.Queue[list[bytes] | None] = asyncio.Queue()
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    async def open(self, instance_epoch: str, timeout_s: float) -> None:
        """Raises ConfigError where the server does not answer."""
        try:
            await self._look(timeout_s)
            await self._look_at_load(timeout_s)
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(f"instance {self._url} does not answer: {error!r}") from error
        self._looking = asyncio.create_task(self._keep_looking())

    async def send(self, message: ToInstance, frames: Sequence[Any] = ()) -> None:
        """What has no meaning for such a server is not said: it has no part in a cut request, and knows no other instance."""
        if self.closed:
            return
        match message:
            case Run(request_id=request_id):
                progress = _Progress(request_id, self._decoder.decode(frames), time.monotonic())
                task = asyncio.create_task(self._run(progress))
                self._running[request_id] = task
                # Not in the task: one that is cancelled before it begins would say nothing.
                task.add_done_callback(lambda _: self._end(progress))
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    if (running := self._running.get(request_id)) is not None:
                        running.cancel()

    async def receive(self) -> list[bytes]:
        """The next message; raises LinkLost when there will be none."""
        frames = await self._said.get()
        if frames is None or self.closed:
            raise LinkLost("closed")
        return frames

    async def ended(self) -> str:
        """Waits until the server does not answer any more, and returns how."""
        return await asyncio.shield(self._over)

    def close(self, *, bye: bool = False) -> None:
        """Ends what runs there: vLLM aborts a request whose client has gone."""
        if self.closed:
            return
        self.closed = True
        for task in (*self._running.values(), *([] if self._looking is None else [self._looking])):
            with contextlib.suppress(RuntimeError):  # the event loop has gone
                task.cancel()
        self._said.put_nowait(None)
        self._over.cancel()
        with contextlib.suppress(RuntimeError):
            self._closing = asyncio.get_running_loop().create_task(self._http.aclose())

    # -- is it there ---------------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        """A server that is only slow is not dead: without beats `dynaserve.liveness` decides."""
        for number in count(1):
            try:
                await self._look(NO_ANSWER_S)
                if number % LOADS_EVERY == 0:
                    await self._look_at_load(NO_ANSWER_S)
            except httpx.TimeoutException:
                continue
            except (httpx.HTTPError, ValueError) as error:
                self._over.set_result(f"its server does not answer: {error!r}")
                return
            self._say(Beat(Pulse(number)))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self, timeout_s: float) -> None:
        (await self._http.get("/health", timeout=timeout_s)).raise_for_status()

    async def _look_at_load(self, timeout_s: float) -> None:
        metrics = (await self._http.get("/metrics", timeout=timeout_s)).raise_for_status()
        self._say(Step([], stock.load_of(metrics.text), time.monotonic()))

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _run(self, progress: _Progress) -> None:
        """Whatever this server makes of the request but an answer, an instance with the plugin may answer it, or say what is wrong."""
        try:
            async for output in self._answer(progress):
                self._say_outputs(output)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            told = "instance %s has not finished a request: %r"
            logger.warning(told, self._url, error, extra=of_request(progress.request_id))
            self._give_back(progress)
        except Exception:
            logger.exception("instance %s has not finished a request", self._url, extra=of_request(progress.request_id))
            self._give_back(progress)

    def _give_back(self, progress: _Progress) -> None:
        """As an engine that is told to stop does: the request is placed again."""
        self._say_outputs(EngineCoreOutput(progress.request_id, [], finish_reason=FinishReason.ABORT))

    def _end(self, progress: _Progress) -> None:
        del self._running[progress.request_id]
        self._say(Step([Ended(progress.request_id, progress.computed_tokens, 0)], None, time.monotonic()))

    async def _answer(self, progress: _Progress) -> AsyncIterator[EngineCoreOutput]:
        """Raises what the request did not survive on this server, and another may."""
        finished = False
        async with self._http.stream("POST", "/v1/completions", json=body_of(progress.request, self._model)) as response:
            if response.is_error:
                said = (await response.aread()).decode(errors="replace")[:500]
                raise httpx.HTTPStatusError(f"HTTP {response.status_code}: {said}", request=response.request, response=response)
            async for line in _lines(response):
                if finished or not line.startswith(b"data: {"):
                    continue  # to the end, so that the connection can be used again
                chunk = msgspec.json.decode(line.removeprefix(b"data: "), type=_Chunk)
                if chunk.error is not None:
                    raise httpx.RemoteProtocolError(f"the answer ended with {chunk.error}")
                for choice in chunk.choices:
                    output = progress.take(choice)
                    cut_short = output.finish_reason is FinishReason.LENGTH and not progress.is_full(self._max_model_len)
                    if cut_short:
                        output.finish_reason = None  # the request is not over, only this server is done with it
                    finished = output.finish_reason is not None
                    yield output
                    if cut_short:
                        raise httpx.RemoteProtocolError(f"the server ends answers after {progress.tokens} tokens")
        if not finished:
            raise httpx.RemoteProtocolError("the answer ended without a finish reason")

    # -- what it would say ---------------------------------------------------------------------------------------------

    def _say(self, message: FromInstance, frames: Sequence[Any] = ()) -> None:
        if not self.closed:
            self._said.put_nowait([msgspec.msgpack.encode(message), *(bytes(frame) for frame in frames)])

    def _say_outputs(self, *outputs: EngineCoreOutput) -> None:
        self._say(Step([], None, time.monotonic()), self._encoder.encode(EngineCoreOutputs(outputs=list(outputs))))


@dataclass
class _Progress:
    """Of a request. tokens: of its answer so far. sent_s: on the monotonic clock."""

    request_id: str
    request: EngineCoreRequest
    sent_s: float
    tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids or ())

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens + self.tokens - 1 if self.tokens else 0

    def is_full(self, max_model_len: int) -> bool:
        """Whether the answer is as long as it may be."""
        params = self.request.sampling_params
        assert params is not None
        assert params.max_tokens is not None
        return bool(self.tokens >= min(params.max_tokens, max_model_len - self.prompt_tokens))

    def take(self, choice: _Choice) -> EngineCoreOutput:
        """The first output tells what an engine tells with it: AsyncLLM's metrics need that."""
        first = not self.tokens
        self.tokens += len(choice.token_ids or ())
        reason = None if choice.finish_reason is None else _FINISH_REASONS[choice.finish_reason]
        output = EngineCoreOutput(self.request_id, choice.token_ids or [], finish_reason=reason, stop_reason=choice.stop_reason)
        if first:
            output.events = [EngineCoreEvent(kind, self.sent_s) for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)]
            output.prefill_stats = PrefillStats()
            output.prefill_stats.set(self.prompt_tokens, 0, 0)
        return output


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Without their ends. httpx's own `aiter_lines` ends a line at U+2028 as well, which may be in a text."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
