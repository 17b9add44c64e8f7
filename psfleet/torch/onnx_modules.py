"""PyTorch modules as ONNX graphs. Rows come in as inputs: whoever predicts looks them up."""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from psfleet.core.base.errors import ConfigError, PsfleetError
from psfleet.core.engine.interface import Runtime
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet
from psfleet.torch.conversion import ModulePredictor
from psfleet.torch.embeddings import Embedding, EmbeddingBag, TableModule
from psfleet.torch.feature_embedding import FeatureEmbedding

_OPSET = 17
_EXPORT: Callable[..., Any] = torch.onnx.export
# The exporter that traces needs no package but onnx.
_NAMED = {"dynamo": False} if "dynamo" in inspect.signature(_EXPORT).parameters else {}


class _LookUps:
    """The look-ups of a module: they give what they find, or the values of `given` in place of it.

    Attributes:
        tables: By the name of an input of the graph its table; of a Number none.
        found: By this name what the last run has found.
        given: Likewise what the next runs get.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tables: dict[str, str] = {}
        self.found: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()
        for path, module in model.named_modules():
            if isinstance(module, TableModule):  # torch asks for all values of what it traces
                module._save_to_state_dict = lambda *state: None  # type: ignore[method-assign]
            if isinstance(module, Embedding | EmbeddingBag):
                table = module.table.name or path or "embedding"
                module.forward = self._rows(  # type: ignore[method-assign]
                    path or "embedding", table, module.forward
                )
            elif isinstance(module, FeatureEmbedding):
                module.forward = self._features(  # type: ignore[method-assign]
                    module.features, module.forward
                )

    def restart(self, rows: dict[str, Tensor]) -> None:
        """A run of the model begins."""
        self.given = rows
        self._counts.clear()

    def _rows(self, path: str, table: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rows(*ids: Any, **options: Any) -> Tensor:
            name = self._name(path, table)
            if not self.given:
                self.found[name] = plain(*ids, **options)
            return (self.given or self.found)[name]

        return rows

    def _features(
        self, features: FeatureSet, plain: Callable[..., dict[str, Tensor]]
    ) -> Callable[..., dict[str, Tensor]]:
        def values(batch: Any) -> dict[str, Tensor]:
            tables = {f.name: f.table.name if isinstance(f, Feature) else "" for f in features}
            names = {name: self._name(name, table) for name, table in tables.items()}
            if not self.given:
                self.found |= {names[name]: value for name, value in plain(batch).items()}
            return {name: (self.given or self.found)[at] for name, at in names.items()}

        return values

    def _name(self, name: str, table: str) -> str:
        self._counts[name] += 1
        name = name if self._counts[name] == 1 else f"{name}.{self._counts[name]}"
        if table:
            self.tables[name] = table
        return name


class _Graph(nn.Module):
    """A module as a function of the rows that it looks up, and of the tensors that it is called with."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        super().__init__()
        self.predict = ModulePredictor(model, runtime, direct=False)
        self.model = self.predict.module
        self.look_ups = _LookUps(self.model)

    def take(self, example: Any) -> None:
        """Run the module with an example, to know its inputs and outputs."""
        self.look_ups.restart({})
        out = self.predict(example)
        self.outputs = list(out) if isinstance(out, Mapping) else ["output"]
        self.rows = dict(self.look_ups.found)
        self.leaves, self.tree = tree_flatten(example)
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        keys = list(example) if isinstance(example, Mapping) else []
        flat = len(keys) == len(self.leaves)
        self.tensors = {keys[i] if flat else f"input.{i}": self.leaves[i] for i in self.places}

    def inputs(self) -> dict[str, Tensor]:
        """The example of each input."""
        tensors = {
            name if name not in self.rows else f"ids.{name}": t for name, t in self.tensors.items()
        }
        return {name: tensor.clone() for name, tensor in {**self.rows, **tensors}.items()}

    def forward(self, *tensors: Tensor) -> Any:
        self.look_ups.restart(dict(zip(self.rows, tensors, strict=False)))
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors[len(self.rows) :], strict=True):
            leaves[place] = tensor
        example = tree_unflatten(leaves, self.tree)
        out = self.model(*example) if isinstance(example, tuple) else self.model(example)
        return tuple(out.values()) if isinstance(out, Mapping) else out


