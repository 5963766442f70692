# SPDX-License-Identifier: Apache-2.0
"""Caches of well-known kinds of models as vLLM itself would lay them out, without a model.

vLLM's spec classes say what each layer keeps, its ``get_kv_cache_configs`` groups the layers and
its ``allocate_kv_cache`` makes the views. Sizes of a token or state that a kernel fixes are the
real ones; numbers of layers, heads and tokens are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)
from vllm.v1.worker.utils import allocate_kv_cache

from kvhandoff.model.topology import ParallelSizes

BF16, U8, F32 = torch.bfloat16, torch.uint8, torch.float32
MAX_LEN = 1024
Specs = dict[str, KVCacheSpec]


@dataclass(frozen=True)
class StatePart:
    """A part of a recurrent layer's state: ``heads`` of the model, ``width`` channels each."""

    heads: int
    width: int


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        specs: what each layer keeps on one of so many tensor parallel ranks.
        lengths: numbers of tokens that are handed off.
        conv: parts of a recurrent layer's convolution, in order.
        recurrent: its recurrent state.
    """

    specs: Callable[[int], Specs]
    lengths: tuple[int, ...]
    kv_heads: int = 1
    draft_kv_heads: int = 0
    layout: str = "LBNHC"
    tp: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (1, 2), (2, 2))
    conv: tuple[StatePart, ...] = ()
    recurrent: StatePart | None = None
    text: dict[str, int] = field(default_factory=dict)
    backends: dict[str, str] = field(default_factory=dict)


def _names(count: int, part: str = "self_attn.attn") -> list[str]:
    return [f"model.layers.{layer}.{part}" for layer in range(count)]


def _heads(total: int, tp: int) -> int:
    return max(1, total // tp)


def gemma3(tp: int) -> Specs:
    """Five windows to one full layer, scaled down to two to one."""
    common = {"block_size": 16, "num_kv_heads": _heads(4, tp), "head_size": 8, "dtype": BF16}
    return {
        name: FullAttentionSpec(**common)
        if layer % 3 == 2
        else SlidingWindowSpec(**common, sliding_window=40)
        for layer, name in enumerate(_names(6))
    }


def gpt_oss(tp: int) -> Specs:
    """Windows and full layers in turns; the window is shorter than two blocks."""
    common = {"block_size": 16, "num_kv_heads": _heads(8, tp), "head_size": 8, "dtype": BF16}
    return {
        name: FullAttentionSpec(**common)
        if layer % 2
        else SlidingWindowSpec(**common, sliding_window=24)
        for layer, name in enumerate(_names(4))
    }


def llama4(tp: int) -> Specs:
    """Chunked local attention beside full attention."""
    common = {"block_size": 16, "num_kv_heads": _heads(2, tp), "head_size": 8, "dtype": BF16}
    return {
        name: FullAttentionSpec(**common)
        if layer % 2
        else ChunkedLocalAttentionSpec(**common, attention_chunk_size=32)
        for layer, name in enumerate(_names(4))
    }


def _with_states(
    attention: dict[str, Any], names: list[str], states: list[str], state: dict[str, Any]
) -> Specs:
    """Attention blocks as large as a state, which is padded to them, as vLLM arranges it."""
    one = FullAttentionSpec(**attention, block_size=1).page_size_bytes
    raw = MambaSpec(**state, block_size=MAX_LEN).page_size_bytes
    block = round_up(-(-raw // one), 16)
    full = FullAttentionSpec(**attention, block_size=block)
    padded = MambaSpec(**state, block_size=MAX_LEN, page_size_padded=full.page_size_bytes)
    return dict.fromkeys(names, full) | dict.fromkeys(states, padded)


def qwen3_next(tp: int) -> Specs:
    """Gated delta nets, two to each full layer."""
    shapes = Shapes.gated_delta_net_state_shape(tp, 2, 4, 8, 8, 4)
    names = _names(6)
    recurrent = [name for layer, name in enumerate(names) if layer % 3 != 2]
    return _with_states(
        {"num_kv_heads": _heads(2, tp), "head_size": 8, "dtype": BF16},
        names[2::3],
        [name.replace("self_attn.attn", "linear_attn") for name in recurrent],
        {"shapes": shapes, "dtypes": (BF16, F32), "mamba_type": Kind.GDN_ATTN},
    )


def falcon_h1(tp: int) -> Specs:
    """Mamba 2 and attention in every layer; a single group of B and C, on every rank."""
    shapes = Shapes.mamba2_state_shape(
        tp_world_size=tp, intermediate_size=32, n_groups=1, num_heads=4, head_dim=8, state_size=16,
        conv_kernel=4,
    )  # fmt: skip
    return _with_states(
        {"num_kv_heads": _heads(2, tp), "head_size": 8, "dtype": BF16},
        _names(3),
        _names(3, "mamba"),
        {"shapes": shapes, "dtypes": (BF16, F32), "mamba_type": Kind.MAMBA2},
    )


def jamba(tp: int) -> Specs:
    """Mamba 1, three to one full layer."""
    shapes = Shapes.mamba1_state_shape(
        tp_world_size=tp, intermediate_size=32, state_size=16, conv_kernel=4
    )
    return _with_states(
        {"num_kv_heads": _heads(2, tp), "head_size": 8, "dtype": BF16},
        _names(4)[3:],
        _names(4, "mamba.mixer")[:3],
        {"shapes": shapes, "dtypes": (BF16, F32), "mamba_type": Kind.MAMBA1},
    )


def deepseek_v32(tp: int) -> Specs:
    """656 bytes of latent (``fp8_ds_mla``) beside 132 bytes of indexer for each token."""
    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=U8,
        cache_dtype_str="fp8_ds_mla", state_content_bytes=656,
    )  # fmt: skip
    indexer = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=U8,
        cache_role=SparseCacheRole.INDEXER,
    )  # fmt: skip
    return dict.fromkeys(_names(3), latent) | dict.fromkeys(_names(3, "indexer.k_cache"), indexer)


def deepseek_v4(tp: int) -> Specs:
    """Entries for 4 and for 128 tokens, a window, compressor states, indexer; blocks packed."""

    def compressed(ratio: int) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=256, num_kv_heads=1, max_tp_shards=1, head_size=512, dtype=U8,
            tokens_per_state=ratio, cache_dtype_str="fp8_ds_mla", alignment=576,
            model_version="deepseek_v4", state_content_bytes=584,
        )  # fmt: skip

    def state(ratio: int, block: int) -> SlidingWindowMLASpec:
        overlap = 2 if ratio == 4 else 1
        return SlidingWindowMLASpec(
            block_size=block, num_kv_heads=1, max_tp_shards=1, head_size=2 * overlap * 512,
            dtype=F32, sliding_window=overlap * ratio, alignment=576,
        )  # fmt: skip

    window = SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=512, dtype=U8,
        sliding_window=128, cache_dtype_str="fp8_ds_mla", alignment=576,
        model_version="deepseek_v4", state_content_bytes=584,
    )  # fmt: skip
    indexer = MLAAttentionSpec(
        block_size=256, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=U8,
        tokens_per_state=4, alignment=576,
    )  # fmt: skip
    indexer_state = SlidingWindowMLASpec(
        block_size=4, num_kv_heads=1, max_tp_shards=1, head_size=2 * 2 * 128, dtype=F32,
        sliding_window=8, alignment=576,
    )  # fmt: skip
    specs: Specs = {}
    for layer, ratio in enumerate((4, 128)):
        prefix = f"model.layers.{layer}.attn"
        specs[f"{prefix}.swa_cache"] = window
        specs[prefix] = compressed(ratio)
        specs[f"{prefix}.compressor.state_cache"] = state(ratio, 4 if ratio == 4 else 8)
        if ratio == 4:
            specs[f"{prefix}.indexer.k_cache"] = indexer
            specs[f"{prefix}.indexer.compressor.state_cache"] = indexer_state
    return specs


def mla_mtp(tp: int) -> Specs:
    """Plain latents, and one more layer of the draft (MTP) behind the model's."""
    latent = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=BF16
    )
    return dict.fromkeys(_names(5), latent)


