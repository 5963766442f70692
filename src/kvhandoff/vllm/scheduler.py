# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler's process: what is handed off, and what is fetched."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvhandoff.config import HandoffConfig
from kvhandoff.errors import ProtocolError, UnsupportedSetup
from kvhandoff.ids import PullId, RequestId, Ticket, short_name
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.lifecycle.tickets import Tickets, Turn
from kvhandoff.plan.needs import margins, spans
from kvhandoff.plan.replicas import ReplicaChooser
from kvhandoff.protocol.params import HandoffParams, parse_params
from kvhandoff.protocol.trust import Trust
from kvhandoff.runtime.puller import PullJob
from kvhandoff.runtime.renewer import Renewer
from kvhandoff.vllm import layers
from kvhandoff.vllm.introspect import parallel_sizes
from kvhandoff.vllm.metadata import DeskAddress, StepMetadata
from kvhandoff.vllm.sameness import prompt_digest, warn_of_unhashed_images

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_COMPLETE_PREFILL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""Ends after which the whole prompt has KV: P's one token was sampled, or was a stop token."""


def _wants(request: Request, flag: str) -> bool:
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and bool(params.get(flag))


class ProducerScheduler:
    """Steps 1 and 2 of the flow: announce requests to the desk, hold them after prefill."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: HandoffConfig
    ) -> None:
        self._sizes = parallel_sizes(vllm_config)
        found = layers.needs(kv_cache_config, self._sizes.dcp)
        self._left_over = layers.last_tokens(vllm_config, found)
        self._lease = config.lease
        self._key = Trust(config.shared_key).key
        warn_of_unhashed_images(vllm_config)
        self._desk: DeskAddress | None = None
        self._announced: set[RequestId] = set()
        self._shortened: set[str] = set()
        self._news = StepMetadata()

    def set_desk(self, desk: DeskAddress) -> None:
        """Told once, after the workers have registered their caches."""
        self._desk = desk

    def on_new_request(self, request: Request) -> None:
        """Shorten a prompt by what is left to the consumer (:func:`layers.last_tokens`)."""
        left = self._left_over
        if (
            left == 0
            or not _wants(request, "do_remote_decode")
            or request.num_prompt_tokens <= left
            or request.request_id in self._shortened
            or request.get_skip_reading_prefix_cache()  # a consumer that wants prompt logprobs
        ):
            return
        self._shortened.add(request.request_id)
        if request.prompt_token_ids is not None:
            del request.prompt_token_ids[-left:]
        if request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-left]
        del request._all_token_ids[-left:]
        request.num_prompt_tokens -= left
        request.max_tokens = 1

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """A producer loads nothing."""
        return 0, False

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """A request is scheduled: announce it if it is to be handed off."""
        request_id = short_name(request.request_id)
        if _wants(request, "do_remote_decode") and request_id not in self._announced:
            self._announced.add(request_id)
            self._news.announced.append(request_id)

    def finished(
        self, request: Request, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of a completed prefill, and say where they can be had."""
        request_id = short_name(request.request_id)
        was_announced = request_id in self._announced
        self._announced.discard(request_id)
        self._shortened.discard(request.request_id)
        tokens, computed = request.num_prompt_tokens, request.num_computed_tokens
        digest = prompt_digest(request, tokens)
        if not (
            _wants(request, "do_remote_decode")
            and digest
            and request.status in _COMPLETE_PREFILL
            and (computed == tokens or (computed > tokens and not self._left_over))
        ):
            if was_announced:
                self._news.dropped.append(request_id)
            return False, None
        if self._desk is None:
            raise UnsupportedSetup("the workers of this engine did not open a desk")
        ticket = Ticket(secrets.token_hex(16))
        self._news.holdings.append(
            Holding(request_id, ticket, blocks, tokens, finishes=request.request_id)
        )
        params = HandoffParams(
            remote_engine_id=self._desk.engine,
            remote_request_id=request_id,
            remote_host=self._desk.endpoint.host,
            remote_port=self._desk.endpoint.port,
            remote_num_tokens=tokens,
            remote_replicas=self._sizes.replicas,
            remote_lease=self._lease,
            ticket=ticket,
            prompt_digest=digest,
        )
        return True, (params if self._key is None else params.signed(self._key)).to_dict()

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Freed blocks are the core's business."""

    def reset(self) -> bool:
        """What is held was computed with weights, or for caches, that are not wanted any more."""
        self._news.reset = True
        return True

    def take_step(self) -> StepMetadata:
        """News for the workers since the last step."""
        news, self._news = self._news, StepMetadata()
        return news

    def close(self) -> None:
        """Nothing to stop."""


class _Stage(Enum):
    WAITING = auto()  # for admission; its lease is renewed
    PULLING = auto()  # the workers read; the blocks are not ours to reuse
    OVER = auto()  # read, released or given up; whatever is missing is computed here


@dataclass
class _Fetch:
    """A request whose KV a producer holds."""

    params: HandoffParams
    stage: _Stage = _Stage.WAITING
    computed: int = 0
    tokens: int = 0
    replica: int = 0
    pull: PullId | None = None
    same_prompt: bool | None = None
    finished: bool = False


