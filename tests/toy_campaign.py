"""A comparison of small servers in place of engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.campaign import Campaign
from dynaserve.bench.systems import Running, System
from dynaserve.errors import ConfigError
from tests.completion_server import Act, running_server

MACHINE = {"cores": 2}


PROVENANCE: dict[str, Any] = {"command": "a command", "seed": 1, "machine": MACHINE, "commit": "abc1234", "smoke_test": True}


class Toys:
    """Small servers in place of engines. started: which of them, and by which SLO; up_together: the same, from none that is up to none."""

    def __init__(self) -> None:
        self.started: list[tuple[str, float]] = []
        self.up_together: list[list[tuple[str, float]]] = []
        self._up = 0
        self.broken_below_ms = 0.0
        self.broken = ""
        self.broken_starts: set[int] = set()

    def system(self, name: str, tbt_slo_ms: float, _: Path) -> System:
        @contextmanager
        def start() -> Iterator[Running]:
            self.started.append((name, tbt_slo_ms))
            number = sum(one == name for one, _ in self.started)
            if tbt_slo_ms < self.broken_below_ms or name == self.broken or (name == "dynamic" and number in self.broken_starts):
                raise ConfigError("it does not start")
            with running_server() as server:
                server.act = Act(slots=1 if name == "stock" else 4, delay_s=0.005)
                if not self._up:
                    self.up_together.append([])
                self.up_together[-1].append((name, tbt_slo_ms))
                self._up += 1
                try:
                    yield Running((server.url,))
                finally:
                    self._up -= 1

        return System(name, start=start)


def toy_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Campaign:
    monkeypatch.setattr("benchmarks.compare.campaign.MOST_SHARE", 2.0)  # toys sustain far more: a search would climb and climb
    return Campaign(
        workloads=("fixed:20,5",),
        systems=("stock", "dynamic"),
        tbt_slos_ms=(6000.0, 5000.0),
        layers=30,
        together=1,
        scale=0.5,
        traces=None,
        duration_s=0.3,
        repetitions=1,
        resolution=0.7,
        most_runs=2,
        seed=1,
        max_client_lag_ms=60000.0,
        eos_token_id=None,
        output=tmp_path / "out",
    )


def stopped_before_ours(campaign: Campaign) -> tuple[Campaign, Toys]:
    """One comparison, of which there is the turn of stock only; nothing is broken any more."""
    pytest.importorskip("matplotlib")
    campaign, toys = replace(campaign, tbt_slos_ms=(6000.0,)), Toys()
    toys.broken = "dynamic"
    campaign.run(toys.system, PROVENANCE)
    toys.started, toys.broken = [], ""
    return campaign, toys


ALL_PICTURES = ["capacity", "goodput", "tbt", "timeline"]


def headings(page: str) -> list[str]:
    """Of its pictures."""
    return re.findall(r"<h2>(\w+)</h2><img ", page)
