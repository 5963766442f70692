# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, named so that a user knows whose turn it is to change something."""

from __future__ import annotations


class KVHandoffError(Exception):
    """Base of all errors raised on purpose by this package."""

    @classmethod
    def because(
        cls, problem: str, *, found: object, expected: object, change: str
    ) -> KVHandoffError:
        """One sentence with what was found, what was expected and which setting to change."""
        return cls(f"{problem}: found {found}, expected {expected}; {change}")


class UnsupportedSetup(KVHandoffError, ValueError):
    """This engine's own configuration cannot work; raised while it starts."""


class IncompatiblePeer(KVHandoffError):
    """Two engines that work by themselves cannot exchange KV; raised at the first handshake."""


class PeerUnreachable(KVHandoffError):
    """The peer's desk did not answer in time."""


class ProtocolError(KVHandoffError):
    """A message or parameter does not follow the protocol."""


class TransferFailed(KVHandoffError):
    """The transport could not read the bytes."""


class ThreadDied(KVHandoffError):
    """A thread that this engine cannot do without has stopped; its worker has to go with it."""
