# SPDX-License-Identifier: Apache-2.0
"""Hybrid models over whole runtimes and the real TransferEngine, in caches that vLLM laid out.

The oracle writes and reads what vLLM's kernels would, by vLLM's views and block tables; it knows
nothing of kvhandoff's layouts. After a handoff every byte of every D worker is what it has to be:
the oracle's where a layer looks back to, zero around it in blocks that are the request's alone, and
what was there before everywhere else.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvhandoff.config import HandoffConfig
from kvhandoff.ids import Endpoint, EngineId, Incarnation, PullId, Rank, Reader, RequestId, Ticket
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.model.layout import Segment, WorkerLayout
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.descriptors import Descriptors
from kvhandoff.plan.needs import margins, spans
from kvhandoff.plan.routing import replica_for_request
from kvhandoff.protocol.catalog import Catalog
from kvhandoff.protocol.params import HandoffParams
from kvhandoff.runtime.desk import Desk
from kvhandoff.runtime.puller import Puller, PullJob, PullResult
from kvhandoff.transport.base import Flight, Transport
from kvhandoff.vllm import layers
from tests.engines import FINGERPRINT, HOST, MakeTransport, wait_until
from tests.sim.pool import MooncakePool
from tests.sim.vllm_models import MODELS, Model, allocate

BLOCKS = 200
P_MARKER, D_MARKER = 0x5A, 0xA5
PACKED = ("indexer.k_cache", "swa_cache", ".attn")
"""Layers of the packed models whose rows hold values first and scales behind (by their ends)."""


def noise(seed: int, tag: str, *indices: np.ndarray, width: int) -> np.ndarray:
    """Bytes ``[..., width]`` that follow from all of this and from nothing else."""
    mixed = np.uint64(
        (seed * 0x9E3779B97F4A7C15 + crc32(tag.encode()) * 0xBF58476D1CE4E5B9) % 2**64
    )
    mixed = np.asarray(mixed)[..., None]
    for index, factor in zip(indices, (0x94D049BB133111EB, 0xD6E8FEB86659FD93, 31), strict=False):
        mixed = mixed + np.asarray(index, dtype=np.uint64)[..., None] * np.uint64(factor)
    mixed = mixed + np.arange(width, dtype=np.uint64) * np.uint64(0xA24BAED4963EE407)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9FB21C651E98DF25)
    return (mixed >> np.uint64(40)).astype(np.uint8)


def look_back(spec: KVCacheSpec, stop: int) -> int:
    """First position that the token at position ``stop`` looks back to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, stop - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return stop // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


