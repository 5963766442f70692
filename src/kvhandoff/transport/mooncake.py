# SPDX-License-Identifier: Apache-2.0
"""Reads through Mooncake's TransferEngine; the only module that imports ``mooncake``."""

from __future__ import annotations

import logging
import threading
from typing import Any

from kvhandoff.errors import TransferFailed, UnsupportedSetup
from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors

logger = logging.getLogger(__name__)


class MooncakeTransport:
    """One TransferEngine per worker process, in peer-to-peer handshake mode (no metadata server).

    Args:
        host: address that peers reach this worker by.
        protocol: ``tcp``, ``rdma``, ``ascend``, ...: whatever the installed engine was built with.
        device: comma-separated network devices; empty lets the engine choose.

    Raises:
        UnsupportedSetup: if the engine cannot be imported or started.
    """

    def __init__(self, host: str, protocol: str, device: str = "") -> None:
        self._engine: Any = _engine_class()()
        code = self._engine.initialize(_literal(host), "P2PHANDSHAKE", protocol, device)
        if code != 0:
            raise UnsupportedSetup.because(
                "Mooncake's TransferEngine did not start",
                found=f"code {code} for host {host!r}, protocol {protocol!r}, device {device!r}",
                expected="code 0",
                change="check advertise_host, mooncake_protocol and device_name",
            )
        self._session = f"{_literal(host)}:{self._engine.get_rpc_port()}"
        self._registered: list[Segment] = []
        self._lock = threading.Lock()

    @property
    def session(self) -> str:
        return self._session

    def register(self, segment: Segment) -> None:
        code = self._engine.register_memory(segment.base, segment.length)
        if code != 0:
            raise UnsupportedSetup.because(
                "Mooncake's TransferEngine cannot register the KV cache",
                found=f"code {code} for {segment.length} bytes at {segment.base:#x}",
                expected="code 0",
                change="raise the locked-memory limit (ulimit -l), or check device_name",
            )
        with self._lock:
            self._registered.append(segment)

    def read(self, session: str, descriptors: Descriptors) -> None:
        if not len(descriptors):
            return
        code = self._engine.batch_transfer_sync_read(
            session,
            descriptors.local.tolist(),
            descriptors.remote.tolist(),
            descriptors.length.tolist(),
        )
        if code != 0:
            raise TransferFailed(
                f"reading {descriptors.nbytes} bytes in {len(descriptors)} pieces from {session} "
                f"failed with code {code} of Mooncake's TransferEngine"
            )

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


def _literal(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
