"""The specification of the data path: odd values come in by every route, and have one outcome.

A model in which each kind of feature is used gives a prediction for a sample. By each route it must be the
one for the value that the sample has (or for none, where the value is missing), or the value must be refused
in one sentence that names its feature.
"""

import csv
import functools
import http.client
import importlib.util
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import psfleet
from psfleet import fleet, layers, serving
from psfleet.core.base.errors import PsfleetError, UsageError
from psfleet.features import Feature, FeatureSet, Jagged, Number, Table, feed
from psfleet.optimizer import SGD
from psfleet.serving import http_app
from psfleet.serving.batcher import samples_of

TABLE = Table("rows", 4, SGD(0.1))
FEATURES = FeatureSet(
    [
        Feature("id_", TABLE),
        Feature("int_", TABLE, dtype="int"),
        Feature("key_", TABLE, hashed=True),
        Feature("text_", TABLE, hashed=True, dtype="text"),
        Number("number_", default=-1.0),
        Number("real_", default=-1.0, dtype="float"),
    ]
)
KINDS = list(FEATURES.features)
CELLS = ("csv", "tsv")
ARROW = ("parquet", "arrow", "polars")
FILES = (*CELLS, *ARROW, "kafka")
JSON = ("kafka", "http", "plain json")
REFUSED, MISSING = "refused", None
SURROGATE = "shoes \ud83d"
NEIGHBOURS: dict[str, list[Any]] = {
    "id_": [5, None],
    "int_": [5, "6", None],
    "key_": [5, "red", None],
    "text_": [5, "red", None],
    "number_": [0.5, 2, None],
    "real_": [0.5, "2", None],
}
"""Good values, between which a value must not become another one."""


class Case(NamedTuple):
    """A value of a feature, and its outcome: what it stands for, MISSING or REFUSED.

    Attributes:
        cells: The outcome in text files, whose cells have no types; "": the same.
        routes: Those that can have the value; none: all.
    """

    kind: str
    value: Any
    outcome: Any
    cells: Any = ""
    routes: tuple[str, ...] = ()


def is_for(case: Case, route: str) -> bool:
    """Return whether a route can have the value of a case."""
    return not case.routes or route in case.routes


