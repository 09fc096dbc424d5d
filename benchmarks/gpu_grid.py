"""The grid of GPU step times that `benchmarks.paper` and `dynaserve simulate --gpu-grid` read, out of aiconfigurator's measured operators.

Needs `pip install '.[gpu-tables]'`. A step is a prefill of so many tokens after so many cached ones beside so many decodes of that context
each: the sum of the kernels that vLLM runs for it, without the host (`--overhead-ms` of `dynaserve simulate` adds that). Models are shapes,
not weights; all bfloat16. Some seconds, and nothing is downloaded.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.parsers import parser_of
from dynaserve.errors import ConfigError
from dynaserve.files import check_replaceable, write_in_one_move

PREFILL_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED_TOKENS = (0, 1024, 4096, 16384)
DECODES = (1, 8, 16, 32, 64, 128, 256)
CONTEXT_TOKENS = (512, 1024, 2048, 4096, 8192)
SYSTEMS = {"a100_sxm": "0.14.0", "h100_sxm": "0.24.0", "h200_sxm": "0.24.0"}
"""The vLLM whose kernels were measured there."""
COLUMNS = ("model", "system", "backend_version", "tp", "prefill_new", "prefill_cached", "decode_n", "decode_ctx", "ms")


@dataclass(frozen=True)
class Shape:
    """Of a dense model with full attention. devices: over which its tensors are split."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    devices: int

    def config(self) -> dict[str, Any]:
        """As its `config.json`."""
        architecture = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[self.family]
        return {
            "architectures": [architecture],
            "model_type": self.family,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 32768,
            "vocab_size": self.vocabulary,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
        }


MODELS = {
    "qwen2.5-14b": Shape("qwen2", 5120, 48, 40, 8, 13824, 152064, devices=1),
    "llama-3-8b": Shape("llama", 4096, 32, 32, 8, 14336, 128256, devices=1),
    "qwen2.5-32b": Shape("qwen2", 5120, 64, 40, 8, 27648, 152064, devices=2),
    "qwen2.5-72b": Shape("qwen2", 8192, 80, 64, 8, 29568, 152064, devices=4),
    "llama-3-70b": Shape("llama", 8192, 80, 64, 8, 28672, 128256, devices=4),
}


@dataclass(frozen=True)
class Step:
    """context_tokens: of each decode."""

    prefill_tokens: int
    cached_tokens: int
    decodes: int
    context_tokens: int

    def scheduled(self) -> dict[str, Any]:
        """As aiconfigurator asks for it."""
        prefills = 1 if self.prefill_tokens else 0
        requests = {
            "num_prefill_requests": prefills,
            "sum_prefill_tokens": self.prefill_tokens,
            "sum_prefill_kv_tokens": self.cached_tokens,
            "num_decode_requests": self.decodes,
            "sum_decode_kv_tokens": self.decodes * self.context_tokens,
        }
        return {"version": 1, "scheduled_requests": requests}


def steps() -> Iterator[Step]:
    """Of one model on one system."""
    beside = [(0, 0), *((decodes, context) for decodes in DECODES for context in CONTEXT_TOKENS)]
    for decodes, context in beside[1:]:
        yield Step(0, 0, decodes, context)
    for new in PREFILL_TOKENS:
        for cached in CACHED_TOKENS:
            for decodes, context in beside:
                yield Step(new, cached, decodes, context)


def rows(model: str, system: str, folder: Path) -> Iterator[tuple[object, ...]]:
    """In the order of `COLUMNS`. folder: of this model only, whose config.json is remembered by its name. Raises ConfigError without
    aiconfigurator-core."""
    try:
        from aiconfigurator_core.sdk import RustForwardPassPerfModel
    except ImportError as error:
        raise ConfigError(f"aiconfigurator-core is not installed ({error}): pip install 'dynaserve[gpu-tables]'") from error
    shape, version = MODELS[model], SYSTEMS[system]
    (folder / "config.json").write_text(json.dumps(shape.config()))
    setting = {
        "schema_version": 1,
        "model_name": str(folder),
        "system_name": system,
        "backend": "vllm",
        "backend_version": version,
        "systems_path": None,
        "tp_size": shape.devices,
        "pp_size": 1,
        "attention_dp_size": 1,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        **dict.fromkeys(("weight_dtype", "moe_dtype", "activation_dtype", "kv_cache_dtype"), "bfloat16"),
        "kv_block_size": None,
        "nextn": None,
    }
    built = RustForwardPassPerfModel.from_native(setting)
    for step in steps():
        ms = built.estimate_forward_pass_time_ms([step.scheduled()])
        told = (step.prefill_tokens, step.cached_tokens, step.decodes, step.context_tokens)
        yield (model, system, version, shape.devices, *told, f"{ms:.4f}")


def main(arguments: Sequence[str]) -> None:
    """Ends with exit status 2 for bad options."""
    parser = parser_of("gpu_grid", __doc__, "--output grid.csv.gz")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="CSV, compressed if its name ends in .gz")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of the attention of each model on A100, which it knows by another name
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    try:
        check_replaceable(args.output)
        with tempfile.TemporaryDirectory() as folder:
            for model in args.models:
                own = Path(folder, model)
                own.mkdir()
                for system in args.systems:
                    writer.writerows(rows(model, system, own))
                    print(f"{model} on {system}", file=sys.stderr, flush=True)
    except ConfigError as error:
        parser.error(str(error))
    content = text.getvalue().encode()
    write_in_one_move(args.output, gzip.compress(content, mtime=0) if args.output.suffix == ".gz" else content)


if __name__ == "__main__":
    main(sys.argv[1:])
