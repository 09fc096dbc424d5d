"""Options of an engine that vLLM reads in its API server: defaults and limits of requests, which its input processor applies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def options_of(config: VllmConfig) -> dict[str, str]:
    """By name of the option, as JSON. Read in openai/chat_completion/serving.py:175, sampling_params.py and config/vllm.py:1281."""
    model, outputs = config.model_config, config.structured_outputs_config
    return _as_json(
        {
            "--generation-config": model.generation_config,
            "--override-generation-config": model.override_generation_config,
            "--max-logprobs": model.max_logprobs,
            "--structured-outputs-config backend": outputs.backend,
            "--watermark-config": config.watermark_config is not None,
        }
    )


def usual_options() -> dict[str, str]:
    """Of an engine that is given none of them."""
    from vllm.config import ModelConfig, StructuredOutputsConfig

    return _as_json(
        {
            "--generation-config": ModelConfig.generation_config,
            "--override-generation-config": {},
            "--max-logprobs": ModelConfig.max_logprobs,
            "--structured-outputs-config backend": StructuredOutputsConfig().backend,
            "--watermark-config": False,
        }
    )


def _as_json(values: Mapping[str, Any]) -> dict[str, str]:
    return {option: json.dumps(value, sort_keys=True, default=str) for option, value in values.items()}
