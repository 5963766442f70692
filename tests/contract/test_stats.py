# SPDX-License-Identifier: Apache-2.0
"""What workers observe reaches vLLM's metrics once, whoever saw it and however it is summed up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # comes with vLLM

from kvhandoff.vllm.stats import HandoffPromMetrics, HandoffStats, Observations

LABELS = {"model_name": "m", "engine": "0"}


def test_stuck_reads_add_up_over_workers_and_steps() -> None:
    """Each worker tells of changes only; the gauge is what they come to."""
    workers = [Observations() for _ in range(2)]
    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = HandoffPromMetrics(config, types, list(LABELS), {0: list(LABELS.values())})
    for step, expected in (((3, 0), 3), ((3, 2), 5), ((0, 2), 2), ((0, 2), 2), ((0, 0), 0)):
        stats = HandoffStats()
        for worker, stuck in zip(workers, step, strict=True):
            worker.stuck(stuck)
            if (taken := worker.take()) is not None:
                stats.aggregate(taken)
        metrics.observe(stats.data)
        assert REGISTRY.get_sample_value("vllm:kvhandoff_stuck_reads", LABELS) == expected
