# SPDX-License-Identifier: Apache-2.0
"""Make idle vLLM processes leave the cores to the busy ones.

vLLM is written for machines with a core for each process: workers spin for a second after each
message, and an engine that only waits for a handoff takes a thousand empty steps a second. With
two engines of several processes on two cores that starves the engine that has work for minutes,
so that leases run out. Here waiting is done by sleeping, at the cost of some latency.

A sleeping reader depends on a notification, and vLLM's may be lost: it is published by a socket
with room for one message, which is fine for a reader that spins. vLLM bounds the wait for a lost
one to five seconds; here it is :data:`LONGEST_SLEEP_MS`, so that nothing stalls.
"""

from __future__ import annotations

import functools
import time
from typing import Any

EMPTY_STEP_PAUSE_S = 0.01
LONGEST_SLEEP_MS = 20


def spare_the_cores() -> None:
    """Patch vLLM in this process."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine.core import EngineCoreProc

    construct = SpinCondition.__init__

    @functools.wraps(construct)
    def without_spinning(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.busy_loop_s = 0

    wait = SpinCondition.wait

    @functools.wraps(wait)
    def briefly(self: Any, timeout_ms: int | None = None) -> None:
        longest = LONGEST_SLEEP_MS if timeout_ms is None else min(timeout_ms, LONGEST_SLEEP_MS)
        wait(self, timeout_ms=longest)

    step = EngineCoreProc._process_engine_step

    @functools.wraps(step)
    def with_a_pause(self: Any) -> bool:
        executed: bool = step(self)
        if not executed and self.scheduler.has_requests():
            time.sleep(EMPTY_STEP_PAUSE_S)
        return executed

    SpinCondition.__init__ = without_spinning
    SpinCondition.wait = briefly
    EngineCoreProc._process_engine_step = with_a_pause