class ConsumerScheduler:
    """Steps 3 and, early, 8: fetch what a producer holds, or let go of it at once."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: HandoffConfig
    ) -> None:
        self._needs = layers.needs(kv_cache_config, parallel_sizes(vllm_config).dcp)
        self._left_over = layers.last_tokens(vllm_config, self._needs)
        self._fetches: dict[str, _Fetch] = {}
        self._tickets = Tickets()
        self._replicas = ReplicaChooser(config.replica_policy)
        self._trust = Trust(config.shared_key, config.prefill_hosts)
        self._renewer = Renewer(config.answer_timeout, key=self._trust.key)
        self._news = StepMetadata()
        logger.info(
            "decode engine: replica policy %s, %s",
            config.replica_policy,
            "with a shared key"
            if self._trust.key is not None
            else f"no shared key, prefill hosts: {', '.join(config.prefill_hosts) or 'any'}",
        )
        if self._trust.is_open:
            logger.warning(
                "whoever reaches this engine's HTTP port can make it read KV from any host: set "
                "shared_key or prefill_hosts, or let a router in front drop kv_transfer_params"
            )

    def on_new_request(self, request: Request) -> None:
        """From now on its lease is renewed."""
        if not _wants(request, "do_remote_prefill"):
            return
        try:
            params = parse_params(request.kv_transfer_params or {})
            self._trust.check_params(params)
        except ProtocolError as error:
            logger.warning("%s is computed here: %s", request.request_id, error)
            return
        self._fetches[request.request_id] = _Fetch(params)
        if self._tickets.join(params.proof, request.request_id):
            self._renewer.keep(params)
        elif self._tickets.turn(params.proof, request.request_id) is Turn.COMPUTE:
            logger.info(
                "%s is computed here: %s has been fetched or released before",
                request.request_id,
                params.remote_request_id,
            )

    def matched_tokens(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the ``computed`` ones. vLLM may ask many times."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not _Stage.WAITING:
            return 0, False
        turn = self._tickets.turn(fetch.params.proof, request.request_id)
        if turn is Turn.COMPUTE or not self._usable(request, fetch):
            return 0, False
        if turn is Turn.WAIT:
            return None, False  # for what the one that pulls will bring into the prefix cache
        fetch.computed = computed
        held = fetch.params.remote_num_tokens
        if held > request.num_prompt_tokens - min(self._left_over, 1):
            return 0, False  # a prompt too short to be shortened: its state covers the last token
        # vLLM computes the last token of a prompt in any case, for its logits.
        if min(held, request.num_prompt_tokens - 1) <= computed:
            return 0, False
        return held - computed, True

    def _usable(self, request: Request, fetch: _Fetch) -> bool:
        params = fetch.params
        if self._renewer.is_lost(params):
            return False
        if fetch.same_prompt is None:
            ours = prompt_digest(request, params.remote_num_tokens)
            fetch.same_prompt = (
                request.num_prompt_tokens >= params.remote_num_tokens
                and ours != ""
                and ours == params.prompt_digest
            )
            if not fetch.same_prompt:
                logger.warning(
                    "%s is computed here: its %d prompt tokens are not the %d that %s prefilled "
                    "as %s; use the same model, tokenizer and chat template on both",
                    request.request_id,
                    request.num_prompt_tokens,
                    params.remote_num_tokens,
                    params.remote_engine_id,
                    params.remote_request_id,
                )
        return fetch.same_prompt

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """The request is admitted: fetch ``external`` tokens, or let go if there is nothing to."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None or fetch.stage is not _Stage.WAITING:
            return
        if external == 0:
            self._let_go(request.request_id, fetch)
            return
        params = fetch.params
        fetch.stage = _Stage.PULLING
        self._tickets.pull(params.proof, request.request_id)
        fetch.pull = PullId(secrets.token_hex(8))
        fetch.tokens = external
        fetch.replica = self._replicas.choose(
            params.engine, params.remote_request_id, params.remote_replicas, external
        )
        found = spans(self._needs, fetch.computed, fetch.computed + external)
        block_ids = tuple(list(ids) for ids in blocks.get_block_ids())
        self._news.jobs.append(
            PullJob(
                request=request.request_id,
                params=params,
                pull=fetch.pull,
                replica=fetch.replica,
                spans=found,
                blocks=block_ids,
                margins=margins(self._needs, found),
            )
        )

    def finished(
        self, request: Request, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Rejected, aborted or done. Reads under way go on; the core keeps their blocks."""
        fetch = self._fetches.get(request.request_id)
        if fetch is not None:
            fetch.finished = True
            if fetch.stage is _Stage.WAITING:
                self._let_go(request.request_id, fetch)
            if fetch.stage is _Stage.OVER:
                del self._fetches[request.request_id]
        return False, None

    def worker_output(self, output: KVConnectorOutput) -> None:
        """Every worker has ended the pulls named here."""
        for request_id in output.finished_recving or ():
            fetch = self._fetches.get(request_id)
            if fetch is None or fetch.stage is not _Stage.PULLING:
                continue
            self._replicas.done(fetch.params.engine, fetch.replica, fetch.tokens)
            if request_id in (output.failed_recving or ()):
                self._let_go(request_id, fetch)
            else:
                fetch.stage = _Stage.OVER
                self._tickets.read(fetch.params.proof)
                self._renewer.stop(fetch.params)
            if fetch.finished:
                del self._fetches[request_id]

    def _let_go(self, request_id: str, fetch: _Fetch) -> None:
        fetch.stage = _Stage.OVER
        if self._tickets.leave(fetch.params.proof, request_id):
            self._renewer.release(fetch.params, fetch.pull)

    def take_step(self) -> StepMetadata:
        """News for the workers since the last step.

        Raises:
            ThreadDied: if nobody renews any more; requests would wait for what is let go of.
        """
        self._renewer.require_alive()
        news, self._news = self._news, StepMetadata()
        return news

    def reset(self) -> bool:
        """Nothing that was fetched is kept here; what waits can be fetched as before."""
        return True

    def close(self) -> None:
        """Stop renewing."""
        self._renewer.close()
