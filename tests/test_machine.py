"""What this machine says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaserve import machine
from dynaserve.machine import StolenTime


def test_stolen_time_is_the_steal_of_all_ticks_since(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "_STAT", stat)
    stat.write_text("cpu  100 5 50 800 10 1 2 32 7 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    stolen = StolenTime()
    assert stolen.share() is None, "no time has passed"
    stat.write_text("cpu  150 5 50 830 10 1 2 52 7 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    assert stolen.share() == pytest.approx(0.2)
    assert str(stolen) == "20.0%"


def test_where_the_system_does_not_tell_it_is_not_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_STAT", tmp_path / "missing")
    assert StolenTime().share() is None
    assert str(StolenTime()) == "not known"
