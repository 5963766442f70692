# SPDX-License-Identifier: Apache-2.0
"""The connector in a worker's process: registers the cache, then runs a desk or a puller."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvhandoff.config import HandoffConfig
from kvhandoff.errors import UnsupportedSetup
from kvhandoff.ids import Endpoint, EngineId, Reader, RequestId
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.protocol.catalog import Catalog
from kvhandoff.protocol.trust import Trust
from kvhandoff.runtime.desk import Desk
from kvhandoff.runtime.puller import Puller
from kvhandoff.transport.base import Transport
from kvhandoff.transport.mooncake import MooncakeTransport
from kvhandoff.vllm import introspect, layers, sameness
from kvhandoff.vllm.metadata import DeskAddress, StepMetadata
from kvhandoff.vllm.stats import HandoffStats, Observations

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


logger = logging.getLogger(__name__)


class _Worker:
    """What both kinds of worker have: a registered cache, observations, maybe a desk's address."""

    desk_address: DeskAddress | None = None

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: HandoffConfig
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._transport: Transport | None = None
        self._observed = Observations()

    def _register_memory(
        self, kv_caches: Mapping[str, torch.Tensor]
    ) -> tuple[Transport, WorkerLayout]:
        """Start this worker's transport, make its cache readable, and describe it."""
        config = self._config
        host = introspect.advertised_host(config)
        transport = MooncakeTransport(host, config.mooncake_protocol, config.device_name)
        layout = layers.describe_worker(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            introspect.coordinate(),
            transport.session,
        )
        layout.check()
        for segment in layout.segments:
            transport.register(segment)
        self._transport = transport
        return transport, layout

    def _engine_id(self) -> EngineId:
        transfer = self._vllm_config.kv_transfer_config
        if transfer is None or transfer.engine_id is None:
            raise UnsupportedSetup("this engine has no engine_id")
        return EngineId(transfer.engine_id)

    def close(self) -> None:
        """Give up the registered memory."""
        if self._transport is not None:
            self._transport.close()


class ProducerWorker(_Worker):
    """A worker whose cache is read. The first worker of the engine runs the desk as well.

    Every worker reports every held request once: the one with the desk when it is let go, all
    others, unused replicas among them, as soon as they hear of it. vLLM frees the blocks when the
    last report is in.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: HandoffConfig
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, config)
        self._desk: Desk | None = None
        self._finished: set[str] = set()
        self._names: dict[RequestId, str] = {}  # what the engine calls what is held
        self._entered: StepMetadata | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Collective: all workers of the engine call this together."""
        _, layout = self._register_memory(kv_caches)
        sizes = introspect.parallel_sizes(self._vllm_config)
        workers = introspect.gather(layout)
        if sizes.rank(layout.at) != 0:
            return
        catalog = Catalog(
            engine=self._engine_id(),
            incarnation=secrets.token_hex(16),
            fingerprint=sameness.fingerprint(self._vllm_config),
            sizes=sizes,
            lease=self._config.lease,
            workers=tuple(workers),
        )
        catalog.check()
        self._desk = self._open_desk(catalog)
        host = introspect.advertised_host(self._config)
        self.desk_address = DeskAddress(Endpoint(host, self._desk.port), catalog.engine)
        logger.info(
            "prefill engine %s: desk at %s, Mooncake over %s, %d replicas, lease %g s, %s",
            catalog.engine,
            self.desk_address.endpoint,
            self._config.mooncake_protocol,
            sizes.replicas,
            catalog.lease,
            "with a shared key" if self._config.shared_key else "no shared key",
        )

    def _open_desk(self, catalog: Catalog) -> Desk:
        """On the port that was asked for; vLLM's default one is a wish, as it is all engines'."""
        config = self._config
        transfer = self._vllm_config.kv_transfer_config
        bind_host = config.bind_host or introspect.advertised_host(config)
        dp_rank = self._vllm_config.parallel_config.data_parallel_index
        port = transfer.kv_port + dp_rank if transfer.kv_port else 0

        def open_at(port: int) -> Desk:
            return Desk(
                Endpoint(bind_host, port),
                catalog,
                max_hold=config.max_hold,
                first_lease=config.first_lease,
                key=Trust(config.shared_key).key,
            )

        try:
            return open_at(port)
        except UnsupportedSetup as error:
            if transfer.kv_port != KVTransferConfig.kv_port:
                raise
            logger.info("vLLM's default kv_port is not used by this desk: %s", error)
            return open_at(0)

    def enter(self, news: StepMetadata) -> None:
        """Take note of a step's news, before its forward: readers may be asking already."""
        if news is self._entered:
            return
        self._entered = news
        if self._desk is None:
            self._finished.update(holding.finishes for holding in news.holdings)
            return
        if news.reset:
            self._desk.reset()
        if news.announced:
            self._desk.announce(news.announced)
        for holding in news.holdings:
            self._names[holding.request] = holding.finishes
            self._desk.hold(holding)
        if news.dropped:
            self._desk.drop(news.dropped)

    def start(self, news: StepMetadata) -> None:
        """A producer begins nothing after the forward."""
        self.enter(news)

    def take_results(self) -> KVConnectorTransferResults:
        """Requests that may be freed as far as this worker is concerned."""
        if self._desk is not None:
            self._finished.update(self._names.pop(name) for name in self._desk.take_free())
        finished, self._finished = self._finished, set()
        return KVConnectorTransferResults(finished_sending=finished)

    def take_stats(self) -> HandoffStats | None:
        """What happened since the last call."""
        if self._desk is not None:
            self._observed.counted(self._desk.counters)
        return self._observed.take()

    def close(self) -> None:
        """Stop serving."""
        if self._desk is not None:
            self._desk.close()
        super().close()


class ConsumerWorker(_Worker):
    """A worker that reads into its cache."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: HandoffConfig
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, config)
        self._puller: Puller | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Start the puller on this worker's cache."""
        transport, layout = self._register_memory(kv_caches)
        sizes = introspect.parallel_sizes(self._vllm_config)
        siblings = self._vllm_config.parallel_config.data_parallel_size > 1
        self._puller = Puller(
            layout,
            Reader(sizes.rank(layout.at), sizes.world_size),
            self._engine_id(),
            sameness.fingerprint(self._vllm_config),
            transport,
            self._config,
            introspect.accelerator_init(),
            introspect.clearer(kv_caches),
            self._config.sibling_grace if siblings else 0.0,
        )

    def enter(self, news: StepMetadata) -> None:
        """Nothing is begun before the forward: blocks may still be in use by it."""

    def start(self, news: StepMetadata) -> None:
        """Begin this step's pulls."""
        if self._puller is not None:
            for job in news.jobs:
                self._puller.submit(job)

    def take_results(self) -> KVConnectorTransferResults:
        """Pulls that have ended on this worker."""
        results = KVConnectorTransferResults()
        if self._puller is None:
            return results
        for result in self._puller.take_results():
            results.finished_recving.add(result.request)
            if result.failure is not None:
                results.failed_recving.add(result.request)
            self._observed.pulled(result)
        return results

    def take_stats(self) -> HandoffStats | None:
        """What happened since the last call."""
        if self._puller is not None:
            self._observed.stuck(self._puller.stuck)
            self._observed.counted({"cuts": self._puller.cuts})
        return self._observed.take()

    def close(self) -> None:
        """Stop pulling."""
        if self._puller is not None:
            self._puller.close()
        super().close()
