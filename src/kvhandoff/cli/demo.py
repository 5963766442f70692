# SPDX-License-Identifier: Apache-2.0
"""``kvhandoff demo``: a prefill engine with two PCP ranks, a decode engine, a router, real chats.

It passes only if every answer equals the one that the decode engine gives alone, both replicas
have been read, and the prefill engine's cache is empty afterwards.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvhandoff.cli.servers import (
    HOST,
    Server,
    free_port,
    http,
    router_server,
    vllm_server,
    wait_ready,
)
from kvhandoff.cli.status import fetch_status
from kvhandoff.errors import UnsupportedSetup
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import PullRecord
from kvhandoff.protocol.trust import KEY_VARIABLE, Trust

QUESTIONS = (
    "What is the capital of France?",
    "What is the largest planet?",
    "Name three primary colors.",
    "How many days are in a week?",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Give me a synonym of happy.",
    "What is the boiling point of water?",
    "Write one sentence about the sea.",
    "What language is spoken in Brazil?",
    "Which animal barks?",
    "Summarize in five words: " + "The quick brown fox jumps over the lazy dog. " * 8,
    "Answer with one word: is the following text about animals? "
    + "Cats and dogs are kept as pets all over the world, and so are birds and fish. " * 12,
    "What is two plus two?",
)
MAX_TOKENS = 12
PHASES = ("held_until_opened", "open", "plan", "read", "held")
READY_SECONDS = 600.0


@dataclass
class Exchange:
    """One chat through the router, and the same one asked of the decode engine alone."""

    question: str
    streamed: bool
    answer: str = ""
    alone: str = ""
    response_id: str = ""
    seconds: float = 0.0
    first_token_seconds: float | None = None
    tokens: int = 0
    replicas: list[int] = field(default_factory=list)
    nbytes: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return self.answer == self.alone


@dataclass
class Report:
    """What ``demo-report.json`` holds; times in seconds."""

    model: str
    prefill_context_parallel_size: int
    requests: int = 0
    equal: int = 0
    streamed: int = 0
    replicas_used: list[int] = field(default_factory=list)
    kv_bytes_moved: int = 0
    expired: int = 0
    prefill_kv_usage_after: float = 1.0
    start_up: dict[str, float] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Everything that must not be so."""
        found = []
        if self.equal != self.requests:
            found.append(
                f"{self.requests - self.equal} answers differ from the decode engine's own"
            )
        if len(self.replicas_used) != self.prefill_context_parallel_size:
            found.append(f"only the replicas {self.replicas_used} have been read")
        if self.prefill_kv_usage_after != 0:
            found.append(
                f"the prefill engine still uses {self.prefill_kv_usage_after:.2%} of its KV"
            )
        if self.expired:
            found.append(f"{self.expired} leases ran out")
        if any(not exchange.replicas for exchange in self.exchanges):
            found.append("some requests were not handed off")
        return found


def run_demo(
    model: str, report_path: Path, workspace: Path, console: Console, *, keyed: bool = True
) -> bool:
    """Run the demo with one of the lab's models and write the report. True if all is well."""
    report = Report(model=model, prefill_context_parallel_size=2)
    with ExitStack() as stack:
        progress = stack.enter_context(
            Progress(
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
                TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=console,
            )
        )  # fmt: skip
        with _task(progress, f"make model {model}", 1) as advance:
            path, environment = _lab(model, workspace)
            if keyed:
                environment[KEY_VARIABLE] = secrets.token_hex(32)
            advance("ready")
        logs = workspace.parent / "logs"
        kv_port = free_port()
        servers = _servers(model, path, environment, kv_port, logs)
        for server in servers:
            stack.callback(server.stop)
        _start(servers, report, progress)
        prefill, decode, router = servers
        _chat(router, decode, report, progress)
        _settle(prefill, Endpoint(HOST, kv_port), report, progress)
    _show(report, console)
    report_path.write_text(json.dumps(asdict(report), indent=2) + "\n")
    problems = report.problems()
    for problem in problems:
        console.print(f"[bold red]not as it should be:[/] {problem}")
    if not problems:
        console.print(
            f"[bold green]{report.equal} of {report.requests} answers equal[/], "
            f"{report.kv_bytes_moved / 2**20:.1f} MiB of KV read from replicas "
            f"{report.replicas_used}, nothing left on the prefill engine; see {report_path}"
        )
    return not problems


def _lab(model: str, workspace: Path) -> tuple[Path, dict[str, str]]:
    try:
        from kvhandoff_cpu_lab.environment import cpu_environment
        from kvhandoff_cpu_lab.models import MAKERS
    except ImportError as error:
        raise UnsupportedSetup(
            f"the demo runs vLLM on a CPU with tools/cpu_lab, which cannot be imported ({error}); "
            "run `make demo` in a checkout of the repository"
        ) from None
    if model not in MAKERS:
        raise UnsupportedSetup(f"there is no demo model {model!r}; there are {', '.join(MAKERS)}")
    path = workspace / model
    MAKERS[model](path)
    return path, cpu_environment()