def gqa_draft(tp: int) -> Specs:
    """A target with four KV heads and a draft layer with two that are larger."""
    target = FullAttentionSpec(block_size=16, num_kv_heads=_heads(4, tp), head_size=8, dtype=BF16)
    draft = FullAttentionSpec(block_size=16, num_kv_heads=_heads(2, tp), head_size=16, dtype=BF16)
    return dict.fromkeys(_names(3), target) | {"draft_model.layers.0.self_attn.attn": draft}


MODELS = {
    "gemma3": Model(gemma3, (1, 15, 16, 17, 39, 40, 41, 55, 56, 57, 130), kv_heads=4),
    "gpt_oss": Model(gpt_oss, (1, 16, 23, 24, 25, 31, 32, 33, 47, 90), kv_heads=8, layout="LBHNC"),
    "llama4": Model(llama4, (1, 16, 31, 32, 33, 48, 63, 64, 65, 90), kv_heads=2),
    "qwen3_next": Model(
        qwen3_next,
        (1, 2, 31, 32, 33, 48, 100),
        kv_heads=2,
        conv=(StatePart(2, 8), StatePart(2, 8), StatePart(4, 8)),
        recurrent=StatePart(4, 64),
    ),
    "falcon_h1": Model(
        falcon_h1,
        (1, 2, 47, 48, 49, 100),
        kv_heads=2,
        conv=(StatePart(4, 8), StatePart(1, 16), StatePart(1, 16)),
        recurrent=StatePart(4, 128),
        text={"mamba_n_groups": 1},
    ),
    "jamba": Model(
        jamba,
        (1, 2, 47, 48, 49, 100),
        kv_heads=2,
        conv=(StatePart(32, 1),),
        recurrent=StatePart(32, 16),
    ),
    "deepseek_v32": Model(deepseek_v32, (1, 63, 64, 65, 127, 128, 129, 200)),
    "deepseek_v4": Model(
        deepseek_v4,
        (1, 3, 4, 5, 8, 9, 127, 128, 129, 255, 256, 257, 300, 520),
        layout="BLHNC",
        tp=((1, 1), (2, 1), (1, 2)),
    ),
    "mla_mtp": Model(mla_mtp, (1, 15, 16, 17, 100), draft_kv_heads=1),
    "gqa_draft": Model(gqa_draft, (1, 15, 16, 17, 100), kv_heads=4, draft_kv_heads=2),
}


