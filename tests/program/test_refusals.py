"""What a script may get wrong in building and running a program: one sentence quotes it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import fluid, initializer, layers, optimizer
from psfleet.core.base.errors import CheckpointError
from psfleet.core.graph.program import names
from psfleet.core.graph.program.ops.reduce import SequencePool
from psfleet.core.graph.program.program import default_startup_program
from psfleet.core.graph.program.variable import Variable, to_variable
from tests.program.hand import HandSGD
from tests.refusals import check_refusals, named
from tests.runtimes import own_programs

pytestmark = pytest.mark.quick


def x(*shape: int | None, dtype: str = "float32") -> Variable:
    """Data of this shape."""
    return layers.data(names.generate("x"), shape, dtype)


def run(value: Any, is_fetched: bool = True) -> Any:
    """Feed a line and fetch its result."""
    out = layers.fc(layers.data("x", [None, 2]), 1)
    return ps.Executor().run(feed={"x": value}, fetch_list=[out] if is_fetched else None)


def pool(kind: Any = "sum", data: Any = None, **options: Any) -> Any:
    """Pool a padded batch of 4 sequences of 5 steps."""
    return layers.sequence_pool(
        to_variable(np.ones((4, 5, 3)) if data is None else data, None), kind, **options
    )


NAMES = vars(layers) | named(x, run, pool, SequencePool)
NAMES |= {"np": np, "fluid": fluid, "initializer": initializer, "layers": layers}
NAMES |= {"nan": np.nan, "const": to_variable}
LAYERS = """
x(None, 3) + x(None, 4)  # ShapeError: ...cannot combine the shapes (None, 3) and (None
fc(x(None, None), 2)  # ShapeError: ...extents from axis 1 on must be known
fc(x(None, 2), 2, act="swish")  # ConfigError: ...act is 'swish'; use log_softmax
fc(x(None, 2, dtype="int64"), 2)  # ShapeError: ...fc of 'x_0' needs floats
fc(x(None, 2), 2, param_attr=False)  # ShapeError: ...but weights there must be
fc(x(None, 2), 2, param_attr=3)  # UsageError: ...a parameter attribute is 3
fc(x(2), 0)  # size is 0, it must be a whole number above 0
matmul(x(2, 3), x(4, 5))  # ShapeError: ...the inner extents 3 and 4 differ
reshape(x(2, 3), [4, -1])  # ShapeError: ...6 values do not fill it
reshape(x(2, 3), [-1, -1])  # ShapeError: ...only one extent may be -1
concat([x(2, 3), x(3, 2)])  # ShapeError: ...the other extents differ
concat([x(2), x(2, dtype="int64")])  # ShapeError: ...the dtypes differ
stack([x(2, 3), x(3, 2)])  # ShapeError: ...the shapes differ
split(x(2, 5), 2)  # ShapeError: ...it cannot be split into 2
split(x(2, None), 2)  # ShapeError: ...the extent of axis 1 is unknown
transpose(x(2, 3), [0, 0])  # ShapeError: ...(0, 0) is not an order
squeeze(x(2, 3), [0])  # ShapeError: ...are not all 1
reduce_sum(x(2, 3), dim=2)  # ShapeError: ...axis 2 is outside a shape of 2
softmax(x(2), axis=1)  # ShapeError: ...axis 1 is outside
sigmoid_cross_entropy_with_logits(x(2), x(2, dtype="int64"))  # ShapeError: ...of 'x_1' needs floats, not int64; use layers.cast
mean(x(2, dtype="int64"))  # ShapeError: ...mean of 'x_0' needs floats
accuracy(x(2, 2), x(2))  # IdError: ...it must be int64
accuracy(x(2, 2), x(2, 1, dtype="int64"), k=0)  # k is 0
accuracy(x(None, 3, 2), x(None, 1))  # ShapeError: ...[n, classes]
exp(x(2, dtype="int64"))  # ShapeError: ...needs floats, not int64
embedding(x(None, 2), [5, 2])  # IdError: ...they must be int64
embedding(x(None, dtype="int64"), [None, 2])  # IdError: ...is_distributed=True only
embedding(x(None, dtype="int64"), [5])  # ShapeError: ...must be [rows, dim]
embedding(x(None, dtype="int64"), [5, 2], dtype="float64")  # ShapeError: ...float32
embedding(x(None, dtype="int64"), [10, 2], padding_idx=10)  # padding_idx is 10, it must be in [-10, 10)
fluid.nn.Embedding(10, 2, -11)  # padding_idx is -11, it must be in [-10, 10)
square_error_cost(x(None, 1), x(None, 2))  # ShapeError: ...shapes must be equal
cross_entropy(x(None, 3), x(None, 1))  # IdError: ...hard labels are int64
cross_entropy(x(None, 3), x(None, 2, dtype="int64"))  # ShapeError: ...it must be
auc(x(None, 1), x(None, 1), num_thresholds=0)  # num_thresholds is 0
auc(x(None, 1), x(None, 1), curve="PR")  # ConfigError: ...curve is 'PR'
expand(x(None, 2), [1, -1])  # expand_times is [1, -1]
fluid.nn.Dropout(1.5)  # p is 1.5
fluid.nn.Dropout(0.5, "upscale")  # mode is 'upscale'
fluid.dygraph.Dropout(0.5, None, "upscale")  # dropout_implementation is 'upscale'
fluid.gradients([mean(x(2)), mean(x(2))], x(2))  # UsageError: ...got 2 targets
fluid.gradients([], x(2))  # UsageError: ...got 0 targets
dropout(x(2), 1.5)  # ConfigError: ...dropout_prob is 1.5
clip(x(2), 1.0, 0.0)  # ShapeError: ...min 1.0 is above max 0.0
cast(x(2), "complex64")  # ShapeError: ...dtype 'complex64' is unknown
layers.data("twice", [2]), layers.data("twice", [2])  # UsageError: ...'twice' already
create_parameter([2], "float64")  # ShapeError: ...parameters are float32
elementwise_add(x(2, 3), x(3, 4), axis=1)  # ShapeError: ...does not fit into
const([1.0]) + const([1])  # ShapeError: ...the dtypes differ; use layers.cast
batch_norm(x(None, 3), data_layout="CHW")  # data_layout is 'CHW', use NCHW or NHWC
gather(const(np.ones((2, 2))), const([5]))  # IdError: ...indices are 5 to 5, there are rows 0 to 1
one_hot(const([[3]]), 0)  # depth is 0
one_hot(const([[3]]), 3)  # IdError: ...values are 3 to 3, depth is 3
cross_entropy(const(np.full((2, 2), 0.5)), const([[2], [1]]))  # IdError: ...labels are 1 to 2, there are classes 0 to 1
run([[1], [1, 2]])  # feed 'x' has samples of 1 to 2 values; pad them to one length
run([1, []])  # feed 'x' has samples of 0 to 1 values
run([[1, 2]], False)  # run: fetch_list is None and the program trains nothing
pool("mean")  # pool_type is 'mean', use one of sum, average
pool(3)  # pool_type is 3
pool(lengths=[1, 2, 6, 0])  # a length is 6; sequences here have 0 to 5 steps
pool(lengths=[1, 2, -1, 0])  # a length is -1
pool(lengths=[1, 2])  # is (2,), it must be [batch] or [batch, 1]
pool(lengths=[1.0, 2.0, 3.0, 4.0])  # they must be int64
pool(mask=np.ones((4, 4)))  # is (4, 4), it must be [batch, time]
pool(lengths=[3, 0, 5, 1], mask=np.ones((4, 5)))  # lengths and a mask; give one
pool(data=np.ones(3))  # it must be [batch, time, ...]
pool(data=np.ones((3, 2), int))  # needs floats
SequencePool("x")  # ConfigError: ...pool_type is 'x'
"""
INITIALIZERS = """
initializer.Constant("a")  # Constant: value is 'a', it must be a finite number
initializer.Constant(nan)  # ConfigError: Constant: value is nan
initializer.Uniform(0.0, np.inf)  # ConfigError: Uniform: high is inf
initializer.Uniform(seed=-1)  # ConfigError: Uniform: seed is -1, it must be a whole number
initializer.Xavier(uniform="no")  # Xavier: uniform is 'no', it must be True or
initializer.MSRA(fan_in="x")  # MSRA: fan_in is 'x', it must be a finite number
initializer.Assign([[1], [1, 2]])  # Assign: value cannot be read as an array
initializer.Xavier().resolve((-1, 4))  # ShapeError: ...pass fan_in and fan_out
initializer.Assign([1.0]).resolve((1, 1))  # ConfigError: ...cannot initialise a sparse table
initializer.resolve(3, (1,))  # initializer is 3
create_parameter([3, 2], attr=initializer.Assign(np.ones((2, 3))))  # ShapeError: ...of shape (3, 2) cannot start as an array of
"""


@pytest.mark.parametrize("table", [LAYERS, INITIALIZERS])
def test_layers(table: str) -> None:
    """What does not fit is refused when it is built, or when values come."""
    check_refusals(table, NAMES, own_programs)


FEEDS = """
run({"ids": np.zeros((5, 9), np.int64)})  # ShapeError: ...feed 'ids' has shape (5, 9), the program wants (None, 10)
run({"ids": np.full((5, 10), 0.5)})  # IdError: ...feed 'ids' must be whole numbers ... 0.5
run({"ids": np.full((5, 10), np.nan)})  # IdError: ...nan
run({"ids": np.full((5, 10), 2.0**63)})  # IdError: ...whole numbers of 64 bits
run({"ids": np.full((5, 10), 2**64 - 1, np.uint64)})  # IdError: ...whole numbers of 64 bits
run({"ids": np.full((5, 10), 7)})  # IdError: ...embedding 'table.w_0' has rows 0 to 6; an id is 7
run({"ids": np.full((5, 10), -1)})  # IdError: ...an id is -1
run({"ids": np.full((5, 10), "a")})  # ShapeError: ...feed 'ids' has dtype
run({})  # UsageError: ...feed 'ids' is missing
run({"ids": np.zeros((5, 10)), "idz": 1})  # UsageError: ...feed 'idz' is not data of the program; it has ids
run({"ids": np.zeros((5, 10))}, ["nothing"])  # UsageError: ...fetch 'nothing' is not in the program
run({"ids": np.zeros((5, 10))}, [3])  # UsageError: ...fetch_list has 3
sgd.minimize(rows)  # ShapeError: ...has shape (None, 10, 2); it must be a single value
sgd.minimize(loss, parameter_list=["fc_9.w_0"])  # UsageError: ...parameter_list 'fc_9.w_0' is not in the program
rows.numpy()  # UsageError: ...has no value until a program runs
"""


def test_feeds_and_fetches() -> None:
    """A bad feed or fetch is refused before anything changes."""
    ids = layers.data("ids", [None, 10], dtype="int64")
    rows = layers.embedding(ids, [7, 2], is_sparse=True, name="table")
    sgd, loss = HandSGD(), layers.mean(rows)
    sgd.minimize(loss)

    def fed(feed: Any, fetch_list: Any = (loss,)) -> Any:
        return ps.Executor().run(feed=feed, fetch_list=list(fetch_list))

    check_refusals(FEEDS, {"run": fed, "np": np, "sgd": sgd, "loss": loss, "rows": rows})
    assert sgd.calls == []


def test_no_such_folder(tmp_path: Path) -> None:
    """A state that cannot be written says where."""
    with pytest.raises(CheckpointError, match=r"none/state.pdopt' cannot be written"):
        fluid.save({"step": 1}, str(tmp_path / "none" / "state.pdopt"))


def test_empty_batch() -> None:
    """A batch without samples has the loss NaN, as NumPy's mean, and changes no weight."""
    ids = layers.data("ids", [None, 2], dtype="int64")
    rows = layers.reshape(layers.embedding(ids, [10, 3], is_sparse=True), [-1, 6])
    loss = layers.mean(layers.square(layers.fc(rows, 1)))
    optimizer.SGD(0.5).minimize(loss)
    weights = default_startup_program().parameters.values()
    started = [np.array(parameter.numpy()) for parameter in weights]
    (value,) = ps.Executor().run(feed={"ids": np.empty((0, 2), np.int64)}, fetch_list=[loss])
    assert np.isnan(value)
    for parameter, start in zip(weights, started, strict=True):
        np.testing.assert_array_equal(parameter.numpy(), start)
