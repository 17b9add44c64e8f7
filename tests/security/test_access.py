"""Who may talk to a server over TCP, with real servers: everybody else is refused, clearly, at once."""

import contextlib
import dataclasses
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from psfleet.core.base.errors import AccessDenied, ConfigError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.engine.runtime_interface import load_runtime
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.connections.tls_sockets import closes_at_once
from psfleet.core.net.v1.shard_pb2 import StatusRequest
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.process import Server
from tests.security.forged import CLIENT, Forge
from tests.server_channels import ServerChannel
from tests.trainings import TrainingWorkload
from tests.waiting import until

_SOON = 50.0  # seconds; a worker that is not refused goes on asking for 60
"""Seconds within which a refusal must come: nobody waits for a server that will never answer."""


@pytest.fixture(scope="module")
def forge() -> Forge:
    """The authority of this job."""
    return Forge()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For credentials."""
    return tmp_path_factory.mktemp("credentials")


@pytest.fixture(scope="module")
def fleet(forge: Forge, folder: Path) -> Iterator[LocalFleet]:
    """One server that knows the job's certificates and token."""
    credentials = {
        "server": forge.write(folder / "server"),
        "worker": forge.write(folder / "worker", "psfleet-worker", (CLIENT,)),
    }
    with pytest.MonkeyPatch.context() as patch:
        # gRPC decides while it is imported what it logs; here a server under TLS has it log refusals.
        patch.setenv("PSFLEET_TEST_STARTER", "0")
        fleet = LocalFleet(1, 1, "tcp", credentials=credentials).start()
    with contextlib.closing(fleet):
        yield fleet


def refusal(environment: Environment) -> str:
    """What a worker with this environment is told, and within how long."""
    began = time.monotonic()
    with pytest.raises(AccessDenied) as error:
        load_runtime("cluster", environment, "async")
    assert time.monotonic() - began < _SOON
    assert "\n" not in str(error.value)
    return str(error.value)


def until_logged(fleet: LocalFleet, pattern: str) -> None:
    """Wait until the server's log has a line like this."""
    until(lambda: re.search(pattern, fleet.log(0)), lambda: fleet.log(0))


def with_(fleet: LocalFleet, credentials: Path | None) -> Environment:
    """A worker's environment with other credentials; None: plainly."""
    return dataclasses.replace(
        fleet.environment(0), tls=str(credentials or ""), insecure=credentials is None
    )


def test_plaintext_is_refused(fleet: LocalFleet) -> None:
    """A worker that was told to be insecure does not get into a job that is not."""
    assert "wants credentials and this process has none" in refusal(with_(fleet, None))
    until_logged(fleet, "WRONG_VERSION_NUMBER")


