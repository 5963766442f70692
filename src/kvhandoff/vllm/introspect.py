# SPDX-License-Identifier: Apache-2.0
"""From vLLM's configuration and tensors to the model of this package.

All knowledge of vLLM's private shapes is in this file, so that a new vLLM release is read here.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
)

from kvhandoff.config import HandoffConfig
from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.layout import LayerLayout, Segment, WorkerLayout
from kvhandoff.model.rules import require_role
from kvhandoff.model.topology import EVERY_TOKEN, Coordinate, ParallelSizes, heads_of
from kvhandoff.protocol.catalog import Fingerprint

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

CELL_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"})
"""Backends that store a head's token where the strides of the view say, K beside V. (Every MLA
backend stores one row per token.) Any other backend's rows are moved whole."""

_VOLATILE = {"_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Keys of a model's configuration that may differ between hosts that serve the same model."""


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
            return "127.0.0.1"


def describe_worker(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    session: str,
) -> WorkerLayout:
    """This worker's layout, read from the tensors that vLLM registers.

    Layers that share another layer's cache have no spec and are left out.

    Raises:
        UnsupportedSetup: for a kind of cache that this release does not move.
    """
    layers = tuple(
        _describe_layer(vllm_config, kv_cache_config, name, group, spec, kv_caches[name])
        for name, group, spec in _layer_specs(kv_cache_config)
    )
    return WorkerLayout(coordinate(), session, segments(kv_caches), layers)


def segments(kv_caches: Mapping[str, torch.Tensor]) -> tuple[Segment, ...]:
    """The allocations behind the views; vLLM makes one for each worker."""
    storages = {
        (view.untyped_storage().data_ptr(), view.untyped_storage().nbytes())
        for view in kv_caches.values()
    }
    return tuple(Segment(base, length) for base, length in sorted(storages))


def _layer_specs(kv_cache_config: KVCacheConfig) -> Iterator[tuple[str, int, KVCacheSpec]]:
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            yield name, index, by_layer.get(name, group.kv_cache_spec)


def _total_heads(vllm_config: VllmConfig, name: str, spec: FullAttentionSpec) -> int:
    if isinstance(spec, MLAAttentionSpec):
        return 1
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    tp = vllm_config.parallel_config.tensor_parallel_size
    if len(heads_of(total, tp, 0)) != spec.num_kv_heads:
        raise UnsupportedSetup.because(
            f"KV heads of layer {name!r} are not those of the model",
            found=f"{spec.num_kv_heads} on each of {tp} tensor parallel ranks",
            expected=f"a share of {total}",
            change="serve the model without a draft model of another shape",
        )
    return total


def _row_format(vllm_config: VllmConfig, name: str, spec: KVCacheSpec) -> str:
    """See :attr:`LayerLayout.format`."""
    if isinstance(spec, MLAAttentionSpec):
        return ""
    layer: Any = vllm_config.compilation_config.static_forward_context[name]
    backend = str(layer.get_attn_backend().get_name())
    if backend in CELL_BACKENDS:
        return ""
    # CPU attention packs keys for the vector unit that it found.
    unit = getattr(layer, "isa", "")
    return f"{backend}/{unit}" if unit else backend


def _describe_layer(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    name: str,
    group: int,
    spec: KVCacheSpec,
    view: torch.Tensor,
) -> LayerLayout:
    if not isinstance(spec, FullAttentionSpec) or spec.sliding_window is not None:
        raise UnsupportedSetup.because(
            f"the cache of layer {name!r} is of a kind that is not moved yet",
            found=type(spec).__name__,
            expected="full attention or MLA",
            change="serve a model with one kind of attention",
        )
    rows, heads, row_tokens, _ = view.shape
    total = _total_heads(vllm_config, name, spec)
    tp_rank = coordinate().tp
    held = heads_of(total, vllm_config.parallel_config.tensor_parallel_size, tp_rank)
    if (
        heads != len(held)
        or view.stride(3) != 1
        or rows * row_tokens != (kv_cache_config.num_blocks * spec.block_size)
    ):
        raise UnsupportedSetup.because(
            f"the cache of layer {name!r} has an unknown shape",
            found=f"[B, H, N, C] = {tuple(view.shape)} with strides {view.stride()}",
            expected=f"{kv_cache_config.num_blocks} blocks of {spec.block_size} tokens, "
            f"{len(held)} heads, dense content",
            change="use another --kv-cache-dtype or attention backend",
        )
    size = view.element_size()
    sizes = parallel_sizes(vllm_config)
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    sharded = getattr(spec, "dcp_sharded", True)
    return LayerLayout(
        name=name,
        group=group,
        heads=held,
        total_heads=total,
        block_tokens=spec.block_size,
        row_tokens=row_tokens,
        rows=rows,
        base=view.data_ptr(),
        row_stride=view.stride(0) * size,
        head_stride=view.stride(1) * size,
        token_stride=view.stride(2) * size,
        content=view.shape[3] * size,
        stripe=sizes.stripe(coordinate(), interleave) if sharded else EVERY_TOKEN,
        format=_row_format(vllm_config, name, spec),
    )


def fingerprint(vllm_config: VllmConfig) -> Fingerprint:
    """What has to be equal on both sides, from configuration alone (so all ranks agree)."""
    model = vllm_config.model_config
    config = {k: v for k, v in model.hf_config.to_dict().items() if k not in _VOLATILE}
    speculative = vllm_config.speculative_config
    draft = "" if speculative is None else f"{speculative.method}:{speculative.model}"
    return Fingerprint(
        model=_digest({"config": config, "revision": model.revision}),
        model_name=str(model.model),
        dtype=str(model.dtype),
        cache_dtype=str(vllm_config.cache_config.cache_dtype),
        layers=_digest({"draft": draft, "mla": model.use_mla}),
    )


def _digest(facts: object) -> str:
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def prompt_digest(request: Request, tokens: int) -> str:
    """Digest of what the first ``tokens`` tokens of a prompt are; empty for prompt embeddings.

    Images count by their content hash and adapters by name, as their tokens alone do not tell.
    """
    if request.prompt_token_ids is None:
        return ""
    ids = np.asarray(request.prompt_token_ids[:tokens], dtype=np.int64)
    digest = blake2b(ids.tobytes(), digest_size=16)
    for feature in request.mm_features or ():
        digest.update(f"{feature.mm_position.offset}:{feature.identifier};".encode())
    if request.lora_request is not None:
        digest.update(request.lora_request.lora_name.encode())
    return digest.hexdigest()


def accelerator_init() -> Any:
    """A function that makes the calling thread use this worker's accelerator, or does nothing."""
    import torch

    if not torch.accelerator.is_available():
        return lambda: None
    index = torch.accelerator.current_device_index()
    return lambda: torch.accelerator.set_device_index(index)
