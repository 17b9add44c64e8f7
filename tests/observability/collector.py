"""An OpenTelemetry collector in this process: OTLP over HTTP, as protobuf."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What has arrived.

    Attributes:
        url: Where it listens.
        spans: Each with the name of the process that has made it, as "psfleet-server 0".
    """

    url: str
    spans: list[tuple[str, Span]] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        """Take the body of a request."""
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            said = {one.key: one.value.string_value for one in group.resource.attributes}
            rank = said["service.instance.id"].rpartition(".")[2]
            for scope in group.scope_spans:
                self.spans += [(f"{said['service.name']} {rank}", span) for span in scope.spans]

    def under(self, span: Span) -> list[tuple[str, Span]]:
        """The spans of the same trace whose parent is this one."""
        same = [one for one in self.spans if one[1].trace_id == span.trace_id]
        return [one for one in same if one[1].parent_span_id == span.span_id]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens within the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces", self.path
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            reply = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
