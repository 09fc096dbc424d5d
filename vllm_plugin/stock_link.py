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
from http import HTTPStatus
from itertools import count
from typing import Any

import httpx
import msgspec
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynaserve import stock
from dynaserve.errors import ConfigError
from dynaserve.fleet import Instance
from dynaserve.instance_link import LinkLost
from dynaserve.messages import Abort, Beat, Ended, Event, FromInstance, Pulse, Refused, Run, Step, ToInstance
from dynaserve.request_log import of_request

logger = logging.getLogger("vllm.dynaserve.frontend")

LOOK_EVERY_S = 0.25
"""Is it there, and how busy is it."""
NO_ANSWER_S = 1.4
"""Then it is taken for dead."""

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
    said_or_ours = {*_SENT, *_OURS, *_INTERNAL}
    default = SamplingParams()
    others = (name for name in params.__struct_fields__ if not name.startswith("_") and name not in said_or_ours)
    return all(getattr(params, name) == getattr(default, name) for name in others)


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
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._http = httpx.AsyncClient(base_url=self._url, timeout=httpx.Timeout(NO_ANSWER_S, read=None), limits=limits)
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
        except (httpx.HTTPError, ValueError) as error:
            raise ConfigError(f"instance {self._url} does not answer: {error!r}") from error
        self._looking = asyncio.create_task(self._keep_looking())

    async def send(self, message: ToInstance, frames: Sequence[Any] = ()) -> None:
        """What has no meaning for such a server is not said: it has no part in a cut request, and knows no other instance."""
        if self.closed:
            return
        match message:
            case Run(request_id=request_id):
                request: EngineCoreRequest = self._decoder.decode(frames)
                self._running[request_id] = asyncio.create_task(self._run(request_id, request))
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    if (task := self._running.get(request_id)) is not None:
                        task.cancel()

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
        for number in count(1):
            try:
                await self._look(NO_ANSWER_S)
            except (httpx.HTTPError, ValueError) as error:
                if not self._over.done():
                    self._over.set_result(f"its server does not answer: {error!r}")
                return
            self._say(Beat(Pulse(number)))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self, timeout_s: float) -> None:
        (await self._http.get("/health", timeout=timeout_s)).raise_for_status()
        metrics = (await self._http.get("/metrics", timeout=timeout_s)).raise_for_status()
        self._say(Step([], stock.load_of(metrics.text), time.monotonic()))

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _run(self, request_id: str, request: EngineCoreRequest) -> None:
        tokens = 0
        try:
            async for output in self._answer(request_id, request):
                tokens += len(output.new_token_ids)
                self._say_outputs(output)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            logger.warning("instance %s has not finished a request: %r", self._url, error, extra=of_request(request_id))
            self._say_outputs(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))  # it is placed again
        finally:
            del self._running[request_id]
            computed_tokens = len(request.prompt_token_ids or ()) + tokens - 1 if tokens else 0
            self._say_events(Ended(request_id, computed_tokens, 0))

    async def _answer(self, request_id: str, request: EngineCoreRequest) -> AsyncIterator[EngineCoreOutput]:
        """Raises what the request did not survive on this server, and another may."""
        async with self._http.stream("POST", "/v1/completions", json=body_of(request, self._model)) as response:
            if response.is_client_error and response.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                said = (await response.aread()).decode(errors="replace")[:500]
                self._say_events(Refused(request_id, f"HTTP {response.status_code}: {said}"))
                return
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = msgspec.json.decode(line.removeprefix("data: "), type=_Chunk)
                if chunk.error is not None:
                    raise httpx.RemoteProtocolError(f"the answer ended with {chunk.error}")
                for choice in chunk.choices:
                    reason = None if choice.finish_reason is None else _FINISH_REASONS[choice.finish_reason]
                    yield EngineCoreOutput(request_id, choice.token_ids or [], finish_reason=reason, stop_reason=choice.stop_reason)
                    if reason is not None:
                        return
        raise httpx.RemoteProtocolError("the answer ended without a finish reason")

    # -- what it would say ---------------------------------------------------------------------------------------------

    def _say(self, message: FromInstance, frames: Sequence[Any] = ()) -> None:
        if not self.closed:
            self._said.put_nowait([msgspec.msgpack.encode(message), *(bytes(frame) for frame in frames)])

    def _say_events(self, *events: Event) -> None:
        self._say(Step(list(events), None, time.monotonic()))

    def _say_outputs(self, *outputs: EngineCoreOutput) -> None:
        self._say(Step([], None, time.monotonic()), self._encoder.encode(EngineCoreOutputs(outputs=list(outputs))))
