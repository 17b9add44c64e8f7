"""The service that gives the metrics of a server and its standby, and on server 0 those of the workers."""

from typing import Any

import grpc

from psfleet.observability.exposition import encode
from psfleet.wire.body import parse
from psfleet.wire.v1.metrics_pb2 import CollectReply, CollectRequest, ProcessMetrics
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.deferred_reply import immediate
from psfleet_server.server_metrics import ServerMetrics


def metrics_handler(host: ShardHost, metrics: ServerMetrics) -> "grpc.GenericRpcHandler[Any, Any]":
    """Return the handler of requests for metrics, from outside the job."""

    def collect(request: bytes) -> bytes:
        parse(CollectRequest, request)
        rank = host.shard.index
        own = [ProcessMetrics(role="server", rank=rank, text=encode(metrics.collect()))]
        if standby := host.feed.look():
            own.append(ProcessMetrics(role="standby", rank=rank, text=standby))
        workers = [] if host.coordinator is None else sorted(host.worker_reports.look().items())
        others = [ProcessMetrics(role="worker", rank=rank, text=text) for rank, text in workers]
        reply: bytes = CollectReply(processes=[*own, *others]).SerializeToString()
        return reply

    return grpc.method_handlers_generic_handler(
        "psfleet.v1.Metrics", {"Collect": immediate(collect)}
    )
