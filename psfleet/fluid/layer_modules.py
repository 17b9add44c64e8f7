"""Eager layers as objects that own their parameters."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from psfleet.errors import UsageError
from psfleet.fluid.state_files import ParameterState, set_value
from psfleet.parameters import initializer
from psfleet.parameters.parameter import Parameter
from psfleet.program import names
from psfleet.program.attribute import ParamAttr, attribute, make_parameter
from psfleet.program.variable import Variable

__all__ = ["Layer", "Sequential"]


class Layer:
    """Base of eager layers: a subclass gives `forward` and sets parameters and layers as attributes.

    Attributes:
        training: Whether layers such as Dropout act as in training.
    """

    def __init__(self, name_scope: str | None = None, dtype: str = "float32") -> None:
        self._label = names.generate(name_scope or type(self).__name__.lower())
        self.training = True

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The output for these inputs."""
        raise NotImplementedError

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.forward(*inputs, **named)

    def full_name(self) -> str:
        """The unique name, of which the parameters' names are made."""
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
        """A new parameter `<name>.w_0` or `<name>.b_0`, or of the attribute's name.

        Args:
            shape: Known extents.
            attr: A ParamAttr, a name or an initializer.
            is_bias: It starts as zeros if nothing else is said; else by Xavier.
            sparse: Its gradients are SparseGrad.
            by_row: It starts with the bits of a sparse one.
        """
        start = default_initializer or (initializer.Constant() if is_bias else initializer.Xavier())
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
        """Own parameters and those of the layers within, by the attributes that hold them."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Layer):
                yield from value.named_parameters(f"{prefix}{name}.")

    def parameters(self, include_sublayers: bool = True) -> list[Parameter]:
        """The parameters."""
        return [p for name, p in self.named_parameters() if include_sublayers or "." not in name]

    def sublayers(self) -> list["Layer"]:
        """The layers within, at any depth."""
        own = [value for value in vars(self).values() if isinstance(value, Layer)]
        return [layer for child in own for layer in (child, *child.sublayers())]

    def add_sublayer(self, name: str, sublayer: "Layer") -> "Layer":
        """Hold a layer under a name."""
        setattr(self, name, sublayer)
        return sublayer

    def train(self) -> None:
        """Act as in training."""
        for layer in (self, *self.sublayers()):
            layer.training = True

    def eval(self) -> None:
        """Act as in tests."""
        for layer in (self, *self.sublayers()):
            layer.training = False

    def clear_gradients(self) -> None:
        """Forget the parameters' gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def state_dict(self, include_sublayers: bool = True) -> ParameterState:
        """The parameters' values, float32 by the names of `named_parameters`."""
        return ParameterState(
            {
                name: parameter.numpy().copy()
                for name, parameter in self.named_parameters()
                if include_sublayers or "." not in name
            }
        )

    def set_state_dict(self, state_dict: dict[str, Any], include_sublayers: bool = True) -> None:
        """Set the parameters from a dict made by `state_dict`.

        Raises:
            UsageError: One is missing. ShapeError: One has another shape. Nothing was changed.
        """
        wanted = {
            name: p for name, p in self.named_parameters() if include_sublayers or "." not in name
        }
        missing = [name for name in wanted if name not in state_dict]
        if missing:
            raise UsageError(
                f"the state has no parameter {missing[0]!r}; it has "
                f"{', '.join(state_dict) or 'none'}"
            )
        set_value([(p, np.asarray(state_dict[name])) for name, p in wanted.items()])

    set_dict = set_state_dict
    load_dict = set_state_dict


class Sequential(Layer):
    """Layers one after the other."""

    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_sublayer(str(number), layer)

    def forward(self, *inputs: Variable, **named: Any) -> Variable:
        """The last layer's output."""
        (value,) = inputs
        for layer in vars(self).values():
            if isinstance(layer, Layer):
                value = layer(value)
        return value
