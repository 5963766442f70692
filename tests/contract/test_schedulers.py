# SPDX-License-Identifier: Apache-2.0
"""Both schedulers with vLLM's own requests: which tokens are left to D, and what D asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvhandoff.config import HandoffConfig
from kvhandoff.errors import ThreadDied
from kvhandoff.ids import Endpoint, EngineId
from kvhandoff.model.topology import ParallelSizes
from kvhandoff.plan.pairing import Span
from kvhandoff.vllm.metadata import DeskAddress
from kvhandoff.vllm.sameness import prompt_digest
from kvhandoff.vllm.scheduler import ConsumerScheduler, ProducerScheduler
from tests.sim.vllm_models import MODELS, allocate

TO_REMOTE = {"do_remote_decode": True}
PROMPT = list(range(100, 150))


def request(prompt: list[int], params: dict[str, Any], *, name: str = "r") -> Request:
    sampling = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params})
    return Request(name, list(prompt), sampling, None)


def producer(model: str, lookahead: int = 0, key: str = "") -> ProducerScheduler:
    config, caches, _ = allocate(MODELS[model], ParallelSizes(pcp=2), 200)
    config.num_prefill_lookahead_tokens = lookahead
    scheduler = ProducerScheduler(config, caches[0], HandoffConfig(shared_key=key))
    scheduler.set_desk(DeskAddress(Endpoint("127.0.0.1", 1), EngineId("p")))
    return scheduler


@pytest.fixture
def consumers() -> Iterator[Any]:
    made = []

    def consumer(model: str, **settings: Any) -> ConsumerScheduler:
        config, caches, _ = allocate(MODELS[model], ParallelSizes(), 200)
        made.append(
            ConsumerScheduler(config, caches[0], HandoffConfig(answer_timeout=0.2, **settings))
        )
        return made[-1]

    yield consumer
    for scheduler in made:
        scheduler.close()


@pytest.mark.parametrize(
    ("model", "lookahead", "left"),
    [
        ("mla_mtp", 0, 0), ("deepseek_v32", 0, 0), ("gqa_draft", 0, 0), ("mla_mtp", 3, 2),
        ("gemma3", 0, 1), ("llama4", 0, 1), ("qwen3_next", 0, 1), ("deepseek_v4", 0, 1),
        ("qwen3_next", 3, 2),
    ],
)  # fmt: skip
def test_prompts_are_shortened_by_what_cannot_be_taken_back(
    model: str, lookahead: int, left: int
) -> None:
    """A state, a window or a draft's lookahead after the last token is of no use to D."""
    scheduler, asked = producer(model, lookahead), request(PROMPT, TO_REMOTE)
    for _ in range(2):  # a preempted request comes again
        scheduler.on_new_request(asked)
        assert asked.num_prompt_tokens == len(PROMPT) - left
        assert asked.prompt_token_ids == PROMPT[: len(PROMPT) - left]
        assert list(asked.all_token_ids) == PROMPT[: len(PROMPT) - left]


def test_others_and_prompts_of_one_token_stay_whole() -> None:
    """Who asks P for an answer of its own gets it to the whole prompt."""
    scheduler = producer("qwen3_next")
    for asked, tokens in ((request(PROMPT, {}), 50), (request([5], TO_REMOTE), 1)):
        scheduler.on_new_request(asked)
        assert asked.num_prompt_tokens == tokens


def hold(scheduler: ProducerScheduler, asked: Request) -> dict[str, Any]:
    scheduler.on_new_request(asked)
    scheduler.allocated(asked, KVCacheBlocks(((),)), 0)
    asked.num_computed_tokens = asked.num_prompt_tokens
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    held, params = scheduler.finished(asked, ([1],))
    assert held
    assert params is not None
    return params


