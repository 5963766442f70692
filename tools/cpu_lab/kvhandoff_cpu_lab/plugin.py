# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin: prefill context parallelism for grouped-query attention, quick greedy sampling.

vLLM 0.32 runs prefill context parallelism (PCP) for models with latent attention (MLA) only. What
its CPU attention lacks for other models is small: PCP splits a step's tokens over the ranks, and
every rank has to write the keys and values of all of them. The layers of an MLA model gather those
rows before they write; here the same is done around the CPU backend's cache write. Reading needs
no change, since queries are local and the cache is complete on every rank.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")


class _View:
    """A view of an object in which some attributes have other values."""

    def __init__(self, target: Any, **overrides: Any) -> None:
        self.__dict__.update(overrides)
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def _gathering(update: Callable[..., None]) -> Callable[..., None]:
    """Wrap the CPU backend's cache write so that it writes the rows of all PCP ranks."""

    @functools.wraps(update)
    def do_kv_cache_update(
        self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        rows = key.shape[0]
        # The runner hands out a slot mapping for the rows of all ranks exactly when it has split
        # the step; it is then longer than what this rank computed.
        if slot_mapping.shape[0] > rows:
            from vllm.distributed.parallel_state import get_pcp_group

            group = get_pcp_group()
            key = group.all_gather(key.contiguous(), dim=0)
            value = group.all_gather(value.contiguous(), dim=0)
            slot_mapping = slot_mapping[: group.world_size * rows]
        update(self, layer, key, value, kv_cache, slot_mapping)

    return do_kv_cache_update


def _without_mla_requirement(validate: Callable[..., None]) -> Callable[..., None]:
    """Wrap PCP's configuration check so that it stops asking for MLA and keeps the rest."""

    @functools.wraps(validate)
    def validate_config(vllm_config: Any, supports_mm_inputs: bool) -> None:
        model = _View(vllm_config.model_config, use_mla=True)
        validate(_View(vllm_config, model_config=model), supports_mm_inputs)

    return validate_config


def register() -> None:
    """Entry point: called by vLLM in each of its processes, and possibly more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.worker.gpu.pcp_manager import PCPManager
    from vllm.v1.worker.gpu.sample import sampler

    from kvhandoff_cpu_lab.sampling import greedy_first
    from kvhandoff_cpu_lab.sparing import spare_the_cores

    if CPUAttentionBackendImpl.supports_pcp:
        return
    CPUAttentionBackendImpl.supports_pcp = True
    CPUAttentionBackendImpl.do_kv_cache_update = _gathering(
        CPUAttentionBackendImpl.do_kv_cache_update
    )
    PCPManager.validate_config = staticmethod(_without_mla_requirement(PCPManager.validate_config))
    spare_the_cores()
    sampler.gumbel_sample = greedy_first(sampler.gumbel_sample)
    logger.info("kvhandoff-cpu-lab: CPU attention accepts prefill context parallelism")
