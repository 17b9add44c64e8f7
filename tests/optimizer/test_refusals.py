"""What optimizers, schedules, averages and strategies refuse, each with a sentence that quotes the value."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import clip, fluid, layers, optimizer, regularizer
from psfleet.core.base.errors import PsfleetError
from psfleet.core.client import Client
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.strategy import AMPSettings, Settings
from psfleet.optimizer import SGD, Adam, lr
from psfleet.optimizer.outgoing_gradients import GradientScaler
from tests.refusals import check_refusals, named
from tests.runtimes import own_programs

pytestmark = pytest.mark.quick

NAMES = vars(optimizer) | vars(clip) | vars(regularizer) | named(Parameter, SparseGrad)
NAMES |= {"lr": lr, "fluid": fluid, "np": np, "nan": math.nan, "SETTINGS": Settings.from_parts}
VALUES = """
SGD(-0.1)  # learning_rate is -0.1
SGD(nan)  # learning_rate is nan
SGD("fast")  # learning_rate is 'fast'
SGD(0.1, parameters=[])  # parameters is []
SGD(0.1, parameters=[3])  # parameters has 3
SGD(0.1, parameters=Parameter("w", [1.0]))  # must be a list
SGD(0.1, weight_decay=-1.0)  # weight_decay is -1.0
SGD(0.1, grad_clip=1.0)  # grad_clip is 1.0
SGD(0.1, weight_decay=0.1, regularization=0.1)  # repeats weight_decay
SGD(0.1).set_lr(-2.0)  # value is -2.0
SGD(0.1).set_lr_scheduler(0.1)  # scheduler is 0.1
SGD(0.1).step()  # parameters=[...]
SGD(0.1).apply_gradients([(Parameter("w", [1.0]), "x")])  # the gradient of parameter 'w' is 'x'; it must be an array
SGD(0.1, parameters=[Parameter("w", [1.0])]).minimize(3)  # the loss is 3; it must be a variable
SGD(0.1, no_such_argument=1)  # 'no_such_argument'
DGCMomentum(0.1, 0.9)  # 'rampup_begin_step'
Momentum(0.1, 1.5)  # momentum is 1.5
Adam(0.1, beta1=1.0)  # beta1 is 1.0
Adam(0.1, beta2=-0.5)  # beta2 is -0.5
Adam(0.1, epsilon=-1.0)  # epsilon is -1.0
Adam(0.1, sparse_mode="eager")  # sparse_mode is 'eager'
Adam(0.1, 0.95, 0.9, sparse_mode="catch-up")  # beta1 is 0.95 and beta2 is 0.9
Adam(0.1, amsgrad=True, sparse_mode="catch-up")  # amsgrad
AdamW(0.1, weight_decay=-0.1)  # weight_decay is -0.1
AdamW(lr_ratio=2.0)  # lr_ratio is 2.0, it must be a function
Ftrl(0.1, lr_power=0.5)  # lr_power is 0.5
Ftrl(0.1, l1=-1.0)  # l1 is -1.0
ASGD(0.1, 0)  # batch_num is 0
Lamb(0.1, -0.1)  # weight_decay is -0.1
Lamb(exclude_from_weight_decay_fn=3)  # exclude_from_weight_decay_fn is 3, it must be a function
LarsMomentum(0.1, 0.9, exclude_from_weight_decay="bias")  # exclude_from_weight_decay is 'bias', it must be a list
RMSProp(0.1, rho=1.5)  # rho is 1.5
DGCMomentum(0.1, 0.9, -1)  # rampup_begin_step is -1
DGCMomentum(0.1, 0.9, 0, rampup_step=0)  # rampup_step is 0
DGCMomentum(0.1, 0.9, 0, sparsity=0.9)  # sparsity is 0.9, it must be a list
DGCMomentum(0.1, 0.9, 0, sparsity=[1.0])  # sparsity is [1.0]
DGCMomentum(0.1, 0.9, 0, num_trainers=0)  # num_trainers is 0
DGCMomentum(0.1, 0.9, 0, local_grad_clip_norm=-1.0)  # clip_norm is -1.0
LookAhead(SGD(0.1), alpha=2.0)  # alpha is 2.0
LookAhead(SGD(0.1), alpha="0.5")  # alpha is '0.5', it must be a finite number in [0, 1]
LookAhead(SGD(0.1), k=0)  # k is 0
ExponentialMovingAverage("0.9")  # decay is '0.9', it must be a finite number in [0, 1)
ExponentialMovingAverage(1)  # decay is 1
ExponentialMovingAverage().update()  # UsageError: ...no parameter
ModelAverage("0.1")  # average_window_rate is '0.1', it must be a finite number of at least 0
ModelAverage(0.1, 5, 4)  # min_average_window is 5
ModelAverage(0.1).apply().__enter__()  # UsageError: ...before the first
DistributedOptimizer(SGD(0.1), "async")  # WrongType: DistributedOptimizer: strategy is
DistributedOptimizer(SGD(0.1), [1])  # WrongType: DistributedOptimizer: strategy is
DistributedOptimizer("async")  # WrongType: ...optimizer is ..., it must be a psfleet optimizer
DistributedOptimizer(SGD(0.1), {"mode": {}})  # ConfigError: ...no part 'mode'
ClipGradByNorm(0.0)  # clip_norm is 0.0
ClipGradByValue("1")  # max is '1', it must be a finite number
ClipGradByValue(1.0, 2.0)  # min is 2.0 and max is 1.0
L2Decay(-0.1)  # coeff is -0.1
fluid.ParamAttr(learning_rate=-1.0)  # ParamAttr: learning_rate is -1.0, it must be a finite number of at least 0
fluid.ParamAttr(name=3)  # ParamAttr: name is 3, it must be a text
Parameter("w", "abc")  # the value of parameter 'w' is 'abc'; it must be an array of real numbers
Parameter("w", [[1], [1, 2]])  # the value of parameter 'w' cannot be read as an array
Parameter("w", np.ones(2, np.complex64))  # the value of parameter 'w' has the dtype complex64
Parameter("", [1.0])  # name is '', it must be a text
SparseGrad([1], ["x"])  # the rows array of a sparse gradient is ['x']; it must be an array
Parameter("w", shape=(3, 1), sparse=True).lookup(np.array([0.5]))  # parameter 'w': id 0.5 is not a whole number
Parameter("w", shape=(3, 1), sparse=True).lookup(np.array([3]))  # parameter 'w' has rows 0 to 2; id 3 is not one
"""
SCHEDULES = """
lr.NoamDecay(0, 10)  # d_model is 0
lr.PiecewiseDecay([1], [1.0])  # 1 boundaries need 2 values
lr.ExponentialDecay(0.5, 1.5)  # gamma is 1.5
lr.StepDecay(-1.0, 7)  # learning_rate is -1.0
lr.StepDecay(0.5, 0)  # step_size is 0
lr.MultiStepDecay(0.5, [5, 3])  # milestones are [5, 3]
lr.MultiStepDecay(0.5, 3)  # milestones is 3, it must be a list
lr.PolynomialDecay(0.5, 0)  # decay_steps is 0
lr.CosineAnnealingDecay(0.5, 0)  # T_max is 0
lr.CosineAnnealingDecay(0.5, "12")  # T_max is '12', it must be a whole number above 0
lr.LinearWarmup(0.5, 3, 0.5, 0.1)  # end_lr is 0.1
lr.LinearWarmup("0.5", 8, 0.0, 0.5)  # learning_rate is '0.5', it must be a finite number of at least 0 or an LRScheduler
lr.OneCycleLR(0.5, 40, phase_pct=2.0)  # phase_pct is 2.0
lr.CyclicLR(0.1, 0.5, 0)  # step_size_up is 0
lr.ReduceOnPlateau(0.5, factor=1.0)  # factor is 1.0
lr.ReduceOnPlateau(0.5).step("loss")  # metrics is 'loss', it must be one number
lr.StepDecay(0.5, 7).step(-1)  # epoch is -1
lr.exponential_decay(0.5, 0, 0.9)  # steps is 0
lr.StepDecay(0.5, 7).set_state_dict({"last_epoch": 3})  # UsageError: ...last_lr
"""
GROUPS = """
SGD(0.1, parameters=[{"params": [A]}, {"params": [A, B]}])  # Parameter('a', shape=(6,)) is in two groups
SGD(0.1, parameters=[{"params": [A], "beta1": 0.5}])  # has 'beta1'; it may have params, learning_rate, weight_decay
SGD(0.1, parameters=[{"weight_decay": 0.1}])  # 'params'
SGD(0.1, parameters=[{"params": []}])  # at least one
SGD(0.1, parameters=[{"params": [A]}, B])  # each entry must be
SGD(0.1, parameters=[{"params": [A], "learning_rate": -1}])  # a group's learning_rate is -1
Adam(0.1, parameters=[{"params": [A], "beta1": 1.5}])  # beta1 is 1.5
DGCMomentum(0.1, 0.9, 0, parameters=[{"params": [A]}])  # DGCMomentum: parameters has groups
"""
STRATEGIES = """
SETTINGS({"amp": {"dtype": "int8"}})  # amp dtype is 'int8'
SETTINGS({"amp": {"dtype": "float16", "init_loss_scaling": 0.5}})  # init_loss_scaling is 0.5
SETTINGS({"amp": {"dtype": "float16", "decr_ratio": 2.0}})  # decr_ratio is 2.0
SETTINGS({"amp": {"dtype": "float16", "incr_every_n_steps": 0}})  # incr_every_n_steps is 0
SETTINGS({"amp": {"init_loss_scaling": 8.0}})  # needs no loss scaling
SETTINGS({"amp": {"level": "O2"}})  # 'level'
SETTINGS({"amp": {}, "dgc": {}})  # dgc and amp contradict
SETTINGS({"localsgd": {"k_steps": 0}})  # localsgd k_steps is 0
SETTINGS({"localsgd": {"begin_step": 0}})  # begin_step is 0
SETTINGS({"localsgd": {}, "dgc": {}})  # dgc and localsgd contradict
SETTINGS({"localsgd": {}, "consistency": {"mode": "async"}})  # localsgd and the consistency mode 'async'
SETTINGS({"localsgd": {}, "pipeline": {}})  # localsgd and pipeline contradict
SETTINGS({"localsgd": {"adaptive": True}})  # 'adaptive'
SETTINGS({"wire": {"push": "int4"}})  # wire push is 'int4'; it must be fp32, bf16 or int8
SETTINGS({"wire": {"pull": "bfloat16"}})  # wire pull is 'bfloat16'
SETTINGS({"wire": {"both": "bf16"}})  # 'both'
SETTINGS({"wire": {}, "amp": {}})  # amp and wire contradict
SETTINGS({"wire": {}, "dgc": {}})  # dgc and wire contradict
SETTINGS({"wire": {}, "consistency": {"mode": "geo"}})  # wire and the consistency mode 'geo'
"""
TABLES = """
ps.sparse_table("t", 2, None)  # there is no table 't', and without an optimizer
ps.dense_table("t", [1.0], "sgd")  # optimizer is 'sgd', it must be an Optimizer
ps.sparse_table("t", 2, LookAhead(SGD(0.1)))  # is LookAhead, which works on the worker
ps.dense_table("t", [1.0], DGCMomentum(0.1, 0.9, 0))  # is DGCMomentum, which works on the worker
ps.sparse_table("t", 2, SGD(0.1, grad_clip=ClipGradByNorm(1.0)))  # the SGD of table 't' has a grad_clip
ps.sparse_table("t", 2, SGD(fluid.layers.noam_decay(64, 10)))  # counts updates, which a plain table does not have
ps.sparse_table("t", "2", SGD(0.1))  # dim is '2', it must be a whole number
ps.dense_table("t", "x", SGD(0.1))  # the value of table 't' is 'x'
"""


@pytest.mark.parametrize("table", [VALUES, SCHEDULES, GROUPS, STRATEGIES])
def test_arguments(table: str) -> None:
    """Wrong arguments of constructors and methods, wrong groups and wrong parts of a strategy are refused."""
    known = {"A": Parameter("a", np.ones(6)), "B": Parameter("b", np.ones((2, 2)))}
    check_refusals(table, NAMES | known)


def test_plain_tables() -> None:
    """Optimizers that a plain table cannot have are refused before a table is made."""
    with Client(EmbeddedRuntime()) as client:
        check_refusals(TABLES, NAMES | {"ps": client})
        assert not client.runtime.specs()


def test_schedules_of_plain_tables() -> None:
    """A schedule that the script steps decides the rate of the next push to a plain table."""
    rate = lr.StepDecay(1.0, 1, 0.5)
    with Client(EmbeddedRuntime()) as client:
        table = client.sparse_table("t", 1, SGD(rate))
        moved = []
        for _ in range(3):
            before = table.pull([7])
            table.push([7], [[1.0]]).wait()
            moved.append(float((before - table.pull([7])).item()))
            rate.step()
    np.testing.assert_allclose(moved, [1, 0.5, 0.25], atol=1e-6)


def recomputing() -> Any:
    """An optimizer that recomputes from a checkpoint."""
    made = optimizer.RecomputeOptimizer(SGD(0.1))
    made._set_checkpoints(["line"])
    return made


MINIMIZE = """
opt().minimize(loss, grad_clip="x")  # grad_clip is 'x'
opt().minimize(loss, parameter_list="line.w_0")  # parameter_list is 'line.w_0', it must be a list
opt().minimize(loss, parameter_list=["line.w_0", "line.w_1"])  # UsageError: ...parameter_list ...'line.w_1'
opt().minimize(loss, parameter_list=[3])  # UsageError: ...parameter_list has 3; it must hold parameters
opt().minimize(loss, no_grad_set="line.w_0")  # no_grad_set is 'line.w_0', it must be a list
opt().minimize(loss, no_grad_set=["line.w_0", "line.w_1"])  # UsageError: ...no_grad_set ...'line.w_1'
opt().minimize(loss, no_grad_set=[3])  # UsageError: ...no_grad_set has 3; it must hold parameters
opt().set_lr("x")  # value is 'x'
opt().set_lr_scheduler("x")  # scheduler is 'x'
"""
KINDS = {
    "SGD": lambda: SGD(0.1),
    "LookAhead": lambda: optimizer.LookAhead(SGD(0.1)),
    "Recompute": recomputing,
    "Pipeline": lambda: optimizer.PipelineOptimizer(SGD(0.1)),
}


@pytest.mark.parametrize(
    ("kind", "eager"), [*((kind, False) for kind in KINDS), ("SGD", True), ("LookAhead", True)]
)
def test_minimize(kind: str, eager: bool) -> None:
    """Wrong arguments of minimize and of the rate are refused, and nothing is added to the program."""
    with own_programs():
        x: Any = (
            fluid.to_tensor(np.ones((1, 1), np.float32)) if eager else layers.data("x", [None, 1])
        )
        loss = layers.mean(layers.fc(x, 1, name="line"))
        check_refusals(MINIMIZE, {"opt": KINDS[kind], "loss": loss})
        assert not default_main_program().updates


BAD_STATES = """
opt.set_state_dict({"other.moment1": np.zeros(2), "other.moment2": np.zeros(2), "other.step": 1})  # other
opt.set_state_dict({"nonsense": 1})  # nonsense
opt.set_state_dict({"global_step": "x"})  # 'x'
"""
BAD_SLOTS = """
opt.set_state_dict({"w.moment1": "x", "w.moment2": np.zeros(2), "w.step": 1})  # 'x'
opt.set_state_dict({"w.moment1": np.zeros(2), "w.moment2": np.zeros(2), "w.step": nan})  # nan
"""


def test_states_of_something_else() -> None:
    """A state with only foreign names, or with a wrong entry, is refused and changes nothing."""
    w = Parameter("w", [1.0, 2.0])
    opt = Adam(0.1, parameters=[w])
    check_refusals(BAD_STATES, NAMES | {"opt": opt})
    opt.apply_gradients([(w, np.ones(2, np.float32))])
    before = opt.state_dict()
    check_refusals(BAD_STATES + BAD_SLOTS.lstrip(), NAMES | {"opt": opt})
    after = opt.state_dict()
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key], after[key])


AVERAGES = """
ema.set_dict({"w.moment": np.ones(2)})  # UsageError: ...has 'w.moment'; was it made by another
ema.set_dict({"updates": 1})  # decay is None
ema.set_dict({"w.ema": "x", "updates": 1, "decay": 0.5})  # the state w.ema is 'x'
ema.set_dict({"w.ema": np.ones(2), "updates": -1, "decay": 0.5})  # updates is -1
ModelAverage(0.5).set_dict({})  # num_updates is None
"""


def test_states_of_loss_scaling() -> None:
    """So are states of the loss scaling, before a table is written."""
    opt = SGD(0.1, parameters=[Parameter("w", [1.0])])
    opt.scale(GradientScaler(AMPSettings("float16")))
    check_refusals(SCALINGS, NAMES | {"opt": opt})


SCALINGS = """
opt.set_state_dict({"loss_scaling": 3})  # loss_scaling is 3, it must be a dict
opt.set_state_dict({"loss_scaling": {"scale": "x"}})  # loss_scaling scale is 'x'
opt.set_state_dict({"loss_scaling": {"scale": 2.0, "good": -1, "bad": 0}})  # loss_scaling good is -1
"""


def test_states_of_averages() -> None:
    """So are states of averages."""
    ema = optimizer.ExponentialMovingAverage(0.5)
    check_refusals(AVERAGES, NAMES | {"ema": ema})
    assert ema.state_dict() == {"updates": 0, "decay": 0.5}


GRADIENTS = """
opt.apply_gradients([(w, np.ones(4))])  # ShapeError: ...'w' has shape
opt.apply_gradients([(w, ONE), (e, SparseGrad(np.array([3]), row))])  # IdError: ...id 3
opt.apply_gradients([(e, SparseGrad(np.array([-1]), row))])  # IdError: ...id -1
opt.apply_gradients([(e, SparseGrad(np.array([0.5]), row))])  # IdError: ...id 0.5
opt.apply_gradients([(e, SparseGrad(np.array([nan]), row))])  # IdError: ...id nan
opt.apply_gradients([(e, SparseGrad(np.array([1]), row[:, :1]))])  # ShapeError: ...rows of (2,)
opt.apply_gradients([(w, ONE), (w, ONE)])  # UsageError: ...two gradients
opt.apply_gradients([])  # UsageError: ...no gradient
opt.apply_gradients([(w, None)])  # UsageError: ...no gradient
opt.step()  # UsageError: ...parameters=[
"""


def test_gradients() -> None:
    """A gradient that does not fit is refused and changes nothing."""
    one = np.ones(3, np.float32)
    w, e, opt = Parameter("w", one), Parameter("e", np.ones((3, 2)), sparse=True), SGD(0.1)
    given = {"w": w, "e": e, "opt": opt, "ONE": one, "row": np.ones((1, 2), np.float32)}
    check_refusals(GRADIENTS, NAMES | given)
    assert w.numpy().tolist() == [1] * 3
    assert opt.state_dict() == {}


def test_a_rate_that_fails_later() -> None:
    """A function that gives no number, and a formula that overflows, end in a sentence at that step."""
    replies = itertools.chain([1.0, 1.0], itertools.repeat("x"))
    schedule = lr.LambdaDecay(0.5, lambda epoch: next(replies))  # type: ignore[arg-type,return-value]
    schedule.step()
    with pytest.raises(PsfleetError, match="what lr_lambda gives is 'x'"):
        schedule.step()
    growing = lr.exponential_decay(1.0, 1, 1e200)
    growing.step()
    with pytest.raises(PsfleetError, match="the rate of epoch 2"):
        growing.step()


def test_checkpoints_are_a_list() -> None:
    """One name in place of a list of checkpoints is refused."""
    opt = optimizer.RecomputeOptimizer(SGD(0.1))
    for wrong in ("line", 3, None):
        with pytest.raises(
            psfleet.UsageError, match=f"checkpoints is {wrong!r}; it must be a list"
        ):
            opt._set_checkpoints(wrong)


def test_periods_of_restarts_are_whole_numbers() -> None:
    """As in the reference a float is refused, also one without a fraction."""
    for arguments in ({"T_0": 1.0}, {"T_0": 2, "T_mult": 2.0}, {"T_0": True}):
        with pytest.raises(PsfleetError, match=r"it must be a whole number above 0, no float"):
            lr.CosineAnnealingWarmRestarts(0.1, **arguments)
