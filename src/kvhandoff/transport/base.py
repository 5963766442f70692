# SPDX-License-Identifier: Apache-2.0
"""What a transport has to do."""

from __future__ import annotations

from typing import Protocol

from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors


class Transport(Protocol):
    """Reads remote memory that its owner has registered. Many threads call :meth:`read`."""

    @property
    def session(self) -> str:
        """How peers address this transport; travels in the catalog."""
        ...

    def register(self, segment: Segment) -> None:
        """Make a range of local memory readable by peers and usable as a target.

        Raises:
            UnsupportedSetup: if the transport cannot register it.
        """
        ...

    def read(self, session: str, descriptors: Descriptors) -> None:
        """Copy every descriptor's bytes from the peer; returns when all have landed.

        Raises:
            TransferFailed: if any did not land. No write to local memory happens afterwards.
        """
        ...

    def close(self) -> None:
        """Release what was registered."""
        ...
