"""Options of an engine that vLLM reads in its API server: defaults and limits of requests, which its input processor applies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def options_of(config: VllmConfig) -> dict[str, str]:
    """By name of the option, as JSON. Read in openai/chat_completion/serving.py:175, sampling_params.py and config/vllm.py:1281."""
    model, outputs = config.model_config, config.structured_outputs_config
    told = {
        "--generation-config": model.generation_config,
        "--override-generation-config": model.override_generation_config,
        "--max-logprobs": model.max_logprobs,
        "--structured-outputs-config backend": outputs.backend,
        "--watermark-config": config.watermark_config is not None,
    }
    return {option: json.dumps(value, sort_keys=True, default=str) for option, value in told.items()}