def cases() -> Iterator[Case]:
    """All values, by kind."""
    number: Any
    memory = tuple(name for name in ROUTES if name not in (*CELLS, *JSON, "polars"))
    typed_memory = tuple(name for name in memory if name not in ARROW)
    for kind in KINDS:
        is_text = kind in ("key_", "text_")
        yield Case(kind, None, MISSING)
        # Arrow's columns have types: those that no value of a feature can have are refused as a whole.
        typed = tuple(name for name in ROUTES if name not in ARROW)
        for text in ("", r"\N"):
            yield Case(kind, text, MISSING, routes=typed if kind == "id_" else ())
        routes = (
            (*memory, *CELLS) if kind[0] in "inr" and kind != "id_" else (*typed_memory, *CELLS)
        )
        yield Case(kind, math.nan, MISSING, "nan" if is_text else "", routes)
        nothing = REFUSED if kind == "id_" else MISSING
        yield Case(kind, "nan", "nan" if is_text else nothing, "nan" if is_text else MISSING)
        odd_words = ("NA", "12_34", "\uff11\uff12", "0x1F", "inf", "Infinity")
        for odd in (*odd_words, "1\u00a0", "red\u2028hat\x85"):
            yield Case(kind, odd, odd if is_text else REFUSED)
        yield Case(
            kind,
            [[]],
            REFUSED,
            routes=("list", "feed", "torch", "client", "http", "plain json", "grpc"),
        )
        yield Case(
            kind, {"a": 1}, REFUSED, routes=("list", "feed", "torch", "client", *JSON, "grpc")
        )
    for kind in ("id_", "int_"):
        for number in (7, 0, -(2**63), 2**63 - 1, 1234567890123456789):
            yield Case(kind, number, number)
        for number in (2**63, 2**64, 0.5, 1e3 + 0.5, float(2**53), -1e300, math.inf):
            routes = () if number not in (2**64, math.inf) else ("list", "feed", "client")
            yield Case(kind, number, REFUSED, routes=routes)
        # Of numbers gRPC does not say that they were booleans.
        yield Case(kind, True, REFUSED, routes=tuple(name for name in ROUTES if name != "grpc"))
        for text in ("15", "007", "+7", " 7 ", "\t7"):
            yield Case(kind, text, int(text) if kind == "int_" else REFUSED, int(text))
        for text in ("7.0", "7."):
            yield Case(kind, text, 7 if kind == "int_" else REFUSED)
        yield Case(kind, 7.0, 7 if kind == "int_" else REFUSED)
        for text in ("9007199254740993.0", str(2**63), "1e3", "7.5", "--7", "7-", "red"):
            yield Case(kind, text, REFUSED)
    for kind in ("key_", "text_"):
        for whole in (7, 0, -1, 2**63 - 1):
            yield Case(kind, whole, str(whole))
            yield Case(kind, str(whole), str(whole))
        for text in ("red", "Orl\u00e9ans", "015", str(2**64), "7.0", "a\x00", " red "):
            yield Case(kind, text, text)
        for number in (7.5, float(2**60)):
            yield Case(kind, number, REFUSED, repr(number))
        yield Case(kind, True, REFUSED, "True")
        yield Case(kind, b"red", "red", routes=memory)
        yield Case(kind, b"\xff", REFUSED, routes=memory)
        yield Case(
            kind,
            SURROGATE,
            REFUSED,
            routes=("list", "numpy", "feed", "torch", "client", *JSON, "grpc"),
        )
    for whole in (2**63 + 5, 2**64 - 1, -(2**63)):
        yield Case("key_", whole, str(whole))
        yield Case("key_", str(whole), str(whole))
    for kind in ("number_", "real_"):
        for number in (3, 3.5, -0.25, 3e38, 2**63):
            yield Case(kind, number, float(number))
            yield Case(kind, str(number), float(number))
        for text in (" 3.5 ", ".5", "+1e3", "7."):
            yield Case(kind, text, float(text))
        for number in (1e39, math.inf, -math.inf):
            routes = () if number == 1e39 else (*memory, *CELLS, "polars")
            yield Case(kind, number, REFUSED, routes=routes)
        yield Case(kind, True, 1.0, REFUSED)
        for text in ("1e39", "1_0", "1,5", "3 5", "red"):
            yield Case(kind, text, REFUSED)


class Stage(NamedTuple):
    """What the routes share: a model and its service, a client, a module of torch, a broker and a folder."""

    model: Any
    http: http.client.HTTPConnection
    grpc: serving.ServingClient
    torch: Any
    client: Any
    broker: Any
    folder: Path
    topics: dict[str, Any]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A model of all kinds of features, and all that takes samples for it."""
    needed = "httptools grpc_health grpc_reflection torch polars pyarrow confluent_kafka"
    for name in needed.split():
        pytest.importorskip(name)
    import torch

    import psfleet.torch as pst
    from tests.datasets.broker import Broker

    folder = tmp_path_factory.mktemp("routes")
    psfleet.reset()
    fleet.init()
    values = layers.features(FEATURES)
    out = layers.concat(list(values.values()), axis=1)
    fleet.distributed_optimizer(SGD(0.1)).minimize(layers.mean(layers.fc(out, 1)))
    given = feed(FEATURES, {"id_": [7], "key_": ["red"], "number_": [1.0]})
    psfleet.Executor().run(feed=given, fetch_list=[out])
    fleet.save_inference_model(str(folder / "model"), list(given), [out])
    psfleet.reset()
    model = serving.load(folder / "model", FEATURES)
    fleet.init()
    module, linear = pst.FeatureEmbedding(FEATURES), torch.nn.Linear(1, 1)
    pst.DistributedOptimizer(
        torch.nn.ModuleList([module, linear]), torch.optim.SGD(linear.parameters(), 0.1)
    )
    with (
        serving.Server({"m": model}) as server,
        serving.ServingClient(server.grpc_address) as grpc,
        psfleet.connect() as client,
        Broker() as broker,
    ):
        connection = http.client.HTTPConnection(server.http_address, timeout=60)
        features = client.features(FeatureSet([*FEATURES]))
        stage = Stage(model, connection, grpc, module, features, broker, folder, {})
        for route in ("http", "grpc"):  # a service's thread of a connection stays
            ROUTES[route](stage, "id_", [7])
        yield stage
        connection.close()
        for topic, _ in stage.topics.values():
            topic.close()
    psfleet.reset()


def in_memory(
    predict: Callable[[Stage, Any], Any], form: Callable[[list[Any]], Any]
) -> Callable[..., Any]:
    """A route of batches that are values of Python in some form."""
    return lambda stage, kind, values: predict(stage, {kind: form(values)})


def embedded(stage: Stage, batch: Any) -> Any:
    values = stage.torch(batch)
    return np.concatenate([value.detach().numpy() for value in values.values()], 1)


def looked_up(stage: Stage, batch: Any) -> Any:
    """The look-up of a client, with the model's rows."""
    lookup = stage.client.batch(batch)
    rows = {key: stage.model.look_up("rows", ids) for key, ids in lookup.ids.items()}
    return np.concatenate(list(lookup.pool(rows).values()), 1)


