"""Grafana's dashboard and Prometheus' alerts ask for nothing that is not there, and the documentation has it all."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from dynaserve import fleet_view, frontend_metrics
from dynaserve.frontend_metrics import FleetCollector
from tests import looked_at
from vllm_plugin import gateway_metrics, step_metrics

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "examples" / "grafana" / "dynaserve.json"
ALERTS = ROOT / "examples" / "prometheus" / "rules.yaml"
DOCUMENTED = (ROOT / "docs" / "observability.md").read_text()
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
OF_PROMETHEUS = {"le", "instance", "job"}
"""Labels that are in no definition: of buckets, and of whom Prometheus has asked."""


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def exposed() -> dict[str, set[str]]:
    """Labels by the names that samples of ours have."""
    labels: dict[str, set[str]] = {}
    for module in (frontend_metrics, step_metrics, gateway_metrics):
        for metric in (value for value in vars(module).values() if isinstance(value, MetricWrapperBase)):
            (family,) = metric.describe()
            labels |= {family.name + suffix: set(metric._labelnames) for suffix in SUFFIXES[family.type]}
    registry = CollectorRegistry()
    registry.register(FleetCollector(looked_at.snapshot))
    labels |= {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}
    return labels


def names_in(expression: str, prefix: str) -> set[str]:
    return set(re.findall(rf"\b{prefix}\w+", expression))


def test_every_metric_of_ours_exists_with_its_labels() -> None:
    labels = exposed()
    for expression in expressions():
        names = names_in(expression, "dynaserve_")
        assert names <= labels.keys(), expression
        used = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        used |= set(re.findall(r"[{,](\w+)!?=", expression))
        assert used - OF_PROMETHEUS <= set().union(*(labels[name] for name in names)), expression


def test_what_vllm_counts_is_that_of_the_front_ends_only() -> None:
    of_vllm = [target["expr"] for panel in panels() for target in panel.get("targets", ()) if "vllm:" in target["expr"]]
    assert of_vllm
    assert [expression for expression in of_vllm if '{job=~"$job"}' not in expression] == []


def test_every_metric_of_vllm_exists() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("needs vLLM's source")
    source = (Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py").read_text()
    known = set(re.findall(r'name="(vllm:\w+)"', source))
    assert known
    for name in set().union(*(names_in(expression, "vllm:") for expression in expressions())):
        assert re.sub(r"_(total|bucket|count|sum)$", "", name) in known, name


def test_the_dashboard_can_be_imported() -> None:
    """It names no data source of its author's, no panel twice, and lays none over another."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert [variable["type"] for variable in dashboard["templating"]["list"]] == ["datasource", "query"]
    assert [panel["title"] for panel in panels() if panel["type"] == "row"] == ["Fleet", "Latency", "Hand-overs", "Instances"]
    assert len({panel["id"] for panel in panels()}) == len(panels())
    cells: set[tuple[int, int]] = set()
    for panel in panels():
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel.get("targets", ()))
        at = panel["gridPos"]
        taken = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= taken


def test_every_metric_of_the_front_end_is_documented() -> None:
    metrics = [value for value in vars(frontend_metrics).values() if isinstance(value, MetricWrapperBase)]
    names = {family.name + ("_total" if family.type == "counter" else "") for metric in metrics for family in metric.describe()}
    names |= {family.name for family in FleetCollector(looked_at.snapshot).collect()}
    missing = {name for name in names if f"`{name}" not in DOCUMENTED}
    assert not missing


def test_every_field_of_the_snapshot_is_documented() -> None:
    views = [value for value in vars(fleet_view).values() if isinstance(value, type) and value.__module__ == fleet_view.__name__]
    missing = {field.name for view in views for field in dataclasses.fields(view) if f"`{field.name}`" not in DOCUMENTED}
    assert not missing
