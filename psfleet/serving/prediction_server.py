"""The prediction service of one process: gRPC, and HTTP with JSON."""

import importlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc

from psfleet.errors import ConfigError, not_installed
from psfleet.platform.threads import ServiceThread
from psfleet.serving.batching import Batcher
from psfleet.serving.grpc_service import GrpcPrediction, TokenGate
from psfleet.serving.http_app import HttpApp
from psfleet.serving.model import Model
from psfleet.serving.service import PredictionService, ServingMetrics
from psfleet.serving.versions import ModelVersion, ServedModel, VersionedModel
from psfleet.validation.annotations import NonNegative, NonNegativeInt, PositiveInt, checked
from psfleet.wire.connections.access import Access
from psfleet.wire.connections.credentials import Credentials
from psfleet.wire.v1 import serving_pb2
from psfleet.wire.v1.serving_pb2_grpc import add_PredictionServicer_to_server

_MOST = 64 << 20  # bytes of a message
_LOOK = 1.0  # seconds between two looks for new versions
_SERVICE = serving_pb2.DESCRIPTOR.services_by_name["Prediction"].full_name


def _serving_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise not_installed("a prediction service needs", name, "serve") from None


@checked
class PredictionServer:
    """Models that other processes ask for predictions and rows, from construction until `close`.

        with psfleet.serving.Server({"ctr": psfleet.serving.load("model")}) as server:
            print(server.http_address, server.grpc_address)

    Args:
        models: By name a Model, or a VersionedModel, of which new versions are taken up.
        host: Address that it listens on. Another one than loopback needs `tls`, or `insecure`.
        port: Port of gRPC; 0: any that is free.
        http_port: Port of HTTP; 0: any that is free.
        tls: Folder of a server's credentials, as `psfleet certs` makes it: both ends show a certificate, and
            calls carry its token; "": none.
        insecure: Listen without TLS and token on any address.
        max_batch: Most samples of a batch, and of a request.
        max_delay: Seconds for which a request may wait for others, so that batches get larger.
        max_queue: Most requests of a model that wait; more are refused, with the time when to try again.
        follow_versions: Take up versions that appear in the folder of a VersionedModel.

    Attributes:
        service: Service with the models.
        grpc_address, http_address: Addresses, as "127.0.0.1:8500".

    Raises:
        ConfigError: The address cannot be had, or would be open to strangers; the extra `serve` is missing.
        PsfleetError: A model cannot be loaded.
    """

    def __init__(
        self,
        models: dict[str, Model | VersionedModel],
        host: str = "127.0.0.1",
        port: NonNegativeInt = 0,
        http_port: NonNegativeInt = 0,
        *,
        tls: str = "",
        insecure: bool = False,
        max_batch: PositiveInt = 1024,
        max_delay: NonNegative = 0.0,
        max_queue: PositiveInt = 100,
        follow_versions: bool = True,
    ) -> None:
        if not models:
            raise ConfigError("there is no model to serve; name one")
        self._access = _access(host, tls, insecure)
        metrics = ServingMetrics()

        def batched(name: str, number: int, model: Model) -> ModelVersion:
            observe = partial(metrics.observe, name)
            batcher = Batcher(model, max_batch, max_delay, max_queue, observe)
            return ModelVersion(number, model, batcher)

        served = [_served(name, model, batched) for name, model in models.items()]
        self.service = PredictionService(served, metrics)
        self._http, self._socket = self._http_server(host, http_port)
        try:
            self._grpc, bound = self._grpc_server(host, port, max_queue)
        except BaseException:
            self._socket.close()
            raise
        self.grpc_address = f"{host}:{bound}"
        self.http_address = f"{host}:{self._socket.getsockname()[1]}"
        self._closing = threading.Event()
        self._threads: Sequence[ServiceThread] = [
            ServiceThread(self._http.run, "http", ([self._socket],)),
            *([ServiceThread(self._watch, "versions")] if follow_versions else []),
        ]
        self._grpc.start()
        for thread in self._threads:
            thread.start()

    def _grpc_server(self, host: str, port: int, max_queue: int) -> tuple[grpc.Server, int]:
        credentials = self._access.credentials
        self._pool = ThreadPoolExecutor(max_queue + 8, "prediction")
        server = grpc.server(
            self._pool,
            interceptors=[TokenGate(credentials)] if credentials else [],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MOST),
                ("grpc.max_send_message_length", -1),
            ],
        )
        handlers = GrpcPrediction(self.service)
        add_PredictionServicer_to_server(handlers, server)  # type: ignore[no-untyped-call]  # generated
        health = _serving_module("grpc_health.v1.health")
        status = _serving_module("grpc_health.v1.health_pb2")
        own = _serving_module("grpc_health.v1.health_pb2_grpc")
        self._health = health.HealthServicer()
        for name in ("", _SERVICE):
            self._health.set(name, status.HealthCheckResponse.SERVING)
        own.add_HealthServicer_to_server(self._health, server)
        reflection = _serving_module("grpc_reflection.v1alpha.reflection")
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            return server, self._access.listen(server, f"{host}:{port}")
        except RuntimeError:
            raise ConfigError(f"gRPC cannot listen on {host}:{port}; choose another port") from None

    def _http_server(self, host: str, port: int) -> tuple[Any, socket.socket]:
        uvicorn = _serving_module("uvicorn")
        credentials = self._access.credentials
        tls = (
            {
                "ssl_certfile": str(credentials.folder / "cert.pem"),
                "ssl_keyfile": str(credentials.folder / "key.pem"),
                "ssl_ca_certs": str(credentials.folder / "ca.pem"),
                "ssl_cert_reqs": int(ssl.CERT_REQUIRED),
            }
            if credentials
            else {}
        )
        app = HttpApp(self.service, credentials)
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            **tls,
        )
        try:
            return uvicorn.Server(config), _listening(host, port)
        except OSError as error:
            raise ConfigError(
                f"HTTP cannot listen on {host}:{port}: {error.strerror}; choose another port"
            ) from None

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK):
            for model in self.service.models.values():
                model.refresh()

    def close(self) -> None:
        """End: requests under way are answered, then the ports are closed. Safe to call twice."""
        self._closing.set()
        self._http.should_exit = True
        self._health.enter_graceful_shutdown()
        self._grpc.stop(5).wait()
        self._pool.shutdown()
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _listening(host: str, port: int) -> socket.socket:
    """A socket for HTTP. asyncio sends at once on those that say they are TCP, and others wait for 40 ms."""
    [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    listening = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except BaseException:
        listening.close()
        raise
    return listening


def _served(name: str, model: Model | VersionedModel, batched: Any) -> ServedModel:
    if isinstance(model, Model):
        return ServedModel(name, lambda: [1], lambda number: batched(name, number, model))
    return ServedModel(
        name, model.numbers, lambda number: batched(name, number, model.load(number))
    )


def _access(host: str, tls: str, insecure: bool) -> Access:
    if tls:
        return Access(Credentials.read(tls))
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not (is_loopback or insecure):
        raise ConfigError(
            f"cannot listen on {host!r} without credentials; name their folder with tls (`psfleet certs` "
            "makes one), or say insecure where every host on the network is trusted"
        )
    return Access(insecure=True)
