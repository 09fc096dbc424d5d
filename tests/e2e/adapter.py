"""A LoRA adapter with random weights, large enough to change every answer."""

from __future__ import annotations

import json
from pathlib import Path

ADAPTER = "an-adapter"
RANK = 8


def write_adapter(model: Path, folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    head = config["head_dim"]
    heads = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in heads.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * 0.1
            weights[f"{prefix}.lora_B.weight"] = torch.randn(count * head, RANK, generator=generator) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    adapter_config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(heads), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
