"""Requests that wait for any instance at all."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_plugin.orphans import Orphans


def test_an_orphan_waits_since_it_was_first_without_an_instance() -> None:
    orphans = Orphans(patience_s=5.0)
    orphans.add("a", 10.0)
    orphans.add("b", 12.0)
    orphans.add("a", 14.0)
    assert orphans.waiting == ["a", "b"]
    assert orphans.given_up(15.0) == []
    assert orphans.given_up(16.0) == ["a"]
    assert orphans.waiting == ["b"]


def test_an_orphan_that_was_placed_is_not_given_up() -> None:
    orphans = Orphans(patience_s=5.0)
    orphans.add("a", 10.0)
    orphans.remove("a")
    orphans.remove("a")
    assert orphans.given_up(100.0) == []
