"""Header blocks (HPACK, RFC 7541) of unary gRPC calls: encodes ours, decodes those of any peer.

HPACK compresses headers with a table that both ends change as blocks arrive, so in general each block must
be decoded in order. This module writes only literals without an index. Such a block depends on no table, so
the headers of a method are constant bytes, with the timeout appended. It accepts any block: the library
`hpack` decodes it. A block that neither reads nor changes the dynamic table is decoded once and then found
in a dictionary by its bytes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import quote, unquote

from hpack import Decoder, HPACKError

from psfleet.core.net.http2.frames import ErrorCode, ProtocolViolation, StreamError

MAX_HEADERS = 16 << 10
"""Largest size of the headers of one call in bytes, both encoded and decoded."""

_POST, _HTTP, _HTTPS, _STATUS_200 = b"\x83", b"\x86", b"\x87", b"\x88"
_STATIC = 61  # entries of HPACK's static table; higher indices are in the dynamic table
_MOST_KNOWN = 64  # decoded blocks that a connection remembers
_TIMEOUT = b"\0\x0cgrpc-timeout\x09"  # a literal header: name of 12 bytes, value of 9
_VALUE_SIZE = 9  # bytes of a timeout as this module writes it: 8 digits and a unit
_TIMEOUT_SIZE = len(_TIMEOUT) + _VALUE_SIZE


NO_TABLE = b"\x20"  # update of the dynamic table's size to 0 (RFC 7541, section 6.3)
_ANY_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
REQUEST = frozenset((":method", ":scheme", ":authority", ":path"))
"""Pseudo-headers of a request."""
RESPONSE = frozenset((":status",))
"""Pseudo-headers of a response."""
_NEEDED = (":method", ":scheme", ":path")
_OF_CONNECTION = {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
_NAME = re.compile(rb":?[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])")
_SINGLE = ("content-length", "content-type", "host")


def _integer(value: int, bits: int, first: int = 0) -> bytes:
    """Encode an integer (RFC 7541, section 5.1) whose prefix has `bits` bits of the first byte.

    `first`: The other bits of the first byte.
    """
    all_ones = (1 << bits) - 1
    if value < all_ones:
        return bytes((first | value,))
    value -= all_ones
    octets = bytearray((first | all_ones,))
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
    """Return the encoded headers of a request, without its timeout."""
    fields = [
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    return _POST + (_HTTPS if tls else _HTTP) + b"".join(_literal(*field) for field in fields)


def timeout_field(seconds: float) -> bytes:
    """Return the encoded header of a timeout. It always has the same length, so that it can be split off."""
    milliseconds = min(max(int(seconds * 1000), 1), 99_999_999)
    return b"%b%08dm" % (_TIMEOUT, milliseconds)


def split_timeout(block: bytes) -> tuple[bytes, bytes]:
    """Split a block into its headers and the timeout value that `timeout_field` wrote at its end.

    The timeout is empty if the block does not end with one.
    """
    value = block[-_VALUE_SIZE:]
    if (
        block[-_TIMEOUT_SIZE:-_VALUE_SIZE] == _TIMEOUT
        and value[:-1].isdigit()
        and value[-1:] == b"m"
    ):
        return block[:-_TIMEOUT_SIZE], value
    return block, b""


def seconds_of(timeout: str) -> float | None:
    """Return a timeout in seconds, or None if the header is empty, which means no limit.

    Raises:
        ValueError: The header is not a valid timeout.
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
    """Return the headers of a reply that consists only of an error status."""
    fields = {
        "grpc-status": str(code),
        "grpc-message": quote(details, safe=" !#$&'()*+,/:;=?@[]"),
        **metadata,
    }
    return OK_HEADERS + b"".join(_literal(*field) for field in fields.items())


class HeaderReader:
    """Decodes the header blocks of one connection. Each block must be passed to `read` in order of arrival.

    Args:
        pseudo: Pseudo-headers that are allowed.
    """

    def __init__(self, pseudo: frozenset[str]) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADERS)
        self._pseudo = pseudo
        self._known: dict[bytes, dict[str, str]] = {}  # block without timeout -> headers

    def read(self, block: bytes) -> tuple[dict[str, str], str]:
        """Decode a block. Returns its headers, and the value of its timeout or "" if it has none.

        Names of headers are in lower case. The dictionary may be shared with other calls: do not change it.

        Raises:
            ProtocolViolation: The block cannot be decoded, so the table of all later blocks is unknown.
            StreamError: The headers are malformed. The block was decoded, so later blocks can be read.
        """
        prefix, timeout = split_timeout(block)
        headers = self._known.get(prefix)
        if headers is None:
            # A block that uses the dynamic table means something else each time, so it is never remembered.
            if not _is_stateless(block):
                fields = self._decode(block)
                return fields, fields.get("grpc-timeout", "")
            # Without its timeout, so that calls with any timeout find the entry.
            headers = self._decode(prefix)
            if len(self._known) < _MOST_KNOWN:
                self._known[prefix] = headers
        return headers, headers.get("grpc-timeout", "") + timeout.decode("ascii")

    def knows(self, block: bytes) -> bool:
        """Return whether the block, apart from its timeout, has the same meaning whenever it arrives."""
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
            if first & 0x80:  # a whole header from a table
                index, at = _read_integer(block, at, 7)
                if not 1 <= index <= _STATIC:
                    return False
            elif first < 0x20:  # a literal that does not enter the dynamic table
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
    """Decode an integer whose prefix has `bits` bits. Returns the integer and the offset after it."""
    all_ones = (1 << bits) - 1
    value, at = block[at] & all_ones, at + 1
    if value < all_ones:
        return value, at
    shift = 0
    while True:
        value += (block[at] & 127) << shift
        shift += 7
        at += 1
        if block[at - 1] < 128 or shift > 28:
            return value, at


def read_message(headers: dict[str, str]) -> str:
    """Return the status text of a failed call."""
    return unquote(headers.get("grpc-message", ""), errors="replace")


def repeated(names: Iterable[str]) -> str:
    """Return the name of a header that occurs twice in an HTTP/1.1 request but may occur once, or "".

    Such a request is dangerous behind a proxy: the proxy could act on one value and the server on the
    other.
    """
    counts = Counter(names)
    return next((name for name in (*_SINGLE, "authorization") if counts[name] > 1), "")


def fields_of(pairs: Iterable[tuple[bytes, bytes]], pseudo: frozenset[str]) -> dict[str, str]:
    """Return headers by name, after checking them.

    Repeated headers are joined with commas, as in a list. So a request with two tokens has neither of them.

    Args:
        pairs: Names and values in order of arrival.
        pseudo: Pseudo-headers that are allowed.

    Raises:
        StreamError: The headers are malformed.
    """
    fields: dict[str, str] = {}
    # Pseudo-headers must come before all others (RFC 9113, section 8.3); the first ordinary header ends
    # them.
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
    """Check the headers of a request, and return its content-length or None if it announces none.

    Raises:
        StreamError: The headers are malformed.
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
    """Return whether the headers contain a pseudo-header; trailers must not."""
    return any(name[0] == ":" for name in fields)


def _malformed(details: str) -> StreamError:
    return StreamError(ErrorCode.PROTOCOL_ERROR, details)
