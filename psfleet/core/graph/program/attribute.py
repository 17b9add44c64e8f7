"""ParamAttr: settings of a layer's parameter, and the functions that make parameters from them.

Layers accept an attribute as a ParamAttr, a name, an initializer, True or False, and convert it with
`attribute`. Then they make their parameter in the default startup program (`make_parameter`). If the program
has a parameter of that name already, they get the existing one. So layers share weights by naming the same
parameter.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from psfleet import initializer as initializers
from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.validation.annotations import Must, NonNegative, check_fields, checked
from psfleet.core.engine.kernels.initial_values import initial_rows
from psfleet.core.engine.schema.entry import Entry
from psfleet.core.engine.schema.table import InitializerSpec, RowPrecision, ServerCount
from psfleet.core.graph.parameters.parameter import Parameter, note_dense_rows
from psfleet.core.graph.program import names
from psfleet.core.graph.program.operation import dtype_of
from psfleet.core.graph.program.program import default_main_program, default_startup_program
from psfleet.core.graph.program.variable import Variable, leaf
from psfleet.regularizer import WeightDecay


@dataclass
class ParamAttr:
    """Name, initial values and other settings of one parameter of a layer.

        y = layers.fc(x, 8, param_attr=ParamAttr(name="w", learning_rate=0.1))

    Attributes:
        name: Name of the parameter. Layers with the same name share it.
        initializer: Initializer from psfleet.initializer, or None for the layer's default.
        learning_rate: Factor on the optimizer's rate.
        regularizer: Regularizer that replaces the optimizer's, or None to use the optimizer's.
        trainable: False for a parameter that keeps its initial value.
        do_model_average: False if ModelAverage and ExponentialMovingAverage leave the parameter out.
        need_clip: False if gradient clipping leaves the parameter out.
        precision: Storage on servers of an embedding's rows with sparse gradients: "float32", "bfloat16" (for
            the weights), "bfloat16/bfloat16" or "bfloat16/int8" (for the weights and the optimizer state).
        servers: Number of servers that hold the parameter. With fewer servers, a step makes fewer calls.
            With None, rows are on all servers, and other weights on as few as their size requires. An
            existing table stays on its servers.
    """

    name: Annotated[str, Must(bool, "a text")] | None = None
    initializer: InitializerSpec | initializers.Initializer | None = None
    learning_rate: NonNegative = 1.0
    regularizer: WeightDecay | NonNegative | None = None
    trainable: bool = True
    do_model_average: bool = True
    need_clip: bool = True
    precision: RowPrecision = "float32"
    servers: ServerCount | None = None

    def __post_init__(self) -> None:
        check_fields("ParamAttr", self)


Attribute: TypeAlias = ParamAttr | str | bool | InitializerSpec | initializers.Initializer | None


def attribute(argument: Attribute) -> ParamAttr | None:
    """Convert a layer's argument to a ParamAttr. Returns None if it is False, which means no parameter.

    Args:
        argument: A ParamAttr, a name, or an initializer. True or None means a ParamAttr with defaults.

    Raises:
        UsageError: The argument is something else.
    """
    match argument:
        case None | True:
            return ParamAttr()
        case False:
            return None
        case str():
            return ParamAttr(name=argument)
        case ParamAttr():
            return argument
        case InitializerSpec() | initializers.Initializer():
            return ParamAttr(initializer=argument)
    raise UsageError(
        f"a parameter attribute is {argument!r}; it must be a ParamAttr, a name, an "
        "initializer or False"
    )


def make_parameter(
    shape: tuple[int, ...],
    name: str,
    attributes: ParamAttr,
    start: Any,
    *,
    sparse: bool = False,
    distributed: bool = False,
    by_row: bool = False,
    entry: Entry | None = None,
) -> Parameter:
    """Return the default startup program's parameter of a name. Makes it if there is none.

    Args:
        name: Name, used if the attributes have none.
        start: Initializer, used if the attributes have none.
        by_row: True for a dense parameter that must have the same initial values as a sparse parameter of
            this name.
        entry: Rule that decides when an unknown id of a distributed parameter gets a row, or None to give
            every id a row.

    Raises:
        ShapeError: The parameter exists with another shape or kind.
    """
    programs = default_startup_program()
    name = attributes.name or name
    existing = programs.parameters.get(name)
    if existing is not None:
        kind = existing.shape, existing.sparse, existing.distributed, existing.entry
        if kind != (shape, sparse, distributed, entry):
            raise ShapeError(
                f"parameter {name!r} exists with shape {existing.shape}; here it would "
                f"be {shape}, or of another kind: give it another name, build under a new startup "
                "program (program_guard), or forget the model with psfleet.reset()"
            )
        return existing
    if by_row:
        note_dense_rows(
            f"embedding {name!r}", shape[0], "sparse (is_sparse=True of layers.embedding)"
        )
    initializer = attributes.initializer if attributes.initializer is not None else start
    seed = default_main_program().random_seed or programs.random_seed
    value = None
    if by_row and not isinstance(initializer, initializers.Assign):
        spec, start_seed = initializers.starting(initializer, shape, seed, f"parameter {name!r}")
        value = initial_rows(np.arange(shape[0]), shape[1], spec, start_seed, name)
    parameter = Parameter(
        name,
        value,
        shape=shape,
        sparse=sparse,
        distributed=distributed,
        initializer=initializer,
        seed=seed,
        trainable=attributes.trainable,
        learning_rate=attributes.learning_rate,
        regularizer=attributes.regularizer,
        do_model_average=attributes.do_model_average,
        need_clip=attributes.need_clip,
        entry=entry,
        precision=attributes.precision,
        servers=attributes.servers,
    )
    programs.parameters[name] = parameter
    return parameter


@checked
def create_parameter(
    shape: list[int] | tuple[int, ...],
    dtype: DTypeLike = "float32",
    name: str | None = None,
    attr: Attribute = None,
    is_bias: bool = False,
    default_initializer: Any = None,
) -> Variable:
    """Make a dense parameter, and return a variable to compute with it.

        w = create_parameter([4, 8], name="w")
        y = layers.matmul(x, w)

    Args:
        shape: Shape, without unknown extents.
        dtype: float32, the only dtype of parameters.
        name: Name of the parameter. The default is `attr.name` or a generated name.
        attr: Settings as a ParamAttr, a name or an initializer.
        is_bias: True if the default initial value is zeros, False if it is Xavier's.
        default_initializer: Initializer if `attr` has none, instead of these defaults.
    """
    if dtype_of(dtype) != np.float32:
        raise ShapeError(f"parameters are float32; dtype is {dtype!r}")
    usual = initializers.Constant() if is_bias else initializers.Xavier()
    start = usual if default_initializer is None else default_initializer
    attributes = attribute(attr) or ParamAttr()
    unique = name or attributes.name or names.generate("parameter") + ".w_0"
    return leaf(make_parameter(tuple(shape), unique, attributes, start))
