"""Thread pools of servers that several tests share, and servers of grpcio."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc


def started_pool(threads: int) -> ThreadPoolExecutor:
    """A pool whose threads have all started, so that no test is blamed for one of them."""
    pool, all_here = ThreadPoolExecutor(threads), threading.Barrier(threads)
    list(pool.map(lambda _: all_here.wait(60), range(threads)))
    return pool


@contextlib.contextmanager
def grpcio_server(
    service: str,
    methods: dict[str, Any],
    place: str = "127.0.0.1:0",
    threads: int = 2,
    options: Any = (),
) -> Iterator[str]:
    """The endpoint of a server of grpcio with these methods of a service."""
    with started_pool(threads) as pool:
        server = grpc.server(pool, options=options)
        handler = grpc.method_handlers_generic_handler(service, methods)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port(place)
        server.start()
        try:
            yield place.replace(":0", f":{port}")
        finally:
            server.stop(None).wait()
