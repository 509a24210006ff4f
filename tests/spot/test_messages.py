"""Only messages signed for this run and direction, and unchanged since, are accepted."""

from __future__ import annotations

import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.spot.messages import LARGEST_DIRECTIVE, Drop, Dropped, MessageSigner, new_secret
from megatron_tlt.spot.types import Directive, MemberProgress, Report, SessionOrder

SECRET = bytes(range(32))
REPORT = Report(3, 17, 2, True, True, 40, 5, MemberProgress(1, 2, 3), 9)
ORDER = SessionOrder(2, 1, 2, tuple(range(64)), 0, 4, 6, False)
DIRECTIVE = Directive(3, 9, 2, False, ORDER)
seal = MessageSigner(SECRET, "run")

numbers = st.integers(-(2**63), 2**63 - 1)


def reason(frames: list[bytes], kind: type[Report] | type[Directive] = Report) -> Drop:
    with pytest.raises(Dropped) as dropped:
        seal.open(frames, kind)
    return dropped.value.reason


@given(st.builds(Report, place=st.none() | st.builds(MemberProgress, numbers, numbers, numbers)))
def test_reports_arrive_as_they_were(report: Report) -> None:
    try:
        frames = seal.close(report)
    except OverflowError:
        return  # sequence numbers beyond any real run
    assert MessageSigner(SECRET, "run").open(frames, Report) == report


@pytest.mark.parametrize("order", [None, ORDER])
def test_directives_arrive_as_they_were(order: SessionOrder | None) -> None:
    directive = Directive(1, 2, 3, True, order)
    assert seal.open(seal.close(directive), Directive) == directive


@given(st.integers(0, 1), st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_byte_is_a_forgery(frame: int, position: int, flip: int) -> None:
    frames = [bytearray(part) for part in seal.close(REPORT)]
    frames[frame][position % len(frames[frame])] ^= flip
    assert reason([bytes(part) for part in frames]) is Drop.FORGED


@pytest.mark.parametrize("other", [MessageSigner(new_secret(), "run"), MessageSigner(SECRET, "another run")])
def test_another_secret_or_run_is_a_forgery(other: MessageSigner) -> None:
    assert reason(other.close(REPORT)) is Drop.FORGED


def test_a_directive_cannot_be_sent_back_as_a_report() -> None:
    assert reason(seal.close(DIRECTIVE), Report) is Drop.FORGED
    assert reason(seal.close(REPORT), Directive) is Drop.FORGED


def test_unsigned_and_malformed_messages_are_distinguished() -> None:
    mac, payload = seal.close(REPORT)
    assert reason([payload]) is Drop.UNSIGNED
    assert reason([b"", payload]) is Drop.UNSIGNED
    assert reason([]) is Drop.UNSIGNED
    assert reason([mac[:-1], payload]) is Drop.MALFORMED
    assert reason([mac, payload, b"more"]) is Drop.MALFORMED
    assert reason([mac, payload + bytes(2000)]) is Drop.OVERSIZED
    assert reason([mac, bytes(LARGEST_DIRECTIVE)], Directive) is Drop.OVERSIZED


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", msgspec.msgpack.encode({"rank": 3}), msgspec.msgpack.encode([1, 2]), b"\x80"]
)
def test_signed_content_that_is_no_report_is_malformed(content: bytes) -> None:
    key = hmac.digest(SECRET, b"run", "sha256")
    assert reason([hmac.digest(key, b"Report\0" + content, "sha256"), content]) is Drop.MALFORMED


def test_an_order_for_many_ranks_fits() -> None:
    order = SessionOrder(2**40, 2**40, 2**40, tuple(range(100_000)), 0, 2**40, 2**40, True)
    assert seal.open(seal.close(Directive(0, 2**62, 0, False, order)), Directive).order == order


def test_secrets_have_one_length() -> None:
    assert len(new_secret()) == 32 and new_secret() != new_secret()
    with pytest.raises(ValueError, match="5 bytes; allowed: 32"):
        MessageSigner(b"short", "run")
