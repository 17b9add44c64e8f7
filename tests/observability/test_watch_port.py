"""The launcher's port by itself: who may look over a network, and how long it lasts."""

import contextlib
import json
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.net.connections.credentials import SERVER_NAME
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.observability.fleet_reader import FleetReader
from psfleet_launch.observability.job_history import JobHistory, heading
from psfleet_launch.observability.watch_port import WatchPort, _Handler
from psfleet_launch.supervision.job_events import ProcessExited, ServerReady, StartProcesses
from psfleet_launch.supervision.standbys import PromoteStandby
from tests.security.attacks import address_of, hold
from tests.waiting import until

SERVER = Member("server", 1)
STANDBY, SECOND = Member("server", 1, copy=1), Member("server", 1, copy=2)


def made(address: str, folder: Path, **request: bool) -> WatchPort:
    """A port of a job whose server came back once, then lost its place to its standby."""
    asked = JobRequest(script=__file__, port=0, **request)  # type: ignore[arg-type]
    job = Job(asked, "alone", "token", folder, folder)
    history = JobHistory(folder, heading(job, "local", "0.1", {}))
    history.take(StartProcesses((SERVER, STANDBY)), 0.0)
    history.take(ProcessExited(SERVER, -9), 3.0)
    history.take(StartProcesses((SERVER,)), 4.0)
    history.take(ProcessExited(SERVER, -9), 10.0)
    history.take(PromoteStandby(STANDBY, SERVER, 2), 10.5)
    history.take(ServerReady(STANDBY, "unix:/x"), 12.0)
    history.take(StartProcesses((SECOND,)), 13.0)
    history.close()
    reader = FleetReader("alone", [], Environment(), history.timeline)
    return WatchPort(address, job, reader, history)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[WatchPort]:
    """Listens where others than this machine's users could look, for all that it knows."""
    port = made("127.0.0.2:0", tmp_path)
    port.open()
    yield port
    port.close()


