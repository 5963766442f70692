# SPDX-License-Identifier: Apache-2.0
"""Starts and stops vLLM servers and vllm-router as child processes, and nothing else's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvhandoff.errors import KVHandoffError

HOST = "127.0.0.1"


class ServerFailed(KVHandoffError):
    """A server process ended or did not become ready."""


@functools.cache
def http() -> httpx.Client:
    """One client for all: making one costs as much as hundreds of requests."""
    return httpx.Client(timeout=300, limits=httpx.Limits(max_keepalive_connections=0))


_PORTS = range(20000, 30000)
"""Not among the ports that systems give to whoever asks for any (on Linux from 32768 on), nor
among those that Mooncake's TransferEngine takes (15000 to 17000)."""

_candidates = itertools.cycle(random.sample(_PORTS, len(_PORTS)))


def free_port() -> int:
    """A port that nobody listens on right now, and that nobody is given unasked before it is used.

    Raises:
        ServerFailed: if all are taken.
    """
    for port in itertools.islice(_candidates, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerFailed(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")


@dataclass
class Server:
    """A child process with an HTTP port; its output goes to ``log``.

    Attributes:
        command: without the port, which is chosen at :meth:`start`.
        environment: added to this process's own.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Begin; in a session of its own, so that its children can be ended with it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(self.port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether ``/health`` answers 200.

        Raises:
            ServerFailed: if the process has ended, with the end of its log.
        """
        if self.process is None or self.process.poll() is not None:
            raise ServerFailed(f"{self.name} ended while it started; {self.explain()}")
        try:
            return http().get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def explain(self) -> str:
        """The last error in the log, or its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error: " in line or "kvhandoff.errors" in line]
        return f"log {self.log}:\n" + "\n".join(errors[-2:] or lines[-15:])

    def metric(self, name: str) -> float:
        """Sum of a Prometheus metric over its label values."""
        text = http().get(f"{self.url}/metrics", timeout=30).text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"{name}{{", f"{name} "))
        )

    def signal(self, number: int) -> None:
        """Send a signal to the process and all it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def stop(self, patience: float = 20.0) -> None:
        """End the process and all it has started; by force if it takes longer than ``patience``."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGTERM)  # vLLM's parent ends its children itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process = None


def vllm_server(
    name: str,
    model: str | Path,
    log: Path,
    *,
    transfer: Mapping[str, object] | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Server:
    """A vLLM OpenAI server. ``transfer`` is its ``--kv-transfer-config``."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--host", HOST, *arguments,
    ]  # fmt: skip
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return Server(name, command, log, {"VLLM_HOST_IP": HOST, **(environment or {})})


def router_server(prefill: Server, decode: Server, log: Path) -> Server:
    """vllm-router, asking ``prefill`` first and handing its answer to ``decode``."""
    program = Path(sys.executable).with_name("vllm-router")
    if not program.exists():
        raise ServerFailed("vllm-router is not installed: pip install 'kvhandoff[router]'")
    command = [
        str(program), "--vllm-pd-disaggregation", "--host", HOST,
        "--prefill", prefill.url, "--decode", decode.url,
        "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    return Server("router", command, log)


def wait_ready(servers: Sequence[Server], seconds: float) -> Iterator[tuple[Server, float]]:
    """Yield each server with its start-up time as it becomes ready.

    Raises:
        ServerFailed: if one ends, or is not ready within ``seconds``.
    """
    began = time.monotonic()
    waiting = list(servers)
    while waiting:
        for server in list(waiting):
            if server.is_ready():
                waiting.remove(server)
                yield server, time.monotonic() - began
        if waiting and time.monotonic() - began > seconds:
            names = ", ".join(server.name for server in waiting)
            raise ServerFailed(f"{names} not ready after {seconds:g} s; {waiting[0].explain()}")
        time.sleep(0.3)
