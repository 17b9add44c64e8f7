"""What RFC 9113 and RFC 7541 ask of a server, a row for each case.

The rows follow the sections of the RFC. Each sends its bytes behind preface and settings, on a connection
of its own, and names what the server is to do.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import IncomingCall
from psfleet.core.net.http2.frames import ErrorCode
from tests.http2.calls import METHODS, SETTINGS, serving
from tests.http2.raw_connection import GRPC, block, goaway, headers, message, rst, talking

HELD = tuple((name, "/test.Echo/Held" if name == ":path" else value) for name, value in GRPC)
BOTH = frames.END_HEADERS | frames.END_STREAM
CALL = headers(1) + message(1)
HELD_CALL = headers(1, HELD) + message(1)  # stays half-closed: the server has not answered
OPEN = headers(1)
ANSWERED = (frames.DATA, 1, b"hello")
PONG = (frames.PING, 0, b"")
ACKNOWLEDGED = (frames.SETTINGS, 0, b"")
Expected = tuple[int, int, bytes]

SYNTAX = goaway(ErrorCode.PROTOCOL_ERROR)
SIZE = goaway(ErrorCode.FRAME_SIZE_ERROR)
FLOW = goaway(ErrorCode.FLOW_CONTROL_ERROR)
CLOSED = goaway(ErrorCode.STREAM_CLOSED)
COMPRESSION = goaway(ErrorCode.COMPRESSION_ERROR)
MALFORMED = rst(ErrorCode.PROTOCOL_ERROR)


def frame(kind: int, stream: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A frame; most have no flags."""
    return frames.frame(kind, flags, stream, payload)


def priority(stream: int, on: int) -> bytes:
    """A stream that depends on another one."""
    return frame(frames.PRIORITY, stream, on.to_bytes(4, "big") + b"\x10")


def call(*more: tuple[str, str], without: str = "", flags: int = BOTH) -> bytes:
    """A call with more headers, and without one."""
    return headers(1, [field for field in GRPC if field[0] != without] + [*more], flags)


def first(*fields: tuple[str, str]) -> bytes:
    """A call with more headers before its own."""
    return headers(1, [*fields, *GRPC], BOTH)


def packed(payload: bytes) -> bytes:
    """A call whose header block ends with these bytes."""
    return frame(frames.HEADERS, 1, block(GRPC) + payload, frames.END_HEADERS) + message(1)


def continued(*parts: bytes, stream: int = 1) -> bytes:
    """CONTINUATION frames, the last of which ends the headers."""
    *some, last = parts
    return b"".join(frame(frames.CONTINUATION, stream, part) for part in some) + frame(
        frames.CONTINUATION, stream, last, frames.END_HEADERS
    )


BLOCK = block(GRPC)
BEGUN = frame(frames.HEADERS, 1, BLOCK[:20])  # its headers go on
UPPER = tuple((name.upper(), value) for name, value in [("x-name", "value")])

