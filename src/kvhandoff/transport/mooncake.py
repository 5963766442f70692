# SPDX-License-Identifier: Apache-2.0
"""Reads through Mooncake's TransferEngine; the only module that imports ``mooncake``.

What of the engine's interface tells when a read is over (see docs/facts.md): the status of a batch
of *one* piece, and nothing else. ``batch_transfer_sync_read`` gives up while pieces are under way,
and ``transfer_check_status`` looks at a batch's first piece only. So each piece is a batch of its
own here, which costs less than a synchronous call that spins.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections import deque
from typing import Any

from kvhandoff.errors import TransferFailed, UnsupportedSetup
from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors

logger = logging.getLogger(__name__)

_COMPLETED, _FAILED = 1, -1
"""Codes of ``transfer_check_status``. 0: under way. -2: late by Mooncake's own clock (a setting
that is off by default), and under way. Others are not known, so they are not final."""

FINAL_FAILURES = frozenset({"tcp", "rdma"})
"""Protocols whose failed pieces are final, by their source: TCP gives up a piece in the handler of
its last read, RDMA when the card has returned its work request. With any other protocol a piece
that has failed counts as under way until a cut."""


_ATTEMPTS = 8


class _Life:
    """One TransferEngine, until it is cut."""

    def __init__(self, engine: Any, failures_are_final: bool) -> None:
        self.engine = engine
        self.failures_are_final = failures_are_final


class MooncakeFlight:
    """Batches of one piece each, oldest first."""

    def __init__(self, life: _Life, session: str) -> None:
        self._life, self._session = life, session
        self._batches: deque[int] = deque()
        self._doubtful = 0  # pieces that have failed, but may not be final; cannot be asked again
        self.failure: str | None = None

    @property
    def left(self) -> int:
        return len(self._batches) + self._doubtful

    def begin(self, descriptors: Descriptors) -> None:
        """Submit all pieces, up to the first one that is rejected."""
        submit = self._life.engine.batch_transfer_async_read
        for local, remote, length in zip(
            descriptors.local.tolist(),
            descriptors.remote.tolist(),
            descriptors.length.tolist(),
            strict=True,
        ):
            batch = submit(self._session, [local], [remote], [length])
            if batch == 0:
                self._fail(f"reading {length} bytes from {self._session} was rejected")
                return
            self._batches.append(batch)

    def poll(self) -> None:
        engine = self._life.engine
        if engine is None:
            if self.left:
                self._batches.clear()
                self._doubtful = 0
                self._fail(f"the connection to {self._session} was cut")
            return
        check = engine.transfer_check_status
        while self._batches:
            code = check(self._batches[0])
            if code == _FAILED:
                self._fail(
                    f"reading from {self._session} failed with code {code} of Mooncake's "
                    "TransferEngine"
                )
                self._doubtful += not self._life.failures_are_final
            elif code != _COMPLETED:
                return
            self._batches.popleft()

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason


class MooncakeTransport:
    """One TransferEngine per worker process, in peer-to-peer handshake mode (no metadata server).

    Args:
        host: address that peers reach this worker by.
        protocol: ``tcp``, ``rdma``, ``ascend``, ...: whatever the installed engine was built with.
        device: comma-separated network devices; empty lets the engine choose.

    Raises:
        UnsupportedSetup: if the engine cannot be imported or started, or would use another
            protocol.
    """

    def __init__(self, host: str, protocol: str, device: str = "") -> None:
        self._host, self._protocol, self._device = _literal(host), protocol, device
        self._lock = threading.Lock()
        self._registered: list[Segment] = []
        self._life = self._open()

    def _open(self) -> _Life:
        if self._protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"  # else Mooncake takes any RDMA card it finds
        engine, code = self._start()
        if code != 0:
            raise UnsupportedSetup.because(
                "Mooncake's TransferEngine did not start",
                found=f"code {code} for host {self._host!r}, protocol {self._protocol!r}, "
                f"device {self._device!r}",
                expected="code 0",
                change="check advertise_host, mooncake_protocol and device_name",
            )
        if self._protocol == "rdma":
            _require_card(engine, self._device)
        return _Life(engine, self._protocol in FINAL_FAILURES)

    def _start(self) -> tuple[Any, int | str]:
        """An engine, and the code of its start.

        Mooncake chooses a free port, gives it back, and binds it later: of workers that start at
        the same moment, one can find its port taken. The next attempt chooses another one.
        """
        code: int | str = 0
        for attempt in range(_ATTEMPTS):
            engine: Any = _engine_class()()
            try:
                code = engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device)
            except RuntimeError as error:
                code = str(error)
            if code == 0:
                break
            logger.info("Mooncake's TransferEngine did not start (%s), attempt %d", code, attempt)
            time.sleep(random.uniform(0.02, 0.2))
        return engine, code

    @property
    def _engine(self) -> Any:
        return self._life.engine

    @property
    def session(self) -> str:
        return f"{self._host}:{self._engine.get_rpc_port()}"

    def register(self, segment: Segment) -> None:
        self._register(segment)
        with self._lock:
            self._registered.append(segment)

    def _register(self, segment: Segment) -> None:
        code = self._engine.register_memory(segment.base, segment.length)
        if code != 0:
            raise UnsupportedSetup.because(
                "Mooncake's TransferEngine cannot register the KV cache",
                found=f"code {code} for {segment.length} bytes at {segment.base:#x}",
                expected="code 0",
                change="raise the locked-memory limit (ulimit -l), or check device_name",
            )

    def connect(self, session: str) -> None:
        """Fetch the peer's segment description, by a batch without pieces (never polled)."""
        if self._engine.batch_transfer_async_read(session, [], [], []) == 0:
            raise TransferFailed(f"nobody answers at {session}")

    def begin(self, session: str, descriptors: Descriptors) -> MooncakeFlight:
        flight = MooncakeFlight(self._life, session)
        flight.begin(descriptors)
        return flight

    def cut(self) -> None:
        """Destroy the engine, with its connections, and start another one.

        Takes about a second (more where registering memory is slow), and Python waits for it.
        """
        life, registered = self._life, self._registered
        life.engine = None  # the last reference: its destructor joins all threads of the engine
        self._life = self._open()
        for segment in registered:
            self._register(segment)

    def close(self) -> None:
        """Unregister all memory. The engine lives on, and may be given other memory."""
        with self._lock:
            segments, self._registered = self._registered, []
        for segment in segments:
            self._engine.unregister_memory(segment.base)


