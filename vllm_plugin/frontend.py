"""`dynaserve serve`: vLLM's own OpenAI server over a fleet of instances."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

# Before vLLM is imported: the front-end runs no model, and must start on a host without an accelerator.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import uvloop
from opentelemetry import trace
from vllm import AsyncEngineArgs, envs
from vllm.entrypoints.launchers.api_server.entry import build_and_serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.logger import configure_logging_from_args
from vllm.outputs import RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from dynaserve import fleet, length_predictor, request_log, request_spans
from dynaserve.admission import Admission
from dynaserve.errors import BadRequest, ConfigError, NoInstance, Overloaded
from dynaserve.length_predictor import LengthPredictor
from dynaserve.serve import FrontendConfig, add_arguments
from vllm_plugin import patches
from vllm_plugin.fleet_client import FleetClient
from vllm_plugin.frontend_routes import FrontendEndpoint, choose_host
from vllm_plugin.read_by_server import options_of, usual_options
from vllm_plugin.requests import check_request_id

DESCRIPTION = """\
Serve an OpenAI-compatible endpoint over a fleet of instances.

example:
  dynaserve serve MODEL --instances http://10.0.0.5:8000 http://10.0.0.6:8000 --fleet-secret-file secret --policy disaggregated"""
SAVE_EVERY_S = 60.0
"""The lengths of answers, beside the last time: a front-end may be killed."""

_FOLLOWS = re.compile(r"-beam-\d+$|^resp_[0-9a-f]+_[1-9]\d*$")
"""Ids of what vLLM asks of its engine for a request that was admitted before: a step of a beam search (generate/beam_search/online.py:85),
or what follows on a tool's answer (openai/responses/serving.py:656)."""

logger = logging.getLogger("vllm.dynaserve.frontend")


