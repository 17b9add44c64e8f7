"""Attributes of a parameter in a script, and the making of the parameter."""

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
    """Name, first values and treatment of one parameter.

    Attributes:
        name: Name of the parameter; layers that name the same one share it.
        initializer: One of psfleet.initializer; None: the layer's own choice.
        learning_rate: A factor on the optimizer's rate.
        regularizer: Replaces the optimizer's.
        trainable: False: it stays as it starts.
        do_model_average: False: ModelAverage and ExponentialMovingAverage leave it out.
        need_clip: False: gradient clipping leaves it out.
        precision: Storage of an embedding's rows with sparse gradients: on servers "float32",
            "bfloat16" (the weights), "bfloat16/bfloat16" or "bfloat16/int8" (the weights, then the
            state).
        servers: Number of servers that hold it, so that a step calls fewer; None: rows on all,
            other weights on as few as their size asks for. A table that is there stays where it is.
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
    """A ParamAttr of what layers accept: a name, an initializer, True, None; None of False."""
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
    """The parameter `said.name or name` of the default startup program, made if it is new.

    Args:
        start: The initializer if the attribute has none.
        by_row: A dense parameter that starts with the same bits as a sparse one of its name.
        entry: Rule of a distributed one by which unknown ids get a row.

    Raises:
        ShapeError: It exists with another shape or kind.
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
        spec, own = initializers.starting(initializer, shape, seed, f"parameter {name!r}")
        value = initial_rows(np.arange(shape[0]), shape[1], spec, own, name)
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
    """A new dense parameter, as a variable to compute with.

    Args:
        shape: Known extents.
        dtype: float32.
        name: Name of the parameter; also settable as `attr.name`.
        attr: A ParamAttr, a name or an initializer.
        is_bias: It starts as zeros if nothing else is said; else by Xavier.
    """
    if dtype_of(dtype) != np.float32:
        raise ShapeError(f"parameters are float32; dtype is {dtype!r}")
    usual = initializers.Constant() if is_bias else initializers.Xavier()
    start = usual if default_initializer is None else default_initializer
    attributes = attribute(attr) or ParamAttr()
    unique = name or attributes.name or names.generate("parameter") + ".w_0"
    return leaf(make_parameter(tuple(shape), unique, attributes, start))
