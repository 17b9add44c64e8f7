"""The prediction service: real sockets, gRPC and HTTP."""

import contextlib
import http.client
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet import serving
from psfleet.core.base.errors import (
    AccessDenied,
    ConfigError,
    LimitExceeded,
    UnknownTable,
    UsageError,
)
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.serving.batcher import Batcher, QueueFull
from psfleet.serving.model import ModelVersion, ServedModel
from tests.security.attacks import address_of, hold
from tests.serving import models
from tests.waiting import until

pytest.importorskip("httptools", reason="httptools is not installed")
pytest.importorskip("grpc_health", reason="grpcio-health-checking is not installed")
pytest.importorskip("grpc_reflection", reason="grpcio-reflection is not installed")


@pytest.fixture
def server(trained: tuple[Path, Any]) -> Iterator[serving.Server]:
    """A service of the model."""
    model = serving.load(trained[0] / "model", models.FEATURES)
    with serving.Server({"clicks": model}, max_batch=64) as server:
        yield server


def asked(server: serving.Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and document of an HTTP request."""
    with contextlib.closing(
        http.client.HTTPConnection(server.http_address, timeout=60)
    ) as connection:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, content)
        reply = connection.getresponse()
        text = reply.read()
        is_json = reply.headers["content-type"] == "application/json"
        return reply.status, json.loads(text) if is_json else text


def test_http(server: serving.Server, trained: tuple[Path, Any]) -> None:
    """Inputs by name and samples one by one have the model's predictions; pages say how it is."""
    expected = trained[1][:, 0]
    status, actual = asked(server, "POST", "/v1/models/clicks:predict", {"inputs": models.BATCH})
    assert status == 200
    assert (np.array(actual["predictions"], np.float32) == expected).all()
    assert (actual["version"], actual["cut"]) == (1, 0)
    names = list(models.BATCH)
    samples = [
        dict(zip(names, row, strict=True)) for row in zip(*models.BATCH.values(), strict=True)
    ]
    _, actual = asked(server, "POST", "/v1/models/clicks:predict", {"instances": samples})
    assert (np.array(actual["predictions"], np.float32) == expected).all()
    assert asked(server, "GET", "/healthz") == asked(server, "GET", "/readyz") == (200, b"ok\n")
    _, actual = asked(server, "GET", "/v1/models/clicks")
    assert actual["versions"][0]["percentage"] == 100
    _, text = asked(server, "GET", "/metrics")
    assert b'psfleet_serving_requests_total{code="ok",method="predict_json",model="clicks"}' in text


PREDICT = "/v1/models/clicks:predict"
BAD = [
    (400, "no JSON", "POST", PREDICT, b"{"),
    (400, "must be an object", "POST", PREDICT, [1]),
    (400, "unknown field 'x'", "POST", PREDICT, {"inputs": {}, "x": 1}),
    (400, "'colour'", "POST", PREDICT, {"inputs": {"colour": [1]}}),
    (400, "items", "POST", PREDICT, {"inputs": {"items": [1.5]}}),
    (400, "items", "POST", PREDICT, {"inputs": {"items": [[{}]]}}),
    (400, "up to 64", "POST", PREDICT, {"inputs": {"age": [0.0] * 65}}),
    (400, "version 7", "POST", "/v1/models/clicks/versions/7:predict", {"inputs": {"age": [0]}}),
    (404, "no model 'none'", "POST", "/v1/models/none:predict", {"inputs": {"age": [0]}}),
    (404, "nothing at", "GET", "/elsewhere", None),
    (405, "takes POST", "GET", PREDICT, None),
]
"""Status, words of the error, method, path and body of requests that cannot be meant."""


def test_bad_requests(server: serving.Server) -> None:
    """A request that cannot be meant has a status and a sentence; the service goes on."""
    for status, words, method, path, body in BAD:
        actual, document = asked(server, method, path, body)
        assert (actual, words in document["error"]) == (status, True), document
    assert asked(server, "GET", "/readyz")[0] == 200


def test_grpc(server: serving.Server, trained: tuple[Path, Any]) -> None:
    """Predictions and rows over gRPC are the model's; what cannot be meant has its class of error."""
    model = serving.load(trained[0] / "model", models.FEATURES)
    with serving.ServingClient(server.grpc_address) as client:
        assert (client.predict(models.BATCH) == trained[1]).all()
        flags = {**models.BATCH, "age": np.array([True, False, True, False])}
        assert (client.predict(flags) == model(flags)).all()
        ids = np.array([1, 2, 77, -5])
        assert (client.look_up("items", ids) == model.look_up("items", ids)).all()
        with pytest.raises(UnknownTable, match="no table 'colours'"):
            client.look_up("colours", ids)
        with pytest.raises(UsageError, match="'colour'"):
            client.predict({"colour": [1]})
        [line] = client.lines()
        assert line.startswith("clicks 1: 100 % of requests, cut 0")


def test_health_and_reflection(server: serving.Server) -> None:
    """Standard clients see that it is healthy, and what it offers."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
        ProtoReflectionDescriptorDatabase,
    )

    with grpc.insecure_channel(server.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert "psfleet.v1.Prediction" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_health_is_watched(server: serving.Server) -> None:
    """Who watches hears that it serves, and that it stops, at once; so does who asks for reflection twice."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(server.grpc_address) as channel:
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as error:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        answered = threading.Semaphore(0)

        def requests() -> Iterator[Any]:
            for name in ("psfleet.v1.Prediction", "nothing"):
                yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
                assert answered.acquire(timeout=60)

        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        kinds = []
        for reply in stub.ServerReflectionInfo(requests()):
            kinds.append(reply.WhichOneof("message_response"))
            answered.release()
        assert kinds == ["file_descriptor_response", "error_response"]
        server.close()
        assert next(watched).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_calls_of_one_connection(server: serving.Server, trained: tuple[Path, Any]) -> None:
    """Calls that another client has open at once on one connection are all answered, a bad one as such."""
    import grpc

    from psfleet.core.net.v1 import serving_pb2 as messages
    from psfleet.serving.serving_client import _message

    request = messages.PredictRequest(inputs=[_message(*each) for each in models.BATCH.items()])
    channel: Any
    with grpc.insecure_channel(server.grpc_address) as channel:
        ask = channel.unary_unary("/psfleet.v1.Prediction/Predict")
        calls = [ask.future(request.SerializeToString(), timeout=60) for _ in range(50)]
        with pytest.raises(grpc.RpcError, match=r"is no psfleet\.v1\.PredictRequest"):
            ask(b"\xff", timeout=60)
        for call in calls:
            [output] = messages.PredictReply.FromString(call.result()).outputs
            np.testing.assert_array_equal(np.array(output.values, np.float32), trained[1][:, 0])


def said(server: serving.Server, *parts: bytes) -> bytes:
    """All that the service answers to these bytes, until it ends the connection."""
    host, _, port = server.http_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        text = b""
        while more := connection.recv(1 << 16):
            text += more
    return text


def test_raw_http(server: serving.Server) -> None:
    """Requests in one piece or in several, with a body in chunks, and those that are none or too long."""
    get = b"GET /readyz HTTP/1.1\r\nhost: x\r\n"
    both = said(server, get + b"\r\n" + get + b"connection: close\r\n\r\n")
    assert both.count(b"HTTP/1.1 200 OK") == both.count(b"\r\n\r\nok\n") == 2
    body = json.dumps({"inputs": models.BATCH}).encode()
    head = f"POST {PREDICT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
    chunked = said(server, head, b"transfer-encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n")
    assert b'"predictions":' in chunked
    expecting = b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert said(server, head + expecting, body).startswith(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200"
    )
    assert said(server, b"no request\r\n\r\n").startswith(b"HTTP/1.1 400 Bad Request")
    assert said(server, get + b"x: " + b"y" * 40_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert said(server, head + b"content-length: 99999999\r\n\r\n", b" " * (65 << 20)).startswith(
        b"HTTP/1.1 413"
    )
    only_head = said(server, get.replace(b"GET", b"HEAD") + b"connection: close\r\n\r\n")
    assert only_head.startswith(b"HTTP/1.1 405")
    assert only_head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "name", ["host", "Host", "content-length", "content-type", "authorization"]
)
def test_a_header_that_comes_twice(server: serving.Server, name: str) -> None:
    """A proxy could take the other one, so the request is refused."""
    request = f"GET /healthz HTTP/1.1\r\n{name}: 0\r\n{name.title()}: 0\r\n\r\n"
    assert said(server, request.encode()).startswith(b"HTTP/1.1 400 Bad Request")


@pytest.mark.parametrize("word", [b"", b"P"], ids=["silent", "one byte"])
def test_newcomers_come_in_beside_strangers(server: serving.Server, word: bytes) -> None:
    """More connections than an address may have without a request hold both ports: each newcomer is
    answered."""
    with contextlib.ExitStack() as stack:
        for address in (server.http_address, server.grpc_address):
            hold(stack, address_of(address), word, 140)
        for _ in range(40):
            assert asked(server, "GET", "/healthz") == (200, b"ok\n")
            with serving.ServingClient(server.grpc_address) as client:
                assert client.models()


def test_batches() -> None:
    """Requests that wait go together, one that fails alone fails alone, and a full queue refuses more."""
    sizes: list[int] = []
    entered, proceed = threading.Event(), threading.Event()

    def predict(batch: dict[str, Any]) -> Any:
        sizes.append(len(batch["x"]))
        entered.set()
        assert proceed.wait(60)
        if (batch["x"] < 0).any():
            raise UsageError("an x is negative")
        return batch["x"] * 2

    batcher = Batcher(predict, max_batch=8, max_queue=5)

    def ask(*values: int) -> list[int]:
        predictions: list[int] = batcher.predict({"x": np.array(values)}, len(values))[""].tolist()
        return predictions

    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(ask, 1)
        assert entered.wait(60)
        others = []
        for i in range(2, 6):
            others.append(pool.submit(ask, i, i))
            until(lambda: len(batcher._waiting) == len(others))
        bad = pool.submit(ask, -1)
        until(lambda: len(batcher._waiting) == 5)
        with pytest.raises(QueueFull, match="5 requests wait") as full:
            ask(9)
        assert full.value.seconds > 0
        proceed.set()
        assert first.result() == [2]
        assert [other.result() for other in others] == [[2 * i, 2 * i] for i in range(2, 6)]
        with pytest.raises(UsageError, match="negative"):
            bad.result()
    assert sizes[0] == 1
    assert max(sizes) == 8


def test_full_queue(trained: tuple[Path, Any]) -> None:
    """A client of a full queue is told to try again, and when."""
    model = serving.load(trained[0] / "model", models.FEATURES)
    with (
        serving.Server({"clicks": model}, max_queue=1, max_delay=30, max_batch=8) as server,
        serving.ServingClient(server.grpc_address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(client.predict, models.BATCH)
        batcher = server.service.model("").active.batcher
        until(lambda: batcher._waiting)
        with pytest.raises(LimitExceeded, match="1 requests wait"):
            client.predict(models.BATCH)
        connection = http.client.HTTPConnection(server.http_address, timeout=60)
        body = json.dumps({"inputs": models.BATCH})
        connection.request("POST", "/v1/models/clicks:predict", body)
        reply = connection.getresponse()
        assert (reply.status, int(reply.headers["retry-after"])) == (503, 1)
        connection.close()
        batcher.max_delay = 0.0
        with batcher._changed:
            batcher._changed.notify_all()
        assert (waiting.result() == trained[1]).all()


def test_versions(trained: tuple[Path, Any], tmp_path: Path) -> None:
    """A version swaps, comes back and gets its percentage of requests, none of which fails."""
    root = tmp_path / "ctr"
    shutil.copytree(trained[0] / "model", root / "1")
    source = serving.VersionedModel(str(root), models.FEATURES)
    with serving.Server({"ctr": source}, follow_versions=False) as server:
        client, model = serving.ServingClient(server.grpc_address), server.service.model("ctr")
        failed, ended = [], threading.Event()

        def load() -> None:
            while not ended.is_set():
                try:
                    client.predict(models.BATCH)
                except Exception as error:
                    failed.append(error)

        with client, ThreadPoolExecutor(2) as pool:
            busy = [pool.submit(load) for _ in range(2)]
            models.train(root, steps=9)
            (root / "model").rename(root / "2")
            model.refresh()
            assert model.active.number == 2
            second = client.predict(models.BATCH)
            assert (second != trained[1]).any()
            client.route("ctr", 1, 100)
            assert (client.predict(models.BATCH) == trained[1]).all()
            model.refresh()  # it is pinned
            assert model.active.number == 1
            with pytest.raises(UsageError, match="has no version 3"):
                client.route("ctr", 3, 100)
            client.route("ctr", 2, 10)
            ended.set()
            for each in busy:
                each.result()
            shares = [model.choose().number for _ in range(100)]
            assert shares.count(2) == 10
            assert [line.split(":")[0] for line in client.lines()] == ["ctr 1", "ctr 2"]
        assert failed == []


def test_a_version_that_is_pinned_meanwhile() -> None:
    """A version that a client pins while newer ones are looked for stays the active one."""
    model: Any = None

    def numbers() -> list[int]:
        if model is None:
            return [1]
        if not model.pinned:
            model.route(1, 100)  # between the look of `refresh` and what it does
        return [1, 2]

    def load(number: int) -> Any:
        return ModelVersion(number, None, None)  # type: ignore[arg-type]

    model = ServedModel("ctr", numbers, load)
    model.refresh()
    assert model.active.number == 1


def test_tls(trained: tuple[Path, Any], tmp_path: Path) -> None:
    """Between hosts there are TLS and a token; without credentials only loopback is open."""
    import ssl

    model = serving.load(trained[0] / "model", models.FEATURES)
    with pytest.raises(ConfigError, match=r"cannot listen on '0\.0\.0\.0' without credentials"):
        serving.Server({"clicks": model}, "0.0.0.0")
    folders = make_credentials(tmp_path / "own")
    with serving.Server({"clicks": model}, tls=str(folders["server"])) as server:
        with serving.ServingClient(server.grpc_address, str(folders["worker"])) as client:
            assert (client.predict(models.BATCH) == trained[1]).all()
            with serving.ServingClient(server.grpc_address, str(folders["reader"])) as reader:
                assert (reader.predict(models.BATCH) == trained[1]).all()
                with pytest.raises(AccessDenied, match="to change versions that of readers"):
                    reader.route("clicks", 1, 100)
            (folders["worker"] / "token").write_text("x" * 32)
            with (
                serving.ServingClient(server.grpc_address, str(folders["worker"])) as other,
                pytest.raises(AccessDenied, match="no token, another one"),
            ):
                other.predict(models.BATCH)
        context = ssl.create_default_context(cafile=str(folders["worker"] / "ca.pem"))
        context.check_hostname = False  # it is psfleet-server
        for is_known, status in ((False, 401), (True, 200)):
            token = (folders["server"] / "token").read_text().strip() if is_known else "none"
            own = folders["worker"]
            context.load_cert_chain(own / "cert.pem", own / "key.pem")
            connection = http.client.HTTPSConnection(
                server.http_address, timeout=60, context=context
            )
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {token}"})
            assert connection.getresponse().status == status
            connection.close()