def are_large(values: list[Any]) -> bool:
    return any(isinstance(value, int) and 2**63 <= value < 2**64 for value in values) and all(
        isinstance(value, int) and value >= 0 for value in values
    )


def arrayed(values: list[Any]) -> Any:
    """The array that a user who has such values would make."""
    if len(set(map(type, values))) > 1 or isinstance(values[0], str | bytes):
        return np.array([*values, None], object)[:-1]
    return np.array(values, np.uint64 if are_large(values) else None)


def asked(stage: Stage, kind: str, values: list[Any]) -> Any:
    body = json.dumps({"instances": [{kind: value} for value in values]})
    stage.http.request("POST", "/v1/models/m:predict", body)
    reply = stage.http.getresponse()
    document = json.loads(reply.read())
    if reply.status == 400:
        raise UsageError(document["error"])
    assert reply.status == 200, document
    return np.array(document["predictions"], np.float32)


def asked_plainly(stage: Stage, kind: str, values: list[Any]) -> Any:
    """A request to a service without orjson."""
    body = json.dumps({"inputs": {kind: values}}).encode()
    batch, _ = samples_of(FEATURES, without_orjson()._inputs(body))
    return stage.model(batch)


def without_orjson() -> Any:
    """The module of HTTP as it is where orjson is not installed."""
    if "orjson" not in MODULES:
        spec: Any = importlib.util.spec_from_file_location("plain_http_app", http_app.__file__)
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "orjson", None)
            patch.setitem(sys.modules, "plain_http_app", module)
            spec.loader.exec_module(module)
        MODULES["orjson"] = module
    return MODULES["orjson"]


MODULES: dict[str, Any] = {}


def from_source(make: Callable[[Stage, FeatureSet, str, list[Any]], Any]) -> Callable[..., Any]:
    """A route of `fleet.dataset`, whose source has one feature."""

    def predict(stage: Stage, kind: str, values: list[Any]) -> Any:
        from psfleet.data.batches import Batches

        only = FeatureSet([FEATURES.features[kind]])
        source = make(stage, only, kind, values)
        [batch] = Batches(source, len(values)) if hasattr(source, "prepare") else [source]
        return stage.model(batch.features)

    return predict


def text_file(stage: Stage, features: FeatureSet, kind: str, values: list[Any], ending: str) -> Any:
    from psfleet.data.text_files import TextFiles

    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter="," if ending == "csv" else "\t", lineterminator="\n")
    writer.writerows([[kind, "other"], *([value, "x"] for value in values)])
    path = stage.folder / f"cells.{ending}"
    path.write_bytes(out.getvalue().encode("utf-8"))
    return TextFiles(path, features)


def table_of(kind: str, values: list[Any]) -> Any:
    import pyarrow as pa

    large = are_large(values)
    return pa.table({kind: pa.array(values, pa.uint64() if large else None)})


def parquet(stage: Stage, features: FeatureSet, kind: str, values: list[Any]) -> Any:
    import pyarrow.parquet as pq

    from psfleet.data.parquet import ParquetFiles

    path = stage.folder / "rows.parquet"
    pq.write_table(table_of(kind, values), path)
    return ParquetFiles(path, features)


def arrow(stage: Stage, features: FeatureSet, kind: str, values: list[Any]) -> Any:
    from psfleet.data.record_batches import RecordBatches

    return RecordBatches(table_of(kind, values), features)


