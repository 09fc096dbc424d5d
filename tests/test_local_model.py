"""The models of the local fleet are made once, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

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