FRAMES: list[tuple[str, str, bytes, Expected]] = [
    ("4.1", "a frame of an unknown type is ignored", frame(0xF0, 0, b"12345678"), PONG),
    ("4.1", "so is a long one", frame(0xF0, 3, bytes(100_000)), PONG),
    ("4.1", "undefined flags are ignored", frame(frames.PING, 0, b"alive???", 0xFE), PONG),
    ("4.1", "a reserved bit is ignored", frame(frames.PING, 1 << 31, b"alive???"), PONG),
    ("4.2", "a frame of 2^14 bytes is taken", headers(1) + message(1, b"hello" + bytes(16374)), ANSWERED),
    ("4.2", "a frame may be as long as SETTINGS_MAX_FRAME_SIZE says and no longer",
     OPEN + frames.head(frames.LARGEST_TAKEN + 1, frames.DATA, 0, 1), SIZE),
    ("4.2", "nor headers", frames.head(20_000, frames.HEADERS, frames.END_HEADERS, 1), SIZE),
    ("4.3", "headers that cannot be decoded", frame(frames.HEADERS, 1, b"\xff\xff\xff\xff\xff", BOTH),
     COMPRESSION),
    ("4.3", "a frame between headers that go on", BEGUN + priority(1, 0), SYNTAX),
    ("4.3", "headers of another stream there", BEGUN + headers(3), SYNTAX),
    ("5.1", "idle: DATA", message(1), SYNTAX),
    ("5.1", "idle: RST_STREAM", frames.reset(1, 8), SYNTAX),
    ("5.1", "idle: WINDOW_UPDATE", frames.window_update(1, 10), SYNTAX),
    ("5.1", "idle: CONTINUATION", continued(BLOCK), SYNTAX),
    ("5.1", "idle: PRIORITY is taken", priority(1, 0), PONG),
    ("5.1", "half-closed: DATA", HELD_CALL + message(1), rst(ErrorCode.STREAM_CLOSED)),
    ("5.1", "half-closed: HEADERS", HELD_CALL + headers(1), rst(ErrorCode.STREAM_CLOSED)),
    ("5.1", "half-closed: CONTINUATION", HELD_CALL + continued(BLOCK), SYNTAX),
    ("5.1", "half-closed: WINDOW_UPDATE is taken", HELD_CALL + frames.window_update(1, 10), PONG),
    ("5.1", "half-closed: PRIORITY is taken", HELD_CALL + priority(1, 0), PONG),
    ("5.1", "half-closed: RST_STREAM is taken", HELD_CALL + frames.reset(1, 8), PONG),
    ("5.1", "reset: DATA", OPEN + frames.reset(1, 8) + message(1), CLOSED),
    ("5.1", "reset: HEADERS", OPEN + frames.reset(1, 8) + headers(1), CLOSED),
    ("5.1", "reset: RST_STREAM is taken", OPEN + 2 * frames.reset(1, 8), PONG),
    ("5.1", "reset: PRIORITY is taken", OPEN + frames.reset(1, 8) + priority(1, 0), PONG),
    ("5.1", "closed: DATA", CALL + message(1), CLOSED),
    ("5.1", "closed: HEADERS", CALL + headers(1), CLOSED),
    ("5.1", "closed: WINDOW_UPDATE is taken", CALL + frames.window_update(1, 10), PONG),
    ("5.1.1", "a stream of a client has an odd number", headers(2), SYNTAX),
    ("5.1.1", "and a higher one than those before it", headers(5, HELD) + headers(3), CLOSED),
    ("5.3.1", "a stream that depends on itself", priority(1, 1), SYNTAX),
    ("5.3.1", "likewise in headers",
     frame(frames.HEADERS, 1, b"\0\0\0\1\x10" + BLOCK, frames.PRIORITY_FLAG | BOTH), SYNTAX),
    ("5.5", "an extension between headers that go on", BEGUN + frame(0xF0, 0), SYNTAX),
    ("6.1", "DATA on stream 0", message(0), SYNTAX),
    ("6.1", "more padding than bytes", OPEN + frame(frames.DATA, 1, b"\x09hello", frames.PADDED), SYNTAX),
    ("6.1", "padding without its length", OPEN + frame(frames.DATA, 1, b"", frames.PADDED), SYNTAX),
    ("6.1", "padding is passed over",
     OPEN + frame(frames.DATA, 1, b"\x02\0\0\0\0\5hello\0\0", frames.PADDED | frames.END_STREAM), ANSWERED),
    ("6.1", "a message may come in several frames",
     OPEN + frame(frames.DATA, 1, b"\0\0") + frame(frames.DATA, 1) + frame(frames.DATA, 1,
     b"\0\0\5hel") + frame(frames.DATA, 1, b"lo", 1), ANSWERED),
    ("6.2", "HEADERS on stream 0", headers(0), SYNTAX),
    ("6.2", "more padding than bytes", frame(frames.HEADERS, 1, b"\xf0" + BLOCK[:9],
     frames.PADDED | BOTH), SYNTAX),
    ("6.2", "padding and a priority are passed over",
     frame(frames.HEADERS, 1, b"\3\0\0\0\0\x10" + BLOCK + bytes(3), 0x2C) + message(1), ANSWERED),
    ("6.2", "a priority that is cut off", frame(frames.HEADERS, 1, b"\0\0", 0x24), SIZE),
    ("6.3", "PRIORITY on stream 0", priority(0, 1), SYNTAX),
    ("6.3", "PRIORITY of another length", frame(frames.PRIORITY, 1, bytes(4)), SIZE),
    ("6.4", "RST_STREAM on stream 0", frames.reset(0, 8), SYNTAX),
    ("6.4", "RST_STREAM of another length", OPEN + frame(frames.RST_STREAM, 1, bytes(3)), SIZE),
    ("6.5", "settings are acknowledged", b"", ACKNOWLEDGED),
    ("6.5", "SETTINGS with ACK and a payload", frame(frames.SETTINGS, 0, bytes(6), frames.ACK), SIZE),
    ("6.5", "SETTINGS on a stream", frame(frames.SETTINGS, 1), SYNTAX),
    ("6.5", "SETTINGS of another length", frame(frames.SETTINGS, 0, bytes(5)), SIZE),
    ("6.5.2", "unknown settings are ignored", frames.settings({0xFF: 1}), PONG),
    ("6.5.2", "ENABLE_PUSH is 0 or 1", frames.settings({frames.ENABLE_PUSH: 2}), SYNTAX),
    ("6.5.2", "a window above the largest", frames.settings({frames.INITIAL_WINDOW: 1 << 31}), FLOW),
    ("6.5.2", "frames below the smallest", frames.settings({frames.MAX_FRAME_SIZE: (1 << 14) - 1}), SYNTAX),
    ("6.5.2", "frames above the largest", frames.settings({frames.MAX_FRAME_SIZE: 1 << 24}), SYNTAX),
    ("6.5.3", "of a setting given twice the last counts",
     frame(frames.SETTINGS, 0, bytes.fromhex("000400000000 000400000005")) + CALL, (frames.DATA, 1,
     b"\0\0\0\0\5")),
    ("6.5.3", "but each is checked", frame(frames.SETTINGS, 0,
     bytes.fromhex("000200000002 000200000000")), SYNTAX),
    ("6.6", "a client sends no PUSH_PROMISE", OPEN + frame(frames.PUSH_PROMISE, 1, b"\0\0\0\2" + BLOCK,
     4), SYNTAX),
    ("6.7", "an answer to a PING is not answered", frame(frames.PING, 0, b"12345678", frames.ACK), PONG),
    ("6.7", "PING on a stream", frame(frames.PING, 1, bytes(8)), SYNTAX),
    ("6.7", "PING of another length", frame(frames.PING, 0, bytes(7)), SIZE),
    ("6.7", "an answer of another length", frame(frames.PING, 0, bytes(9), frames.ACK), SIZE),
    ("6.8", "GOAWAY on a stream", frame(frames.GOAWAY, 1, bytes(8)), SYNTAX),
    ("6.8", "GOAWAY that is cut off", frame(frames.GOAWAY, 0, bytes(7)), SIZE),
    ("6.8", "a client that leaves gets its answers", OPEN + frames.goaway(0, 0, "") + message(1), ANSWERED),
    ("6.9", "WINDOW_UPDATE by nothing", frames.window_update(0, 0), SYNTAX),
    ("6.9", "likewise on a stream", OPEN + frames.window_update(1, 0), MALFORMED),
    ("6.9", "WINDOW_UPDATE of another length", frame(frames.WINDOW_UPDATE, 0, bytes(3)), SIZE),
    ("6.9.1", "a window above 2^31-1", 2 * frames.window_update(0, frames.LARGEST_WINDOW), FLOW),
    ("6.9.1", "likewise of a stream",
     OPEN + 2 * frames.window_update(1, frames.LARGEST_WINDOW), rst(ErrorCode.FLOW_CONTROL_ERROR)),
    ("6.9.2", "likewise by settings", OPEN + frames.window_update(1, frames.LARGEST_WINDOW - 65_535) +
     frames.settings({frames.INITIAL_WINDOW: 65_536}), FLOW),
    ("6.9.2", "settings open the windows of streams",
     frames.settings({frames.INITIAL_WINDOW: 0}) + CALL + frames.settings({frames.INITIAL_WINDOW: 10}),
     ANSWERED),
    ("6.9.2", "a window may be below 0", frames.settings({frames.INITIAL_WINDOW: 5}) + CALL +
     frames.settings({frames.INITIAL_WINDOW: 3}) + frames.window_update(1, 7), (frames.DATA, 1, b"hello")),
    ("6.10", "headers may come in several frames", BEGUN + continued(BLOCK[20:40], b"",
     BLOCK[40:]) + message(1),
     ANSWERED),
    ("6.10", "CONTINUATION of another stream", BEGUN + continued(BLOCK, stream=3), SYNTAX),
    ("6.10", "CONTINUATION on stream 0", BEGUN + continued(BLOCK, stream=0), SYNTAX),
    ("6.10", "CONTINUATION behind whole headers", OPEN + continued(BLOCK), SYNTAX),
    ("6.10", "CONTINUATION behind a CONTINUATION that ends them", BEGUN + 2 * continued(BLOCK[20:]),
     SYNTAX),
    ("6.10", "CONTINUATION behind DATA", OPEN + message(1, flags=0) + continued(BLOCK), SYNTAX),
    ("6.10", "CONTINUATION without end", BEGUN + 65 * frame(frames.CONTINUATION, 1),
     goaway(ErrorCode.ENHANCE_YOUR_CALM)),
    ("7", "an unknown error code of GOAWAY", frames.goaway(0, 0xFF, ""), PONG),
    ("7", "an unknown error code of RST_STREAM", OPEN + frames.reset(1, 0xFF), PONG),
]  # fmt: skip