def test_decode_asks_for_the_shortened_prompt_and_computes_the_rest(consumers: Any) -> None:
    """Of each group what it looks back to, and the margins of the blocks that it comes into."""
    params = hold(producer("gemma3"), request(PROMPT, TO_REMOTE))
    assert params["remote_num_tokens"] == 49
    scheduler, asked = consumers("gemma3"), request(PROMPT, params)
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (49, True)
    blocks = tuple([KVCacheBlock(1 + n + 10 * group) for n in range(4)] for group in range(3))
    scheduler.allocated(asked, KVCacheBlocks(blocks), 49)
    (job,) = scheduler.take_step().jobs
    assert job.spans == {0: Span(10, 49), 1: Span(10, 49), 2: Span(0, 49)}
    assert job.margins[0] == (Span(0, 10), Span(49, 64))
    assert job.margins[2] == (Span(49, 64),)
    assert job.blocks == ([1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24])


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_a_state_that_covers_the_last_token_is_not_loaded(
    consumers: Any, prompt: list[int]
) -> None:
    """Held by a producer that did not shorten it (a prompt of one token): computed here."""
    params = hold(producer("qwen3_next"), request(prompt, TO_REMOTE))
    asked = request(prompt, params)
    params["remote_num_tokens"] = len(prompt)
    params["prompt_digest"] = prompt_digest(asked, len(prompt))
    scheduler = consumers("qwen3_next")
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)


def test_a_full_hit_is_let_go(consumers: Any) -> None:
    """Everything that is held is in D's prefix cache: nothing to load, P hears so at once."""
    params = hold(producer("gemma3"), request(PROMPT[:49], TO_REMOTE))
    scheduler, asked = consumers("gemma3"), request(PROMPT[:49], params)
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 48) == (0, False)
    scheduler.allocated(asked, KVCacheBlocks(((), (), ())), 0)
    assert scheduler.take_step().jobs == []
    assert scheduler.matched_tokens(asked, 0) == (0, False)


KEY = "a key that both sides know"


@pytest.mark.parametrize(
    ("theirs", "settings", "loaded"),
    [
        (KEY, {"shared_key": KEY}, 50),
        (KEY, {}, 50),
        ("", {"shared_key": KEY}, 0),
        ("another key, as long", {"shared_key": KEY}, 0),
        ("", {"prefill_hosts": ("127.0.0.1",)}, 50),
        ("", {"prefill_hosts": ("10.0.0.0/8",)}, 0),
    ],
)
def test_only_those_who_are_trusted_are_asked(
    consumers: Any, theirs: str, settings: dict[str, Any], loaded: int
) -> None:
    """Others' requests are computed here, and nobody connects to the hosts that they name."""
    params = hold(producer("mla_mtp", key=theirs), request(PROMPT, TO_REMOTE))
    scheduler, asked = consumers("mla_mtp", **settings), request(PROMPT, params)
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (loaded, bool(loaded))
    assert len(scheduler._renewer) == bool(loaded)


def test_a_changed_ticket_is_computed_here(consumers: Any) -> None:
    """What a router or client has changed is not signed any more."""
    params = hold(producer("mla_mtp", key=KEY), request(PROMPT, TO_REMOTE))
    asked = request(PROMPT, params | {"ticket": "f" * 32})
    scheduler = consumers("mla_mtp", shared_key=KEY)
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (0, False)


