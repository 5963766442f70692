# SPDX-License-Identifier: Apache-2.0
"""Engines that cannot hand off are refused when they start, by vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")

import torch
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.vllm import introspect, layers

COMMON: dict[str, Any] = {
    "block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32,
}  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        specs.HiddenStateCacheSpec(**COMMON),
        specs.SinkFullAttentionSpec(**COMMON, sink_len=4),
        specs.CrossAttentionSpec(**COMMON),
        specs.EncoderOnlyAttentionSpec(**COMMON),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_kinds_of_cache_that_nobody_has_looked_at_are_refused(spec: KVCacheSpec) -> None:
    """Also those that vLLM derives from a kind that is moved."""
    with pytest.raises(UnsupportedSetup, match=f"found {type(spec).__name__}"):
        layers._require_moved(KVCacheGroupSpec(["model.layers.0"], spec))


def test_every_kind_of_vllm_is_moved_or_refused_on_purpose() -> None:
    """A new vLLM release with a new kind fails here, and somebody has a look."""
    kinds = {
        kind
        for kind in vars(specs).values()
        if isinstance(kind, type) and issubclass(kind, KVCacheSpec)
    }
    refused = {
        specs.KVCacheSpec, specs.AttentionSpec, specs.HiSparseHotSpec, specs.HiSparseResidentSpec,
        specs.HiddenStateCacheSpec, specs.RSWASpec, specs.SinkFullAttentionSpec,
        specs.CrossAttentionSpec, specs.EncoderOnlyAttentionSpec, specs.UniformTypeKVCacheSpecs,
    }  # fmt: skip
    assert kinds == refused | layers.MOVED


def test_sleep_mode_is_refused() -> None:
    """After waking up, other memory is behind the addresses that peers know."""
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_producer"),
        model_config=SimpleNamespace(enable_sleep_mode=True),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
    )
    with pytest.raises(UnsupportedSetup, match="remove --enable-sleep-mode"):
        introspect.require_supported(config)
    config.model_config.enable_sleep_mode = False
    introspect.require_supported(config)