def write_onnx(
    where: Path,
    model: nn.Module,
    runtime: Runtime,
    features: FeatureSet | None,
    example: Any = None,
) -> None:
    """Write a module as an ONNX graph, as `psfleet.serving.export` describes it.

    Args:
        where: The file.
        model: The module.
        runtime: Has the values of its tables.
        features: Its inputs, of which examples are made. The graph takes what their transforms make.
        example: An example of its inputs in place of that.

    Raises:
        ConfigError: It has no inputs that are known, or its graph does not compute the same.
    """
    batches = [example, tree_map(_reversed, example)]
    if example is None:
        if features is None:
            raise ConfigError(
                "an ONNX file of a module needs what it is called with; name its --features, or call "
                "psfleet.serving.export(..., example=...)"
            )
        # The look-ups become inputs of the graph, so what transforms do before them is left out.
        batches = [_batch(_behind_transforms(features), n) for n in (2, 3)]
        for module in model.modules():
            if isinstance(module, FeatureEmbedding):
                module.features = _behind_transforms(module.features)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        graph = _Graph(model, runtime).eval()
        graph.take(batches[0])
        _write(where, graph)
        graph.take(batches[1])
        _check(where, graph)


def _write(where: Path, graph: _Graph) -> None:
    import onnx

    inputs = graph.inputs()
    axes = {name: {0: f"{name}.0"} for name, tensor in inputs.items() if tensor.ndim}
    try:
        _EXPORT(
            graph,
            tuple(inputs.values()),
            str(where),
            input_names=list(inputs),
            output_names=graph.outputs,
            dynamic_axes={**axes, **{name: {0: f"{name}.0"} for name in graph.outputs}},
            opset_version=_OPSET,
            **_NAMED,
        )
    except PsfleetError:
        raise
    except Exception as error:  # whatever torch raises: it says which operation
        raise ConfigError(
            f"torch makes no ONNX graph of the module: {str(error).strip().splitlines()[0]}"
        ) from None
    document: Any = onnx.load(str(where))
    names = {name for node in document.graph.node for name in node.input}
    for unused in [each for each in document.graph.input if each.name not in names]:
        document.graph.input.remove(unused)  # ids that are only looked up
    tables = {f"rows of {name}": table for name, table in graph.look_ups.tables.items()}
    onnx.helper.set_model_props(document, tables)
    onnx.checker.check_model(document, full_check=True)
    onnx.save(document, str(where))


def _check(where: Path, graph: _Graph) -> None:
    """Refuse a graph that has an input of its example as a constant."""
    from onnx.reference import ReferenceEvaluator

    evaluator, inputs = ReferenceEvaluator(str(where)), graph.inputs()
    feed = {name: inputs[name].numpy() for name in evaluator.input_names if name in inputs}
    outputs = evaluator.run(None, feed) if len(feed) == len(evaluator.input_names) else []
    expected = graph(*inputs.values())
    arrays = expected if isinstance(expected, tuple) else (expected,)
    same = len(outputs) == len(arrays) and all(
        np.allclose(mine, theirs.numpy(), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(outputs, arrays, strict=True)
    )
    if not same:
        raise ConfigError(
            f"the graph of {type(graph.model).__name__} does not compute what the module does for other "
            "inputs; let it take all inputs as tensors or by its FeatureEmbedding, without Python numbers "
            "made of them"
        )


def _reversed(leaf: Any) -> Any:
    return leaf.flip(0) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _behind_transforms(features: FeatureSet) -> FeatureSet:
    """The set whose values are ids and numbers as the transforms of this one make them."""
    return FeatureSet(replace(each, transform=(), inputs=(), dtype=None) for each in features)


def _batch(features: FeatureSet, samples: int) -> dict[str, Any]:
    """So many samples with some ids and numbers."""
    batch: dict[str, Any] = {}
    for each in features:
        if not isinstance(each, Feature):
            values = np.linspace(-samples, 1, samples * each.dim, dtype=np.float32)
            batch[each.name] = values.reshape(samples, each.dim)
        elif each.pooling == "none" and not each.last:
            raise ConfigError(
                f"feature {each.name!r} has as many rows as ids, of which no ONNX graph knows the samples; "
                "give it a pooling, or `last`"
            )
        else:
            batch[each.name] = [[samples + i, i] for i in range(samples)]
    return batch