HEADERS: list[tuple[str, str, bytes, Expected]] = [
    ("8.1", "trailers end a call", OPEN + message(1, flags=0) + headers(1, [("x-a", "1")], BOTH), ANSWERED),
    ("8.1", "headers in the middle of a call", OPEN + headers(1, [("x-a", "1")]), MALFORMED),
    ("8.1", "pseudo-headers in trailers", OPEN + message(1, flags=0) + headers(1, GRPC, BOTH), MALFORMED),
    ("8.1.1", "a content-length that is right", call(("content-length", "10"), flags=4) + message(1),
     ANSWERED),
    ("8.1.1", "one that is too small", call(("content-length", "9"), flags=4) + message(1), MALFORMED),
    ("8.1.1", "one that is too large", call(("content-length", "11"), flags=4) + message(1), MALFORMED),
    ("8.1.1", "one that several frames exceed", call(("content-length", "5"), flags=4) +
     2 * frame(frames.DATA, 1, b"\0\0\0"), MALFORMED),
    ("8.1.1", "one without a message", call(("content-length", "9")), MALFORMED),
    ("8.1.1", "one before trailers", call(("content-length", "9"), flags=4) + headers(1, [("x-a", "1")],
     BOTH),
     MALFORMED),
    ("8.1.1", "one that is no number", call(("content-length", "+10"), flags=4), MALFORMED),
    ("8.1.1", "two of them", call(("content-length", "10"), ("content-length", "10"), flags=4), MALFORMED),
    ("8.2.1", "a name in upper case", call(*UPPER), MALFORMED),
    ("8.2.1", "a name with a space", call(("x a", "1")), MALFORMED),
    ("8.2.1", "a name with a colon in it", call(("x:a", "1")), MALFORMED),
    ("8.2.1", "no name", call(("", "1")), MALFORMED),
    ("8.2.1", "a name that is not ASCII", call(("x\xe4", "1")), MALFORMED),
    ("8.2.1", "a value with a line end", call(("x-a", "1\r\nx-b: 2")), MALFORMED),
    ("8.2.1", "a value with a zero", call(("x-a", "1\0")), MALFORMED),
    ("8.2.1", "a value with a space at its end", call(("x-a", "1 ")), MALFORMED),
    ("8.2.1", "a value may be empty", call(("x-a", ""), flags=4) + message(1), ANSWERED),
    *(("8.2.2", f"{name} is of HTTP/1.1", call((name, "close")), MALFORMED)
      for name in ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")),
    ("8.2.2", "te is trailers or nothing", call(("te", "gzip"), without="te"), MALFORMED),
    ("8.3", "an unknown pseudo-header", first((":test", "1")), MALFORMED),
    ("8.3", "one of answers", first((":status", "200")), MALFORMED),
    ("8.3", "one behind other headers", call((":path", "/"), without=":path"), MALFORMED),
    *(("8.3.1", f"no {name}", call(without=name), MALFORMED) for name in (":method", ":scheme", ":path")),
    ("8.3.1", "an empty :path", headers(1, [(":path", ""), *GRPC[:2], *GRPC[3:]], BOTH), MALFORMED),
    *(("8.3.1", f"two {field[0]}", first(field), MALFORMED) for field in GRPC[:4]),
]  # fmt: skip

COMPRESSED: list[tuple[str, str, bytes, Expected]] = [
    ("7541 2.3.3", "the index 0", packed(b"\x80"), COMPRESSION),
    ("7541 2.3.3", "an index that nothing has", packed(b"\xff\x80\x01"), COMPRESSION),
    ("7541 4.2", "a size of the table behind headers", packed(b"\x20"), COMPRESSION),
    ("7541 5.1", "an integer without end", packed(b"\xff" * 40), COMPRESSION),
    ("7541 5.2", "a text that is cut off", packed(b"\0\x09abc"), COMPRESSION),
    ("7541 5.2", "a code with more than 7 bits of padding",
     packed(b"\0\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"), COMPRESSION),
    ("7541 5.2", "a code that is padded with zeros", packed(b"\0\x83\x2a\x61\x80\x01a"), COMPRESSION),
    ("7541 5.2", "a code that holds the end of text", packed(b"\0\x84\xff\xff\xff\xff\x01a"), COMPRESSION),
    ("7541 4.2", "of a smaller table the next block says so", frames.settings({frames.HEADER_TABLE_SIZE: 0}) +
     CALL, (frames.HEADERS, 1, b"\x20\x88")),
    ("7541 4.2", "also those of a call that fails", frames.settings({frames.HEADER_TABLE_SIZE: 0}) + call(),
     (frames.HEADERS, 1, b"\x20\x88")),
    ("7541 6.3", "a larger table than was offered",
     frame(frames.HEADERS, 1, b"\x3f\xe2\x1f" + BLOCK, BOTH), COMPRESSION),
    ("7541 6.3", "a smaller table is taken", frame(frames.HEADERS, 1, b"\x20" + BLOCK, 4) + message(1),
     ANSWERED),
    ("7541 6.2", "headers are remembered", frame(frames.HEADERS, 1, BLOCK + b"\x40\3x-a\1b", 4) +
     frame(frames.HEADERS, 3, BLOCK + b"\xbe", 4) + message(3), (frames.DATA, 3, b"hello")),
    ("7541 6.2", "also those of a call that is malformed", frame(frames.HEADERS, 1,
     b"\x40\3X-A\1b" + BLOCK, 5) +
     frame(frames.HEADERS, 3, BLOCK + b"\xbe", 5), rst(ErrorCode.PROTOCOL_ERROR)),
]  # fmt: skip

CALLS: list[tuple[str, str, bytes, Expected]] = [
    ("grpc", "no message of gRPC: refused", OPEN + frame(frames.DATA, 1, b"name=value", 1),
     (frames.HEADERS, 1, b"grpc-status\x0212")),
    ("grpc", "more than the message", OPEN + frame(frames.DATA, 1, b"\0\0\0\0\1ab", 1),
     (frames.HEADERS, 1, b"grpc-status\x013")),
    ("grpc", "less than the message", OPEN + frame(frames.DATA, 1, b"\0\0\0\0\3ab", 1),
     (frames.HEADERS, 1, b"grpc-status\x013")),
    ("grpc", "a message without end", OPEN + frame(frames.DATA, 1, b"\0\xff\xff\xff\xff"),
     (frames.HEADERS, 1, b"grpc-status\x018")),
    ("grpc", "another content type", call(("content-type", "text/plain"), without="content-type"),
     (frames.DATA, 1, b"gRPC alone")),
    ("grpc", "another method", headers(1, [(":method", "GET"), *GRPC[1:]], BOTH), (frames.DATA, 1,
     b"gRPC alone")),
    *(("grpc", f"the timeout {timeout!r}", call(("grpc-timeout", timeout)), (frames.HEADERS, 1,
     b"no timeout"))
      for timeout in ("-5S", "5", "S", "123456789S", "1.5S", "5x")),
    ("grpc", "two timeouts", call(("grpc-timeout", "5S"), ("grpc-timeout", "00060000m")),
     (frames.HEADERS, 1, b"no timeout")),
]  # fmt: skip

ROWS = FRAMES + HEADERS + COMPRESSED + CALLS


def hold(request: bytes, call: IncomingCall) -> None:
    """Leave a call without an answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a server that takes 4 calls of a connection at once."""
    folder = tmp_path_factory.mktemp("http2")
    limits = replace(SETTINGS, handshakes=20, streams=4, message=1 << 20)
    with serving(folder, limits, methods={**METHODS, "/test.Echo/Held": hold}) as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [row[2:] for row in ROWS],
    ids=[f"{section}: {claim}" for section, claim, _, _ in ROWS],
)
def test_the_protocol_is_kept(server: Path, sent: bytes, expected: Expected) -> None:
    """What is allowed is taken; what is forbidden ends its stream or its connection with the right code."""
    with talking(server) as client:
        client.send(sent)
        if expected != PONG:
            client.until(*expected)
        if expected[0] == frames.GOAWAY:
            client.ends()
        else:
            client.ping()


