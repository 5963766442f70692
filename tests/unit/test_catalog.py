# SPDX-License-Identifier: Apache-2.0
"""Which engines may exchange KV, and which catalogs can be true."""

from __future__ import annotations

import msgspec
import pytest

from kvhandoff.errors import IncompatiblePeer, ProtocolError
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.protocol.catalog import Catalog, Fingerprint, check_compatible
from tests.oracle import CacheShape, ModelShape, make_engine

OURS = Fingerprint("model-1", "tiny", "weights-1", "float32", "auto", "layers-1")


def changed(**fields: str) -> Fingerprint:
    return msgspec.structs.replace(OURS, **fields)


def test_equal_fingerprints_are_compatible() -> None:
    """The model's name is for messages: hosts may keep the same model under other paths."""
    check_compatible(OURS, OURS)
    check_compatible(OURS, changed(model_name="/mnt/tiny"))


@pytest.mark.parametrize(
    ("field", "value", "setting"),
    [
        ("model", "model-2", "same model and revision"),
        ("weights", "weights-2", "same weights"),
        ("dtype", "bfloat16", "--dtype"),
        ("cache_dtype", "fp8", "--kv-cache-dtype"),
        ("layers", "layers-2", "speculative decoding settings and draft model"),
    ],
)
def test_each_difference_is_named(field: str, value: str, setting: str) -> None:
    """The refusal says which field differs, both values, whose they are and what to change."""
    with pytest.raises(IncompatiblePeer) as refusal:
        check_compatible(OURS, changed(**{field: value}))
    text = str(refusal.value)
    assert text.startswith(f"{field} differs")
    assert f"{getattr(OURS, field)!r} on the prefill engine (tiny)" in text
    assert f"{value!r} on the decode engine (tiny)" in text
    assert setting in text


def test_every_compared_field_has_a_case_above() -> None:
    """A new field of the fingerprint needs a setting to name, too."""
    everything = dict.fromkeys(Fingerprint.__struct_fields__, "other")
    with pytest.raises(IncompatiblePeer) as refusal:
        check_compatible(OURS, Fingerprint(**everything))
    for name in set(everything) - {"model_name"}:
        assert f"{name} differs" in str(refusal.value)


def catalog(sizes: ParallelSizes) -> Catalog:
    engine = make_engine(ModelShape(heads=2), sizes, CacheShape())
    workers = tuple(cache.layout for cache in engine.values())
    return Catalog("engine", "incarnation", OURS, sizes, 30.0, workers)


@pytest.mark.parametrize("sizes", [ParallelSizes(), ParallelSizes(tp=2, pp=2, pcp=2)], ids=str)
def test_true_catalogs_pass_in_any_order(sizes: ParallelSizes) -> None:
    """Workers are named by their coordinates, so their order means nothing."""
    described = catalog(sizes)
    described.check()
    msgspec.structs.replace(described, workers=described.workers[::-1]).check()


TWO = catalog(ParallelSizes(tp=2))


@pytest.mark.parametrize(
    "bad",
    [
        msgspec.structs.replace(TWO, workers=TWO.workers[:1]),
        msgspec.structs.replace(TWO, workers=TWO.workers[:1] * 2),
        msgspec.structs.replace(TWO, workers=(*TWO.workers, TWO.workers[0])),
        msgspec.structs.replace(TWO, workers=()),
        msgspec.structs.replace(TWO, sizes=ParallelSizes(pp=2)),
        msgspec.structs.replace(TWO, sizes=ParallelSizes(tp=4096, pp=4096, pcp=4096)),
    ],
    ids=["one missing", "one twice", "one too many", "none", "other sizes", "absurd sizes"],
)
def test_workers_that_do_not_fit_the_sizes_are_refused(bad: Catalog) -> None:
    """Every place has one worker, which costs no more to find out than the catalog is long."""
    with pytest.raises(ProtocolError, match="not those of an engine with"):
        bad.check()


def test_layouts_are_checked_with_the_catalog() -> None:
    """One worker's impossible layout refuses the engine."""
    worker = msgspec.structs.replace(TWO.workers[1], segments=())
    bad = msgspec.structs.replace(TWO, workers=(TWO.workers[0], worker))
    with pytest.raises(ProtocolError, match="outside of the registered segments"):
        bad.check()
