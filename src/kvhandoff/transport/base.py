# SPDX-License-Identifier: Apache-2.0
"""What a transport has to do.

A read is *begun*, then *polled* until it is *final*: no byte of it can land any more, whether it
went well or not. That a read has failed does not make it final; some of its pieces may be under
way, and would land in memory that has been given to somebody else by then. A read that never
becomes final ends by a *cut*.
"""

from __future__ import annotations

from typing import Protocol

from kvhandoff.model.layout import Segment
from kvhandoff.plan.descriptors import Descriptors


class Flight(Protocol):
    """A read that was begun."""

    @property
    def left(self) -> int:
        """Pieces that are not final."""
        ...

    @property
    def failure(self) -> str | None:
        """Why a piece did not land, known maybe while others are under way; None if all is well."""
        ...

    def poll(self) -> None:
        """Look what has become of the pieces. Never blocks."""
        ...


class Transport(Protocol):
    """Reads remote memory that its owner has registered. One thread begins, polls and cuts."""

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

    def connect(self, session: str) -> None:
        """Get to know a peer; may block for long. Called from a thread of its own.

        Raises:
            TransferFailed: if it cannot be reached.
        """
        ...

    def begin(self, session: str, descriptors: Descriptors) -> Flight:
        """Begin to copy every descriptor's bytes from a connected peer. Does not wait for them."""
        ...

    def cut(self) -> None:
        """Make all flights final: when this returns, nothing of what was begun before can land.

        Raises:
            UnsupportedSetup: if the transport cannot be used any more.
        """
        ...

    def close(self) -> None:
        """Release what was registered."""
        ...
