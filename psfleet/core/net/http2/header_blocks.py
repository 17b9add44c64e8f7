"""Header blocks (HPACK, RFC 7541) of unary gRPC calls.

What this package writes are literals without an index, so that a block is a constant of the method
and needs no state. What it reads may be anything: the library `hpack` decodes it. A block that
neither reads nor changes the decoder's table is decoded once and looked up afterwards.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import quote, unquote

from hpack import Decoder, HPACKError

from psfleet.core.net.http2.frames import ErrorCode, ProtocolViolation, StreamError

MAX_HEADERS = 16 << 10
"""Bytes of the headers of one call, encoded and decoded."""

_POST, _HTTP, _HTTPS, _STATUS_200 = b"\x83", b"\x86", b"\x87", b"\x88"
_STATIC = 61  # entries of HPACK's static table
_MOST_KNOWN = 64
_TIMEOUT = b"\0\x0cgrpc-timeout\x09"
_VALUE_SIZE = 9  # of a timeout as this package writes it
_TIMEOUT_SIZE = len(_TIMEOUT) + _VALUE_SIZE


NO_TABLE = b"\x20"  # the size of the table is 0 from here on
_ANY_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
REQUEST = frozenset((":method", ":scheme", ":authority", ":path"))
"""Pseudo-headers of a call."""
RESPONSE = frozenset((":status",))
"""Pseudo-headers of an answer."""
_NEEDED = (":method", ":scheme", ":path")
_OF_CONNECTION = {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
_NAME = re.compile(rb":?[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])")
_SINGLE = ("content-length", "content-type", "host")


def _integer(value: int, bits: int, first: int = 0) -> bytes:
    """Return an integer with a prefix of so many bits, in a byte whose other bits are `first`."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((first | value,))
    value -= most
    octets = bytearray((first | most,))
    while value >= 128:
        octets.append(value & 127 | 128)
        value >>= 7
    octets.append(value)
    return bytes(octets)


@lru_cache(256)
def _literal(name: str, value: str) -> bytes:
    text, content = name.encode("ascii"), value.encode("ascii")
    return b"\0" + _integer(len(text), 7) + text + _integer(len(content), 7) + content


OK_HEADERS = _STATUS_200 + _literal("content-type", "application/grpc")
OK_TRAILERS = _literal("grpc-status", "0")
TEXT_HEADERS = _literal(":status", "415") + _literal("content-type", "text/plain")
TEXT_TRAILERS = _literal("grpc-status", "2")


def request_prefix(
    path: str, authority: str, tls: bool, metadata: tuple[tuple[str, str], ...]
) -> bytes:
    """Return the headers of a call, without its timeout."""
    fields = [
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    return _POST + (_HTTPS if tls else _HTTP) + b"".join(_literal(*field) for field in fields)


def timeout_field(seconds: float) -> bytes:
    """Return the header of a call's timeout, always of the same length: 8 digits of milliseconds."""
    milliseconds = min(max(int(seconds * 1000), 1), 99_999_999)
    return b"%b%08dm" % (_TIMEOUT, milliseconds)


def split_timeout(block: bytes) -> tuple[bytes, bytes]:
    """Split off the timeout that `timeout_field` has written last, empty if there is none; return both."""
    value = block[-_VALUE_SIZE:]
    if (
        block[-_TIMEOUT_SIZE:-_VALUE_SIZE] == _TIMEOUT
        and value[:-1].isdigit()
        and value[-1:] == b"m"
    ):
        return block[:-_TIMEOUT_SIZE], value
    return block, b""


def seconds_of(timeout: str) -> float | None:
    """Return the time limit of a call with this header; None: unlimited.

    Raises:
        ValueError: It is no timeout.
    """
    if not timeout:
        return None
    match = _ANY_TIMEOUT.fullmatch(timeout)
    if match is None:
        raise ValueError(
            f"{timeout!r} is no timeout: it has at most 8 digits and one of H M S m u n"
        )
    return int(match[1]) * _UNITS[match[2]]


def failure_trailers(code: int, details: str, metadata: Mapping[str, str]) -> bytes:
    """Return the only headers of a call that fails."""
    fields = {
        "grpc-status": str(code),
        "grpc-message": quote(details, safe=" !#$&'()*+,/:;=?@[]"),
        **metadata,
    }
    return OK_HEADERS + b"".join(_literal(*field) for field in fields.items())


class HeaderReader:
    """Decodes the header blocks of one connection, in the order in which they come.

    Args:
        pseudo: Pseudo-headers that are allowed.
    """

    def __init__(self, pseudo: frozenset[str]) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADERS)
        self._pseudo = pseudo
        self._known: dict[bytes, dict[str, str]] = {}  # without their timeouts

    def read(self, block: bytes) -> tuple[dict[str, str], str]:
        """Return the headers, and the timeout that is among them; empty: there is none.

        Headers are lower case and not to be changed.

        Raises:
            ProtocolViolation: The block cannot be decoded.
            StreamError: The headers are malformed; the block is decoded.
        """
        prefix, timeout = split_timeout(block)
        headers = self._known.get(prefix)
        if headers is None:
            if not _is_stateless(block):
                fields = self._decode(block)
                return fields, fields.get("grpc-timeout", "")
            headers = self._decode(prefix)
            if len(self._known) < _MOST_KNOWN:
                self._known[prefix] = headers
        return headers, headers.get("grpc-timeout", "") + timeout.decode("ascii")

    def knows(self, block: bytes) -> bool:
        """Return whether these headers, without their timeout, mean the same wherever they come."""
        return split_timeout(block)[0] in self._known

    def _decode(self, block: bytes) -> dict[str, str]:
        try:
            fields = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise ProtocolViolation(
                ErrorCode.COMPRESSION_ERROR, f"headers cannot be decoded: {error}"
            ) from None
        return fields_of(fields, self._pseudo)


