"""The one port of a launcher: /metrics, /sd, /events, the page and the report.

On loopback whoever may use this machine may look. Elsewhere a look needs the token, over TLS.
"""

import contextlib
import hmac
import json
import secrets
import ssl
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Thread, current_thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from psfleet.errors import ConfigError
from psfleet.observability.exposition import encode
from psfleet_launch.job.job_plan import Job
from psfleet_launch.observability.fleet_reader import FleetReader
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.observability.job_report import job_report
from psfleet_launch.observability.recorder import Recorder, panel_texts

__all__ = ["WatchPort"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PATIENCE = 2.0  # seconds for a browser to take what is left
_HTML = "text/html; charset=utf-8"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class WatchPort:
    """Serves what can be seen of a job, from `open` to `close`.

    Args:
        address: `PORT` of loopback, or `HOST:PORT`; port 0 takes a free one.
        job: Which job.
        reader: Of its metrics.
        recorder: Of its recent figures.

    Attributes:
        url: Of the page, with the token if one is needed.
    """

    address: str
    job: Job
    reader: FleetReader
    recorder: Recorder
    url: str = ""

    def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: The address cannot be had.
        """
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]") or _LOOPBACK[0]
        is_open = host not in _LOOPBACK
        self.token = secrets.token_urlsafe(24) if is_open else ""
        try:
            self._server = _HttpServer((host, int(port)), self)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"--watch is {self.address!r}, which cannot be listened on ({error}); name a free port, "
                "or 0 for any"
            ) from None
        is_plain = not is_open or self.job.request.insecure
        if not is_plain:
            context = self._certificate()
            # The handshake comes with the first byte that the thread of a connection reads.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.host = f"{host}:{self._server.server_address[1]}"
        secret = f"?token={self.token}" if self.token else ""
        self.url = f"{'http' if is_plain else 'https'}://{self.host}/{secret}"
        self._thread = Thread(target=self._server.serve_forever, name="psfleet-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the port, and of whoever looks; the recorder has been stopped."""
        self._server.shutdown()
        self._thread.join()
        for stream in [*self._server.streams]:
            stream.join(_PATIENCE)  # so that its reader hears of the end
        self._server.server_close()

    def _certificate(self) -> ssl.SSLContext:
        """A certificate of its own; who looks can check it with `watch-ca.pem` beside the logs."""
        from psfleet.wire.certificates import make_credentials

        own = make_credentials(self.job.folder / "watch")["server"]
        (self.job.logs / "watch-ca.pem").write_bytes((own / "ca.pem").read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(own / "cert.pem", own / "key.pem")
        return context


class _HttpServer(ThreadingHTTPServer):
    """Each connection has a thread. Browsers open some that say nothing; the end waits for none of those.

    Attributes:
        streams: Threads that follow the job; they end with the recorder.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], port: WatchPort) -> None:
        self.port = port
        self.streams: set[Thread] = set()
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody has hung up."""


class _Handler(BaseHTTPRequestHandler):
    """One look."""

    server: _HttpServer
    timeout = 10  # seconds that whoever looks may take for a request

    def do_GET(self) -> None:  # the name that http.server calls
        """Answer."""
        asked = urlsplit(self.path)
        if not self._may_look(parse_qs(asked.query).get("token", [""])[0]):
            self._answer(403, "text/plain", b"403: the token of the job is missing or wrong\n")
        elif asked.path == "/metrics":
            self._answer(200, _TEXT, encode(self.server.port.reader.read()))
        elif asked.path == "/sd":
            self._answer(200, "application/json", json.dumps(self._targets()).encode())
        elif asked.path == "/events":
            self._stream()
        elif asked.path == "/":
            self._answer(200, _HTML, files(__package__).joinpath("dashboard.html").read_bytes())
        elif asked.path == "/report":
            page = job_report(read_history(self.server.port.job.logs), is_running=True)
            self._answer(200, _HTML, page.encode())
        else:
            there = b"404: there are /, /metrics, /sd, /events and /report\n"
            self._answer(404, "text/plain", there)

    def _may_look(self, token: str) -> bool:
        wanted = self.server.port.token
        if not wanted:
            # A page of somewhere else could otherwise read this one through a name of its own.
            host = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
            return host in _LOOPBACK
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return any(hmac.compare_digest(one.encode(), wanted.encode()) for one in (token, bearer))

    def _targets(self) -> list[dict[str, Any]]:
        """As Prometheus' http_sd_config wants it."""
        return [{"targets": [self.server.port.host], "labels": {"job": self.server.port.job.name}}]

    def _stream(self) -> None:
        """Server-sent events: what the panels are, then frames as they come."""
        self._head(200, "text/event-stream")
        self.server.streams.add(current_thread())
        heading = {"job": self.server.port.job.name, "panels": panel_texts()}
        with contextlib.suppress(OSError):  # it has hung up
            self._event("panels", heading)
            for frames in self.server.port.recorder.follow():
                self._event("frames", frames)
            self._event("end", {})
        self.server.streams.discard(current_thread())

    def _event(self, name: str, content: Any) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(content)}\n\n".encode())

    def _answer(self, code: int, kind: str, content: bytes) -> None:
        self._head(code, kind, len(content))
        self.wfile.write(content)

    def _head(self, code: int, kind: str, size: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if size is not None:
            self.send_header("Content-Length", str(size))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""
