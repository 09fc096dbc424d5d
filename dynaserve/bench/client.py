"""The open-loop client: sends at times fixed beforehand, however the server is doing, and stamps what comes back."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

from dynaserve.bench.priority import before_servers
from dynaserve.bench.records import Failure, RequestRecord
from dynaserve.bench.stream import CompletionStream
from dynaserve.machine import StolenTime
from workloads.trace import TraceRequest

_HEAD_START_S = 0.1
_LAG_INTERVAL_S = 0.01
_PROGRESS_INTERVAL_S = 1.0


IsLost = Callable[[float], bool]
"""Called with each gap between two tokens (ms), in the order in which they end."""


@dataclass(frozen=True)
class Planned:
    """A request ready to be sent to `url`, `due_s` after the start of the run."""

    index: int
    due_s: float
    request: TraceRequest
    url: str
    body: bytes


@dataclass
class Progress:
    """How a run is going. given_up: nothing more is sent."""

    planned: int
    elapsed_s: float = 0.0
    sent: int = 0
    finished: int = 0
    failed: int = 0
    output_tokens: int = 0
    given_up: bool = False


@dataclass(frozen=True)
class Recording:
    """started_unix_s: the zero of all times. loop_lags_ms: how late this process woke up, once for each 10 ms of the run.
    stolen_share: of the time of the client's cores, what their host gave to others; None: not known. niceness: of the client."""

    started_unix_s: float
    records: list[RequestRecord]
    loop_lags_ms: list[float] = field(repr=False)
    stolen_share: float | None
    niceness: int


def http_client(api_key: str | None) -> httpx.AsyncClient:
    """One that opens as many connections as there are requests under way, and waits for ever: the caller has the timeout.

    It asks servers directly, as `direct_http` does: what a proxy of the environment adds would be told as theirs.
    """
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    # Idle connections are dropped before the server does it, which could be in the moment in which one is used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
    return httpx.AsyncClient(headers=headers, transport=httpx.AsyncHTTPTransport(limits=limits), timeout=None)


def allow_many_connections() -> None:
    """Raises this process's limit of open files to what it may have at most."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def replay(
    http: httpx.AsyncClient,
    plan: Sequence[Planned],
    timeout_s: float,
    show: Callable[[Progress], None],
    is_lost: IsLost = lambda _: False,
) -> Recording:
    """Sends each request of the plan (ordered by time) when it is due; returns when all have ended.

    timeout_s: for one request, from sending to its end. show: called each second. is_lost: from the first time that it is true nothing
    more is sent.
    """
    with _undisturbed() as niceness:
        started_unix_s, start_s = time.time() + _HEAD_START_S, time.perf_counter() + _HEAD_START_S
        progress, loop_lags_ms, stolen = Progress(len(plan)), list[float](), StolenTime()
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(_watch_loop(start_s, loop_lags_ms)), group.create_task(_tell(start_s, progress, show))]
            sent = []
            for planned in plan:
                await asyncio.sleep(max(0.0, start_s + planned.due_s - time.perf_counter()))
                if progress.given_up:
                    break
                sent.append(group.create_task(_counted(http, planned, start_s, timeout_s, progress, is_lost)))
            records = list(await asyncio.gather(*sent))
            for watcher in watchers:
                watcher.cancel()
    return Recording(started_unix_s, records, loop_lags_ms, stolen.share(), niceness)


@contextmanager
def _undisturbed() -> Iterator[int]:
    """By the collector and, as far as may be, by servers on the same cores. Yields the niceness."""
    gc.collect()
    gc.freeze()  # A collection that walks all the prepared bodies would stop the clock's reader for milliseconds.
    try:
        with before_servers() as niceness:
            yield niceness
    finally:
        gc.unfreeze()


async def send(
    http: httpx.AsyncClient,
    planned: Planned,
    start_s: float,
    timeout_s: float,
    on_token: Callable[[float | None], None] = lambda _: None,
) -> RequestRecord:
    """Sends one request now and reads its answer. start_s: `time.perf_counter()` at the start of the run. on_token: called with each
    token's gap to the one before (ms), None for the first."""
    stream, status = CompletionStream(), None
    sent_s = time.perf_counter()
    try:
        async with (
            asyncio.timeout(timeout_s),
            http.stream("POST", planned.url, content=planned.body) as response,
        ):
            status = response.status_code
            if response.is_error:
                failure: Failure | None = Failure(f"HTTP {status}", (await response.aread())[:500].decode(errors="replace"))
            else:
                async for data in response.aiter_raw():
                    known = len(stream.token_times_s)
                    stream.feed(data, time.perf_counter() - start_s)
                    if not known and stream.token_times_s:
                        on_token(None)
                    for before, after in pairwise(stream.token_times_s[max(0, known - 1) :]):
                        on_token(1e3 * (after - before))
                failure = stream.end(planned.request.output_tokens)
    except TimeoutError:
        failure = Failure("timed out", f"no end after {timeout_s:g} s")
    except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
        failure = Failure("no connection", _words(error))
    except httpx.HTTPError as error:
        failure = Failure("connection lost", _words(error))
    return RequestRecord(
        index=planned.index,
        label=planned.request.label,
        prompt_tokens=planned.request.prompt_tokens,
        output_tokens=planned.request.output_tokens,
        due_s=planned.due_s,
        sent_s=sent_s - start_s,
        ended_s=time.perf_counter() - start_s,
        token_times_s=stream.token_times_s,
        tokens_counted_by=stream.counted_by,
        usage_prompt_tokens=stream.usage_prompt_tokens,
        usage_output_tokens=stream.usage_output_tokens,
        finish_reason=stream.finish_reason,
        http_status=status,
        failure=failure,
    )


async def _counted(
    http: httpx.AsyncClient,
    planned: Planned,
    start_s: float,
    timeout_s: float,
    progress: Progress,
    is_lost: IsLost,
) -> RequestRecord:
    def on_token(gap_ms: float | None) -> None:
        progress.output_tokens += 1
        if gap_ms is not None:
            progress.given_up = is_lost(gap_ms) or progress.given_up

    progress.sent += 1
    record = await send(http, planned, start_s, timeout_s, on_token)
    if record.failure is None:
        progress.finished += 1
    else:
        progress.failed += 1
    return record


async def _watch_loop(start_s: float, lags_ms: list[float]) -> None:
    """Notes how late each wake-up is. Those that fall into one long pause are all noted, as a token in it would be late as well."""
    due_s = start_s
    while True:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        lags_ms.append(1e3 * max(0.0, time.perf_counter() - due_s))
        due_s += _LAG_INTERVAL_S


async def _tell(start_s: float, progress: Progress, show: Callable[[Progress], None]) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_INTERVAL_S)
        progress.elapsed_s = time.perf_counter() - start_s
        show(progress)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
