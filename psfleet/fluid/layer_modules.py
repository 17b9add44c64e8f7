"""Layer, the base class of models and layers in eager mode, and files of their parameters.

A state dict maps names of attributes ("hidden.weight") to arrays. `save` writes a state dict to a
safetensors file. After its first update a parameter's value is in a table of the fleet. `set_state_dict`
then writes the table, and all workers must call it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from psfleet import initializer
from psfleet.checkpoint.safetensors_files import read_arrays, write_arrays
from psfleet.core.base.errors import CheckpointError, ShapeError, UsageError
from psfleet.core.base.files import let_appear
from psfleet.core.base.json_documents import Format, exact, reading
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.base.validation.annotations import FilePath, checked
from psfleet.core.engine.schema.table import key_of
from psfleet.core.graph.parameters.binding import tables
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program import names
from psfleet.core.graph.program.attribute import ParamAttr, attribute, make_parameter
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.process_runtime import active, current

__all__ = [
    "Layer",
    "ParameterState",
    "Sequential",
    "load",
    "load_dygraph",
    "save",
    "save_dygraph",
    "set_value",
]


_FORMAT = Format("state dict")
Floats = NDArray[np.float32]


class ParameterState(dict[str, Any]):
    """State dict of parameters. `save_dygraph` recognizes it by this class, and not as an optimizer's."""


@checked
def save(state_dict: dict[str, Any], path: FilePath) -> None:
    """Write a state dict to a file. If writing fails, an earlier file stays unchanged.

        save(model.state_dict(), "model.pdparams")

    Args:
        state_dict: Arrays, variables, and values that JSON can represent, by name.
        path: Path of the file.

    Raises:
        UsageError: A value cannot be saved. CheckpointError: The file cannot be written.
    """
    arrays = {
        name: np.ascontiguousarray(value.numpy() if isinstance(value, Variable) else value)
        for name, value in state_dict.items()
        if isinstance(value, Variable | np.ndarray)
    }
    plain_values = {name: value for name, value in state_dict.items() if name not in arrays}
    try:
        document = _FORMAT.document(values=json.loads(json.dumps(plain_values, default=_plain)))
    except TypeError as error:
        raise UsageError(f"the state dict cannot be saved to {path!r}: {error}") from None
    try:
        let_appear(local_path(path), lambda draft: write_arrays(draft, arrays, document))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path!r} cannot be written: {error}") from None


@checked
def load(path: FilePath) -> dict[str, Any]:
    """Read a state dict from a file written by `save`.

    Raises:
        CheckpointError: The file is missing, damaged or of another kind.
    """
    with reading(local_path(path)):
        fields, arrays = read_arrays(local_path(path), _FORMAT)
        [values] = exact(fields, "state dict", values=dict)
        return {**arrays, **values}


@checked
def save_dygraph(state_dict: dict[str, Any], model_path: FilePath) -> None:
    """Write the state dict of a layer to `<model_path>.pdparams`, or of an optimizer to
    `<model_path>.pdopt`."""
    suffix = "pdparams" if isinstance(state_dict, ParameterState) else "pdopt"
    save(state_dict, f"{model_path}.{suffix}")


@checked
def load_dygraph(model_path: FilePath) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the state dicts of a layer and of an optimizer that `save_dygraph` has written.

        parameters, optimizer_state = load_dygraph("model")

    If one of the two files is missing, its state dict is empty.

    Raises:
        CheckpointError: Both files are missing.
    """
    base = os.fspath(model_path).removesuffix(".pdparams").removesuffix(".pdopt")
    parts = [local_path(f"{base}.{suffix}") for suffix in ("pdparams", "pdopt")]
    if not any(part.exists() for part in parts):
        raise CheckpointError(f"neither {parts[0]} nor {parts[1]} exists")
    parameters, optimizer = (load(str(part)) if part.exists() else {} for part in parts)
    return ParameterState(parameters), optimizer


def set_value(pairs: Sequence[tuple[Parameter, NDArray[Any]]]) -> None:
    """Set the values of parameters. If a parameter has a table in the fleet, set the table's weights.

    Args:
        pairs: Parameters and their new values.

    Raises:
        ShapeError: A value has another shape than its parameter. Nothing was changed.
    """
    for parameter, value in pairs:
        if value.shape != parameter.shape:
            raise ShapeError(
                f"parameter {parameter.name!r} has shape {parameter.shape}, "
                f"the value has {value.shape}"
            )
    bound = (
        []
        if not current().is_active
        else [(p, value) for p, value in pairs if key_of(p.name) in active().specs()]
    )
    for parameter, value in pairs:
        parameter._value = np.array(value, np.float32)
    if bound:
        tables().exclusively(lambda: _write_all(bound))


def _write_all(pairs: Sequence[tuple[Parameter, NDArray[Any]]]) -> None:
    for parameter, value in pairs:
        _write(parameter, value)


def _write(parameter: Parameter, value: NDArray[Any]) -> None:
    """Set a table's weights and keep its optimizer state. New rows get the initial state."""
    spec = active().specs()[key_of(parameter.name)]
    ids = np.arange(len(value), dtype=np.int64) if spec.kind == "sparse" else None
    tables().set_weights(spec, np.array(value, np.float32), ids)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a value is {value!r}")


