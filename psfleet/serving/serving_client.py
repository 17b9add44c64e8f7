"""Clients of prediction services over gRPC: ServingClient for one service, SplitClient for several.

A connection is opened when a call needs it, and kept for further calls. If the service has closed an idle
connection, the next call opens a new one without an error. Any thread may use a client.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import DeadlineExceeded, ServerUnavailable
from psfleet.core.engine.kernels.id_routing import routes, virtual_shards
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.error_statuses import KEY, error_named
from psfleet.core.net.connections.tls_sockets import connects
from psfleet.core.net.frame import MAX_MESSAGE
from psfleet.core.net.http2.frames import CallFailed, ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.http2_client import Http2Client
from psfleet.core.net.v1 import serving_pb2 as messages
from psfleet.data.feature_sets.feature_values import columns_of
from psfleet.data.feature_sets.jagged import Jagged, array_of, as_jagged
from psfleet.data.feature_sets.value_types import as_typed, is_missing, typed

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ServingClient:
    """Client of one prediction service. Any thread may use it.

        with psfleet.serving.ServingClient("127.0.0.1:8500") as client:
            chances = client.predict({"user": [17, 42], "item": [[3, 5], [8]]})

    Args:
        address: Address of the service's gRPC port, such as "127.0.0.1:8500".
        tls: Folder of a worker's credentials, or "" for a service without TLS.
        timeout: Maximum number of seconds for a call.
    """

    def __init__(self, address: str, tls: str = "", timeout: float = 60.0) -> None:
        self._address, self._timeout = address, timeout
        access = Access(Credentials.read(tls)) if tls else Access(insecure=True)
        self._client = Http2Client(
            connects(access, address), address, bool(tls), MAX_MESSAGE, access.metadata or ()
        )

    def predict(self, inputs: Mapping[str, Any], model: str = "", version: int = 0) -> Any:
        """Predict a batch.

            chances = client.predict({"user": [17, 42], "item": [[3, 5], [8]]})

        Returns what `psfleet.serving.Model` returns: an array, or a dict of arrays if the model has several
        outputs.

        Args:
            inputs: Values by name, as the model takes them, or a data frame.
            model: Name of the model, or "" for the only one.
            version: Number of the version, or 0 to let the service choose.

        Raises:
            PsfleetError: The service refuses the request, or does not reply.
        """
        request = messages.PredictRequest(model=model, version=version)
        columns = columns_of(inputs).items()
        request.inputs.extend(_message(name, value) for name, value in columns if value is not None)
        reply = self._call("Predict", request, messages.PredictReply)
        outputs = {
            output.name: np.array(output.values, np.float32).reshape(output.shape)
            for output in reply.outputs
        }
        return outputs[""] if list(outputs) == [""] else outputs

    def look_up(
        self, table: str, ids: NDArray[np.int64], model: str = "", version: int = 0
    ) -> NDArray[np.float32]:
        """Return the rows of ids, int64 [n], as float32 [n, dim].

        Args:
            table: Name of the table.
            ids: The ids.
            model: Name of the model, or "" for the only one.
            version: Number of the version, or 0 to let the service choose.

        Raises:
            PsfleetError: The service refuses the request, or does not reply.
        """
        request = messages.LookUpRequest(model=model, version=version, table=table)
        request.ids.extend(ids.tolist())
        reply = self._call("LookUp", request, messages.LookUpReply)
        return np.frombuffer(reply.rows, np.float32).reshape(len(ids), reply.dim)

    def route(self, model: str, version: int, percentage: float) -> None:
        """Send a share of the requests, in percent, to a version. With 100 the version becomes the active
        one.
        """
        request = messages.RouteRequest(model=model, version=version, percentage=percentage)
        self._call("Route", request, messages.ModelsReply)

    def models(self) -> Any:
        """Return the models and their versions, as the message ModelsReply of serving.proto."""
        return self._call("Models", messages.ModelsRequest(), messages.ModelsReply)

    def lines(self) -> Iterator[str]:
        """Yield one line of text for each version: its share of the requests, its cut, age and size.

        The cut is the number of the training state that the version's weights are from.
        """
        for model in self.models().models:
            for version in model.versions:
                from_ = version.freshness
                age = f", {from_.age:.3f} s old" if from_.HasField("age") else ""
                state = (
                    f"{version.percentage:g} % of requests, cut {from_.cut}{age}, {version.bytes:,} bytes"
                    if version.loaded
                    else "not loaded"
                )
                yield f"{model.name} {from_.version}: {state}"

    def _call(self, method: str, request: Any, reply: Any) -> Any:
        content, name = request.SerializeToString(), f"the service at {self._address}"
        try:
            return reply.FromString(self._reply_to(f"/psfleet.v1.Prediction/{method}", content))
        except CallFailed as error:
            code = _CODES.get(error.code, grpc.StatusCode.UNKNOWN)
            raise error_named(error.metadata.get(KEY, ""), code, error.details, name) from None
        except DeadlinePassed:
            raise DeadlineExceeded(
                f"{name} does not answer within {self._timeout:g} seconds"
            ) from None
        except ConnectionBroken as error:
            raise ServerUnavailable(f"{name} does not answer: {error}") from None

    def _reply_to(self, path: str, content: bytes) -> bytes:
        """Make a call. If the service has closed the idle connection, repeat the call over a new
        connection.
        """
        # Only a call over a connection that was idle before is repeated. If a new connection breaks, the
        # service is in trouble, and the caller must get the error.
        was_open = bool(self._client.idle)
        try:
            return self._client.call(path, content, self._timeout)
        except ConnectionBroken:
            if not was_open:
                raise
        self._client.forget_idle()
        return self._client.call(path, content, self._timeout)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _message(name: str, value: Any) -> Any:
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "iufb"
    shape = value.shape if is_array and value.ndim > 1 else ()
    field, bags = _field(f"input {name!r}", as_jagged(name, value.reshape(-1) if shape else value))
    lengths = bags.lengths.tolist()
    if all(length == 1 for length in lengths) and bags.weights is None:
        lengths = []
    message = messages.InputValues(name=name, lengths=lengths, shape=shape)
    getattr(message, field).extend(bags.values.tolist())
    if bags.weights is not None:
        message.weights.extend(bags.weights.tolist())
    return message


def _field(owner: str, bags: Jagged) -> tuple[str, Jagged]:
    """Choose the field of a message for the values of an input, and convert the values for this field.

    Missing ids and texts are left out. Missing numbers become NaN, because the position of a number
    matters. Integers beyond int64 are sent as texts; psfleet makes the same ids from these.

    Returns:
        The name of the field ("ids", "numbers" or "texts"), and the converted bags.

    Raises:
        IdError: A value fits no field.
    """
    values = bags.values
    if values.dtype.kind not in "iufb":
        kinds = {type(value) for value in values.tolist() if not is_missing(value)}
        has_floats = any(issubclass(kind, bool | float | np.floating) for kind in kinds)
        if has_floats and not any(issubclass(kind, str | bytes) for kind in kinds):
            numbers, missing, bad = typed(values, "float")
            if not bad.any():
                return "numbers", bags.with_values(np.where(missing, np.nan, numbers))
        bags = as_typed(owner, bags, "key")
        values = array_of(bags.values.tolist())
    if values.dtype.kind in "fb":
        return "numbers", bags
    if values.dtype.kind in "iu" and not (values.dtype.kind == "u" and (values >= 2**63).any()):
        return "ids", bags.with_values(values.astype(np.int64))
    return "texts", bags.with_values(array_of(list(map(str, values.tolist()))))


class SplitClient:
    """Client of several services that divide a job's ids, such as `psfleet serve --follow JOB --part 2/4`.

        with SplitClient(["host0:8500", "host1:8500"]) as client:
            rows = client.look_up("user", np.array([17, 42]))

    Args:
        addresses: Address of each service's gRPC port, in the order of the parts.
        tls, timeout: As in ServingClient.
    """

    def __init__(self, addresses: Sequence[str], tls: str = "", timeout: float = 60.0) -> None:
        self._clients = [ServingClient(address, tls, timeout) for address in addresses]
        self._routes = routes(len(addresses))
        self._pool = ThreadPoolExecutor(len(addresses), "parts")

    def look_up(self, table: str, ids: NDArray[np.int64], model: str = "") -> NDArray[np.float32]:
        """Return the rows of ids, int64 [n], as float32 [n, dim]. All services are called at the same time.

        Raises:
            PsfleetError: A service refuses the request, or does not reply.
        """
        # Sort the ids by part, request from each service its rows, and put the rows into the order of
        # `ids`.
        parts = self._routes[virtual_shards(ids)]
        order = np.argsort(parts, kind="stable")
        ends = np.searchsorted(parts[order], np.arange(len(self._clients) + 1))
        positions = [order[low:high] for low, high in itertools.pairwise(ends)]
        calls = [
            self._pool.submit(client.look_up, table, ids[part_positions], model)
            for client, part_positions in zip(self._clients, positions, strict=True)
            if len(part_positions) or len(ids) == 0  # without ids, the replies still give dim
        ]
        parts_rows = np.concatenate([call.result() for call in calls])
        rows = np.empty_like(parts_rows)
        rows[order] = parts_rows
        return rows

    def part(self, number: int) -> ServingClient:
        """Return the client of the service with this number, from 0."""
        return self._clients[number]

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
