# SPDX-License-Identifier: Apache-2.0
"""Parallel sizes, worker coordinates, and the part of a KV cache that a worker holds.

Only this module knows what TP, PP, PCP and DCP mean. Everything behind it sees *holdings*:
a range of KV heads and a stripe of tokens, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvhandoff.errors import UnsupportedSetup
from kvhandoff.ids import Rank

MAX_PARALLEL_SIZE = 4096


class Coordinate(NamedTuple):
    """A worker's place in its engine."""

    pp: int
    pcp: int
    tp: int


class HeadRange(msgspec.Struct, frozen=True, array_like=True, order=True):
    """KV heads ``[start, stop)``, counted over the whole model."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= 1 << 20:
            raise ValueError(f"not a head range: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start


class TokenStripe(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Tokens ``p`` with ``p // interleave % count == index``; ``(0, 1, 1)`` is every token.

    This is vLLM's decode context parallelism: ``count`` = DCP, ``interleave`` =
    ``cp_kv_cache_interleave_size``. A rank stores its tokens densely, in order.
    """

    index: int = 0
    count: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.index < self.count <= MAX_PARALLEL_SIZE and self.interleave >= 1):
            raise ValueError(
                f"not a token stripe: {self.index} of {self.count} x {self.interleave}"
            )


EVERY_TOKEN = TokenStripe()


class ParallelSizes(msgspec.Struct, frozen=True):
    """Parallel sizes of one engine (one data-parallel rank).

    Raises:
        UnsupportedSetup: for a DCP size that vLLM does not have. With PCP 1, DCP divides TP;
            with PCP > 1 it is 1, PCP or TP * PCP (vLLM's ``ParallelConfig``).
    """

    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "pcp", "dcp"):
            size = getattr(self, name)
            if not 1 <= size <= MAX_PARALLEL_SIZE:
                raise UnsupportedSetup(f"{name} size {size} is not in 1..{MAX_PARALLEL_SIZE}")
        allowed = self.allowed_dcp(self.tp, self.pcp)
        if self.dcp not in allowed:
            raise UnsupportedSetup.because(
                "decode context parallel size cannot be laid over these ranks",
                found=f"dcp={self.dcp} with tp={self.tp}, pcp={self.pcp}",
                expected=f"dcp in {sorted(allowed)}",
                change="change --decode-context-parallel-size",
            )

    @staticmethod
    def allowed_dcp(tp: int, pcp: int) -> set[int]:
        """DCP sizes that vLLM accepts beside these TP and PCP sizes."""
        if pcp > 1:
            return {1, pcp, tp * pcp}
        return {size for size in range(1, tp + 1) if tp % size == 0}

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} pcp={self.pcp} dcp={self.dcp}"

    @property
    def world_size(self) -> int:
        """Worker processes of the engine; DCP adds none."""
        return self.pp * self.pcp * self.tp

    @property
    def replicas(self) -> int:
        """Complete copies of the KV that PCP makes. With DCP > 1 its ranks hold shards instead."""
        return self.pcp if self.dcp == 1 else 1

    def rank(self, at: Coordinate) -> Rank:
        """vLLM's rank layout, tensor parallelism innermost."""
        return Rank((at.pp * self.pcp + at.pcp) * self.tp + at.tp)

    def coordinate(self, rank: int) -> Coordinate:
        """Inverse of :meth:`rank`."""
        outer, tp = divmod(rank, self.tp)
        pp, pcp = divmod(outer, self.pcp)
        return Coordinate(pp, pcp, tp)

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates, in rank order."""
        return map(self.coordinate, range(self.world_size))

    def stripe(self, at: Coordinate, interleave: int) -> TokenStripe:
        """Tokens of a DCP-sharded layer on this worker.

        DCP groups are cut from the ranks in (tp, pcp) order (vLLM's ``initialize_model_parallel``).
        """
        if self.dcp == 1:
            return EVERY_TOKEN
        return TokenStripe((at.tp * self.pcp + at.pcp) % self.dcp, self.dcp, interleave)


def heads_of(total: int, tp_size: int, tp_rank: int) -> HeadRange:
    """KV heads of one TP rank: an equal share, or one head that ``tp_size / total`` ranks hold.

    ``total`` is 1 for MLA, whose latent every TP rank holds.

    Raises:
        UnsupportedSetup: if neither number divides the other (vLLM cannot load such a model).
    """
    if total >= tp_size and total % tp_size == 0:
        share = total // tp_size
        return HeadRange(tp_rank * share, (tp_rank + 1) * share)
    if total < tp_size and tp_size % total == 0:
        head = tp_rank * total // tp_size
        return HeadRange(head, head + 1)
    raise UnsupportedSetup.because(
        "KV heads cannot be divided over tensor parallel ranks",
        found=f"{total} KV heads with tp={tp_size}",
        expected="one number to divide the other",
        change="change --tensor-parallel-size",
    )