@checked
class Layer:
    """Base of models and layers in eager mode. A subclass defines `forward`.

        class Model(Layer):
            def __init__(self):
                super().__init__()
                self.hidden = Linear(4, 8)
            def forward(self, x):
                return self.hidden(x)

    Parameters and layers that are attributes belong to the layer.

    Args:
        name_scope: Prefix of the parameters' names, or None for the name of the class.
        dtype: Accepted for Paddle scripts, without effect.

    Attributes:
        training: True if layers such as Dropout compute as in training.
    """

    def __init__(self, name_scope: str | None = None, dtype: str = "float32") -> None:
        self._label = names.generate(name_scope or type(self).__name__.lower())
        self.training = True

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the output for these inputs. Calling the layer calls this method."""
        raise NotImplementedError

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.forward(*inputs, **options)

    def full_name(self) -> str:
        """Return the unique name of this layer, which is the prefix of its parameters' names."""
        return self._label

    def create_parameter(
        self,
        shape: list[int] | tuple[int, ...],
        attr: Any = None,
        dtype: str = "float32",
        is_bias: bool = False,
        default_initializer: Any = None,
        *,
        sparse: bool = False,
        by_row: bool = False,
    ) -> Parameter:
        """Return a new parameter. Without a name in `attr` it is named `<name>.w_0`, or `<name>.b_0` for a
        bias.

        Args:
            shape: Shape, without unknown extents.
            attr: Settings: a ParamAttr, a name or an initializer.
            dtype: Accepted for Paddle scripts, without effect.
            is_bias: True for a bias, which is initialized to 0 by default. Other parameters are initialized
                by Xavier.
            default_initializer: Initializer to use if `attr` has none.
            sparse: True if gradients are SparseGrad.
            by_row: True to give a dense parameter the initial values that a sparse one would have.
        """
        usual = initializer.Constant() if is_bias else initializer.Xavier()
        start = usual if default_initializer is None else default_initializer
        suffix = "b" if is_bias else "w"
        return make_parameter(
            tuple(shape),
            names.generate(f"{self._label}.{suffix}"),
            attribute(attr) or ParamAttr(),
            None if by_row or sparse else start,
            sparse=sparse,
            by_row=by_row,
        )

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) for this layer and the layers in it. Names are paths such as
        "hidden.weight"."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Layer):
                yield from value.named_parameters(f"{prefix}{name}.")

    def parameters(self, include_sublayers: bool = True) -> list[Parameter]:
        """Return the parameters of this layer and, if `include_sublayers` is True, of the layers in it."""
        return [p for name, p in self.named_parameters() if include_sublayers or "." not in name]

    def sublayers(self) -> list["Layer"]:
        """Return all layers in this layer, at any depth."""
        children = [value for value in vars(self).values() if isinstance(value, Layer)]
        return [layer for child in children for layer in (child, *child.sublayers())]

    def add_sublayer(self, name: str, sublayer: "Layer") -> "Layer":
        """Set a layer as the attribute `name`, and return it."""
        setattr(self, name, sublayer)
        return sublayer

    def train(self) -> None:
        """Make this layer and all layers in it compute as in training, for example drop values in Dropout."""
        for layer in (self, *self.sublayers()):
            layer.training = True

    def eval(self) -> None:
        """Make this layer and all layers in it compute as in evaluation, without dropout."""
        for layer in (self, *self.sublayers()):
            layer.training = False

    def clear_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self, include_sublayers: bool = True) -> ParameterState:
        """Return float32 copies of the parameters' values, by names such as "hidden.weight"."""
        return ParameterState(
            {
                name: parameter.numpy().copy()
                for name, parameter in self.named_parameters()
                if include_sublayers or "." not in name
            }
        )

    def set_state_dict(self, state_dict: dict[str, Any], include_sublayers: bool = True) -> None:
        """Set the parameters' values from a dict made by `state_dict`.

        Raises:
            UsageError: A parameter is missing. Nothing was changed.
            ShapeError: A value has another shape than its parameter. Nothing was changed.
        """
        parameters = {
            name: p for name, p in self.named_parameters() if include_sublayers or "." not in name
        }
        missing = [name for name in parameters if name not in state_dict]
        if missing:
            raise UsageError(
                f"the state has no parameter {missing[0]!r}; it has "
                f"{', '.join(state_dict) or 'none'}"
            )
        set_value([(p, np.asarray(state_dict[name])) for name, p in parameters.items()])

    set_dict = set_state_dict
    load_dict = set_state_dict


@checked
class Sequential(Layer):
    """Chain of layers.

        model = Sequential(Linear(4, 8), ReLU(), Linear(8, 1))

    Each layer gets the output of the previous layer.
    """

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_sublayer(str(number), layer)

    def forward(self, *inputs: Variable, **options: Any) -> Variable:
        """Return the output of the last layer."""
        (value,) = inputs
        for layer in vars(self).values():
            if isinstance(layer, Layer):
                value = layer(value)
        return value
