# SPDX-License-Identifier: Apache-2.0
"""Messages between consumers (D) and a producer's desk (P), one msgpack frame each way.

A frame is ``[version, correlation id, body]``. The body is decoded only after the version has been
found to be ours, and into exactly the types below: nothing is ever unpickled, and a frame that does
not fit costs its sender an answer of :class:`Refused`.

Version log:
    1   first version; its messages may change until 0.1.0 is released.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from kvhandoff.errors import ProtocolError
from kvhandoff.ids import MAX_NAME_LENGTH, MAX_READERS
from kvhandoff.protocol.catalog import Catalog, Fingerprint

PROTOCOL_VERSION = 1

MAX_REQUEST_BYTES = 1 << 20
"""Upper bound of what a desk reads; the largest request is a batch of renewals."""

MAX_ANSWER_BYTES = 64 << 20
"""Upper bound of what a consumer reads; the largest answer is a catalog of thousands of layers."""

MAX_BATCH = 4096

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Blocks = Annotated[tuple[list[BlockId], ...], msgspec.Meta(max_length=1024)]

Verdict: TypeAlias = Literal["held", "expired", "released", "unknown"]
"""What a desk says about a request: ``held`` is the only one after which bytes may be used."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all bodies."""


class Hello(Message, frozen=True, tag="hello"):
    """Ask for the whole engine in one round trip; answered by a catalog or a refusal."""

    engine: Name
    fingerprint: Fingerprint


class HeldKey(msgspec.Struct, frozen=True, array_like=True):
    """Names a held request and proves the right to it."""

    request: Name
    ticket: Name


class Open(Message, frozen=True, tag="open"):
    """Reader ``index`` of ``of`` of pull ``pull`` wants the block ids of a held request."""

    key: HeldKey
    pull: Name
    index: Index
    of: Count


class Renew(Message, frozen=True, tag="renew"):
    """Consumers still want these requests."""

    keys: Annotated[list[HeldKey], msgspec.Meta(max_length=MAX_BATCH)]


class PullReport(msgspec.Struct, frozen=True):
    """How a reader fared, for the producer's log and for ``kvhandoff status``.

    Times are in seconds; ``sources`` are the ranks read from.
    """

    replica: Number = 0
    sources: Annotated[list[Number], msgspec.Meta(max_length=MAX_READERS)] = []
    nbytes: Number = 0
    descriptors: Number = 0
    open_seconds: Seconds = 0.0
    plan_seconds: Seconds = 0.0
    read_seconds: Seconds = 0.0
    failovers: Number = 0


class Complete(Message, frozen=True, tag="complete"):
    """The reader's reads have ended; the answer says whether the request was held all the while.

    Attributes:
        linger: seconds for which the request is kept when this was the last reader, as others may
            come: with data parallelism, children of one request (n > 1) go to several engines.
    """

    key: HeldKey
    pull: Name
    index: Index
    ok: bool
    linger: Seconds = 0.0
    report: PullReport = PullReport()


class Release(Message, frozen=True, tag="release"):
    """The consumer will not read, or no rank of its pull ``pull`` reads any more."""

    key: HeldKey
    pull: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""


class Status(Message, frozen=True, tag="status"):
    """Ask for counters and held requests."""


class Opened(Message, frozen=True, tag="opened"):
    """What is held.

    Attributes:
        incarnation: as in the catalog; another one means that the consumer's catalog is stale.
        blocks: block ids by the producer's KV group and by position in the request.
        tokens: tokens of the request that have KV, from position 0.
        lease: seconds for which the request is kept without hearing from a consumer.
    """

    incarnation: Name
    blocks: Blocks
    tokens: Number
    lease: Seconds


class Renewed(Message, frozen=True, tag="renewed"):
    """One verdict for each key of a :class:`Renew`, in its order."""

    verdicts: list[Verdict]


class Completed(Message, frozen=True, tag="completed"):
    """The fence: only after ``held`` may the consumer use what it read."""

    verdict: Verdict


class Done(Message, frozen=True, tag="done"):
    """Acknowledges a :class:`Release`."""


class Refused(Message, frozen=True, tag="refused"):
    """The request cannot be served: a code for programs and a sentence for people."""

    code: Literal[
        "malformed", "version", "incompatible", "unknown", "expired", "released", "ticket",
        "reader", "not-ready", "internal",
    ]  # fmt: skip
    reason: str


class PullRecord(msgspec.Struct, frozen=True):
    """One finished request in a status report; times in seconds."""

    request: str
    outcome: str
    tokens: int
    held_seconds: float
    first_open_seconds: float | None
    readers: list[PullReport]


class StatusReport(Message, frozen=True, tag="status_report"):
    """A desk's books."""

    engine: str
    incarnation: str
    held: int
    counters: dict[str, int]
    recent: list[PullRecord]


Request: TypeAlias = Hello | Open | Renew | Complete | Release | Status
Answer: TypeAlias = Catalog | Opened | Renewed | Completed | Done | StatusReport | Refused


class _Frame(msgspec.Struct, array_like=True):
    version: int
    correlation: int
    body: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(_Frame)
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


class WrongVersion(ProtocolError):
    """A frame of another protocol version; its correlation id can still be answered."""

    def __init__(self, version: int, correlation: int) -> None:
        super().__init__(
            f"kvhandoff protocol version {version}, expected {PROTOCOL_VERSION}; "
            "run the same kvhandoff minor version on prefill and decode engines"
        )
        self.correlation = correlation


class Malformed(ProtocolError):
    """A frame that does not decode; ``correlation`` is None where not even that was readable."""

    def __init__(self, reason: str, correlation: int | None) -> None:
        super().__init__(reason)
        self.correlation = correlation


def encode(correlation: int, body: Request | Answer) -> bytes:
    """One frame."""
    return _encoder.encode((PROTOCOL_VERSION, correlation, body))


def decode_request(frame: bytes) -> tuple[int, Request]:
    """Correlation id and body of a frame from a consumer.

    Raises:
        WrongVersion, Malformed: with the correlation id to answer to, where there is one.
    """
    correlation, body = _open(frame, MAX_REQUEST_BYTES)
    try:
        return correlation, _requests.decode(body)
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error), correlation) from None


def decode_answer(frame: bytes) -> tuple[int, Answer]:
    """Correlation id and body of a frame from a desk; raises like :func:`decode_request`."""
    correlation, body = _open(frame, MAX_ANSWER_BYTES)
    try:
        return correlation, _answers.decode(body)
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error), correlation) from None


def _open(frame: bytes, limit: int) -> tuple[int, msgspec.Raw]:
    if len(frame) > limit:
        raise Malformed(f"{len(frame)} bytes, at most {limit} are read", None)
    try:
        opened = _frames.decode(frame)
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error), None) from None
    if opened.version != PROTOCOL_VERSION:
        raise WrongVersion(opened.version, opened.correlation)
    return opened.correlation, opened.body
