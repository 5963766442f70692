# SPDX-License-Identifier: Apache-2.0
"""Which engines may take part in a handoff, from their numbers alone.

Each refusal says what was found, what was expected and which setting to change. What two engines
have to agree on is asked elsewhere: equal facts in :mod:`kvhandoff.protocol.catalog`, holdings in
:func:`kvhandoff.plan.routing.cover`.
"""

from __future__ import annotations

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.model.shapes import CacheShape, ModelShape, stage_sizes
from kvhandoff.model.topology import ParallelSizes, heads_of

PRODUCER = "kv_producer"
CONSUMER = "kv_consumer"


def require_role(role: str | None, sizes: ParallelSizes) -> None:
    """Refuse a ``kv_role`` that is none of ours, and a consumer with context-parallel prefill.

    Raises:
        UnsupportedSetup: with the setting to change.
    """
    if role == CONSUMER and sizes.pcp > 1:
        raise UnsupportedSetup.because(
            "a decode engine cannot use prefill context parallelism",
            found=f"--prefill-context-parallel-size {sizes.pcp} with kv_role {CONSUMER}",
            expected="--prefill-context-parallel-size 1",
            change="remove --prefill-context-parallel-size from the decode engine "
            "(prefill engines may keep it)",
        )
    if role not in (PRODUCER, CONSUMER):
        raise UnsupportedSetup.because(
            "an engine either prefills for others or decodes",
            found=f"kv_role {role}",
            expected="kv_producer or kv_consumer",
            change="set kv_role in --kv-transfer-config to one of them",
        )


def require_whole_stripes(sizes: ParallelSizes, model: ModelShape) -> None:
    """Refuse DCP where the ranks that hold a KV head are not whole DCP groups.

    vLLM (``ModelConfig.verify_with_parallel_config``) shards a head over copies of it only: with
    ``tp / heads`` copies DCP is at most that, and divides the query heads of a KV head. MLA's
    latent is held by every rank, so that any DCP size that vLLM has fits.

    Raises:
        UnsupportedSetup: with the setting to change.
    """
    if sizes.dcp == 1 or model.mla:
        return
    copies = max(1, sizes.tp // model.heads)
    if sizes.dcp > copies or copies * sizes.pcp % sizes.dcp:
        raise UnsupportedSetup.because(
            "decode context parallelism needs whole groups of ranks that hold the same KV head",
            found=f"dcp={sizes.dcp} where tp={sizes.tp} makes {copies} "
            f"{'copy' if copies == 1 else 'copies'} of each of {model.heads} KV heads",
            expected="dcp=1" if copies == 1 else f"dcp that divides {copies}",
            change="lower --decode-context-parallel-size or raise --tensor-parallel-size",
        )
    group = model.query_heads // model.heads
    if group % sizes.dcp:
        raise UnsupportedSetup.because(
            "decode context parallelism cannot share the query heads of a KV head",
            found=f"{group} query heads for each KV head with dcp={sizes.dcp}",
            expected=f"dcp that divides {group}",
            change="change --decode-context-parallel-size",
        )


def require_interleave(sizes: ParallelSizes, cache: CacheShape) -> None:
    """Refuse an interleave that does not fit into a block (vLLM's ``validate_block_size``).

    Raises:
        UnsupportedSetup: with the setting to change.
    """
    if sizes.dcp > 1 and cache.block_tokens % cache.interleave:
        raise UnsupportedSetup.because(
            "blocks do not hold whole runs of interleaved tokens",
            found=f"interleave {cache.interleave} with block size {cache.block_tokens}",
            expected=f"an interleave that divides {cache.block_tokens}",
            change="change --cp-kv-cache-interleave-size or --block-size",
        )


def require_engine(
    role: str | None, sizes: ParallelSizes, model: ModelShape, cache: CacheShape
) -> None:
    """All rules for one engine.

    Raises:
        UnsupportedSetup: with the first rule that the engine breaks.
    """
    require_role(role, sizes)
    heads_of(model.heads, sizes.tp, 0)
    stage_sizes(model.layers, sizes.pp, cache.partition)
    require_whole_stripes(sizes, model)
    require_interleave(sizes, cache)