def polars(stage: Stage, features: FeatureSet, kind: str, values: list[Any]) -> Any:
    import polars as pl

    from psfleet.data.record_batches import RecordBatches

    large = are_large(values)
    return RecordBatches(
        pl.DataFrame({kind: pl.Series(values, dtype=pl.UInt64 if large else None)}), features
    )


def kafka(stage: Stage, features: FeatureSet, kind: str, values: list[Any]) -> Any:
    from psfleet.data.kafka import KafkaTopic

    [sent] = [json.dumps({kind: value}).encode() for value in values]
    # All messages at once, since the broker takes its time for each call.
    if kind not in stage.topics:
        every = [case.value for case in cases() if case.kind == kind and is_for(case, "kafka")]
        messages = [json.dumps({kind: value}).encode() for value in every]
        stage.broker.send(kind, 0, messages)
        topic = KafkaTopic(stage.broker.servers, kind, features, start={0: 0})
        stage.topics[kind] = topic, messages
    topic, messages = stage.topics[kind]
    offset = messages.index(sent)
    return topic.prepare([(offset, offset + 1)], 1, None)()


ROUTES: dict[str, Callable[[Stage, str, list[Any]], Any]] = {
    "list": in_memory(lambda stage, batch: stage.model(batch), list),
    "numpy": in_memory(lambda stage, batch: stage.model(batch), arrayed),
    "mapping": in_memory(
        lambda stage, batch: stage.model(batch),
        lambda values: {"values": values, "lengths": [1] * len(values)},
    ),
    "feed": in_memory(
        lambda stage, batch: stage.model(batch), lambda values: Jagged(values, [1] * len(values))
    ),
    "torch": in_memory(embedded, list),
    "client": in_memory(looked_up, lambda values: [[value] for value in values]),
    "csv": from_source(functools.partial(text_file, ending="csv")),
    "tsv": from_source(functools.partial(text_file, ending="tsv")),
    "parquet": from_source(parquet),
    "arrow": from_source(arrow),
    "polars": from_source(polars),
    "kafka": from_source(kafka),
    "http": asked,
    "plain json": asked_plainly,
    "grpc": in_memory(lambda stage, batch: stage.grpc.predict(batch), list),
}


def expected_of(stage: Stage, route: str, kind: str, outcome: Any) -> Any:
    """The prediction for the value that a value stands for."""
    predict = ROUTES["torch"] if route == "torch" else ROUTES["numpy"]
    return predict(stage, kind, [outcome])[0]


def fault_of(stage: Stage, route: str, case: Case) -> str:
    """What is wrong with the outcome of a case; "" if nothing is."""
    outcome = case.cells if route in CELLS and case.cells != "" else case.outcome
    others: list[Any] = [*NEIGHBOURS[case.kind]] if route not in FILES else []
    for neighbours in [[], *([other] for other in others)]:
        types = {type(value) for value in (*neighbours, case.value)}
        if route == "grpc" and str in types and types & {float, bool}:
            continue  # a message has one of texts and numbers
        try:
            actual = ROUTES[route](stage, case.kind, [*neighbours, case.value])[-1]
        except PsfleetError as error:
            text = str(error)
            if outcome != REFUSED:
                return f"beside {neighbours} is refused: {text}"
            if "\n" in text or (case.kind not in text and "JSON" not in text):
                return f"beside {neighbours} has no sentence: {text}"
        except Exception as error:
            return f"beside {neighbours} is a raw {error!r:.200}"
        else:
            if outcome == REFUSED:
                return f"beside {neighbours} is taken"
            if not np.array_equal(actual, expected_of(stage, route, case.kind, outcome)):
                return f"beside {neighbours} is another value"
    return ""


@pytest.mark.parametrize("route", ROUTES)
def test_values(stage: Stage, route: str) -> None:
    """Each value has the outcome that docs/features.md says, between values of other types too."""
    every = [case for case in cases() if is_for(case, route)]
    faults = [
        f"{case.kind} {case.value!r} {fault}"
        for case in every
        if (fault := fault_of(stage, route, case))
    ]
    assert not faults, "\n".join([f"{route}: {len(faults)} of {len(every)} wrong", *faults])
