"""`dynaserve bench replay`: plan, send, judge, report."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from dynaserve.bench import client, endpoint, options, report
from dynaserve.bench.client import IsLost, Planned, Progress, Recording
from dynaserve.bench.endpoint import Endpoint, HiddenLengths
from dynaserve.bench.exit_status import NOTHING_TO_REPORT, say, status_of
from dynaserve.bench.measures import summarize, why_late, why_not_exact
from dynaserve.bench.options import ReplayOptions
from dynaserve.bench.prompts import Prompts
from dynaserve.errors import ConfigError, NotTrusted
from dynaserve.files import check_replaceable
from workloads import arrivals, catalog
from workloads.trace import TraceRequest, WorkloadError

COMMAND = "bench replay"


def main(arguments: Sequence[str]) -> None:
    """Ends with the exit status that `--help` tells."""
    raise SystemExit(status_of(COMMAND, lambda: run(options.parse(arguments), arguments)))


def run(opts: ReplayOptions, arguments: Sequence[str]) -> int:
    """Returns the exit status. Raises ConfigError before the first request is sent, NotTrusted after the last."""
    if opts.output is not None:
        check_replaceable(opts.output)
    requests = plan_requests(opts)
    prompts = Prompts(secrets.randbits(32) if opts.prompt_seed is None else opts.prompt_seed, opts.vocabulary)
    client.allow_many_connections()
    with report.ProgressLine.on(Console(stderr=True, highlight=False)) as line:
        servers, recording = asyncio.run(measure(opts, requests, prompts, line.show))
    summary = summarize(recording.records, recording.loop_lags_ms, opts.slo)
    problem = why_not_exact(recording.records) or why_late(summary, opts.max_client_lag_ms)
    provenance = _provenance(opts, arguments, servers, prompts)
    if opts.output is not None:
        report.write_raw(opts.output, provenance, recording, summary, problem)
    if problem is not None:
        raise NotTrusted(problem)
    report.print_summary(Console(highlight=False), provenance, summary, opts.slo, recording.stolen_share)
    if not summary.finished:
        return say(COMMAND, "no request finished", NOTHING_TO_REPORT)
    return 0


def plan_requests(opts: ReplayOptions, fewest: int = 0) -> list[TraceRequest]:
    """What is sent when, by the options and the seed alone; at least so many, though they arrive after its duration. Raises ConfigError."""
    try:
        workload = catalog.scaled(catalog.load(opts.workload, opts.traces, opts.tokenizer), opts.scale)
        if opts.skip_s is not None:
            workload = catalog.since(workload, opts.skip_s)
        if opts.max_total_tokens is not None:
            workload = catalog.limited(workload, opts.max_total_tokens)
        rng = np.random.default_rng(opts.seed)
        if opts.drawn:
            workload = catalog.drawn(workload, catalog.GENERATED_REQUESTS, np.random.default_rng((opts.seed, 1)))
        times = arrivals.arrival_times(opts.arrivals, workload, opts.rate_per_s, rng)
        return arrivals.schedule(workload, times, requests=opts.requests, duration_s=opts.duration_s, fewest=fewest)
    except WorkloadError as error:
        raise ConfigError(str(error)) from error


async def measure(
    opts: ReplayOptions,
    requests: Sequence[TraceRequest],
    prompts: Prompts,
    show: Callable[[Progress], None],
    is_lost: IsLost = lambda _: False,
) -> tuple[list[Endpoint], Recording]:
    """Probes the servers, warms them up and replays the requests. Raises ConfigError if one does not do as asked before.

    is_lost: as of `client.replay`.
    """
    async with client.http_client(opts.api_key) as http:
        probe = [opts.vocabulary.start, opts.vocabulary.stop - 1]
        servers = await endpoint.find_all(http, opts.urls, opts.model, opts.extra_body, probe, opts.eos_token_id)
        hidden = None if opts.eos_token_id is None else HiddenLengths.of(opts.eos_token_id, requests)
        await _warm_up(http, servers, requests, prompts, opts, hidden)
        plan = [_planned(servers, prompts, index, request, hidden) for index, request in enumerate(requests)]
        return servers, await client.replay(http, plan, opts.timeout_s, show, is_lost)


async def _warm_up(
    http: httpx.AsyncClient,
    servers: Sequence[Endpoint],
    requests: Sequence[TraceRequest],
    prompts: Prompts,
    opts: ReplayOptions,
    hidden: HiddenLengths | None,
) -> None:
    """Sends requests of the same lengths, but prompts that the run does not have."""
    for number, request in enumerate(islice(cycle(requests), opts.warmup)):
        planned = _planned(servers, prompts, len(requests) + number, replace(request, prefix_hashes=()), hidden)
        record = await client.send(http, planned, 0.0, opts.timeout_s)
        if problem := record.failure or why_not_exact([record]):
            raise ConfigError(f"warm-up request {number} of {opts.warmup} failed: {problem}")


def _planned(servers: Sequence[Endpoint], prompts: Prompts, index: int, request: TraceRequest, hidden: HiddenLengths | None) -> Planned:
    server = servers[index % len(servers)]
    body = server.body(prompts.token_ids(index, request), request.output_tokens, hidden)
    return Planned(index, request.arrived_at_s or 0.0, request, server.completions_url, body)


def _provenance(opts: ReplayOptions, arguments: Sequence[str], servers: Sequence[Endpoint], prompts: Prompts) -> dict[str, Any]:
    return {
        "command": report.command_line(arguments),
        "url": ",".join(server.url for server in servers),
        "model": servers[0].model,
        "workload": opts.workload,
        "seed": opts.seed,
        "eos_token_id": opts.eos_token_id,
        "prompt_seed": prompts.seed,
        "slo": asdict(opts.slo),
        "usage_per_event": all(server.usage_per_event for server in servers),
    }
