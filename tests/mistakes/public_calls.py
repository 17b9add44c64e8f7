"""Every public function, class and method of the public faces, and a right call of each."""

import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import psfleet
from psfleet import features, fluid, layers, metrics, optimizer
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.validation.annotations import Form
from psfleet.core.engine.schema import entry
from psfleet.core.graph.program.program import Program

FACES = (
    *("psfleet", "psfleet.fleet", "psfleet.initializer", "psfleet.layers", "psfleet.metrics"),
    *("psfleet.optimizer", "psfleet.optimizer.lr", "psfleet.clip", "psfleet.regularizer"),
    *("psfleet.fluid", "psfleet.fluid.dygraph", "psfleet.fluid.io", "psfleet.fluid.layers"),
    *("psfleet.fluid.learning_rate_scheduler", "psfleet.fluid.nn", "psfleet.fluid.static"),
    *(
        "psfleet.fluid.static.nn",
        "psfleet.fleet.file_datasets",
        "psfleet.features",
        "psfleet.core.engine.schema.entry",
    ),
    *("psfleet.data", "psfleet.data.kafka"),
)


@dataclass(frozen=True)
class Call:
    """A public function, or a method of a public class.

    Attributes:
        label: Where a script finds it.
        function: What is called; of a constructor, the class.
        owner: The class of a method.
    """

    label: str
    function: Callable[..., Any]
    owner: type | None = None

    @property
    def inner(self) -> Any:
        """The function without what is around it."""
        target: Any = self.function
        if isinstance(target, type):
            target = target.__init__  # type: ignore[misc]
        return inspect.unwrap(target)

    @property
    def is_checked(self) -> bool:
        """Whether its arguments are checked against its annotations."""
        target: Any = self.function
        if isinstance(target, type):
            if hasattr(target, "__post_init__") and "check_fields" in _names_of(target):
                return True
            target = target.__init__  # type: ignore[misc]
        return hasattr(target, "__checked__")

    @property
    def arguments(self) -> dict[str, Any]:
        """The annotation of each argument."""
        return Form(self.inner).annotations

    def bound(self) -> Callable[..., Any]:
        """What a script calls, of a new instance if it is a method."""
        return self.function if self.owner is None else getattr(an(self.owner), self.name)

    @property
    def name(self) -> str:
        """The last part of the label."""
        return self.label.rpartition(".")[2]

    def right(self) -> dict[str, Any]:
        """The arguments that a call needs."""
        signature = inspect.signature(self.inner)
        hints = self.arguments
        return {
            name: [0.5, 0.2, 0.1]
            if (self.name, name) == ("PiecewiseDecay", "values")
            else a_right(name, hints.get(name, Any))
            for name, parameter in signature.parameters.items()
            if parameter.default is parameter.empty
            and name not in ("self", "cls")
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }


def _names_of(kind: Any) -> tuple[str, ...]:
    """The names that `__post_init__` uses, those of its bases' too, which it calls."""
    own = [vars(base).get("__post_init__") for base in kind.__mro__]
    return tuple(name for each in own if each is not None for name in each.__code__.co_names)


MISSING: set[str] = set()
"""Modules that could not be walked, since an extra of theirs is not installed."""


def calls(faces: tuple[str, ...] = FACES) -> Iterator[Call]:
    """Everything public that takes arguments, once each."""
    seen: set[Any] = set()
    for face in faces:
        try:
            module = importlib.import_module(face)
        except ConfigError:  # it needs an extra that is not installed here
            MISSING.add(face)
            continue
        own = [name for name, held in vars(module).items() if _is_own(name, held, face)]
        for name in getattr(module, "__all__", own):
            for call in _of(f"{face}.{name}", getattr(module, name)):
                if call.inner not in seen and (not call.is_checked or call.arguments):
                    seen.add(call.inner)
                    yield call


def _is_own(name: str, held: Any, module: str) -> bool:
    return not name.startswith("_") and getattr(held, "__module__", "") == module


def _of(label: str, target: Any) -> Iterator[Call]:
    ours = str(getattr(target, "__module__", "")).startswith("psfleet")
    if not ours or isinstance(target, types.ModuleType):
        return
    if not isinstance(target, type):
        if isinstance(target, types.FunctionType):
            yield Call(label, target)
        return
    if issubclass(target, BaseException) or inspect.isabstract(target):
        return
    if isinstance(vars(target).get("__init__"), types.FunctionType):
        yield Call(label, target)
    for name, held in inspect.getmembers(target, inspect.isfunction):
        if not name.startswith("_") and held.__module__.startswith("psfleet"):
            yield Call(f"{label}.{name}", held, target)


