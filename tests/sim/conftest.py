# SPDX-License-Identifier: Apache-2.0
"""What the simulations share."""

from __future__ import annotations

import pytest

from tests.sim.pool import MooncakePool


@pytest.fixture(scope="session")
def mooncake_pool() -> MooncakePool:
    pytest.importorskip("mooncake.engine", reason="Mooncake's TransferEngine is not installed")
    return MooncakePool()
