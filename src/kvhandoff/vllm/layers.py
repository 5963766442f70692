# SPDX-License-Identifier: Apache-2.0
"""From vLLM's KV cache groups, specs and views to layouts and needs.

One class of vLLM's specs after the other: attention of all kinds keeps slots by token (an entry
for several tokens if it is compressed), recurrent layers keep a state for each block, whose parts
are cut by head (``states.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    iter_layer_specs,
)

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.layout import LayerLayout, WorkerLayout
from kvhandoff.model.topology import EVERY_TOKEN, Coordinate, HeadRange, heads_of
from kvhandoff.plan.needs import Need
from kvhandoff.vllm.introspect import parallel_sizes, segments
from kvhandoff.vllm.states import Place, describe_state

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

CELL_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION"})
"""Backends that store a head's token where the strides of the view say, K beside V. Any other
backend's rows are moved whole."""

CELL_MLA_BACKENDS = frozenset(
    {
        # Written by MLAAttention for all of these (concat_and_cache_mla: slot times entry size).
        "FLASHMLA", "FLASHMLA_SPARSE", "CUTLASS_MLA", "TRITON_MLA", "FLASH_ATTN_MLA",
        "FLASH_ATTN_MLA_SPARSE", "FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE",
        # Written by themselves, in the same way (cpu_mla.py, amx_mla_concat_and_cache).
        "CPU_MLA", "AMX_MLA",
        # DeepSeek V4's compressor states: a row of partial sums for each token of its window
        # (save_partial_states).
        "CompressorBackend",
    }
)  # fmt: skip
"""Backends that store one dense row for each token's latent: ``fp8_ds_mla`` and ``nvfp4_ds_mla``
are such rows, too, of 656 and 352 bytes. Read in vLLM 0.32's sources."""

MOVED = frozenset(
    {
        FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, SlidingWindowMLASpec,
        ChunkedLocalAttentionSpec, CircularBufferSpec, MambaSpec,
    }
)  # fmt: skip
"""Exactly these; a kind that vLLM derives from one of them is refused until somebody has looked."""

_DRAFT = re.compile(r"(^|\.)(draft_model|mtp|eagle|eagle_head|mtp_block)(\.|$)")
_RING_BLOCK = 1 << 40
"""Tokens of a block that holds the ring of a request for all of its life."""


def needs(kv_cache_config: KVCacheConfig, dcp: int) -> tuple[Need, ...]:
    """What a decode engine has to read of each of its groups.

    Raises:
        UnsupportedSetup: for a kind of group that is not moved.
    """
    return tuple(_need(group, dcp) for group in kv_cache_config.kv_cache_groups)


def _need(group: KVCacheGroupSpec, dcp: int) -> Need:
    _require_moved(group)
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    block = spec.block_size * (dcp if spec.dcp_sharded else 1)
    if isinstance(spec, MambaSpec | CircularBufferSpec):
        return Need(state=True, block=block)
    if isinstance(spec, SlidingWindowSpec):
        return Need(window=spec.sliding_window + spec.extra_retained_tokens, block=block)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Need(chunk=spec.attention_chunk_size, block=block)
    return Need(block=block)


def _require_moved(group: KVCacheGroupSpec) -> None:
    for spec in iter_layer_specs(group.kv_cache_spec):
        if type(spec) not in MOVED or not group.enable_kv_transfer or group.host_resident:
            raise UnsupportedSetup.because(
                f"the cache of layer {group.layer_names[0]!r} is of a kind that is not moved",
                found=type(spec).__name__ + (" in host memory" if group.host_resident else ""),
                expected="full, windowed or chunked attention, MLA, or recurrent state, in the "
                "accelerator's memory",
                change="serve another model, or switch the host tier (HiSparse) off",
            )


def last_tokens(vllm_config: VllmConfig, needs_of_groups: tuple[Need, ...]) -> int:
    """Tokens at the end of a prompt that the producer leaves to the consumer.

    A consumer computes the last token in any case, for its logits. If all groups keep every token,
    the producer may as well compute it too. But a state that covers it cannot be taken back, and a
    window or chunk that was laid out for the token after it lacks the tokens that it looks back
    at. A draft model with several modules embeds drafts that nobody verified in its last tokens
    (vLLM's ``num_prefill_lookahead_tokens``).
    """
    recycles = any(need.state or need.window or need.chunk for need in needs_of_groups)
    lookahead = int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0))
    return max(1 if recycles else 0, lookahead - 1)


def describe_worker(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    at: Coordinate,
    session: str,
) -> WorkerLayout:
    """This worker's layout, read from the tensors that vLLM registers.

    Layers that share another layer's cache have no spec and are left out.

    Raises:
        UnsupportedSetup: for a kind of cache that is not moved.
    """
    layers: list[LayerLayout] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        _require_moved(group)
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            spec, view = by_layer.get(name, group.kv_cache_spec), kv_caches[name]
            place = Place(name, number, at.tp, vllm_config.parallel_config.tensor_parallel_size)
            if isinstance(spec, MambaSpec):
                layers += describe_state(vllm_config, place, spec, view)
            else:
                layers.append(
                    _describe_attention(vllm_config, kv_cache_config, place, at, group, spec, view)
                )
    return WorkerLayout(at, session, segments(kv_caches), tuple(layers))