def a_variable() -> Any:
    """A fed variable [None, 2]."""
    program = fluid.default_main_program()
    return program.variables.get("x") or layers.data("x", [None, 2])


def a_loss() -> Any:
    """A loss with a parameter."""
    return layers.mean(layers.fc(a_variable(), 1))


def an(owner: type) -> Any:
    """A new instance of a public class."""
    make = MADE.get(owner.__name__)
    if make is not None:
        return make()
    if not isinstance(vars(owner).get("__init__"), types.FunctionType):
        return owner()
    call = Call(owner.__name__, owner)
    return owner(**call.right())


MADE: dict[str, Callable[[], Any]] = {
    "Client": lambda: psfleet.connect(),
    "SparseTable": lambda: psfleet.connect().sparse_table("rows", 2, optimizer.SGD(0.1)),
    "DenseTable": lambda: psfleet.connect().dense_table("dense", np.zeros(2), optimizer.SGD(0.1)),
    "KafkaTopic": lambda: importlib.import_module("psfleet.data.kafka").KafkaTopic(
        "localhost:1", "clicks", NAMED["features"](), start={0: 0}
    ),
    "Embedding": lambda: fluid.dygraph.Embedding([10, 2]),
    "Variable": a_variable,
    "Program": Program,
    "Parameter": lambda: psfleet.Parameter("w", [1.0, 2.0]),
    "SparseGrad": lambda: psfleet.SparseGrad(np.array([1]), np.ones((1, 2), np.float32)),
    "DataFeeder": lambda: fluid.DataFeeder([a_variable()]),
    "Fleet": lambda: _fleet(),
    "Util": lambda: _fleet().util,
    "FleetMetrics": lambda: _fleet().metrics([metrics.Auc()]),
    "Jagged": lambda: features.Jagged(np.arange(3), np.array([1, 2])),
    "NDCG": lambda: metrics.NDCG(2),
    "Recall": lambda: metrics.Recall(2),
    "HitRate": lambda: metrics.HitRate(2),
    "MRR": lambda: metrics.MRR(2),
    "Coverage": lambda: metrics.Coverage(2, 3),
    "Assign": lambda: psfleet.initializer.Assign([1.0]),
}


def _fleet() -> Any:
    made = psfleet.fleet.Fleet()
    made.init()
    return made


NAMED: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("x", "y", "input", "X", "Y", "label", "logits", "i"), a_variable),
    **dict.fromkeys(("loss", "losses", "targets"), a_loss),
    **dict.fromkeys(("optimizer", "inner_optimizer"), lambda: optimizer.SGD(0.1)),
    "shape": lambda: [1, 2],
    "size": lambda: [10, 2],
    "dtype": lambda: "float32",
    "name": lambda: "n",
    "table": lambda: features.Table("t", 2),
    "axes": lambda: [0],
    **dict.fromkeys(("feed_list", "var_list", "feeds"), lambda: [a_variable()]),
    "ids": lambda: np.array([1, 2]),
    **dict.fromkeys(("grads", "values"), lambda: np.ones((2, 2), np.float32)),
    "preds": lambda: np.array([0.5, 0.5]),
    "labels": lambda: np.array([0, 1]),
    "metrics": lambda: [metrics.Auc()],
    "num_or_sections": lambda: 2,
    "perm": lambda: [1, 0],
    "start_lr": lambda: 0.0,
    "end_lr": lambda: 1.0,
    **dict.fromkeys(("boundaries", "milestones"), lambda: [5, 12]),
    "T_0": lambda: 3,
    "T_mult": lambda: 2,
    "lr_lambda": lambda: lambda epoch: 0.5,
    "show_name": lambda: "shows",
    "click_name": lambda: "clicks",
    "several": lambda: (entry.TTLEntry(5),),
    "features": lambda: features.FeatureSet([features.Feature("f", features.Table("t", 2))]),
    "state_dict": dict,
}


def a_right(name: str, annotation: Any) -> Any:
    """A value for an argument: by its name, else by its annotation."""
    if name in NAMED:
        return NAMED[name]()
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    inner = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return a_right("", inner[0])
    if origin is typing.Literal:
        return inner[0]
    if annotation in (int, float, str, bool):
        return {int: 2, float: 0.5, str: "x", bool: True}[annotation]
    if origin is not None and isinstance(origin, type) and issubclass(origin, dict):
        return {}
    return [] if origin is not None else np.ones(2)