class Engine:
    """A consumer's scheduler, and what it has released."""

    def __init__(self, scheduler: ConsumerScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scheduler = scheduler
        self.released: list[str] = []
        monkeypatch.setattr(
            scheduler._renewer,
            "release",
            lambda params, pull=None: self.released.append(params.remote_request_id),
        )

    def come(self, asked: Request) -> None:
        self.scheduler.on_new_request(asked)

    def matched(self, asked: Request) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(asked, 0)

    def admit(self, asked: Request, external: int) -> None:
        blocks = KVCacheBlocks(([KVCacheBlock(1 + n) for n in range(4)],))
        self.scheduler.allocated(asked, blocks, external)

    def abort(self, asked: Request) -> None:
        asked.status = RequestStatus.FINISHED_ABORTED
        self.scheduler.finished(asked, ([],))

    def ended(self, asked: Request, *, failed: bool = False) -> None:
        names = {asked.request_id}
        output = KVConnectorOutput(finished_recving=names, failed_recving=names if failed else None)
        self.scheduler.worker_output(output)


@pytest.fixture
def engine(consumers: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(consumers("mla_mtp"), monkeypatch)


def siblings(*prompts: list[int]) -> list[Request]:
    """Requests that came with the same ticket, which is that of the first prompt."""
    params = hold(producer("mla_mtp"), request(prompts[0], TO_REMOTE))
    return [request(prompt, params, name=f"d{n}") for n, prompt in enumerate(prompts)]


def test_a_retry_takes_over_what_its_first_attempt_leaves(engine: Engine) -> None:
    """The first attempt is aborted while both wait to be admitted."""
    first, retry = siblings(PROMPT, PROMPT)
    engine.come(first)
    engine.come(retry)
    assert engine.matched(first) == engine.matched(retry) == (50, True)
    engine.abort(first)
    assert engine.released == []
    assert engine.matched(retry) == (50, True)
    engine.admit(retry, 50)
    engine.ended(retry)
    assert engine.released == []
    assert len(engine.scheduler._tickets) == 0


def test_siblings_wait_for_the_one_that_pulls(engine: Engine) -> None:
    """Then everything is in the prefix cache, and there is nothing left to fetch."""
    first, second = siblings(PROMPT, PROMPT)
    engine.come(first)
    engine.come(second)
    engine.admit(first, 50)
    assert engine.matched(second) == (None, False)
    engine.ended(first)
    assert engine.matched(second) == (0, False)
    engine.admit(second, 0)
    assert engine.released == []


def test_a_sibling_tries_what_has_failed(engine: Engine) -> None:
    """Its own pull may reach another replica; when it fails too, the ticket is released."""
    first, second = siblings(PROMPT, PROMPT)
    engine.come(first)
    engine.come(second)
    engine.admit(first, 50)
    engine.ended(first, failed=True)
    assert engine.released == []
    assert engine.matched(second) == (50, True)
    engine.admit(second, 50)
    engine.ended(second, failed=True)
    assert len(engine.released) == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_prompts_of_one_batch_do_not_wait_for_each_other(
    engine: Engine, order: tuple[int, int]
) -> None:
    """vLLM hands out one ticket for all prompts of a batch; it is of use to one of them."""
    both = siblings(PROMPT, PROMPT[::-1])
    for number in order:
        engine.come(both[number])
    for number in order:
        expected = (50, True) if number == 0 else (0, False)
        assert engine.matched(both[number]) == expected
        engine.admit(both[number], expected[0])
    assert engine.released == []
    engine.ended(both[0])
    assert engine.released == []


def test_a_ticket_that_nobody_can_use_is_released_once(engine: Engine) -> None:
    """When the last one lets go."""
    both = siblings(PROMPT, PROMPT)
    for each in both:
        engine.come(each)
    engine.admit(both[0], 0)
    assert engine.released == []
    engine.abort(both[1])
    assert len(engine.released) == 1


def test_a_request_id_of_any_length_is_handed_off(consumers: Any) -> None:
    """Clients choose theirs; vLLM hears of its own, the network of a name that fits."""
    scheduler, name = producer("mla_mtp"), "cmpl-" + "x" * 600
    params = hold(scheduler, request(PROMPT, TO_REMOTE, name=name))
    news = scheduler.take_step()
    (holding,) = news.holdings
    assert holding.finishes == name
    assert news.announced == [holding.request] == [params["remote_request_id"]]
    assert len(holding.request) < 512
    asked, scheduler = request(PROMPT, params), consumers("mla_mtp")
    scheduler.on_new_request(asked)
    assert scheduler.matched_tokens(asked, 0) == (50, True)


@pytest.mark.parametrize(("computed", "loaded"), [(0, 50), (48, 2), (49, 0), (50, 0)])
def test_the_last_token_alone_is_not_fetched(engine: Engine, computed: int, loaded: int) -> None:
    """vLLM computes it anyhow."""
    (asked,) = siblings(PROMPT)
    engine.come(asked)
    assert engine.scheduler.matched_tokens(asked, computed) == (loaded, bool(loaded))


def test_a_renewer_that_died_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next step; what waits would lose its lease."""
    engine.scheduler.take_step()
    renewer = engine.scheduler._renewer

    def break_down(now: float) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(renewer, "_take_due", break_down)
    (asked,) = siblings(PROMPT)
    engine.come(asked)
    renewer._thread.join(20)
    with pytest.raises(ThreadDied, match="a bug"):
        engine.scheduler.take_step()


def test_a_reset_reaches_the_workers() -> None:
    """vLLM asks for one when weights were replaced in place."""
    scheduler = producer("mla_mtp")
    assert scheduler.reset()
    assert scheduler.take_step().reset
    assert not scheduler.take_step().reset
