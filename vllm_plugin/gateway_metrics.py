"""The gateway in Prometheus: what an instance keeps for others, and what it did not obey."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

DROPPED = Counter("dynaserve_dropped_messages", "Messages on the gateway's socket that were malformed or not allowed.", ["reason"])
PARKED = Gauge("dynaserve_parked_requests", "Alphas that stand at their hand-off points.")
RESERVED = Gauge("dynaserve_reserved_blocks", "KV blocks that are granted to betas which have not resumed.")
QUARANTINED = Gauge("dynaserve_quarantined_blocks", "KV blocks of betas that are over, which a sender may still write to.")
