"""Exports as graphs and indexes: what other programs compute of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import fleet, layers, serving
from psfleet.core.base.errors import ConfigError
from psfleet.core.graph.program.operation import _kinds, ancestors
from psfleet.features import Feature, FeatureLookup, FeatureSet, Table, feed
from psfleet.serving.onnx_programs import OnnxGraph
from psfleet_launch.commands.psfleet_cli import main as psfleet_command


def saved(folder: Path, feeds: list[str], target: Any) -> str:
    """The folder of an inference model with this target."""
    fleet.save_inference_model(str(folder / "model"), feeds, [target])
    return str(folder / "model")


REFUSED: dict[str, Callable[[Any], Any]] = {
    "accuracy": lambda v: layers.accuracy(layers.softmax(v["x"]), v["label"]),
    "area_under_curve": lambda v: layers.auc(layers.sigmoid(v["x"]), v["label"])[0],
    "cross_entropy": lambda v: layers.cross_entropy(layers.softmax(v["x"]), v["label"]),
    "log_loss": lambda v: layers.log_loss(layers.sigmoid(v["x"]), v["x"]),
    "sigmoid_cross_entropy": lambda v: layers.sigmoid_cross_entropy_with_logits(v["x"], v["x"]),
    "softmax_cross_entropy": lambda v: layers.softmax_with_cross_entropy(v["x"], v["label"]),
    "square_error": lambda v: layers.square_error_cost(v["x"], v["x"]),
    "sequence_pool first": lambda v: layers.sequence_pool(v["steps"], "first", v["lengths"]),
    "sequence_pool last": lambda v: layers.sequence_pool(v["steps"], "last", v["lengths"]),
}
"""By its name what ONNX export refuses: losses, metrics, and what depends on the training."""
INNER = {"bound_gradient", "gradient_square", "scale_gradient", "sign", "step_counter"}
"""Operations of optimizers, which no layer makes."""


def every_layer(v: dict[str, Any]) -> dict[str, Any]:
    """By its operation what uses it: everything that can be exported, `v`: the feeds."""
    x, steps, rows = v["x"], v["steps"], v["rows"]
    some = layers.sigmoid(x) + 0.5
    pools = ("sum", "average", "sqrt", "max")
    return {
        **{f"pool {p}": layers.sequence_pool(steps, p, v["lengths"], pad_value=3) for p in pools},
        "sequence_pool": layers.sequence_pool(steps, "max", mask=v["mask"]),
        "whole": layers.sequence_pool(steps, "average"),
        "batch_norm": layers.batch_norm(x),
        "batch_norm of images": layers.batch_norm(layers.reshape(x, [-1, 2, 2, 1])),
        "batch_norm last": layers.batch_norm(
            layers.reshape(x, [-1, 2, 2, 1]), data_layout="NHWC", param_attr=False, bias_attr=False
        ),
        "layer_norm": layers.layer_norm(layers.reshape(x, [-1, 2, 2])),
        "layer_norm plain": layers.layer_norm(x, scale=False, shift=False),
        "one_hot": layers.one_hot(v["label"], 4),
        "arg_max": layers.argmax(x, axis=1),
        "fill": x + layers.fill_constant([1, 4], "float32", 2.5),
        "relu": layers.relu(x),
        "tanh": layers.tanh(x),
        "exp": layers.exp(x),
        "log": layers.log(some),
        "sqrt": layers.sqrt(some),
        "square": layers.square(x),
        "abs": layers.abs(x),
        "clip": layers.clip(x, -0.5, 0.5),
        "pow": layers.elementwise_pow(some, some),
        "power": layers.pow(some, 1.5),
        "max": layers.elementwise_max(x, some),
        "min": layers.elementwise_min(x, some),
        "sub": x - some,
        "mul": x * some,
        "div": x / some,
        "scale": layers.scale(x, 2.0, 1.0),
        "softmax": layers.softmax(x),
        "log_softmax": layers.log_softmax(x),
        "dropout": layers.dropout(x, 0.25),
        "reshape": layers.reshape(x, [-1, 2, 2]),
        "transpose": layers.transpose(x, [1, 0]),
        "cast": layers.cast(v["label"], "float32"),
        "concat": layers.concat([x, some], axis=1),
        "stack": layers.stack([x, some], axis=1),
        "slice": layers.slice(x, axes=[1], starts=[1], ends=[3]),
        "gather": layers.gather(x, layers.reshape(v["label"], [-1])),
        "expand": layers.expand(x, [1, 2]),
        "matmul": layers.matmul(x, some, transpose_y=True),
        "affine": layers.fc(rows, 3, act="relu"),
        "reduce_sum": layers.reduce_sum(x, dim=1),
        "reduce_mean": layers.reduce_mean(x, dim=1, keep_dim=True),
        "reduce_max": layers.reduce_max(x, dim=1),
        "reduce_min": layers.reduce_min(x),
        "embedding": layers.reduce_sum(v["embedding"] * v["sparse"], dim=1),
    }


def test_every_operation(tmp_path: Path) -> None:
    """onnxruntime computes each operation of the layers as the program does, to 1e-5, or the export refuses
    it by its name."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    ps.reset()
    fleet.init()
    fleet.distributed_optimizer(ps.optimizer.SGD(0.5))
    features = FeatureSet([Feature("item", Table("items", 4))])
    ids = layers.data("ids", [None, 2], dtype="int64")
    v: dict[str, Any] = {
        "x": layers.data("x", [None, 4]),
        "steps": layers.data("steps", [None, None, 2]),
        "lengths": layers.data("lengths", [None], dtype="int64"),
        "mask": layers.data("mask", [None, None]),
        "label": layers.data("label", [None, 1], dtype="int64"),
        "rows": layers.features(features)["item"],
        "embedding": layers.embedding(ids, [50, 3]),
        "sparse": layers.embedding(ids, [None, 3], is_distributed=True),
    }
    outputs = every_layer(v)
    dice = np.random.default_rng(4)
    fed: dict[str, Any] = {
        "x": dice.normal(size=(5, 4)).astype(np.float32),
        "steps": dice.normal(size=(5, 3, 2)).astype(np.float32),
        "lengths": np.array([3, 0, 1, 2, 3]),
        "mask": np.array([[1, 0, 1]] * 4 + [[0, 0, 0]], np.float32),
        "label": np.array([[0], [3], [1], [2], [0]]),
        "ids": np.arange(10).reshape(5, 2),
        **feed(features, {"item": np.array([1, 2, 3, 1, 9])}),
    }
    fleet.save_inference_model(str(tmp_path / "model"), list(fed), list(outputs.values()))
    serving.export(str(tmp_path / "model"), tmp_path / "out", "onnx")
    loaded = serving.load(tmp_path / "out")
    program, names, targets = ps.fluid.io.load_inference_model(str(tmp_path / "model"))
    rows = [v[what].name for what in ("rows", "embedding", "sparse")]
    exe = ps.Executor()
    every = {n: fed[n] for n in names}
    expected = exe.run(program, feed=every, fetch_list=[*targets, *map(program.variable, rows)])
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    wanted = {each.name for each in session.get_inputs()}
    actual = session.run(
        None,
        {
            name: value
            for name, value in {**fed, **dict(zip(rows, expected[-3:], strict=True))}.items()
            if name in wanted
        },
    )
    for what, mine, theirs in zip(outputs, actual, expected, strict=False):
        assert mine.shape == theirs.shape, what
        assert np.abs(mine - theirs).max() <= 1e-5, what
    assert loaded.rows.specs()
    for what, target in REFUSED.items():
        with pytest.raises(ConfigError, match=f"operation '{what}'"):
            OnnxGraph((program, [], [target(v)])).write(tmp_path / "no")
    with pytest.raises(ConfigError, match="operation 'log_loss'"):
        serving.export(saved(tmp_path, ["x"], REFUSED["log_loss"](v)), tmp_path / "no", "onnx")
    (tmp_path / "file").touch()
    for model, sentence in {
        "tests.serving.models:chance": "is a function, which has no weights; name the checkpoint",
        "nowhere": "'nowhere' does not exist; name the folder of an inference model, or MODULE:NAME",
        str(tmp_path / "file"): "is a file; name the folder of an inference model",
        str(tmp_path): "is a folder without program.json, so it is no inference model",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            serving.export(model, tmp_path / "no", "onnx")
    assert not (tmp_path / "no").exists()
    used = {record.op.saved[0] for record in ancestors(list(outputs.values())) if record.op.saved}
    refused = {what.partition(" ")[0] for what in REFUSED}
    assert used | refused | INNER == set(_kinds)
    ps.reset()


def test_faiss(tmp_path: Path) -> None:
    """The index finds what exact search over the tower's outputs finds."""
    faiss = pytest.importorskip("faiss", reason="faiss is not installed")
    ps.reset()
    features = FeatureSet([Feature("item", Table("items", 4))])
    fleet.init()
    tower, ids = layers.fc(layers.features(features)["item"], 3), np.array([1, 2, 3, 9])
    fleet.distributed_optimizer(ps.optimizer.SGD(0.5)).minimize(layers.mean(layers.square(tower)))
    ps.Executor().run(feed=feed(features, {"item": ids}))
    (tmp_path / "features.toml").write_text(
        '[tables.items]\ndim = 4\n[features.item]\ntable = "items"\n'
    )
    model = saved(tmp_path, ["item.ids", "item.lengths"], tower)
    serving.export(model, tmp_path / "out", "faiss", features=tmp_path / "features.toml")
    index = faiss.read_index(str(tmp_path / "out" / "index.faiss"))
    vectors = serving.load(tmp_path / "out")({"item": ids})
    queries = np.random.default_rng(2).normal(size=(7, 3)).astype(np.float32)
    scores, actual = index.search(queries, 4)
    exact = queries @ vectors.T
    assert (actual == ids[np.argsort(-exact, axis=1)]).all()
    assert np.allclose(scores, -np.sort(-exact, axis=1), atol=1e-6)
    ps.reset()


def test_onnx_of_a_module_behind_its_transforms(tmp_path: Path) -> None:
    """`psfleet export --format onnx` of a model whose features have transforms writes the part behind them:
    with the rows and numbers that the features' look-up makes of raw values, onnxruntime computes what
    psfleet predicts for these raw values, to 1e-5."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from tests.serving import torch_modules as modules

    snapshot, out = tmp_path / "snapshot", tmp_path / "out"
    modules.train(snapshot)
    name, features = "tests.serving.torch_modules:Transformed", modules.TRANSFORMED
    features.save(tmp_path / "features.json")
    words = ["export", name, str(out), "--format", "onnx", "--checkpoint", str(snapshot)]
    assert psfleet_command([*words, "--features", str(tmp_path / "features.json")]) == 0
    session = runtime.InferenceSession(str(out / "model.onnx"))
    tables = {"age_group": "ages", "place": "places", "tags": "tags"}
    assert session.get_modelmeta().custom_metadata_map == {
        f"rows of {feature}": table for feature, table in tables.items()
    }
    model = serving.load(name, features, snapshot)
    lookup = FeatureLookup(features, modules.RAW_BATCH, {table: table for table in features.tables})
    rows = {table: model.look_up(table, ids) for table, ids in lookup.ids.items()}
    assert all((each != 0).any() for each in rows.values())
    [outputs] = session.run(None, lookup.pool(rows))
    assert np.abs(outputs - model(modules.RAW_BATCH)).max() <= 1e-5
    assert np.ptp(outputs) > 0.1
    ps.reset()


def test_onnx_of_a_module(tmp_path: Path) -> None:
    """onnxruntime computes what a torch module does, to 1e-5, from pooled rows, numbers and tensors, for any
    number of samples; the same function is served with the checkpoint. A graph that would keep an input of
    the example as a constant is refused."""
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from tests.serving import torch_modules as modules

    modules.train(tmp_path / "snapshot")
    name, snapshot = "tests.serving.torch_modules:Click", tmp_path / "snapshot"
    (tmp_path / "features.toml").write_text(modules.FEATURES_TOML)
    given: dict[str, Any] = {"checkpoint": snapshot, "features": tmp_path / "features.toml"}
    serving.export(name, tmp_path / "out", "onnx", **given)
    loaded = serving.load(name, modules.FEATURES, tmp_path / "out")
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    assert session.get_modelmeta().custom_metadata_map == {
        "rows of user": "users",
        "rows of items": "items",
    }
    batch = modules.BATCH
    rows = {
        "user": loaded.look_up("users", np.array([5, 7, 5, 900])),
        "items": np.stack(
            [loaded.look_up("items", np.array(ids)).sum(0) for ids in batch["items"]]
        ),
        "age": np.array(batch["age"], np.float32)[:, None],
    }
    [outputs] = session.run(None, rows)
    expected = serving.load(name, modules.FEATURES, snapshot)(batch)
    assert np.abs(outputs - expected).max() <= 1e-5
    with pytest.raises(ConfigError, match="Careless does not compute what the module does"):
        serving.export("tests.serving.torch_modules:Careless", tmp_path / "no", "onnx", **given)
    with pytest.raises(ConfigError, match="name its --features"):
        serving.export(
            "tests.serving.torch_modules:Towers", tmp_path / "no", "onnx", checkpoint=snapshot
        )
    example = modules.towers_inputs(3)
    serving.export(
        "tests.serving.torch_modules:Towers",
        tmp_path / "towers",
        "onnx",
        checkpoint=snapshot,
        example=example,
    )
    session = runtime.InferenceSession(str(tmp_path / "towers" / "model.onnx"))
    assert [each.name for each in session.get_inputs()] == ["item", "words", "input.1"]
    towers = serving.load("tests.serving.torch_modules:Towers", None, snapshot)
    ids, numbers = example = modules.towers_inputs(5)
    words = towers.look_up("words", ids.numpy().ravel()).reshape(5, 2, 8)
    fed = {
        "item": towers.look_up("item", ids.numpy().ravel()).reshape(5, 2, 8),
        "words": words.mean(1),
        "input.1": numbers.numpy(),
    }
    assert np.abs(session.run(None, fed)[0] - towers(example)).max() <= 1e-5
    ps.reset()
