# SPDX-License-Identifier: Apache-2.0
"""vLLM's view of this package: one thin class, under three names.

Each method says to whom it delegates; the flow is told in the package's docstring.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvhandoff.vllm import introspect
from kvhandoff.vllm.metadata import DeskAddress, StepMetadata
from kvhandoff.vllm.scheduler import ConsumerScheduler, ProducerScheduler
from kvhandoff.vllm.stats import HandoffPromMetrics, HandoffStats
from kvhandoff.vllm.worker import ConsumerWorker, ProducerWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class KVHandoffConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV from prefill engines (any PCP size) to decode engines over Mooncake."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        self._scheduler: ProducerScheduler | ConsumerScheduler | None = None
        self._worker: ProducerWorker | ConsumerWorker | None = None
        introspect.require_supported(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = introspect.settings(vllm_config)
        produces = transfer.kv_role == "kv_producer"
        if role is KVConnectorRole.SCHEDULER:
            scheduler = ProducerScheduler if produces else ConsumerScheduler
            self._scheduler = scheduler(vllm_config, kv_cache_config, config)
        else:
            worker = ProducerWorker if produces else ConsumerWorker
            self._worker = worker(vllm_config, kv_cache_config, config)

    @property
    def scheduler(self) -> ProducerScheduler | ConsumerScheduler:
        """The scheduler's half; only its process has one."""
        if self._scheduler is None:
            raise RuntimeError("a scheduler's method was called on a worker's connector")
        return self._scheduler

    @property
    def worker(self) -> ProducerWorker | ConsumerWorker:
        """A worker's half; only its process has one."""
        if self._worker is None:
            raise RuntimeError("a worker's method was called on a scheduler's connector")
        return self._worker

    # ---- before there is an instance ----

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Head-major blocks let heads be read in long runs; MLA has one head and no preference."""
        introspect.require_supported(vllm_config)
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM 0.33 asks: peers hold addresses of the cache, which sleep mode would move."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return HandoffStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return HandoffPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- in a worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.desk_address

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The earliest hook of a step, before its forward: a desk hears of held requests here."""
        if isinstance(kv_connector_metadata, StepMetadata):
            self.worker.enter(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called after the forward was launched, as no load here is synchronous."""
        metadata = self._get_connector_metadata()
        if isinstance(metadata, StepMetadata):
            self.worker.start(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs only after all of its layers have been read."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Consumers read the cache itself; nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.take_results()

    # ---- in the scheduler ----

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Exactly one worker of a producer, the one with the desk, has sent something."""
        for address in metadata.values():
            if isinstance(address, DeskAddress) and isinstance(self.scheduler, ProducerScheduler):
                self.scheduler.set_desk(address)

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Blocks of these groups are overwritten by a load, so vLLM need not zero them."""
        groups: Iterable[int] = self._kv_cache_config.transfer_group_ids
        return tuple(groups)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.take_step()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.worker_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, tuple(list(ids) for ids in block_ids))

    def reset_cache(self) -> bool | None:
        """vLLM asks with ``reset_connector``, as when weights were replaced in place."""
        return self.scheduler.reset()

    # ---- in both ----

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._worker.take_stats() if self._worker is not None else None

    def shutdown(self) -> None:
        """Also called on an instance whose constructor failed."""
        for half in (getattr(self, "_scheduler", None), getattr(self, "_worker", None)):
            if half is not None:
                half.close()


class MooncakeConnectorV1(KVHandoffConnector):
    """The same, under the name that vllm-ascend gives its connector for plain models."""


class MooncakeHybridConnector(KVHandoffConnector):
    """The same, under the name that vllm-ascend gives its connector for hybrid models."""