def _servers(
    model: str, path: Path, environment: dict[str, str], kv_port: int, logs: Path
) -> list[Server]:
    common = [
        "--served-model-name", "demo", "--enforce-eager", "--dtype", "float32",
        "--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "256",
        "--block-size", "16" if model == "mla" else "32",
        # The decode engine is asked everything twice: without a prefix cache, its own answer
        # cannot come from KV that was handed off before.
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    prefill = vllm_server(
        "prefill engine (PCP 2)", path, logs / "prefill.log", environment=environment,
        transfer={
            "kv_connector": "KVHandoffConnector", "kv_role": "kv_producer", "kv_port": kv_port,
            # A busy CPU machine can need longer than the default for its first step.
            "kv_connector_extra_config": {"lease": 120},
        },
        arguments=[*common, "--prefill-context-parallel-size", "2"],
    )  # fmt: skip
    decode = vllm_server(
        "decode engine", path, logs / "decode.log", environment=environment,
        transfer={"kv_connector": "KVHandoffConnector", "kv_role": "kv_consumer"},
        arguments=common,
    )  # fmt: skip
    return [prefill, decode, router_server(prefill, decode, logs / "router.log")]


@contextmanager
def _task(progress: Progress, name: str, total: int) -> Iterator[Callable[[str], None]]:
    task = progress.add_task(name, total=total, note="")
    yield lambda note: progress.update(task, advance=1, note=note)


def _start(servers: list[Server], report: Report, progress: Progress) -> None:
    engines, router = servers[:2], servers[2]
    with _task(progress, "start engines and router", 3) as advance:
        for group in (engines, [router]):
            for server in group:
                server.start()
            for server, seconds in wait_ready(group, READY_SECONDS):
                report.start_up[server.name] = round(seconds, 1)
                advance(f"{server.name} is up")


def _chat(router: Server, decode: Server, report: Report, progress: Progress) -> None:
    exchanges = [Exchange(text, streamed=i % 2 == 1) for i, text in enumerate(QUESTIONS)]
    with _task(progress, "chat through the router", len(exchanges)) as advance:
        for exchange in exchanges:
            _ask(router, exchange)
            advance(_short(exchange.answer))
    with _task(progress, "ask the decode engine alone", len(exchanges)) as advance:
        for exchange in exchanges:
            body = http().post(f"{decode.url}/v1/chat/completions", json=_body(exchange.question))
            exchange.alone = body.raise_for_status().json()["choices"][0]["message"]["content"]
            advance(_short(exchange.alone))
    report.exchanges = exchanges
    report.requests = len(exchanges)
    report.equal = sum(exchange.equal for exchange in exchanges)
    report.streamed = sum(exchange.streamed for exchange in exchanges)


def _body(question: str) -> dict[str, object]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }


def _ask(router: Server, exchange: Exchange) -> None:
    url = f"{router.url}/v1/chat/completions"
    began = time.monotonic()
    if not exchange.streamed:
        response = http().post(url, json=_body(exchange.question))
        body = response.raise_for_status().json()
        exchange.answer = body["choices"][0]["message"]["content"]
        exchange.response_id = body["id"]
    else:
        request = _body(exchange.question) | {"stream": True}
        with http().stream("POST", url, json=request) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[len("data: ") :])
                exchange.response_id = chunk["id"]
                text = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
                if text and exchange.first_token_seconds is None:
                    exchange.first_token_seconds = time.monotonic() - began
                exchange.answer += text or ""
    exchange.seconds = time.monotonic() - began


def _settle(prefill: Server, desk: Endpoint, report: Report, progress: Progress) -> None:
    """Wait for the prefill engine's gauge, then match the desk's records with the exchanges."""
    with _task(progress, "look at the prefill engine", 1) as advance:
        deadline = time.monotonic() + 30
        while True:
            report.prefill_kv_usage_after = prefill.metric("vllm:kv_cache_usage_perc")
            if report.prefill_kv_usage_after == 0 or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        status = fetch_status(desk, key=Trust(prefill.environment.get(KEY_VARIABLE, "")).key)
        advance(f"{status.counters.get('completed', 0)} completed, {status.held} held")
    report.expired = status.counters.get("expired", 0)
    for exchange in report.exchanges:
        for record in status.recent:
            if record.request.startswith(exchange.response_id):
                _note(exchange, record)
    report.replicas_used = sorted({r for e in report.exchanges for r in e.replicas})
    report.kv_bytes_moved = sum(exchange.nbytes for exchange in report.exchanges)


def _note(exchange: Exchange, record: PullRecord) -> None:
    readers = record.readers
    exchange.tokens = record.tokens
    exchange.replicas = sorted({reader.replica for reader in readers})
    exchange.nbytes = sum(reader.nbytes for reader in readers)
    exchange.phases = {
        "held_until_opened": record.first_open_seconds or 0.0,
        "open": max((reader.open_seconds for reader in readers), default=0.0),
        "plan": max((reader.plan_seconds for reader in readers), default=0.0),
        "read": max((reader.read_seconds for reader in readers), default=0.0),
        "held": record.held_seconds,
    }


def _short(text: str, width: int = 36) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _show(report: Report, console: Console) -> None:
    answers = Table(title=f"{report.model}: {report.requests} chats through the router")
    for name in ("#", "question", "answer", "same alone"):
        answers.add_column(name, no_wrap=name != "same alone")
    for number, exchange in enumerate(report.exchanges, start=1):
        answers.add_row(
            f"{number}{'≈' if exchange.streamed else ''}",
            _short(exchange.question, 24),
            _short(exchange.answer, 30),
            "[green]yes[/]" if exchange.equal else f"[red]no: {_short(exchange.alone)}[/]",
        )
    console.print(answers)
    transfers = Table(title="how each prompt's KV came over (≈ streamed; times in ms)")
    for name in ("#", "tokens", "replica", "MiB", "wait", "open", "plan", "read", "held"):
        transfers.add_column(name, justify="right")
    for number, exchange in enumerate(report.exchanges, start=1):
        transfers.add_row(
            f"{number}{'≈' if exchange.streamed else ''}",
            str(exchange.tokens),
            ",".join(map(str, exchange.replicas)) or "-",
            f"{exchange.nbytes / 2**20:.2f}",
            *(f"{exchange.phases.get(phase, 0) * 1e3:.1f}" for phase in PHASES),
        )
    console.print(transfers)