def _is_stateless(block: bytes) -> bool:
    """Return whether decoding the block neither reads nor changes the table of earlier headers."""
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
    """Return an integer with a prefix of so many bits, and where it ends."""
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
    """Return the text of a failed call's status."""
    return unquote(headers.get("grpc-message", ""), errors="replace")


def repeated(names: Iterable[str]) -> str:
    """Return a header that a request of HTTP/1.1 has twice though it may have it once, or "" if none.

    A proxy and a server could each take another one of the two.
    """
    counts = Counter(names)
    return next((name for name in (*_SINGLE, "authorization") if counts[name] > 1), "")


def fields_of(pairs: Iterable[tuple[bytes, bytes]], pseudo: frozenset[str]) -> dict[str, str]:
    """Return headers by their names.

    The values of one that is given several times are joined by commas, as a list is. So of two tokens neither
    counts.

    Args:
        pairs: Names and values in their order.
        pseudo: Pseudo-headers that are allowed.

    Raises:
        StreamError: They are malformed.
    """
    fields: dict[str, str] = {}
    is_pseudo = True
    for raw, content in pairs:
        if not _NAME.fullmatch(raw) or not _VALUE.fullmatch(content):
            raise _malformed(f"the header {raw!r} has bytes that may not be")
        name, value = raw.decode("ascii"), content.decode("utf-8", "replace")
        if name[0] == ":":
            if name not in pseudo or name in fields or not is_pseudo:
                raise _malformed(f"the header {name!r} may not be here")
        elif name in _OF_CONNECTION or (name == "te" and value != "trailers"):
            raise _malformed(f"the header {name!r} is of HTTP/1.1")
        elif name in _SINGLE and name in fields:
            raise _malformed(f"the header {name!r} comes twice")
        else:
            is_pseudo = False
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    return fields


def check_request(fields: dict[str, str]) -> int | None:
    """Check the headers of a call; what they say of the length of what follows.

    Raises:
        StreamError: They are malformed.
    """
    for name in _NEEDED:
        if not fields.get(name):
            raise _malformed(f"the header {name!r} is missing")
    length = fields.get("content-length")
    if length is None:
        return None
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise _malformed(f"the content-length is {length!r}")
    return int(length)


def has_pseudo(fields: dict[str, str]) -> bool:
    """Return whether there is a pseudo-header, which trailers do not have."""
    return any(name[0] == ":" for name in fields)


def _malformed(details: str) -> StreamError:
    return StreamError(ErrorCode.PROTOCOL_ERROR, details)
