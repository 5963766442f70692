# SPDX-License-Identifier: Apache-2.0
"""From vLLM's configuration to the model of this package.

All knowledge of vLLM's private shapes is here, in ``layers.py`` and in ``sameness.py``, so that a
new vLLM release is read in these.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvhandoff.config import HandoffConfig, parse_config
from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.layout import Segment
from kvhandoff.model.rules import require_role
from kvhandoff.model.topology import Coordinate, ParallelSizes
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.protocol.trust import KEY_VARIABLE
from kvhandoff.runtime.margins import Clear, clear_host_memory

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def settings(vllm_config: VllmConfig) -> HandoffConfig:
    """This package's settings, from vLLM's configuration and the environment.

    Raises:
        UnsupportedSetup: for a setting that is unknown or mistyped.
    """
    transfer = vllm_config.kv_transfer_config
    extra = {} if transfer is None else dict(transfer.kv_connector_extra_config)
    if key := os.environ.get(KEY_VARIABLE):
        extra.setdefault("shared_key", key)
    return parse_config(extra)


def parallel_sizes(vllm_config: VllmConfig) -> ParallelSizes:
    """Sizes of this engine (one data-parallel rank)."""
    config = vllm_config.parallel_config
    return ParallelSizes(
        tp=config.tensor_parallel_size,
        pp=config.pipeline_parallel_size,
        pcp=config.prefill_context_parallel_size,
        dcp=config.decode_context_parallel_size,
    )


def require_supported(vllm_config: VllmConfig) -> None:
    """Refuse what cannot work, as early as this engine's configuration is known.

    Raises:
        UnsupportedSetup: with the setting to change.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise UnsupportedSetup("kvhandoff needs --kv-transfer-config")
    require_role(transfer.kv_role, parallel_sizes(vllm_config))
    if vllm_config.model_config.enable_sleep_mode:
        raise UnsupportedSetup.because(
            "an engine whose cache is read by others, or reads into it, cannot sleep",
            found="--enable-sleep-mode",
            expected="a cache that stays where it is: after waking up, other memory is behind the "
            "addresses that peers and network cards know",
            change="remove --enable-sleep-mode",
        )


def coordinate() -> Coordinate:
    """This worker's place in its engine, from vLLM's process groups."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    return Coordinate(
        get_pp_group().rank_in_group,
        get_pcp_group().rank_in_group,
        get_tp_group().rank_in_group,
    )


def gather(item: object) -> list[Any]:
    """Exchange one object with every worker of this engine; all of them must call this.

    vLLM's world group can span several data-parallel engines, so the exchange goes along TP,
    then PCP, then PP, none of which leaves the engine.
    """
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    items = [item]
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):
        if group.world_size > 1:
            received: list[Any] = [None] * group.world_size
            dist.all_gather_object(received, items, group=group.cpu_group)
            items = [each for some in received for each in some]
    return items


def advertised_host(config: HandoffConfig) -> str:
    """The address peers reach this host by: a setting, vLLM's own, or the default route's."""
    if config.advertise_host:
        return config.advertise_host
    if host := os.environ.get("VLLM_HOST_IP"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation range: chooses a route, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            logger.warning(
                "this host has no default route, so other hosts are told to reach it at 127.0.0.1, "
                "which is themselves: set advertise_host or VLLM_HOST_IP"
            )
            return "127.0.0.1"


def segments(kv_caches: Mapping[str, torch.Tensor]) -> tuple[Segment, ...]:
    """The allocations behind the views; vLLM makes one for each worker."""
    storages = {
        (view.untyped_storage().data_ptr(), view.untyped_storage().nbytes())
        for view in kv_caches.values()
    }
    return tuple(Segment(base, length) for base, length in sorted(storages))


def accelerator_init() -> Any:
    """A function that makes the calling thread use this worker's accelerator, or does nothing."""
    import torch

    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)


def clearer(kv_caches: Mapping[str, torch.Tensor]) -> Clear:
    """A function that clears memory of the cache, wherever it lies."""
    import torch

    storage = next(iter(kv_caches.values())).untyped_storage()
    if storage.device.type == "cpu":
        return clear_host_memory
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
    base = storage.data_ptr()

    def clear(descriptors: Descriptors) -> None:
        """On a stream of its own, so that it does not wait for the model's."""
        stream = torch.Stream(storage.device)
        with stream:
            for address, length in zip(
                descriptors.local.tolist(), descriptors.length.tolist(), strict=True
            ):
                memory[address - base : address - base + length].zero_()
        stream.synchronize()

    return clear