@dataclass
class Backend:
    """A layer as ``static_forward_context`` knows it."""

    name: str

    def get_attn_backend(self) -> Backend:
        return self

    def get_name(self) -> str:
        return self.name


def _usual_backend(spec: KVCacheSpec) -> str:
    if isinstance(spec, SlidingWindowMLASpec):
        return "CompressorBackend" if spec.dtype == F32 else "DEEPSEEK_SPARSE_SWA"
    return "FLASHMLA" if isinstance(spec, MLAAttentionSpec) else "FLASH_ATTN"


def vllm_config(model: Model, sizes: ParallelSizes, blocks: int) -> Any:
    """As much of a ``VllmConfig`` as vLLM's allocator and kvhandoff look at."""
    cache = CacheConfig(block_size=16)
    cache.num_gpu_blocks_override = blocks
    cache.kv_cache_layout = model.layout
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=cache,
        device_config=SimpleNamespace(device_type="cuda"),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        model_config=SimpleNamespace(
            max_model_len=MAX_LEN,
            original_max_model_len=MAX_LEN,
            get_total_num_kv_heads=lambda: model.kv_heads,
            hf_text_config=SimpleNamespace(num_hidden_layers=4, **model.text),
        ),
        max_in_flight_tokens=64,
        num_prefill_lookahead_tokens=0,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=sizes.tp,
            pipeline_parallel_size=sizes.pp,
            prefill_context_parallel_size=sizes.pcp,
            decode_context_parallel_size=sizes.dcp,
            cp_kv_cache_interleave_size=1,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
    )
    if model.draft_kv_heads:
        config.speculative_config = SimpleNamespace(
            draft_model_config=SimpleNamespace(get_total_num_kv_heads=lambda: model.draft_kv_heads),
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
            method="draft_model",
        )
    config.compilation_config = SimpleNamespace(
        static_forward_context={
            name: Backend(model.backends.get(name, _usual_backend(spec)))
            for name, spec in model.specs(sizes.tp).items()
        }
    )
    return config


def allocate(
    model: Model, sizes: ParallelSizes, blocks: int
) -> tuple[Any, list[KVCacheConfig], list[dict[str, torch.Tensor]]]:
    """vLLM's configuration, KV cache configurations and views of all workers of an engine."""
    config = vllm_config(model, sizes, blocks)
    specs = model.specs(sizes.tp)
    workers = sizes.world_size
    caches = get_kv_cache_configs(config, [dict(specs)] * workers, [1 << 33] * workers)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    views = [allocate_kv_cache(cache, torch.device("cpu"), layout) for cache in caches]
    return config, caches, views