def test_each_end_begins_with_its_preface(server: Path) -> None:
    """RFC 9113, 3.4: the server's first frame is SETTINGS; a client that says something else is told so."""
    with talking(server) as client:
        actual = client.read()
        assert actual is not None
        assert actual[:3] == (frames.SETTINGS, 0, 0)
    with talking(server, b"GET / HTTP/1.1\r\nHost: psfleet\r\n\r\n") as client:
        client.until(*SYNTAX)
        client.ends()


def test_more_calls_than_were_offered_are_refused(server: Path) -> None:
    """RFC 9113, 5.1.2: a client may make them again; those before them go on."""
    with talking(server) as client:
        client.send(*(headers(stream, HELD) for stream in (1, 3, 5, 7, 9)))
        client.until(*rst(ErrorCode.REFUSED_STREAM, 9))
        client.send(frames.reset(1, 8), headers(11), message(11))
        client.until(frames.DATA, 11, b"hello")


def test_a_window_of_one_byte_gets_one_byte(server: Path) -> None:
    """RFC 9113, 6.9.1: no more is sent than the other end takes."""
    with talking(server) as client:
        client.send(frames.settings({frames.INITIAL_WINDOW: 1}), CALL)
        for more in range(10):
            while (actual := client.read()) is not None and actual[0] != frames.DATA:
                pass
            assert actual is not None
            assert len(actual[3]) == 1
            client.send(frames.window_update(1, 1) if more < 9 else b"")
        client.until(frames.HEADERS, 1, b"grpc-status\x010")


def test_other_calls_survive_one_that_is_damaged(server: Path) -> None:
    """A message that is none, malformed headers and what is still on its way end their own call alone."""
    with talking(server) as client:
        client.send(headers(1), message(1, flags=0))
        client.send(
            headers(3),
            frame(frames.DATA, 3, b"name=value"),
            message(3),
            headers(5, GRPC[1:]),
            message(5),
        )
        client.until(frames.HEADERS, 3, b"grpc-status\x0212")
        client.until(*rst(ErrorCode.NO_ERROR, 3))
        client.until(*rst(ErrorCode.PROTOCOL_ERROR, 5))
        client.send(frame(frames.DATA, 1, b"", frames.END_STREAM))
        client.until(*ANSWERED)
        client.ping()
