# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's connector tells the workers' connectors, and the one thing they tell it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvhandoff.ids import Endpoint, RequestId
from kvhandoff.lifecycle.entries import Holding
from kvhandoff.runtime.puller import PullJob


@dataclass
class StepMetadata(KVConnectorMetadata):
    """News of one step; the same object for every worker of the engine."""

    announced: list[RequestId] = field(default_factory=list)
    holdings: list[Holding] = field(default_factory=list)
    dropped: list[RequestId] = field(default_factory=list)
    reset: bool = False  # let go of everything that was held before this step
    jobs: list[PullJob] = field(default_factory=list)


@dataclass
class DeskAddress(KVConnectorHandshakeMetadata):
    """Where the engine's desk listens: from the worker that runs it to the scheduler."""

    endpoint: Endpoint
    engine: str
