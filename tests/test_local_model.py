"""The models of the local fleet are made once, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaserve.errors import ConfigError
from dynaserve.local import model


def test_a_folder_whose_making_fails_does_not_exist(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        model._build_once(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    def fail(folder: Path) -> None:
        raise AssertionError(f"made again: {folder}")

    target = tmp_path / "cache" / "model"
    assert model._build_once(target, build) == target
    assert model._build_once(target, fail) == target
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_the_cache_folder_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNASERVE_CACHE", str(tmp_path))
    assert model.cache_dir() == tmp_path
    monkeypatch.delenv("DYNASERVE_CACHE")
    assert model.cache_dir() == Path.home() / ".cache" / "dynaserve"


@pytest.mark.parametrize("layers", [0, model.LAYERS + 1])
def test_only_layers_that_the_model_has_can_be_taken(layers: int) -> None:
    with pytest.raises(ConfigError, match=f"has 30 layers, of which {layers} cannot"):
        model.first_layers(layers)


def test_the_first_layers_are_those_of_the_whole_model(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **shape)).to(torch.bfloat16)
    whole.save_pretrained(tmp_path / "whole")
    model._cut(tmp_path / "whole", 2, tmp_path / "cut")
    cut = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut", dtype="auto")
    kept = {name: weight for name, weight in whole.state_dict().items() if ".layers.2." not in name}
    assert cut.state_dict().keys() == kept.keys()
    assert all(torch.equal(weight, kept[name]) for name, weight in cut.state_dict().items())
