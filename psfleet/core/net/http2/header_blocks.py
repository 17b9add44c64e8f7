"""Header blocks (HPACK, RFC 7541) of unary gRPC calls: encodes ours, and decodes those of any peer.

A header block is the encoded headers of one call or reply. HPACK compresses headers with a table that both
ends change with every block, so blocks must in general be decoded in the order of arrival. This module
writes only literals without an index, which do not use the table. So the headers of a method are constant
bytes, followed by the timeout. Blocks from peers may use all of HPACK; the library `hpack` decodes them. A
block that does not use the changing table is decoded once, and later looked up by its bytes.
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
"""Pseudo-headers (names with a colon) that a request may have."""
RESPONSE = frozenset((":status",))
"""Pseudo-headers that a response may have."""
_NEEDED = (":method", ":scheme", ":path")
_OF_CONNECTION = {"connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade"}
_NAME = re.compile(rb":?[!#$%&'*+.^_`|~0-9a-z-]+")
_VALUE = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])")
_SINGLE = ("content-length", "content-type", "host")


def _integer(value: int, bits: int, first: int = 0) -> bytes:
    """Encode an integer (RFC 7541, section 5.1) in the low `bits` bits of the first byte and further bytes.

    `first`: Value of the first byte's other bits.
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
    """Return the encoded headers of a request, to which `timeout_field` may be appended.

    Args:
        path: Method as "/package.Service/Method".
        authority: Name of the server.
        tls: True if the connection uses TLS.
        metadata: Further headers.
    """
    fields = [
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    return _POST + (_HTTPS if tls else _HTTP) + b"".join(_literal(*field) for field in fields)


def timeout_field(seconds: float) -> bytes:
    """Return the encoded header of a timeout.

    Its length is constant, so that `split_timeout` can remove it.
    """
    milliseconds = min(max(int(seconds * 1000), 1), 99_999_999)
    return b"%b%08dm" % (_TIMEOUT, milliseconds)


def split_timeout(block: bytes) -> tuple[bytes, bytes]:
    """Split a block into its other headers and the timeout that `timeout_field` wrote at its end.

    The value is empty if the block does not end with a timeout.
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
    """Return the seconds in a grpc-timeout header, or None if the header is empty, which means no limit.

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
    """Return the encoded headers of a reply that has an error status and no message."""
    fields = {
        "grpc-status": str(code),
        "grpc-message": quote(details, safe=" !#$&'()*+,/:;=?@[]"),
        **metadata,
    }
    return OK_HEADERS + b"".join(_literal(*field) for field in fields.items())


class HeaderReader:
    """Decodes the header blocks that arrive on one connection.

    Pass every block to `read`, in order of arrival.

    Args:
        pseudo: Pseudo-headers that the other end may send (names that begin with a colon).
    """

    def __init__(self, pseudo: frozenset[str]) -> None:
        self._decoder = Decoder(max_header_list_size=MAX_HEADERS)
        self._pseudo = pseudo
        self._known: dict[bytes, dict[str, str]] = {}  # block without timeout -> headers

    def read(self, block: bytes) -> tuple[dict[str, str], str]:
        """Decode a block. Returns its headers, and the value of its timeout or "" if it has none.

        Names of headers are in lower case. The dictionary may be shared with other calls, so do not change
        it.

        Raises:
            ProtocolViolation: The block cannot be decoded. Later blocks then cannot be decoded either,
                because the state of HPACK's table is unknown.
            StreamError: The headers are malformed. The block was decoded, so later blocks can be read.
        """
        prefix, timeout = split_timeout(block)
        headers = self._known.get(prefix)
        if headers is None:
            # The headers of a block that uses the changing table can differ each time, so they are not
            # remembered.
            if not _is_stateless(block):
                fields = self._decode(block)
                return fields, fields.get("grpc-timeout", "")
            # Decode it without the timeout, so that calls with any timeout find the entry.
            headers = self._decode(prefix)
            if len(self._known) < _MOST_KNOWN:
                self._known[prefix] = headers
        return headers, headers.get("grpc-timeout", "") + timeout.decode("ascii")

    def knows(self, block: bytes) -> bool:
        """Return whether `read` has seen a block with the same headers, apart from the timeout."""
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
    """Return whether a block can be decoded without HPACK's changing table, and does not change the table."""
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
    """Decode an integer in the low `bits` bits of a byte and further bytes. Also returns the next offset."""
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
    """Return the status text from the headers of a failed call."""
    return unquote(headers.get("grpc-message", ""), errors="replace")


def repeated(names: Iterable[str]) -> str:
    """Return the name of a header that an HTTP/1.1 request repeats although it may occur only once, or "".

    Such a request is dangerous behind a proxy, because the proxy may use one value and the server the other.
    """
    counts = Counter(names)
    return next((name for name in (*_SINGLE, "authorization") if counts[name] > 1), "")


def fields_of(pairs: Iterable[tuple[bytes, bytes]], pseudo: frozenset[str]) -> dict[str, str]:
    """Check decoded headers, and return them by name.

    Repeated headers are joined with commas. So a request with two tokens has a value that is no valid token.

    Args:
        pairs: Names and values in order of arrival.
        pseudo: Pseudo-headers that are allowed.

    Raises:
        StreamError: The headers are malformed.
    """
    fields: dict[str, str] = {}
    # Pseudo-headers must come before all others (RFC 9113, section 8.3). `is_pseudo` turns False at the first
    # ordinary header.
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
    """Check the headers of a request, and return its content-length, or None if it has none.

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
    """Return whether the headers contain a pseudo-header. Trailers must not contain any."""
    return any(name[0] == ":" for name in fields)


def _malformed(details: str) -> StreamError:
    return StreamError(ErrorCode.PROTOCOL_ERROR, details)
