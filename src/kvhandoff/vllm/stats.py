# SPDX-License-Identifier: Apache-2.0
"""Counters and durations, towards vLLM's log line and its ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from kvhandoff.runtime.puller import PullResult

SERIES = {
    "pull_seconds": "Time of one worker's pull of one request, from the step that began it.",
    "read_seconds": "Longest read of the transfer engine in one pull.",
    "pull_bytes": "Bytes read by one worker's pull of one request.",
    "pull_descriptors": "Pieces of memory read by one worker's pull of one request.",
}
STUCK = "stuck_reads"
"""Reads of prefill workers that have sent nothing for ``stall_after``. Travels as differences,
which add up over workers and steps."""

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = tuple(4**power for power in range(1, 18))


class HandoffStats(KVConnectorStats):
    """``data["counters"]``: name to increment; ``data[series]``: observations; ``data[STUCK]``."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> HandoffStats:
        counters = Counter(self.data.get("counters", {}))
        counters.update(other.data.get("counters", {}))
        merged: dict[str, Any] = {"counters": dict(counters)}
        for name in SERIES:
            merged[name] = [*self.data.get(name, ()), *other.data.get(name, ())]
        merged[STUCK] = self.data.get(STUCK, 0) + other.data.get(STUCK, 0)
        self.data = merged
        return self

    def reduce(self) -> dict[str, int | float]:
        counters: dict[str, int | float] = dict(self.data.get("counters", {}))
        seconds = sorted(self.data.get("pull_seconds", ()))
        if seconds:
            counters["median_pull_ms"] = round(seconds[len(seconds) // 2] * 1e3, 2)
            counters["mib_read"] = round(sum(self.data["pull_bytes"]) / 2**20, 2)
        return counters


class Observations:
    """Collects what one worker sees between two steps."""

    def __init__(self) -> None:
        self._data: dict[str, Any] = {}
        self._totals: Counter[str] = Counter()
        self._stuck = 0

    def pulled(self, result: PullResult) -> None:
        """A pull ended on this worker."""
        counters = self._data.setdefault("counters", Counter())
        counters["pulls" if result.failure is None else "failed_pulls"] += 1
        if result.report.failovers:
            counters["failovers"] += result.report.failovers
        if result.failure is None:
            self._observe("pull_seconds", result.seconds)
            self._observe("read_seconds", result.report.read_seconds)
            self._observe("pull_bytes", result.report.nbytes)
            self._observe("pull_descriptors", result.report.descriptors)

    def counted(self, totals: Mapping[str, int]) -> None:
        """Totals since start; what they grew by since the last call counts."""
        grown = Counter(totals)
        grown.subtract(self._totals)
        if any(grown.values()):
            self._totals = Counter(totals)
            self._data.setdefault("counters", Counter()).update(+grown)

    def stuck(self, reads: int) -> None:
        """So many reads wait for a silent peer at the moment."""
        if reads != self._stuck:
            self._data[STUCK] = self._data.get(STUCK, 0) + reads - self._stuck
            self._stuck = reads

    def _observe(self, series: str, value: float) -> None:
        self._data.setdefault(series, []).append(value)

    def take(self) -> HandoffStats | None:
        """Everything since the last call, or None."""
        if not self._data:
            return None
        data, self._data = self._data, {}
        data["counters"] = dict(data.get("counters", {}))
        return HandoffStats(data=data)


class HandoffPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvhandoff_*`` on ``/metrics``, one time series per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series = {
            name: self._histogram_cls(
                name=f"vllm:kvhandoff_{name}",
                documentation=text,
                buckets=_SECONDS if name.endswith("seconds") else _SIZES,
                labelnames=labelnames,
            )
            for name, text in SERIES.items()
        }
        self._by_engine = {
            name: create_metric_per_engine(metric, per_engine_labelvalues)
            for name, metric in self._series.items()
        }
        self._stuck = self._gauge_cls(
            name=f"vllm:kvhandoff_{STUCK}",
            documentation="Reads that wait for a prefill worker which has fallen silent.",
            labelnames=labelnames,
        )
        self._events = self._counter_cls(
            name="vllm:kvhandoff_events",
            documentation="What happened to handed-off requests, by kind.",
            labelnames=[*labelnames, "kind"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metrics in self._by_engine.items():
            for value in transfer_stats_data.get(name, ()):
                metrics[engine_idx].observe(value)
        labels = self.per_engine_labelvalues[engine_idx]
        if change := transfer_stats_data.get(STUCK, 0):
            self._stuck.labels(*labels).inc(change)
        for kind, count in transfer_stats_data.get("counters", {}).items():
            self._events.labels(*labels, kind).inc(count)
