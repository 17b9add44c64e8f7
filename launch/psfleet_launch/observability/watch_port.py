"""HTTP server of `--watch`: the page of a job, its report, a stream of updates, and metrics for Prometheus.

On a loopback address every user of this machine may read them. On other addresses requests need TLS and the
token of the job. Each connection has a daemon thread. Connections without requests cannot block other
clients.
"""

import contextlib
import hmac
import json
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread, current_thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typing_extensions import override

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.observability.exposition import encode
from psfleet.core.net.http2.header_blocks import repeated
from psfleet_launch.job.job_plan import Job
from psfleet_launch.observability.fleet_reader import FleetReader, panel_texts
from psfleet_launch.observability.job_history import JobHistory, read_history
from psfleet_launch.observability.job_view import view_of, zone
from psfleet_launch.observability.page_and_report import dashboard_page, job_report, overview

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_BROWSER_TIMEOUT = 2.0  # seconds for a browser to read the rest of a stream
_MOST = 128  # maximum of connections without an admitted request
_FAULTS = 8  # the newest, which the page shows
_HTML, _PLAIN = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class WatchPort:
    """Serves the page, the report and the metrics of a job, from `open` to `close`.

    Args:
        address: `PORT` for the loopback address, or `HOST:PORT`. Port 0 means any free port.

    Attributes:
        url: URL of the page, including the token if one is needed.
    """

    address: str
    job: Job
    reader: FleetReader
    history: JobHistory
    url: str = ""

    def open(self) -> None:
        """Begin to serve.

        Raises:
            ConfigError: The port is in use, or the address does not belong to this machine.
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
            # The TLS handshake is done in the thread of each connection, at its first read.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.host = f"{host}:{self._server.server_address[1]}"
        secret = f"?token={self.token}" if self.token else ""
        self.url = f"{'http' if is_plain else 'https'}://{self.host}/{secret}"
        self._thread = Thread(target=self._server.serve_forever, name="psfleet-port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the streams of updates, and close the port and its connections."""
        self.history.end_streams()
        self._server.shutdown()
        self._thread.join()
        for stream in [*self._server.streams]:
            stream.join(_BROWSER_TIMEOUT)  # so that the browser gets the end of the stream
        self._server.server_close()

    def _certificate(self) -> ssl.SSLContext:
        """Return the TLS context. Clients can verify its certificate with `watch-ca.pem` in the folder of
        the logs."""
        from psfleet.core.net.connections.certificates import make_credentials

        credentials = make_credentials(self.job.folder / "watch")["server"]
        (self.job.logs / "watch-ca.pem").write_bytes((credentials / "ca.pem").read_bytes())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(credentials / "cert.pem", credentials / "key.pem")
        return context


class _HttpServer(ThreadingHTTPServer):
    """HTTP server with a thread for each connection.

    Browsers also open connections without using them; `close` does not wait for these. If more than 128
    connections have not made an admitted request (one with the token, if needed), the oldest of them is
    closed. So strangers cannot use up the launcher's threads or block other clients.

    Attributes:
        streams: Threads that send streams of updates. They end when the port is closed.
    """

    daemon_threads = True
    request_queue_size = _MOST  # with the default of 5 a few strangers could block other clients

    def __init__(self, address: tuple[str, int], port: WatchPort) -> None:
        self.port = port
        self.streams: set[Thread] = set()
        self._strangers: dict[Any, None] = {}  # their sockets, the oldest first
        self._lock = Lock()
        super().__init__(address, _Handler)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > _MOST:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(
                    OSError
                ):  # SSLSocket.shutdown would disturb a thread that reads
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def admit(self, request: Any) -> None:
        """Remove a connection from those without an admitted request, because it has made one or is
        closed."""
        with self._lock:
            self._strangers.pop(request, None)

    @override
    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that have closed their connection."""


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of a connection."""

    server: _HttpServer
    timeout = 10  # seconds for a client to send its request

    def do_GET(self) -> None:  # the name that http.server calls
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self._reply(400, _PLAIN, f"400: the path {self.path!r:.80} is none: {error}\n".encode())
            return
        if twice := repeated(name.lower() for name in self.headers):
            self._reply(400, _PLAIN, f"400: the header {twice} comes twice\n".encode())
        elif not self._may_look(parse_qs(url.query).get("token", [""])[0]):
            self._reply(403, _PLAIN, b"403: the token of the job is missing or wrong\n")
        else:
            self.server.admit(self.request)
            self._reply_to(url.path)

    def _reply_to(self, path: str) -> None:
        if path == "/metrics":
            self._reply(200, _TEXT, encode(self.server.port.reader.read()))
        elif path == "/sd":
            port = self.server.port  # the format of Prometheus' http_sd_config
            targets = [{"targets": [port.host], "labels": {"job": port.job.name}}]
            self._reply(200, "application/json", json.dumps(targets).encode())
        elif path == "/events":
            self._stream()
        elif path == "/":
            self._reply(200, _HTML, dashboard_page().encode())
        elif path == "/report":
            page = job_report(read_history(self.server.port.job.logs), is_running=True)
            self._reply(200, _HTML, page.encode())
        else:
            paths = b"404: there are /, /metrics, /sd, /events and /report\n"
            self._reply(404, _PLAIN, paths)

    def _may_look(self, token: str) -> bool:
        expected = self.server.port.token
        if not expected:
            # Check the Host header. Otherwise another web site could read the page through a host name that
            # it lets resolve to the loopback address.
            with contextlib.suppress(ValueError):  # the header is malformed
                return urlsplit("//" + self.headers.get("Host", "")).hostname in _LOOPBACK
            return False
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return any(
            hmac.compare_digest(credential.encode(), expected.encode())
            for credential in (token, bearer)
        )

    def _stream(self) -> None:
        """Send a stream of server-sent events: first the panels, then new overviews and frames."""
        self._head(200, "text/event-stream")
        self.server.streams.add(current_thread())
        heading = {
            "job": self.server.port.job.name,
            "zone": zone(time.time()),
            "panels": panel_texts(),
        }
        with contextlib.suppress(OSError):  # the browser has gone
            self._event("panels", heading)
            for frames in self.server.port.history.follow():
                self._overview(is_running=True)
                self._event("frames", frames)
            self._overview(is_running=False)
            self._event("end", {})
        self.server.streams.discard(current_thread())

    def _overview(self, is_running: bool) -> None:
        job = self.server.port.history.so_far()
        self._event("overview", overview(view_of(job, is_running), _FAULTS))

    def _event(self, name: str, content: Any) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(content)}\n\n".encode())

    def _reply(self, code: int, kind: str, content: bytes) -> None:
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
        """Discard the log message, so that requests are not printed in the launcher's terminal."""