def _describe_attention(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    place: Place,
    at: Coordinate,
    group: KVCacheGroupSpec,
    spec: AttentionSpec,
    view: torch.Tensor,
) -> LayerLayout:
    rows, heads, slots, _ = view.shape
    ring = isinstance(spec, CircularBufferSpec)
    total, held = _heads(vllm_config, place, group, spec)
    row_tokens = int(slots * spec.tokens_per_state)
    if (
        heads != len(held)
        or view.stride(3) != 1
        or row_tokens != slots * spec.tokens_per_state
        or rows * row_tokens != kv_cache_config.num_blocks * spec.block_size
        or (ring and slots != spec.block_size)
    ):
        raise UnsupportedSetup.because(
            f"the cache of layer {place.name!r} has an unknown shape",
            found=f"[B, H, N, C] = {tuple(view.shape)} with strides {view.stride()}",
            expected=f"{kv_cache_config.num_blocks} blocks of {spec.block_size} tokens, "
            f"{len(held)} heads, dense content",
            change="use another --kv-cache-dtype or attention backend",
        )
    size = view.element_size()
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    stripe = parallel_sizes(vllm_config).stripe(at, interleave)
    return LayerLayout(
        name=place.name,
        group=place.group,
        heads=held,
        total_heads=total,
        block_tokens=_RING_BLOCK if ring else spec.block_size,
        row_tokens=_RING_BLOCK if ring else row_tokens,
        slots=slots,
        rows=rows,
        base=view.data_ptr(),
        row_stride=view.stride(0) * size,
        head_stride=view.stride(1) * size,
        token_stride=view.stride(2) * size,
        content=view.shape[3] * size,
        stripe=stripe if spec.dcp_sharded else EVERY_TOKEN,
        format="" if ring else _row_format(vllm_config, place, spec),
        state=ring,
    )


def _heads(
    vllm_config: VllmConfig, place: Place, group: KVCacheGroupSpec, spec: AttentionSpec
) -> tuple[int, HeadRange]:
    """Heads of the layer in the whole model, and those that are held here."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) or spec.max_tp_shards == 1:
        return 1, HeadRange(0, 1)
    tp, local = place.tp_size, spec.num_heads
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        # The backend's own slots (such as K and V apart); the row format says so as well.
        return local * tp, HeadRange(place.tp * local, (place.tp + 1) * local)
    config = vllm_config.model_config
    if _is_draft(vllm_config, place.name, group):
        config = vllm_config.speculative_config.draft_model_config  # type: ignore[union-attr]
    total = int(config.get_total_num_kv_heads())
    if local > 1 or tp == 1:  # nothing is replicated, so the layer may differ from its model
        total = local * tp
    held = heads_of(total, tp, place.tp)
    if len(held) != local:
        raise UnsupportedSetup.because(
            f"KV heads of layer {place.name!r} are not those of its model",
            found=f"{local} on each of {tp} tensor parallel ranks",
            expected=f"a share of {total}",
            change="change --tensor-parallel-size so that these heads can be told apart",
        )
    return total, held


def _is_draft(vllm_config: VllmConfig, name: str, group: KVCacheGroupSpec) -> bool:
    """Whether a layer belongs to the draft model, by vLLM's ways of naming such layers."""
    speculative = vllm_config.speculative_config
    if speculative is None or getattr(speculative, "draft_model_config", None) is None:
        return False
    number = re.search(r"\blayers\.(\d+)\b", name)
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    behind = number is not None and int(number[1]) >= layers
    return behind or group.is_eagle_group or _DRAFT.search(name) is not None


def _row_format(vllm_config: VllmConfig, place: Place, spec: AttentionSpec) -> str:
    """See :attr:`LayerLayout.format`."""
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        backend, _ = _backend(vllm_config, place.name)
        if backend in CELL_MLA_BACKENDS and not _packs_rows(spec):
            return ""
        return f"{backend}/{spec.state_content_size_bytes}"
    backend, unit = _backend(vllm_config, place.name)
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        return f"{backend}/{spec.num_head_slots} slots/tp {place.tp_size}"
    if backend in CELL_BACKENDS:
        return ""
    # CPU attention packs keys for the vector unit that it found.
    return f"{backend}/{unit}" if unit else backend


def _packs_rows(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> bool:
    """Whether a latent cache keeps the values of a row together, and their scales behind them.

    Indexer caches and DeepSeek V4's pages do; other latents are one run of bytes for each token,
    the 656 bytes of DeepSeek V3.2 (``fp8_ds_mla``) among them.
    """
    if getattr(spec, "cache_role", None) is SparseCacheRole.INDEXER:
        return True
    if spec.dtype.itemsize > 1:
        return False
    return spec.cache_dtype_str is None or getattr(spec, "model_version", None) is not None


def _backend(vllm_config: VllmConfig, name: str) -> tuple[str, str]:
    layer: Any = vllm_config.compilation_config.static_forward_context[name]
    return str(layer.get_attn_backend().get_name()), str(getattr(layer, "isa", "") or "")