class Tables:
    """Block tables of one engine, as vLLM's managers make them: null where nothing is kept."""

    def __init__(self, seed: int) -> None:
        self._free = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).tolist()

    def make(self, groups: list[KVCacheSpec], tokens: int, lookahead: int) -> list[list[int]]:
        tables = []
        for spec in groups:
            count = -(-(tokens + lookahead) // spec.block_size)
            first = look_back(spec, tokens) // spec.block_size
            if isinstance(spec, MambaSpec):
                first = (tokens - 1) // spec.block_size
            tables.append([0 if n < first else self._free.pop() for n in range(count)])
        return tables


@dataclass
class Worker:
    """One worker: what vLLM allocated, and what kvhandoff made of it."""

    model: Model
    tp: int
    tp_size: int
    groups: list[KVCacheSpec]
    specs: dict[str, tuple[int, KVCacheSpec]]
    views: dict[str, np.ndarray]
    memory: np.ndarray
    layout: WorkerLayout

    def shadow(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A copy of the memory, with the same views on it."""
        copy = self.memory.copy()
        base = self.memory.ctypes.data
        views = {
            name: np.lib.stride_tricks.as_strided(
                copy[view.ctypes.data - base :], view.shape, view.strides
            )
            for name, view in self.views.items()
        }
        return copy, views

    def heads(self, spec: Any, local: int) -> np.ndarray:
        """Model heads that this rank's slots hold."""
        total = self.total_heads(spec)
        if total >= self.tp_size:
            return self.tp * local + np.arange(local)
        return np.array([self.tp * total // self.tp_size])

    def total_heads(self, spec: Any) -> int:
        if spec.max_tp_shards == 1 or self.model.kv_heads == 1:
            return 1
        draft = self.model.draft_kv_heads and spec.head_size == 16
        return self.model.draft_kv_heads if draft else self.model.kv_heads

    def write(
        self, views: dict[str, np.ndarray], tables: list[list[int]], seed: int, computed: int,
        stop: int,
    ) -> None:  # fmt: skip
        """What the kernels would have in the cache for positions ``[computed, stop)``."""
        for name, (group, spec) in self.specs.items():
            view, table = views[name], tables[group]
            if isinstance(spec, MambaSpec):
                state = self.state(name, spec, seed, stop)
                view[table[(stop - 1) // spec.block_size], 0, 0, : state.size] = state
                continue
            first = max(computed, look_back(spec, stop))
            each = int(spec.tokens_per_state)
            entries = np.arange(first // each, stop // each)
            position = entries * each
            block = np.array(table)[position // spec.block_size]
            entry = position % spec.block_size // each
            heads = self.heads(spec, view.shape[1])
            cells = noise(seed, name, entries[:, None], heads[None, :], width=view.shape[3])
            if not is_packed(name, self.model):
                view[block[:, None], np.arange(view.shape[1]), entry[:, None]] = cells
                continue
            for number, row, cell in zip(block, entry, cells[:, 0], strict=True):
                scales = 4 if view.shape[3] == 132 else 8
                page = view[number, 0].reshape(-1)
                assert np.shares_memory(page, view), "rows of packed layers are dense"
                values, n = view.shape[3] - scales, view.shape[2]
                page[row * values : (row + 1) * values] = cell[:values]
                page[n * values + row * scales : n * values + (row + 1) * scales] = cell[values:]

    def state(self, name: str, spec: MambaSpec, seed: int, stop: int) -> np.ndarray:
        """This rank's share of a state after ``stop`` tokens, in bytes."""
        (conv_shape, recurrent_shape), (conv_type, recurrent_type) = spec.shapes, spec.dtypes
        length = conv_shape[1] if is_conv_state_dim_first() else conv_shape[0]
        parts = []
        for number, part in enumerate(self.model.conv):
            heads = self.share(part.heads)
            channels = (heads[:, None] * part.width + np.arange(part.width)).reshape(-1)
            tag = f"{name} conv {number} after {stop}"
            parts.append(
                noise(seed, tag, channels[:, None], np.arange(length), width=conv_type.itemsize)
            )
        conv = np.concatenate(parts)  # [channel, position, byte]
        if not is_conv_state_dim_first():
            conv = conv.transpose(1, 0, 2)
        assert conv.shape[:2] == conv_shape
        assert self.model.recurrent is not None
        heads, width = self.share(self.model.recurrent.heads), self.model.recurrent.width
        recurrent = noise(
            seed, f"{name} state after {stop}", heads[:, None], np.arange(width),
            width=recurrent_type.itemsize,
        )  # fmt: skip
        assert recurrent.shape[0] * width == np.prod(recurrent_shape)
        return np.concatenate([conv.reshape(-1), recurrent.reshape(-1)])

    def share(self, total: int) -> np.ndarray:
        if total % self.tp_size:
            return np.arange(total)
        return np.array_split(np.arange(total), self.tp_size)[self.tp]

    def blank(
        self, views: dict[str, np.ndarray], tables: list[list[int]], computed: int, stop: int
    ) -> None:
        """Zero the blocks of a request that hold something it reads, as far as they are its own."""
        for name, (group, spec) in self.specs.items():
            if isinstance(spec, MambaSpec):
                continue
            view, each = views[name], int(spec.tokens_per_state)
            first = max(computed, look_back(spec, stop))
            for number in range(first // spec.block_size, -(-stop // spec.block_size)):
                begin = max(computed - number * spec.block_size, 0)
                view[tables[group][number], :, begin // each :] = 0


def is_packed(name: str, model: Model) -> bool:
    if model is MODELS["deepseek_v4"]:
        return name.endswith(PACKED)
    return name.endswith("indexer.k_cache")


def make_workers(model: Model, sizes: ParallelSizes, sessions: list[str], marker: int) -> Any:
    """All workers of an engine, every byte set to a marker, and the needs of its groups."""
    config, caches, views_of = allocate(model, sizes, BLOCKS)
    workers = []
    for rank, (cache, tensors) in enumerate(zip(caches, views_of, strict=True)):
        groups, specs = [], {}
        for number, group in enumerate(cache.kv_cache_groups):
            by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            groups.append(next(iter(iter_layer_specs(group.kv_cache_spec))))
            for name in group.layer_names:
                specs[name] = (number, by_layer.get(name, group.kv_cache_spec))
        at = sizes.coordinate(rank)
        layout = layers.describe_worker(config, cache, tensors, at, sessions[rank])
        layout.check()
        storage = next(iter(tensors.values())).untyped_storage()
        memory = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
        )
        memory[:] = marker
        views = {
            name: np.lib.stride_tricks.as_strided(
                memory[tensor.data_ptr() - storage.data_ptr() :],
                (*tensor.shape[:3], tensor.shape[3] * tensor.element_size()),
                (*(stride * tensor.element_size() for stride in tensor.stride()[:3]), 1),
            )
            for name, tensor in tensors.items()
        }
        worker = Worker(model, at.tp, sizes.tp, groups, specs, views, memory, layout)
        worker.tensors = tensors  # type: ignore[attr-defined]  # keeps the memory alive
        workers.append(worker)
    return workers, layers.needs(caches[0], sizes.dcp)


class Pair:
    """A prefill and a decode engine of one model."""

    def __init__(
        self, model: Model, p: ParallelSizes, d: ParallelSizes, make: MakeTransport
    ) -> None:
        self.model, self.p, self.d = model, p, d
        self.transports = [make() for _ in range(p.world_size + d.world_size)]
        sessions = [transport.session for transport in self.transports]
        self.producers, _ = make_workers(model, p, sessions[: p.world_size], P_MARKER)
        self.consumers, self.needs = make_workers(model, d, sessions[p.world_size :], D_MARKER)
        for worker, transport in zip(self.producers + self.consumers, self.transports, strict=True):
            for segment in worker.layout.segments:
                transport.register(segment)
        layouts = tuple(worker.layout for worker in self.producers)
        catalog = Catalog(
            engine=EngineId(f"p-{secrets.token_hex(4)}"),
            incarnation=Incarnation(secrets.token_hex(8)),
            fingerprint=FINGERPRINT,
            sizes=p,
            lease=30.0,
            workers=layouts,
        )
        catalog.check()
        self.catalog = catalog
        self.desk = Desk(Endpoint(HOST, 0), catalog, max_hold=900.0)
        self.pullers = [
            Puller(
                worker.layout, Reader(Rank(rank), d.world_size), EngineId("d"), FINGERPRINT,
                self.transports[p.world_size + rank], HandoffConfig(),
            )
            for rank, worker in enumerate(self.consumers)
        ]  # fmt: skip
        self.p_tables, self.d_tables = Tables(1), Tables(2)
        self.held: dict[str, list[list[int]]] = {}

    def hand_off(self, request: str, tokens: int, seed: int) -> HandoffParams:
        """Prefill on every replica and hold."""
        tables = self.p_tables.make(self.producers[0].groups, tokens, 0)
        for worker in self.producers:
            worker.write(worker.views, tables, seed, 0, tokens)
        ticket = Ticket(secrets.token_hex(16))
        self.held[request] = tables
        self.desk.hold(Holding(RequestId(request), ticket, tuple(tables), tokens))
        return HandoffParams(
            remote_engine_id=self.catalog.engine,
            remote_request_id=RequestId(request),
            remote_host=HOST,
            remote_port=self.desk.port,
            remote_num_tokens=tokens,
            remote_replicas=self.p.replicas,
            remote_lease=30.0,
            ticket=ticket,
        )

    def job(self, params: HandoffParams, computed: int = 0) -> PullJob:
        """What D's scheduler would ask its workers for; room for the last token is allocated."""
        tokens = params.remote_num_tokens
        found = spans(self.needs, computed, tokens)
        return PullJob(
            request=f"d-{params.remote_request_id}",
            params=params,
            pull=PullId(secrets.token_hex(8)),
            replica=replica_for_request(params.remote_request_id, params.remote_replicas),
            spans=found,
            blocks=tuple(self.d_tables.make(self.consumers[0].groups, tokens, 1)),
            margins=margins(self.needs, found),
        )

    def pull(self, *jobs: PullJob) -> list[list[PullResult]]:
        """Results of all jobs, by worker."""
        for job in jobs:
            for puller in self.pullers:
                puller.submit(job)
        collected: list[list[PullResult]] = [[] for _ in self.pullers]

        def complete() -> bool:
            for results, puller in zip(collected, self.pullers, strict=True):
                results += puller.take_results()
            return all(len(results) >= len(jobs) for results in collected)

        wait_until(complete, 60)
        return collected

    def check(self, before: list[tuple[np.ndarray, dict[str, np.ndarray]]], jobs: Any) -> None:
        """Every byte of every D worker."""
        for rank, (worker, (expected, views)) in enumerate(
            zip(self.consumers, before, strict=True)
        ):
            for job, seed, computed in jobs:
                stop = job.params.remote_num_tokens
                worker.blank(views, list(job.blocks), computed, stop)
                self.carry_rows(worker, views, job, seed, computed)
                worker.write(views, list(job.blocks), seed, computed, stop)
            wrong = np.flatnonzero(expected != worker.memory)
            if wrong.size:
                pytest.fail(f"worker {rank}: {wrong.size} bytes, first {self.where(worker, wrong)}")

    def carry_rows(
        self, worker: Worker, views: dict[str, np.ndarray], job: PullJob, seed: int, computed: int
    ) -> None:
        """Rows that are packed come whole: with what P has in them behind the request."""
        stop = job.params.remote_num_tokens
        for name, (group, spec) in worker.specs.items():
            if is_packed(name, self.model) and stop >= int(spec.tokens_per_state):
                first = max(computed, look_back(spec, stop))
                last = stop // int(spec.tokens_per_state) * int(spec.tokens_per_state)
                for number in range(first // spec.block_size, -(-last // spec.block_size)):
                    source = self.held_row(name, job, group, number)
                    views[name][job.blocks[group][number]] = source

    def held_row(self, name: str, job: PullJob, group: int, number: int) -> np.ndarray:
        return self.producers[0].views[name][self.held[job.params.remote_request_id][group][number]]

    @staticmethod
    def where(worker: Worker, wrong: np.ndarray) -> str:
        address = worker.memory.ctypes.data + int(wrong[0])
        near = [layer.name for layer in worker.layout.layers if layer.base <= address < layer.end]
        return f"at {wrong[0]} of {worker.memory.size}, within {near}"

    def close(self) -> None:
        for puller in self.pullers:
            puller.close()
        self.desk.close()
        for transport in self.transports:
            transport.close()


def topologies() -> Iterator[Any]:
    for name, model in MODELS.items():
        for p_tp, d_tp in model.tp:
            for pcp in (1, 2, 4):
                yield pytest.param(
                    name, ParallelSizes(tp=p_tp, pcp=pcp), ParallelSizes(tp=d_tp),
                    id=f"{name}-pcp{pcp}-tp{p_tp}-to-tp{d_tp}",
                )  # fmt: skip


@pytest.mark.parametrize(("name", "p", "d"), list(topologies()))
def test_every_byte_of_a_handoff(
    name: str, p: ParallelSizes, d: ParallelSizes, mooncake_pool: MooncakePool
) -> None:
    """Prompts around the borders of windows, chunks, blocks, entries and states."""
    model = MODELS[name]
    pair = Pair(model, p, d, mooncake_pool.lend)
    try:
        for seed, tokens in enumerate(model.lengths):
            pair.p_tables, pair.d_tables = Tables(seed), Tables(seed + 1000)
            params = pair.hand_off(f"r{seed}", tokens, seed)
            job = pair.job(params)
            before = [worker.shadow() for worker in pair.consumers]
            results = pair.pull(job)
            assert [[r.failure for r in each] for each in results] == [[None]] * d.world_size
            pair.check(before, [(job, seed, 0)])
    finally:
        pair.close()


CACHING = ("gemma3", "gpt_oss", "llama4", "deepseek_v32", "deepseek_v4", "mla_mtp", "gqa_draft")
"""Models whose decode engine can have a part of a prompt without a state in the middle of it."""


@pytest.mark.parametrize("name", CACHING)
def test_every_byte_where_decode_has_hits(name: str, mooncake_pool: MooncakePool) -> None:
    """What D has in its prefix cache is shared with others: read around it, touch none of it."""
    model = MODELS[name]
    pair = Pair(model, ParallelSizes(pcp=2), ParallelSizes(tp=1), mooncake_pool.lend)
    try:
        step = max(spec.block_size for spec in pair.consumers[0].groups)
        cases = [
            (tokens, computed) for tokens in model.lengths for computed in range(step, tokens, step)
        ]
        assert cases
        for seed, (tokens, computed) in enumerate(cases):
            pair.p_tables, pair.d_tables = Tables(seed), Tables(seed + 1000)
            job = pair.job(pair.hand_off(f"r{seed}", tokens, seed), computed)
            before = [worker.shadow() for worker in pair.consumers]
            assert [[r.failure for r in each] for each in pair.pull(job)] == [[None]]
            pair.check(before, [(job, seed, computed)])
    finally:
        pair.close()


@dataclass
class Failed:
    """A flight that was rejected."""

    failure: str
    left: int = 0

    def poll(self) -> None:
        """It is final."""


class FailingReads:
    """A transport that cannot write to one range of local memory."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.start = self.stop = 0

    @property
    def session(self) -> str:
        return self.transport.session

    def register(self, segment: Segment) -> None:
        self.transport.register(segment)

    def connect(self, session: str) -> None:
        self.transport.connect(session)

    def begin(self, session: str, descriptors: Descriptors) -> Flight:
        local = descriptors.local
        if np.any((local < self.stop) & (local + descriptors.length > self.start)):
            return Failed("the link is down")
        return self.transport.begin(session, descriptors)

    def cut(self) -> None:
        self.transport.cut()

    def close(self) -> None:
        self.transport.close()


def test_a_group_that_fails_on_one_rank_fails_its_request_everywhere(
    mooncake_pool: MooncakePool,
) -> None:
    """One rank lacks a state; vLLM hears that the request failed, the other one is complete."""
    model, sizes = MODELS["qwen3_next"], ParallelSizes(tp=2)
    made: list[FailingReads] = []

    def lend() -> FailingReads:
        made.append(FailingReads(mooncake_pool.lend()))
        return made[-1]

    pair = Pair(model, ParallelSizes(tp=2, pcp=2), sizes, lend)
    try:
        jobs = [pair.job(pair.hand_off(f"r{seed}", 48, seed)) for seed in range(2)]
        victim, rank = pair.consumers[1], pair.p.world_size + 1
        name = "model.layers.0.linear_attn"
        group, _ = victim.specs[name]
        (block,) = (each for each in jobs[0].blocks[group] if each)
        view = victim.views[name]
        made[rank].start = view.ctypes.data + block * view.strides[0]
        made[rank].stop = made[rank].start + view.shape[3]
        before = [worker.shadow() for worker in pair.consumers]
        results = pair.pull(*jobs)
        outcomes = [{r.request: r.failure for r in each} for each in results]
        assert outcomes[0] == dict.fromkeys(("d-r0", "d-r1"))
        assert outcomes[1]["d-r1"] is None
        assert "the link is down" in str(outcomes[1]["d-r0"])

        reports = [
            ModelRunnerOutput(
                req_ids=[],
                req_id_to_index={},
                kv_connector_output=KVConnectorOutput(
                    finished_recving=set(each),
                    failed_recving={request for request, failure in each.items() if failure},
                ),
            )
            for each in outcomes
        ]
        together = KVOutputAggregator(sizes.world_size).aggregate(reports)
        assert together is not None
        assert together.kv_connector_output is not None
        assert together.kv_connector_output.finished_recving == {"d-r0", "d-r1"}
        assert together.kv_connector_output.failed_recving == {"d-r0"}

        for worker, (_, views) in zip(pair.consumers, before, strict=True):
            worker.blank(views, list(jobs[1].blocks), 0, 48)
            worker.write(views, list(jobs[1].blocks), 1, 0, 48)
            for layer, (number, _) in worker.specs.items():
                mine = [each for each in jobs[1].blocks[number] if each]
                assert np.array_equal(views[layer][mine], worker.views[layer][mine])
    finally:
        pair.close()
