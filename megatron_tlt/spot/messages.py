"""Wire format of reports and directives: MessagePack, signed with a per-run secret.

HMAC replaces ZeroMQ's CURVE, because messages are not secret, ranks need only one shared key, and dropped messages can
be counted by reason, whereas CURVE closes a connection silently. The signature covers the run, the direction, and the
message with its rank and sequence number. The receiver ignores sequence numbers that it has seen
(``Coordinator.counts``, ``Follower.counts``), so replayed messages have no effect.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from megatron_tlt.spot.types import Directive, Report

SECRET_BYTES = 32
_MAC_BYTES = 32
LARGEST_REPORT, LARGEST_DIRECTIVE = 1 << 10, 1 << 20
"""Bytes; a directive lists all members of a session."""
_LARGEST = {Report: LARGEST_REPORT, Directive: LARGEST_DIRECTIVE}

Message = TypeVar("Message", Report, Directive)


class Drop(StrEnum):
    """Why a message was dropped without processing."""

    UNSIGNED = "unsigned"
    FORGED = "forged"
    MALFORMED = "malformed"
    OVERSIZED = "oversized"


class Dropped(Exception):
    """A message that failed validation."""

    def __init__(self, reason: Drop) -> None:
        super().__init__(f"message dropped: {reason}")
        self.reason = reason


def new_secret() -> bytes:
    """Create a run's secret: rank 0 calls this and sends it to the other ranks; it is never stored."""
    return secrets.token_bytes(SECRET_BYTES)


class MessageSigner:
    """Signs messages of one run, and verifies messages signed with the same secret for the same run.

    Raises:
        ValueError: the secret does not have SECRET_BYTES bytes.
    """

    def __init__(self, secret: bytes, run_id: str) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes; allowed: {SECRET_BYTES}")
        self._key = hmac.digest(secret, run_id.encode(), "sha256")
        self._encode = msgspec.msgpack.Encoder().encode

    def close(self, message: Report | Directive) -> list[bytes]:
        """Frames to send: the signature and the message."""
        payload = self._encode(message)
        return [self._mac(type(message), payload), payload]

    def open(self, frames: Sequence[bytes], kind: type[Message]) -> Message:
        """Verify received frames and return their message.

        Raises:
            Dropped: it is too large, not signed with the secret, or not a ``kind``.
        """
        if sum(map(len, frames)) > _LARGEST[kind]:
            raise Dropped(Drop.OVERSIZED)
        if len(frames) < 2 or not frames[0]:
            raise Dropped(Drop.UNSIGNED)
        if len(frames) > 2 or len(frames[0]) != _MAC_BYTES:
            raise Dropped(Drop.MALFORMED)
        mac, payload = frames
        if not hmac.compare_digest(mac, self._mac(kind, payload)):
            raise Dropped(Drop.FORGED)
        try:
            return msgspec.msgpack.decode(payload, type=kind)
        except msgspec.MsgspecError as error:
            raise Dropped(Drop.MALFORMED) from error

    def _mac(self, kind: type[Report] | type[Directive], payload: bytes) -> bytes:
        return hmac.digest(self._key, kind.__name__.encode() + b"\0" + payload, "sha256")