def test_no_certificate_is_refused(fleet: LocalFleet, folder: Path) -> None:
    """TLS without a certificate of one's own is not enough, and the log says so."""
    trust = grpc.ssl_channel_credentials((folder / "worker" / "ca.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "psfleet-server")]
    with grpc.secure_channel(addresses_of(fleet.endpoints[0]).control, trust, options) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/psfleet.v1.Shard/Status", None, None)(b"", timeout=_SOON)
        assert isinstance(error.value, grpc.Call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    until_logged(fleet, "PEER_DID_NOT_RETURN_A_CERTIFICATE")


def test_a_certificate_of_another_job_is_refused(fleet: LocalFleet, folder: Path) -> None:
    """Both ends notice: the worker that the server is a stranger, the server that the worker is."""
    other = Forge().write(folder / "other", "psfleet-worker", (CLIENT,))
    assert "certificate is not good here: it is of another job" in refusal(with_(fleet, other))
    liar = Forge().write(folder / "liar", "psfleet-worker", (CLIENT,))
    (liar / "ca.pem").write_bytes((folder / "worker" / "ca.pem").read_bytes())
    message = refusal(with_(fleet, liar))
    assert "does not take this process's certificate; it is of another job" in message
    until_logged(fleet, "Handshake failed.*(BAD_SIGNATURE|CERTIFICATE_VERIFY_FAILED)")


def test_a_wrong_token_is_refused(fleet: LocalFleet, forge: Forge, folder: Path) -> None:
    """The certificate alone is not enough."""
    wrong = forge.write(folder / "wrong", "psfleet-worker", (CLIENT,), token="x" * 40)
    assert "its token is not this job's" in refusal(with_(fleet, wrong))
    until_logged(fleet, r"refused a call from ipv4:127.0.0.1:\d+: its token is not this job's")


@pytest.mark.parametrize("method", ["Shard/Push", "Shard/Pull", "Coordinator/Barrier", "No/Such"])
def test_no_token_is_refused(fleet: LocalFleet, folder: Path, method: str) -> None:
    """Whatever the method; a call without a token does not even learn whether there is such a one."""
    access = Access.of(with_(fleet, folder / "worker"))
    with ServerChannel(fleet.endpoints[0], access) as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/psfleet.v1.{method}", None, None)(b"", timeout=_SOON)
        assert isinstance(error.value, grpc.Call)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "it carries no token" in (error.value.details() or "")


def test_a_workers_expired_certificate_is_refused(
    fleet: LocalFleet, forge: Forge, folder: Path
) -> None:
    """The worker is told that it is its own, and since when."""
    old = forge.write(folder / "old", "psfleet-worker", (CLIENT,), days=-1)
    failed = "CERTIFICATE_VERIFY_FAILED"  # all that older releases of gRPC say
    before = fleet.log(0).count(failed)
    assert re.search(r"certificate has expired, on 20\d\d-", refusal(with_(fleet, old)))
    until_logged(fleet, rf"certificate has expired|({failed}[\s\S]*?){{{before + 1}}}")


def test_of_two_tokens_neither_counts(fleet: LocalFleet, folder: Path) -> None:
    """Not even if both are right."""
    access = Access.of(with_(fleet, folder / "worker"))
    assert access.metadata
    with open_channel(fleet.endpoints[0], access) as channel:
        for other in (access.metadata, (("authorization", "Bearer wrong"),)):
            for metadata in (access.metadata + other, other + access.metadata):
                with pytest.raises(grpc.RpcError, match="it carries 2 tokens"):
                    channel.unary_unary("/psfleet.v1.Shard/Push", None, None)(
                        b"", metadata=metadata, timeout=_SOON
                    )


def test_a_stranger_costs_no_memory(fleet: LocalFleet, folder: Path) -> None:
    """A call of 200 MB without a token ends before its bytes are taken in."""
    access = Access.of(with_(fleet, folder / "worker"))

    def resident() -> int:
        with open_channel(fleet.endpoints[0], access) as channel:
            reply = channel.unary_unary(
                "/psfleet.v1.Shard/Status", StatusRequest.SerializeToString, None
            )(StatusRequest(), metadata=access.metadata, timeout=_SOON)
        assert reply
        status = Path(f"/proc/{fleet.processes[0].pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1])  # type: ignore[index]

    before = resident()
    with ServerChannel(fleet.endpoints[0], access) as channel:
        for method in ("Shard/Push", "Shard/WriteState"):
            with pytest.raises(grpc.RpcError, match="it carries no token"):
                channel.unary_unary(f"/psfleet.v1.{method}", None, None)(
                    bytes(200_000_000), timeout=60
                )
    assert resident() - before < 50_000  # kilobytes


def test_who_belongs_there_trains_on(fleet: LocalFleet) -> None:
    """After all those refusals the server works, and is as it was."""
    with contextlib.closing(fleet.connect(0, "async")) as runtime:
        TrainingWorkload(3).run(runtime)


def serving(credentials: Path | None, folder: Path) -> Server:
    """A server in this process."""
    return Server(
        Environment(
            "server", 0, ("127.0.0.1:0",), 1, tls=str(credentials or ""), insecure=not credentials
        )
    )


@pytest.mark.parametrize(
    ("name", "made", "text"),
    [
        ("late", {"days": -1}, "it has expired"),
        ("elsewhere", {"name": "another-host"}, "it is made out to another name"),
        ("worker", {"uses": (CLIENT,)}, "it is not a server's"),
    ],
)
def test_a_server_that_cannot_prove_itself_is_refused(
    forge: Forge, folder: Path, name: str, made: dict[str, object], text: str
) -> None:
    """An expired certificate, another name, or a worker's own certificate in place of a server's."""
    bad = forge.write(folder / f"bad {name}", **made)  # type: ignore[arg-type]
    with serving(bad, folder) as server:
        worker = Environment(
            "worker", 0, (server.endpoint,), 1, tls=str(forge_worker(forge, folder))
        )
        assert text in refusal(worker)


def forge_worker(forge: Forge, folder: Path) -> Path:
    """Good credentials of a worker."""
    place = folder / "good worker"
    return place if place.exists() else forge.write(place, "psfleet-worker", (CLIENT,))


def test_a_server_without_tls_is_refused(forge: Forge, folder: Path) -> None:
    """A worker with credentials tells nothing to a server that listens in the clear."""
    with serving(None, folder) as server:
        worker = Environment(
            "worker", 0, (server.endpoint,), 1, tls=str(forge_worker(forge, folder))
        )
        assert "the server speaks no TLS" in refusal(worker)


def test_tcp_in_the_clear_must_be_said_aloud() -> None:
    """Neither a server nor a worker uses TCP without credentials unless PSFLEET_INSECURE is 1."""
    with (
        pytest.raises(ConfigError, match=r"cannot listen on '127.0.0.1:0': TCP needs credentials"),
        Server(Environment("server", 0, ("127.0.0.1:0",), 1)),
    ):
        pass
    with pytest.raises(ConfigError, match="cannot connect to 'far:1': TCP needs credentials"):
        load_runtime("cluster", Environment("worker", 0, ("far:1",), 1), "async")


def test_a_server_that_hangs_up_at_once_is_only_away(forge: Forge, folder: Path) -> None:
    """Nobody there, or somebody who closes: that is an outage, not a refusal."""
    from psfleet.core.net.connections.tls_sockets import why_refused

    access = Access.of(Environment("worker", 0, ("x:1",), tls=str(forge_worker(forge, folder))))

    def close(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener was shut down
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        pool.submit(close, listener)
        for own in (access, Access(insecure=True)):
            assert closes_at_once(endpoint, tls=own is access)
            assert why_refused(endpoint, own) == ""
        listener.shutdown(socket.SHUT_RDWR)
    for own in (access, Access(insecure=True)):
        assert not closes_at_once(endpoint, tls=own is access)
        assert why_refused(endpoint, own) == ""