class FleetLLM(AsyncLLM):
    """AsyncLLM that refuses before the answer starts: from inside the stream an error would come as HTTP 200 or 500."""

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """vLLM's server asks before it begins any answer; Responses call `generate` when theirs has begun (openai/responses/serving.py:350,
        665). With a `request_id` it is asked once more for what `generate` has admitted."""
        super().check_admission(n, request_id)
        client: FleetClient = self.engine_core
        if request_id is None:
            try:
                client.check_room(n)
            except (NoInstance, Overloaded) as error:
                raise GracefulHTTPError(str(error), HTTPStatus(error.status)) from error

    def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if token_ids is None and isinstance(prompt, dict) and "prompt_embeds" in prompt:
            raise VLLMValidationError("prompt embeddings without token ids are not supported by DynaServe")
        prompt_tokens = None if token_ids is None else len(token_ids)
        max_tokens = sampling_params.max_tokens or self.model_config.max_model_len - (prompt_tokens or 0)
        client: FleetClient = self.engine_core
        try:
            check_request_id(request_id)
            client.admit(prompt_tokens, sampling_params, max_tokens, follows=_FOLLOWS.search(request_id) is not None)
        except BadRequest as error:
            raise VLLMValidationError(str(error)) from error
        except (NoInstance, Overloaded) as error:
            raise GracefulHTTPError(str(error), HTTPStatus(error.status)) from error
        stream: AsyncGenerator[RequestOutput, None] = super().generate(prompt, sampling_params, request_id, **kwargs)
        return stream

    def shutdown(self, timeout: float | None = None) -> None:
        """The fleet first: AsyncLLM ends the tokenizer before (async_llm.py:296), and requests may still come to be refused."""
        client: FleetClient | None = getattr(self, "engine_core", None)
        if client is not None:
            client.shutdown(timeout=timeout)
        super().shutdown(timeout=0)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """As AsyncLLM's (async_llm.py:911), which tells its engine as little of why as a stop string does."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        client: FleetClient = self.engine_core
        await client.clients_gone(self.output_processor.abort_requests(request_ids, internal))
        if self.log_requests:
            logger.info("Aborted request(s) %s.", ",".join(request_ids))

    async def check_health(self) -> None:
        """`/health` answers 503 where every request would be: no instance lives, or this front-end is leaving."""
        await super().check_health()
        client: FleetClient = self.engine_core
        if reason := client.why_unavailable(time.monotonic()):
            raise EngineDeadError(reason)

    async def _add_request(self, request: EngineCoreRequest, *args: Any) -> None:
        """vLLM keeps what it has noted of a request that could not be sent: of one that nobody takes, or whose client left meanwhile."""
        try:
            await super()._add_request(request, *args)
        except BaseException:
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    def end_unavailable(self, request_id: str, reason: str, status: int) -> None:
        """Ends a running request with this HTTP status, or with an error event where its answer has begun. With it end the other
        answers that were asked for with the same `n`."""
        state = self.output_processor.request_states.get(request_id)
        whole = request_id if state is None or state.parent_req is None else state.parent_req.request_id
        others = [name for name in self.output_processor.abort_requests([whole], internal=True) if name != request_id]
        if others:
            client: FleetClient = self.engine_core
            client.abort_soon(others)
        if state is not None and state.queue is not None:
            state.queue.output = None  # of the abort, which the client must not take for an answer
            state.queue.put(GracefulHTTPError(reason, HTTPStatus(status)))


def make_parser() -> argparse.ArgumentParser:
    """vLLM's own options of `vllm serve`, and ours. Those of the engine are read by the instances, not here."""
    parser = FlexibleArgumentParser(prog="dynaserve serve", description=DESCRIPTION)
    add_arguments(parser)
    parser = make_arg_parser(parser)
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def serve(argv: list[str], config: FrontendConfig | None) -> None:
    """Runs the server until it is told to stop; `config` is None only where `argv` asks for help. Raises ConfigError."""
    args = make_parser().parse_args(argv)
    assert config is not None
    config.check_read(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    configure_logging_from_args(args)
    if (servers := args.api_server_count or 1) > 1:
        raise ConfigError(f"--api-server-count is {servers}: a front-end is one process, start another one over the same instances")
    fleet.check_model(args.model, config.instances)
    patches.check_vllm()
    _fit(args, config)
    args.api_key = [*(args.api_key or [envs.VLLM_API_KEY or ""]), *config.api_keys]
    choose_host(args)
    validate_parsed_serve_args(args)
    client = FleetClient(
        config.instances,
        config.placer,
        config.transport,
        config.request_timeout_s,
        Admission(config.most_waiting),
        config.secret,
        config.also_check,
        allow_stock=config.allow_stock,
    )
    patches.install_fleet_client(lambda _: client)
    patches.install_endpoint(lambda: FrontendEndpoint(config.instances_file, config.most_body_bytes))
    try:
        uvloop.run(_serve(args, client, config))
    finally:
        if config.length_history is not None:
            _save_lengths(config.length_history, config.placer.lengths)


def _fit(args: argparse.Namespace, config: FrontendConfig) -> None:
    """Takes from the instances what vLLM's server must know of its engine, and loads what the command line names."""
    if args.tool_parser_plugin and len(args.tool_parser_plugin) > 3:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin and len(args.reasoning_parser_plugin) > 3:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    longest = min(instance.description.max_model_len for instance in config.instances)
    if args.max_model_len is not None and args.max_model_len > longest:
        raise ConfigError(f"--max-model-len {args.max_model_len} is more than the instances' {longest}")
    # vLLM's -1 ("auto") is what the engine's memory has room for: the instances have seen to that.
    args.max_model_len = longest if args.max_model_len in (None, -1) else args.max_model_len
    args.served_model_name = args.served_model_name or config.instances[0].description.served_model_names
    args.mm_processor_cache_gb = 0  # an instance keeps what it was sent, and the next turn may go to another one


async def _save_now_and_then(path: Path, lengths: LengthPredictor) -> None:
    while True:
        await asyncio.sleep(SAVE_EVERY_S)
        await asyncio.to_thread(_save_lengths, path, lengths)


def _save_lengths(path: Path, lengths: LengthPredictor) -> None:
    try:
        length_predictor.save(path, lengths)
    except OSError as error:  # requests go on without
        logger.warning("the lengths of answers cannot be saved to %s: %s", path, error.strerror)


async def _serve(args: argparse.Namespace, client: FleetClient, config: FrontendConfig) -> None:
    signal.signal(signal.SIGTERM, _stop_while_starting)
    listen_address, sock = setup_server(args, reuse_port=False)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    fleet.check_read_by_server(options_of(vllm_config), usual_options(), config.instances)
    fleet.check_reasoning_parser(vllm_config.structured_outputs_config.reasoning_parser or None, config.instances)
    llm = FleetLLM.from_vllm_config(
        vllm_config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )
    client.on_unavailable = llm.end_unavailable  # type: ignore[method-assign]
    client.watchers.append(partial(request_log.log_over, engine_args.enable_log_requests))
    if vllm_config.observability_config.otlp_traces_endpoint is not None:  # vLLM has set up where its spans go, and so ours
        client.watchers.append(partial(request_spans.emit, trace.get_tracer("dynaserve")))
    try:
        await client.connect(may_lack=config.instances_file is not None)
        if config.length_history is not None:
            client.spawn(_save_now_and_then(config.length_history, config.placer.lengths))
        # h11: the limits of --h11-max-incomplete-event-size act in no other parser, and httptools has none of its own.
        shutdown_task = await build_and_serve(llm, listen_address, sock, args, http="h11")
        await shutdown_task
    finally:
        sock.close()
        llm.shutdown()


def _stop_while_starting(*_: Any) -> None:
    """Until uvicorn installs its own handlers."""
    raise KeyboardInterrupt("terminated")
