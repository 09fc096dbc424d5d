"""A vLLM server without the plugin, by what it tells over HTTP: `/version`, `/v1/models` and `/metrics`.

It runs whole requests only.  What it tells nobody (data type, device, limits of a batch) is taken to be as on the instances with
the plugin beside it: `dynaserve.fleet.completed`; docs/failures.md lists what is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated

import httpx
import msgspec
from msgspec import Meta

from dynaserve.errors import ConfigError
from dynaserve.kv_transfer.transport import Name
from dynaserve.messages import PROTOCOL_VERSION, InstanceDescription, Load, Size
from dynaserve.metrics_page import samples

OBSTACLE = "it is a vLLM server without the plugin"


class _Version(msgspec.Struct):
    version: Name


class _Model(msgspec.Struct):
    """parent: of an adapter, the model that it belongs to. root: what `vllm serve` was given."""

    id: Name
    root: Name | None = None
    parent: Name | None = None
    max_model_len: Size | None = None


class _Cache(msgspec.Struct):
    """Of `vllm:cache_config_info`, whose labels are texts: `str()` of each field (vllm/config/cache.py)."""

    block_size: Size
    num_gpu_blocks: Size
    enable_prefix_caching: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], Meta(max_length=1 << 16)]


def describe(url: str, get: Callable[[str], httpx.Response]) -> InstanceDescription:
    """get: of a path of the server. Raises ConfigError, naming the URL, if it does not answer as vLLM does, and httpx.HTTPError."""
    try:
        version = msgspec.json.decode(_content(get("/version")), type=_Version).version
        listed = msgspec.json.decode(_content(get("/v1/models")), type=_Models).data
        metrics = _content(get("/metrics")).decode()
        cache = msgspec.convert(cache_config(metrics), _Cache, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"instance {url} is neither a DynaServe instance nor a vLLM server: {error}") from error
    if any(line.startswith("vllm:spec_decode") for line in metrics.splitlines()):
        raise ConfigError(f"instance {url} is a vLLM server with speculative decoding: it refuses parameters that the others take")
    models = [model for model in listed if model.parent is None]
    if not models or models[0].root is None or models[0].max_model_len is None:
        raise ConfigError(f"instance {url} lists no model at /v1/models")
    return InstanceDescription(
        protocol_version=PROTOCOL_VERSION,
        instance_epoch="",
        gateway=url,
        model=models[0].root,
        served_model_names=[model.id for model in models],
        vllm_version=version,
        dtype="",
        block_size=cache.block_size,
        max_model_len=models[0].max_model_len,
        max_num_seqs=0,
        max_num_batched_tokens=0,
        num_blocks=cache.num_gpu_blocks,
        prefix_caching=cache.enable_prefix_caching == "True",
        tensor_parallel_size=0,
        device="",
        parallelism="",
        tbt_slo_ms=None,
        min_prefill_tokens=0,
        cut_obstacle=OBSTACLE,
        workers=[],
        stock=True,
    )


def _content(answer: httpx.Response) -> bytes:
    if answer.is_error:
        raise ValueError(f"HTTP {answer.status_code} at {answer.url.path}")
    return answer.content


def cache_config(metrics: str) -> Mapping[str, str]:
    """The labels of `vllm:cache_config_info` (vllm/v1/metrics/loggers.py). Raises ValueError where there is none."""
    (sample, *_) = samples(metrics, "vllm:cache_config_info")
    return dict(sample.labels)


def load_of(metrics: str) -> Load:
    """Of a server with several engines, all of them: their requests, and the fullest KV cache. Raises ValueError."""
    running, waiting, usage = (
        [sample.value for sample in samples(metrics, f"vllm:{name}")]
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )
    if not all(map(math.isfinite, (*running, *waiting, *usage))):
        raise ValueError(f"requests running {running}, waiting {waiting}, KV cache usage {usage}: not all of them are numbers")
    return Load(int(sum(running)), int(sum(waiting)), max(usage))
