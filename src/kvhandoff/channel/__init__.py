# SPDX-License-Identifier: Apache-2.0
"""Request and answer over ZMQ: a ROUTER on the desk, one DEALER for each peer on a consumer.

This package alone imports ``zmq``. Each frame in either direction is one message of
:mod:`kvhandoff.protocol.messages`; a socket never blocks its owner, and lost messages are the
deadline's business. With a shared key, both directions are encrypted and authenticated: whoever
does not have the key can neither ask nor answer.
"""

from kvhandoff.channel.client import MAX_IDLE_PEERS, Client, OnAnswer
from kvhandoff.channel.server import ReplyAddress, Server

__all__ = ["MAX_IDLE_PEERS", "Client", "OnAnswer", "ReplyAddress", "Server"]
