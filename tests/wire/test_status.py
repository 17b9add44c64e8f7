"""Errors to statuses and back, through real calls."""

import time
from collections.abc import Iterator

import grpc
import pytest

from psfleet.core.base import errors
from psfleet.core.base.errors import PsfleetError
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.connections.error_statuses import CODES, error_of, failure, status_of
from tests.pools import grpcio_server

CLASSES = [getattr(errors, name) for name in errors.__all__]
TEXT = "round 3 waits for worker 1"


def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
    """Fail with the error class that the request names."""
    word = request.decode()
    if word == "sleep":
        time.sleep(0.3)
    elif word == "crash":
        raise RuntimeError("a bug")
    elif word == "later":
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_trailing_metadata((("psfleet-error", "OfALaterVersion"),))
    elif word == "large":
        return b"x" * 1000
    else:
        failure(context, getattr(errors, word)(TEXT))
    return b""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server that fails on demand."""
    with grpcio_server("test", {"Fail": grpc.unary_unary_rpc_method_handler(fail)}) as endpoint:
        yield endpoint


def error_from(endpoint: str, word: str, method: str = "Fail", timeout: float = 10) -> PsfleetError:
    """The error that a client makes of a failed call."""
    options = [("grpc.max_receive_message_length", 100)]
    with (
        grpc.insecure_channel(endpoint, options)
        if word == "large"
        else open_channel(endpoint, Access(insecure=True))
    ) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/test/{method}", None, None)(word.encode(), timeout=timeout)
        return error_of(error.value, "server 1")


def test_the_mapping_is_complete() -> None:
    """Every error class has a code of its own entry, and none is OK."""
    assert set(CODES) == set(CLASSES)
    assert grpc.StatusCode.OK not in CODES.values()


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_crosses_the_wire_as_itself(endpoint: str, cls: type[PsfleetError]) -> None:
    """Class and text of an error survive the way to a status and back."""
    back = error_from(endpoint, cls.__name__)
    assert type(back) is cls
    assert str(back) == TEXT


@pytest.mark.parametrize(
    ("word", "method", "cls"),
    [
        ("sleep", "Fail", errors.DeadlineExceeded),
        ("large", "Fail", errors.LimitExceeded),
        ("later", "Fail", errors.ServerUnavailable),
        ("crash", "Fail", errors.PsfleetError),
        ("any", "Unknown", errors.ProtocolError),
    ],
)
def test_what_grpc_itself_reports_gets_a_class(
    endpoint: str, word: str, method: str, cls: type[PsfleetError]
) -> None:
    """A status without psfleet's metadata becomes the nearest class and names the server."""
    back = error_from(endpoint, word, method, timeout=0.1 if word == "sleep" else 60)
    assert type(back) is cls
    assert "server 1" in str(back)


def test_nobody_there_is_unavailable() -> None:
    """An endpoint where nothing listens is ServerUnavailable."""
    assert isinstance(error_from("unix:/nonexistent/socket", "any"), errors.ServerUnavailable)


def test_an_error_without_a_status_is_unavailable() -> None:
    """A bare RpcError (a closed channel) is a server that does not answer."""
    assert isinstance(error_of(grpc.RpcError("closed"), "server 0"), errors.ServerUnavailable)


def test_a_long_text_is_cut() -> None:
    """The text stays below what HTTP/2 peers accept as headers."""
    assert len(status_of(PsfleetError("x" * 10_000))[1]) == 2000