def _engine_class() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise UnsupportedSetup.because(
            "Mooncake's TransferEngine cannot be imported",
            found=f"{type(error).__name__}: {error}",
            expected="the package mooncake-transfer-engine (on machines without CUDA: "
            "mooncake-transfer-engine-non-cuda) and the libraries it links to",
            change="pip install 'kvhandoff[mooncake]'; on Debian apt-get install libibverbs1 "
            "librdmacm1 libnuma1",
        ) from error
    return TransferEngine


def _require_card(engine: Any, device: str) -> None:
    """Mooncake falls back to TCP without a word where it finds no card."""
    cards = sorted(
        {
            card
            for preferred in json.loads(engine.get_local_topology()).values()
            for group in preferred
            for card in group
        }
    )
    wanted = {name for name in device.split(",") if name}
    forced = bool(os.environ.get("MC_FORCE_TCP"))
    if forced or not cards or not wanted <= set(cards):
        raise UnsupportedSetup.because(
            "Mooncake's TransferEngine would not use RDMA",
            found="MC_FORCE_TCP in the environment" if forced else f"RDMA cards {cards}",
            expected=f"{', '.join(sorted(wanted)) or 'at least one card'}",
            change="set mooncake_protocol to tcp, or check device_name, the drivers of the card "
            "and MC_FORCE_TCP",
        )


def _literal(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
