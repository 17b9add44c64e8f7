"""Header blocks (HPACK, RFC 7541) of unary gRPC calls.

What this package writes are literals without an index, so that a block is a constant of the method
and needs no state. What it reads may be anything: the library `hpack` decodes it. A block that
neither reads nor changes the decoder's table is decoded once and looked up afterwards.
"""

from functools import lru_cache
from urllib.parse import quote, unquote

from hpack import Decoder, HPACKError

from psfleet.http2.call_errors import ConnectionBroken

__all__ = [
    "MAX_HEADERS",
    "OK_HEADERS",
    "OK_TRAILERS",
    "HeaderReader",
    "failure_trailers",
    "request_prefix",
    "seconds_of",
    "split_timeout",
    "timeout_field",
]

MAX_HEADERS = 16 << 10
"""Bytes of the headers of one call, encoded and decoded."""

_POST, _HTTP, _HTTPS, _STATUS_200 = b"\x83", b"\x86", b"\x87", b"\x88"
_STATIC = 61  # entries of HPACK's static table
_MOST_KNOWN = 64
_TIMEOUT = b"\0\x0cgrpc-timeout\x09"
_VALUE_SIZE = 9  # of a timeout as this package writes it
_TIMEOUT_SIZE = len(_TIMEOUT) + _VALUE_SIZE


def _integer(value: int, bits: int, first: int = 0) -> bytes:
    """An integer with a prefix of so many bits, in a byte whose other bits are `first`."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    value -= most
    found = bytearray((first | most,))
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


@lru_cache(256)
def _literal(name: str, value: str) -> bytes:
    text, content = name.encode("ascii"), value.encode("ascii")
    return b"\0" + _integer(len(text), 7) + text + _integer(len(content), 7) + content


OK_HEADERS = _STATUS_200 + _literal("content-type", "application/grpc")
OK_TRAILERS = _literal("grpc-status", "0")


def request_prefix(
    path: str, authority: str, tls: bool, metadata: tuple[tuple[str, str], ...]
) -> bytes:
    """The headers of a call, without its timeout."""
    fields = [
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    return _POST + (_HTTPS if tls else _HTTP) + b"".join(_literal(*field) for field in fields)


def timeout_field(seconds: float) -> bytes:
    """The header of a call's timeout, always of the same length: 8 digits of milliseconds."""
    milliseconds = min(max(int(seconds * 1000), 1), 99_999_999)
    return b"%b%08dm" % (_TIMEOUT, milliseconds)


def split_timeout(block: bytes) -> tuple[bytes, bytes]:
    """A block without the timeout that `timeout_field` has written last; its value, empty: it has none."""
    if block[-_TIMEOUT_SIZE:-_VALUE_SIZE] == _TIMEOUT:
        return block[:-_TIMEOUT_SIZE], block[-_VALUE_SIZE:]
    return block, b""


def seconds_of(timeout: bytes) -> float | None:
    """How long a call may take whose timeout has this value; None: as long as it likes."""
    if timeout[-1:] == b"m" and timeout[:-1].isdigit():  # as this package writes it
        return int(timeout[:-1]) * 1e-3
    return _seconds(timeout.decode("ascii", "replace"))


def failure_trailers(code: int, details: str, metadata: dict[str, str]) -> bytes:
    """The only headers of a call that fails."""
    fields = {
        "grpc-status": str(code),
        "grpc-message": quote(details, safe=" !#$&'()*+,/:;=?@[]"),
        **metadata,
    }
    return OK_HEADERS + b"".join(_literal(*field) for field in fields.items())


class HeaderReader:
    """Decodes the header blocks of one connection, in the order in which they come."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADERS)
        self._known: dict[bytes, dict[str, str]] = {}  # without their timeouts

    def read(self, block: bytes) -> tuple[dict[str, str], float | None]:
        """The headers, and the seconds that the call may take; None: as long as it likes.

        Headers are lower case and not to be changed; of one given twice the last counts.

        Raises:
            ConnectionBroken: The block is damaged.
        """
        prefix, timeout = split_timeout(block)
        known = self._known.get(prefix)
        if known is None:
            if not _is_stateless(block):
                found = self._decode(block)
                return found, _seconds(found.get("grpc-timeout", ""))
            known = self._decode(prefix)
            if len(self._known) < _MOST_KNOWN:
                self._known[prefix] = known
        if not timeout:
            return known, _seconds(known.get("grpc-timeout", ""))
        return known, seconds_of(timeout)

    def knows(self, block: bytes) -> bool:
        """Whether these headers, without their timeout, say the same wherever they come."""
        return split_timeout(block)[0] in self._known

    def _decode(self, block: bytes) -> dict[str, str]:
        try:
            found = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise ConnectionBroken(f"headers cannot be decoded: {error}") from None
        return {_text(name): _text(value) for name, value in found}


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _is_stateless(block: bytes) -> bool:
    """Whether decoding the block neither reads nor changes the table of earlier headers."""
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:  # a header of a table
                index, at = _read_integer(block, at, 7)
                if not 1 <= index <= _STATIC:
                    return False
            elif first < 0x20:  # a literal that is not put into the table
                index, at = _read_integer(block, at, 4)
                if index > _STATIC:
                    return False
                for _ in range(1 if index else 2):
                    size, at = _read_integer(block, at, 7)
                    at += size
            else:
                return False
    except IndexError:
        return False
    return at == len(block)


def _read_integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """An integer with a prefix of so many bits, and where it ends."""
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    shift = 0
    while True:
        value += (block[at] & 127) << shift
        shift += 7
        at += 1
        if block[at - 1] < 128 or shift > 28:
            return value, at


def read_message(headers: dict[str, str]) -> str:
    """What a failed call says, for a person."""
    return unquote(headers.get("grpc-message", ""), errors="replace")


def _seconds(timeout: str) -> float | None:
    """How long a call may take whose header says this."""
    try:
        return int(timeout[:-1]) * _UNITS[timeout[-1]] if timeout else None
    except (ValueError, KeyError):
        raise ConnectionBroken(f"{timeout!r} is no timeout") from None


_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