def fetch(port: WatchPort, path: str, folder: Path, **headers: str) -> bytes:
    """What it answers to somebody who checks its certificate."""
    context = ssl.create_default_context(cafile=str(folder / "watch-ca.pem"))
    context.check_hostname = False
    request = urllib.request.Request(f"https://{port.host}/{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60, context=context) as reply:
        content: bytes = reply.read()
        return content


def test_beyond_loopback_it_takes_tls_and_the_token(port: WatchPort, tmp_path: Path) -> None:
    """The token goes in the address or a header; without it, or without TLS, there is nothing."""
    assert port.url.startswith(f"https://{port.host}/?token=")
    token = port.url.partition("=")[2]
    assert len(token) >= 32
    assert b"psfleet_process_up" in fetch(port, f"metrics?token={token}", tmp_path)
    assert b"<!doctype html>" in fetch(port, "", tmp_path, Authorization=f"Bearer {token}")
    [document] = json.loads(fetch(port, f"sd?token={token}", tmp_path))
    assert document == {"targets": [port.host], "labels": {"job": "alone"}}
    for path in ("", "metrics", "events", "sd", "metrics?token=x", "metrics?token=\u00e9"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(port, urllib.parse.quote(path, safe="?="), tmp_path)
        assert refused.value.code == 403
        refused.value.close()
    with pytest.raises(OSError, match=r"closed|reset|Bad"):
        urllib.request.urlopen(f"http://{port.host}/metrics?token={token}", timeout=60)
    assert (tmp_path / "watch" / "server" / "key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(port.url, timeout=60)


def test_the_certificate_has_the_name_that_is_documented(port: WatchPort, tmp_path: Path) -> None:
    """Prometheus can check it with `ca_file` and `server_name`."""
    host, _, number = port.host.rpartition(":")
    context = ssl.create_default_context(cafile=str(tmp_path / "watch-ca.pem"))
    with (
        socket.create_connection((host, int(number)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=SERVER_NAME) as tls,
    ):
        assert tls.version() in ("TLSv1.2", "TLSv1.3")
    assert SERVER_NAME in (Path(__file__).parents[2] / "docs/watch.md").read_text()


def test_deaths_and_takeovers_are_counted(port: WatchPort, tmp_path: Path) -> None:
    """From the death of the server to the answer of its standby, with restarts by role and rank."""
    text = fetch(port, f"metrics{port.url[port.url.index('?') :]}", tmp_path).decode()
    said = dict(line.rpartition(" ")[::2] for line in text.splitlines())
    server, standby = (f'{{job="alone",rank="1",role="{role}"}}' for role in ("server", "standby"))
    assert said[f"psfleet_deaths_total{server}"] == "2.0"
    assert said[f"psfleet_deaths_total{standby}"] == "0.0"
    assert said[f"psfleet_restarts_total{server}"] == "1.0"
    assert said[f"psfleet_process_up{server}"] == said[f"psfleet_process_up{standby}"] == "1.0"
    assert said[f"psfleet_takeover_seconds_count{server}"] == "1.0"
    assert said[f"psfleet_takeover_seconds_sum{server}"] == "2.0"


def test_a_job_that_is_insecure_has_a_token_but_no_tls(tmp_path: Path) -> None:
    """--insecure says that the network is trusted; the token stays."""
    port = made("127.0.0.2:0", tmp_path, insecure=True)
    port.open()
    try:
        with urllib.request.urlopen(port.url, timeout=60) as page:
            assert page.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{port.host}/", timeout=60)
        refused.value.close()
    finally:
        port.close()


def test_whoever_follows_is_told_of_the_end(tmp_path: Path) -> None:
    """`close` ends the stream of events with `end`, and waits for no one."""
    port = made("0", tmp_path)
    port.open()
    with urllib.request.urlopen(f"{port.url}events", timeout=60) as stream:
        assert stream.readline() == b"event: panels\n"
        port.close()
        assert stream.read().endswith(b"event: end\ndata: {}\n\n")


@pytest.mark.parametrize("word", [b"", b"G", b"GET / HTTP/1.1\r\n"])
def test_strangers_keep_no_browser_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: bytes
) -> None:
    """Of those that have not made a request the oldest ends, and its thread with it, long before its time;
    each of 20 looks is answered."""
    monkeypatch.setattr(_Handler, "timeout", 600)
    port = made("127.0.0.2:0", tmp_path, insecure=True)
    port.open()
    try:
        with contextlib.ExitStack() as stack:
            hold(stack, address_of(port.host), word, 200)
            for _ in range(20):
                with urllib.request.urlopen(port.url, timeout=60) as page:
                    assert page.status == 200
            until(lambda: threading.active_count() < 150)
    finally:
        port.close()


@pytest.mark.parametrize(
    ("request_line", "header"), [("GET http://[ HTTP/1.1", ""), ("GET / HTTP/1.1", "host: b\r\n")]
)
def test_requests_that_are_none(tmp_path: Path, request_line: str, header: str) -> None:
    """A path that is no URL and a second Host header are a 400, whoever asks."""
    port = made("0", tmp_path)
    port.open()
    try:
        with socket.create_connection(address_of(port.host), 60) as end:
            end.sendall(f"{request_line}\r\nhost: localhost\r\n{header}\r\n".encode())
            assert end.recv(100).startswith(b"HTTP/1.0 400 ")
    finally:
        port.close()


@pytest.mark.parametrize(
    "address", ["-1", "65536", "http", "host:", "no.such.host.invalid:0", "1.2.3.4:0"]
)
def test_an_address_that_is_none_is_quoted(address: str, tmp_path: Path) -> None:
    """One sentence, and nothing is left."""
    port = made(address, tmp_path)
    with pytest.raises(ConfigError, match=rf"--watch is '{address}', which cannot be listened on"):
        port.open()
