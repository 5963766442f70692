# SPDX-License-Identifier: Apache-2.0
"""``kvhandoff status``: what a prefill engine's desk has in its books."""

from __future__ import annotations

import queue

from rich.console import Console
from rich.table import Table

from kvhandoff.channel import Client
from kvhandoff.errors import KVHandoffError, ProtocolError
from kvhandoff.ids import Endpoint
from kvhandoff.protocol.messages import Answer, Status, StatusReport


def parse_endpoint(text: str) -> Endpoint:
    """``host:port`` or ``[v6]:port``."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ProtocolError(f"{text!r} is not HOST:PORT (the port is kv_port plus the DP rank)")
    return Endpoint(host.strip("[]"), int(port))


def fetch_status(
    endpoint: Endpoint, timeout: float = 5.0, *, key: bytes | None = None
) -> StatusReport:
    """Ask a desk for its books.

    Raises:
        PeerUnreachable, ProtocolError: if it does not answer, or not with a report.
    """
    answers: queue.SimpleQueue[Answer | KVHandoffError] = queue.SimpleQueue()
    client = Client("kvhandoff-status", key=key)
    try:
        client.ask(endpoint, Status(), timeout, answers.put)
        answer = answers.get()
    finally:
        client.close()
    if isinstance(answer, KVHandoffError):
        raise answer
    if not isinstance(answer, StatusReport):
        raise ProtocolError(f"{endpoint} answered with {type(answer).__name__}")
    return answer


def show_status(report: StatusReport, console: Console) -> None:
    """Print counters and the latest requests."""
    console.print(
        f"engine [bold]{report.engine}[/] · incarnation {report.incarnation} · "
        f"[bold]{report.held}[/] held"
    )
    console.print(", ".join(f"{name} {count}" for name, count in sorted(report.counters.items())))
    table = Table(title="latest requests")
    for column in ("request", "outcome", "tokens", "replica", "MiB", "held ms", "read ms"):
        table.add_column(column, overflow="fold")
    for record in report.recent[-20:]:
        readers = record.readers
        table.add_row(
            record.request,
            record.outcome,
            str(record.tokens),
            ",".join(sorted({str(reader.replica) for reader in readers})) or "-",
            f"{sum(reader.nbytes for reader in readers) / 2**20:.2f}",
            f"{record.held_seconds * 1e3:.0f}",
            f"{max((reader.read_seconds for reader in readers), default=0) * 1e3:.1f}",
        )
    console.print(table)
