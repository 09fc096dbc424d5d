"""What other processes tell at `/metrics`."""

from __future__ import annotations

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(page: str, name: str) -> list[Sample]:
    """Those of this name, as it stands there (a counter's ends in `_total`), or with these labels: `name{label="value"}`.

    Raises ValueError where there is none.

    Of the whole page only these lines are parsed: it has thousands, and is asked for all the time.
    """
    lines = "".join(f"{line}\n" for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    families: list[Metric] = list(text_string_to_metric_families(lines))
    found = [sample for family in families for sample in family.samples]
    if not found:
        raise ValueError(f"no {name} at /metrics")
    return found


def total(page: str, name: str) -> float:
    """The sum of these samples; 0 where there is none: a counter with labels begins when something is counted."""
    try:
        return sum(sample.value for sample in samples(page, name))
    except ValueError:
        return 0.0
