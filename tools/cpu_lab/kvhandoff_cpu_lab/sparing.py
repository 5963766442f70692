# SPDX-License-Identifier: Apache-2.0
"""Make idle vLLM processes leave the cores to the busy ones.

vLLM is written for machines with a core for each process: workers spin for a second after each
message, and an engine that only waits for a handoff takes a thousand empty steps a second. With
two engines of several processes on two cores that starves the engine that has work for minutes,
so that leases run out. Here waiting is done by sleeping, at the cost of some latency.
"""

from __future__ import annotations

import functools
import time
from typing import Any

EMPTY_STEP_PAUSE_S = 0.01


def spare_the_cores() -> None:
    """Patch vLLM in this process."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.engine.core import EngineCoreProc

    construct = SpinCondition.__init__

    @functools.wraps(construct)
    def without_spinning(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.busy_loop_s = 0

    step = EngineCoreProc._process_engine_step

    @functools.wraps(step)
    def with_a_pause(self: Any) -> bool:
        executed: bool = step(self)
        if not executed and self.scheduler.has_requests():
            time.sleep(EMPTY_STEP_PAUSE_S)
        return executed

    SpinCondition.__init__ = without_spinning
    EngineCoreProc._process_engine_step = with_a_pause
