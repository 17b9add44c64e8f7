"""Export of a program as an ONNX graph, for `psfleet.serving.export(..., "onnx")`.

An embedding's rows do not fit into a graph and stay in a table. So the rows of each lookup become an input
of the graph, and a program that runs the graph must look the rows up first. onnx_files.py writes the file.

Each operation has a method `_add_NAME` that adds nodes for it. Operations that ONNX has too are listed in
_PLAIN and _REDUCTIONS. The graph is for prediction: dropout only scales, and gradient operations return
their input.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from psfleet.core.base.errors import ConfigError
from psfleet.core.graph.execution.inference import Loaded
from psfleet.core.graph.program.operation import Record, ancestors
from psfleet.core.graph.program.variable import Variable
from psfleet.serving.onnx_files import onnx_module, save_model

_PLAIN = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "abs": "Abs",
    "sign": "Sign",
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "max": "Max",
    "min": "Min",
    "pow": "Pow",
}
"""ONNX operation with the same meaning and inputs, for each of psfleet's operations."""
_ROWS = ("embedding", "dense_embedding", "pooled_embedding")
_REDUCTIONS = {
    "reduce_sum": "ReduceSum",
    "reduce_mean": "ReduceMean",
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
}
_OPSET, _IR = 18, 9


class OnnxGraph:
    """ONNX graph of a program. The program's operations are added to the graph one after the other.

    Attributes:
        rows: For each input that takes looked-up rows, by its name: the name of their table.
    """

    def __init__(self, inference: Loaded) -> None:
        self._onnx = onnx_module()
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: dict[str, Any] = {}
        self._count = 0
        self.rows: dict[str, str] = {}
        _, _, self._targets = inference

    def write(self, where: Path) -> None:
        """Write the graph to a file.

        Raises:
            ConfigError: An operation has no counterpart in ONNX. The message names the operation.
        """
        for record in ancestors(self._targets):
            self._add(record)
        helper = self._onnx.helper
        outputs = [self._value(target) for target in self._targets]
        graph = helper.make_graph(
            self._nodes, "psfleet", list(self._inputs.values()), outputs, self._constants
        )
        opsets = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR, producer_name="psfleet"
        )
        save_model(model, self.rows, where)

    def _value(self, variable: Variable) -> Any:
        kind = self._onnx.helper.np_dtype_to_tensor_dtype(variable.dtype)
        shape = [f"{variable.name}.{i}" if n is None else n for i, n in enumerate(variable.shape)]
        return self._onnx.helper.make_tensor_value_info(variable.name, kind, shape)

    def _constant(self, value: Any, name: str = "") -> str:
        self._count += 1
        name = name or f"constant.{self._count}"
        self._constants.append(self._onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def _node(self, kind: str, inputs: Sequence[str], output: str = "", **settings: Any) -> str:
        self._count += 1
        output = output or f"value.{self._count}"
        node = self._onnx.helper.make_node(kind, list(inputs), [output], **settings)
        self._nodes.append(node)
        return output

    def _leaf(self, variable: Variable) -> str:
        """Return a variable's name in the graph.

        A leaf (a variable that no operation computes) is first added to the graph, if it is not there yet: a
        feed as an input, a parameter or constant as a constant.
        """
        is_constant = any(constant.name == variable.name for constant in self._constants)
        if variable.record is not None or variable.name in self._inputs or is_constant:
            return variable.name
        if variable.is_data:
            self._inputs[variable.name] = self._value(variable)
            return variable.name
        value = variable.value if variable.parameter is None else variable.parameter.numpy()
        return self._constant(value, variable.name)

    def _add(self, record: Record) -> None:
        name, *settings = record.op.saved or (type(record.op).__name__,)
        output = record.output
        if name in _ROWS:
            table = next(
                variable.parameter for variable in record.inputs if variable.parameter is not None
            )
            self._inputs[output.name] = self._value(output)
            self.rows[output.name] = table.name
            return
        add: Callable[..., None] | None = getattr(self, f"_add_{name}", None)
        if name not in _PLAIN and name not in _REDUCTIONS and add is None:
            raise _refused(output, name)
        inputs = [self._leaf(variable) for variable in record.needed(training=False)]
        values = dict(zip(settings, record.op.settings(), strict=True))
        if name in _PLAIN:
            self._node(_PLAIN[name], inputs, output.name)
        elif name in _REDUCTIONS:
            axes = [self._constant(np.array(values["axes"], np.int64))] if values["axes"] else []
            self._node(
                _REDUCTIONS[name], [*inputs, *axes], output.name, keepdims=int(values["keep"])
            )
        elif add is not None:
            add(inputs, record, **values)

    def _add_fill(self, inputs: list[str], record: Record, **values: Any) -> None:
        value = np.full(values["shape"], values["value"], values["dtype"])
        self._node("Identity", [self._constant(value)], record.output.name)

    def _add_one_hot(self, inputs: list[str], record: Record, depth: int, **values: Any) -> None:
        shape = record.inputs[0].shape
        [x], last = inputs, self._constant(np.array([-1], np.int64))
        if not (shape and shape[-1] == 1):
            x = self._node("Unsqueeze", [x, last])
        kind = record.inputs[0].dtype
        equal = self._node("Equal", [x, self._constant(np.arange(depth, dtype=kind))])
        self._node("Cast", [equal], record.output.name, to=self._onnx.TensorProto.FLOAT)

    def _add_arg_max(self, inputs: list[str], record: Record, axis: int) -> None:
        self._node("ArgMax", inputs, record.output.name, axis=axis, keepdims=0)

    def _add_layer_norm(
        self,
        inputs: list[str],
        record: Record,
        axis: int,
        epsilon: float,
        has_scale: bool,
        has_shift: bool,
    ) -> None:
        extents = record.inputs[0].shape[axis:]
        size = self._constant(np.array(extents, np.int64))
        x, *weights = inputs
        if not has_scale:
            unit_scale = np.ones(int(np.prod(np.array(extents, np.int64))), record.output.dtype)
            weights.insert(0, self._constant(unit_scale))
        factors = [self._node("Reshape", [weight, size]) for weight in weights]
        attributes = {"axis": axis, "epsilon": epsilon}
        self._node("LayerNormalization", [x, *factors], record.output.name, **attributes)

    def _add_batch_norm(
        self,
        inputs: list[str],
        record: Record,
        axis: int,
        epsilon: float,
        has_scale: bool,
        has_shift: bool,
        **values: Any,
    ) -> None:
        rank = len(record.output.shape)
        extents = [-1 if i == axis % rank else 1 for i in range(rank)]
        size = self._constant(np.array(extents, np.int64))
        # y = (x - mean) / sqrt(variance + epsilon) * scale + shift, along `axis`. ONNX's BatchNormalization
        # normalizes along axis 1 only.
        x, mean, variance, *weights = (
            operand if i == 0 else self._node("Reshape", [operand, size])
            for i, operand in enumerate(inputs)
        )
        safe = self._node("Add", [variance, self._constant(record.output.dtype.type(epsilon))])
        difference = self._node("Sub", [x, mean])
        y = self._node("Div", [difference, self._node("Sqrt", [safe])])
        if has_scale:
            y = self._node("Mul", [y, weights[0]])
        if has_shift:
            y = self._node("Add", [y, weights[-1]])
        self._node("Identity", [y], record.output.name)

    def _add_sequence_pool(
        self, inputs: list[str], record: Record, pool: str, pad_value: float, masked: bool
    ) -> None:
        if pool not in ("sum", "average", "sqrt", "max"):
            raise _refused(record.output, f"sequence_pool {pool}")
        # Steps beyond the end of a sequence become 0, or -inf for "max". Then all steps are reduced:
        # average = sum / max(count, 1), sqrt = sum / sqrt(max(count, 1)). Empty sequences get `pad_value`.
        number, rank = record.output.dtype.type, len(record.inputs[0].shape)
        x = inputs[0]
        present = self._present(inputs, record, masked=masked)
        after = self._constant(np.arange(2, rank))
        mask = present if rank == 2 else self._node("Unsqueeze", [present, after])
        empty = number(-np.inf if pool == "max" else 0)
        steps = self._node("Where", [mask, x, self._constant(empty)])
        time = self._constant(np.array([1], np.int64))
        kind = "ReduceMax" if pool == "max" else "ReduceSum"
        y = self._node(kind, [steps, time], keepdims=0)
        to = self._onnx.helper.np_dtype_to_tensor_dtype(record.output.dtype)
        mask_numbers = self._node("Cast", [mask], to=to)
        count = self._node("ReduceSum", [mask_numbers, time], keepdims=0)
        if pool in ("average", "sqrt"):
            some = self._node("Max", [count, self._constant(number(1))])
            y = self._node("Div", [y, self._node("Sqrt", [some]) if pool == "sqrt" else some])
        nothing = self._node("Equal", [count, self._constant(number(0))])
        pad = self._constant(number(pad_value))
        self._node("Where", [nothing, pad, y], record.output.name)

    def _present(self, inputs: list[str], record: Record, *, masked: bool) -> str:
        """Add nodes for a mask, bool [batch, time], which is true for steps before the end of their
        sequence.
        """
        x, *lengths = inputs
        if masked:
            return self._node("Cast", lengths, to=self._onnx.TensorProto.BOOL)
        zero, unit = self._constant(np.array(0, np.int64)), self._constant(np.array(1, np.int64))
        extent = self._node("Gather", [self._node("Shape", [x]), unit])
        steps = self._node("Range", [zero, extent, unit])
        column = self._constant(np.array([-1, 1], np.int64))
        if lengths:
            return self._node("Less", [steps, self._node("Reshape", [lengths[0], column])])
        batch = self._node("Shape", [x], start=0, end=2)
        return self._node("Less", [steps, self._node("Expand", [extent, batch])])

    def _add_square(self, inputs: list[str], record: Record) -> None:
        self._node("Mul", inputs * 2, record.output.name)

    def _add_scale(self, inputs: list[str], record: Record, factor: float, offset: float) -> None:
        kind = record.output.dtype.type
        product = self._node("Mul", [*inputs, self._constant(kind(factor))])
        self._node("Add", [product, self._constant(kind(offset))], record.output.name)

    def _add_power(self, inputs: list[str], record: Record, factor: float) -> None:
        exponent = self._constant(record.output.dtype.type(factor))
        self._node("Pow", [*inputs, exponent], record.output.name)

    def _add_clip(self, inputs: list[str], record: Record, low: float, high: float) -> None:
        kind = record.output.dtype.type
        bounds = self._constant(kind(low)), self._constant(kind(high))
        self._node("Clip", [*inputs, *bounds], record.output.name)

    def _add_softmax(self, inputs: list[str], record: Record, axis: int) -> None:
        self._node("Softmax", inputs, record.output.name, axis=axis)

    def _add_log_softmax(self, inputs: list[str], record: Record, axis: int) -> None:
        self._node("LogSoftmax", inputs, record.output.name, axis=axis)

    def _add_reshape(self, inputs: list[str], record: Record, shape: Sequence[int]) -> None:
        extents = self._constant(np.array(shape, np.int64))
        self._node("Reshape", [*inputs, extents], record.output.name)

    def _add_transpose(self, inputs: list[str], record: Record, order: Sequence[int]) -> None:
        self._node("Transpose", inputs, record.output.name, perm=list(order))

    def _add_cast(self, inputs: list[str], record: Record, dtype: Any) -> None:
        to = self._onnx.helper.np_dtype_to_tensor_dtype(record.output.dtype)
        self._node("Cast", inputs, record.output.name, to=to)

    def _add_concat(self, inputs: list[str], record: Record, axis: int) -> None:
        self._node("Concat", inputs, record.output.name, axis=axis)

    def _add_stack(self, inputs: list[str], record: Record, axis: int) -> None:
        at = self._constant(np.array([axis], np.int64))
        wide = [self._node("Unsqueeze", [operand, at]) for operand in inputs]
        self._node("Concat", wide, record.output.name, axis=axis)

    def _add_slice(
        self,
        inputs: list[str],
        record: Record,
        axes: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        bounds = [self._constant(np.array(numbers, np.int64)) for numbers in (starts, ends, axes)]
        self._node("Slice", [*inputs, *bounds], record.output.name)

    def _add_gather(self, inputs: list[str], record: Record) -> None:
        self._node("Gather", inputs, record.output.name, axis=0)

    def _add_expand(self, inputs: list[str], record: Record, times: Sequence[int]) -> None:
        self._node("Tile", [*inputs, self._constant(np.array(times, np.int64))], record.output.name)

    def _add_matmul(
        self, inputs: list[str], record: Record, transpose_x: bool, transpose_y: bool
    ) -> None:
        flips = (transpose_x, transpose_y)
        operands = zip(inputs, record.needed(training=False), flips, strict=True)
        self._node("MatMul", [self._flipped(*operand) for operand in operands], record.output.name)

    def _flipped(self, name: str, variable: Variable, flip: bool) -> str:
        rank = len(variable.shape)
        if not flip or rank < 2:
            return name
        order = [*range(rank - 2), rank - 1, rank - 2]
        return self._node("Transpose", [name], perm=order)

    def _add_affine(self, inputs: list[str], record: Record, axes: int, relu: bool) -> None:
        x, weights, *bias = inputs
        before = record.needed(training=False)[0]
        if len(before.shape) != axes + 1:
            extents = [*([0] * axes), -1]
            x = self._node("Reshape", [x, self._constant(np.array(extents, np.int64))])
        last = record.output.name
        y = self._node("MatMul", [x, weights], "" if bias or relu else last)
        if bias:
            y = self._node("Add", [y, *bias], "" if relu else last)
        if relu:
            self._node("Relu", [y], last)

    def _add_dropout(self, inputs: list[str], record: Record, **values: Any) -> None:
        scale = record.output.dtype.type(1.0 if values["upscale"] else 1 - values["drop"])
        self._node("Mul", [*inputs, self._constant(scale)], record.output.name)

    def _add_bound_gradient(self, inputs: list[str], record: Record, **values: Any) -> None:
        self._node("Identity", inputs[:1], record.output.name)

    def _add_scale_gradient(self, inputs: list[str], record: Record, **values: Any) -> None:
        self._node("Identity", inputs[:1], record.output.name)


def _refused(output: Variable, operation: str) -> ConfigError:
    return ConfigError(
        f"{output.name!r} comes of the operation {operation!r}, which has no counterpart in ONNX; export "
        "targets that do without it"
    )
