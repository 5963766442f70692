# SPDX-License-Identifier: Apache-2.0
"""Both sides of the channel prove that they have the same shared key, by ZMQ's CURVE mechanism."""

from __future__ import annotations

import hmac
from hashlib import blake2b

import zmq
from zmq.utils import z85

from kvhandoff.errors import UnsupportedSetup


class Keys:
    """CURVE key pairs of the desk's and of the asker's side, derived from one shared key.

    Raises:
        UnsupportedSetup: if ZMQ was built without CURVE.
    """

    def __init__(self, shared: bytes) -> None:
        if not zmq.has("curve"):
            raise UnsupportedSetup.because(
                "a shared_key cannot be used",
                found="a ZMQ library without CURVE",
                expected="one that was built with libsodium, as PyPI's pyzmq is",
                change="pip install --force-reinstall pyzmq, or remove shared_key",
            )
        self.desk_public, self.desk_secret = _key_pair(shared, b"desk")
        self.asker_public, self.asker_secret = _key_pair(shared, b"asker")

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by ZMQ's authenticator: whether the owner of this public key may ask."""
        return hmac.compare_digest(key, self.asker_public)


def _key_pair(shared: bytes, side: bytes) -> tuple[bytes, bytes]:
    secret = z85.encode(blake2b(shared, digest_size=32, person=b"kvh:" + side).digest())
    return zmq.curve_public(secret), secret
