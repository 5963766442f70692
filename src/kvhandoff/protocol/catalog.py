# SPDX-License-Identifier: Apache-2.0
"""How an engine describes itself, and whether two engines may exchange KV at all.

The fingerprint holds what must be *equal*; what may differ (parallel sizes, block sizes, layouts)
is in the catalog, and :func:`kvhandoff.plan.routing.cover` decides about it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvhandoff.errors import IncompatiblePeer, ProtocolError
from kvhandoff.ids import MAX_NAME_LENGTH, MAX_READERS
from kvhandoff.model.layout import WorkerLayout
from kvhandoff.model.topology import ParallelSizes


class Fingerprint(msgspec.Struct, frozen=True):
    """Facts that have to be the same on both sides for bytes to mean the same.

    Attributes:
        model: digest of the model's configuration (not its path, which may differ by host).
        model_name: for messages; not compared.
        weights: digest of the weight files, or the model's name where there are none.
        dtype: of the activations, which decides the cache's under ``cache_dtype`` "auto".
        cache_dtype: ``--kv-cache-dtype``.
        layers: digest of what else decides about the layers that have a cache: the draft model.
    """

    model: str
    model_name: str
    weights: str
    dtype: str
    cache_dtype: str
    layers: str


_SETTING = {
    "model": "serve the same model and revision on both",
    "weights": "serve the same weights on both",
    "dtype": "use the same --dtype on both",
    "cache_dtype": "use the same --kv-cache-dtype on both",
    "layers": "use the same speculative decoding settings and draft model on both",
}


def check_compatible(prefill: Fingerprint, decode: Fingerprint) -> None:
    """Refuse two engines whose caches mean different things.

    Raises:
        IncompatiblePeer: naming each field that differs, both values and what to change.
    """
    problems = [
        f"{field} differs: {getattr(prefill, field)!r} on the prefill engine "
        f"({prefill.model_name}), {getattr(decode, field)!r} on the decode engine "
        f"({decode.model_name}); {change}"
        for field, change in _SETTING.items()
        if getattr(prefill, field) != getattr(decode, field)
    ]
    if problems:
        raise IncompatiblePeer(". ".join(problems))


class Catalog(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="catalog"
):  # fmt: skip
    """A whole producer engine, as sent to a consumer."""

    engine: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    incarnation: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    fingerprint: Fingerprint
    sizes: ParallelSizes
    lease: Annotated[float, msgspec.Meta(ge=0, le=86400)]
    workers: Annotated[tuple[WorkerLayout, ...], msgspec.Meta(max_length=MAX_READERS)]

    def check(self) -> None:
        """Refuse a catalog whose parts do not fit together (it comes from the network).

        Raises:
            ProtocolError: naming the first thing that does not fit.
        """
        places = {worker.at for worker in self.workers}
        if (
            len(self.workers) != self.sizes.world_size  # first: sizes may claim any number
            or places != set(self.sizes.coordinates())
        ):
            raise ProtocolError(
                f"catalog of {self.engine} describes {len(self.workers)} workers at "
                f"{sorted(places)}, which are not those of an engine with {self.sizes}"
            )
        for worker in self.workers:
            worker.check()
