"""The reference's documents against the product: names, arguments in order, defaults, methods."""

import inspect
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, initializer
from psfleet.core.engine import rules
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.optimizer import Optimizer, lr
from psfleet.regularizer import L2Decay

pytestmark = pytest.mark.quick

REQUIRED = inspect.Parameter.empty
# As the older documents list them; `regularization=None, name=None` follow there, given by name too.
OPTIMIZERS = """
SGD(learning_rate)
Momentum(learning_rate, momentum, use_nesterov=False)
LarsMomentum(learning_rate, momentum, lars_coeff=0.001, lars_weight_decay=0.0005)
Adagrad(learning_rate, epsilon=1e-6, initial_accumulator_value=0.0)
DecayedAdagrad(learning_rate, decay=0.95, epsilon=1e-6)
Adadelta(learning_rate, epsilon=1e-6, rho=0.95)
Adam(learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8, lazy_mode=False)
Adamax(learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8)
RMSProp(learning_rate, rho=0.95, epsilon=1e-6, momentum=0.0, centered=False)
Ftrl(learning_rate, l1=0.0, l2=0.0, lr_power=-0.5)
Lamb(learning_rate=0.001, lamb_weight_decay=0.01, beta1=0.9, beta2=0.999, epsilon=1e-6, exclude_from_weight_decay_fn=None)
DGCMomentum(learning_rate, momentum, rampup_begin_step, rampup_step=1, sparsity=(0.999,), use_nesterov=False, local_grad_clip_norm=None, num_trainers=None)
"""  # noqa: E501
OTHERS = """
ExponentialMovingAverage(decay=0.999, thres_steps=None, name=None)
ModelAverage(average_window_rate, min_average_window=10000, max_average_window=10000, regularization=None, name=None)
PipelineOptimizer(optimizer, cut_list=None, place_list=None, concurrency_list=None, queue_size=30, sync_steps=1, start_cpu_core_id=0)
RecomputeOptimizer(optimizer)
DistributedOptimizer(optimizer, strategy=None)
Optimizer(learning_rate, parameters=None, weight_decay=None, grad_clip=None, name=None)
ASGD(learning_rate=0.001, batch_num=1, parameters=None, weight_decay=None, grad_clip=None, name=None)
DistributedOptimizer.minimize(self, losses, scopes=None, startup_programs=None, parameter_list=None, no_grad_set=None)
DistributedOptimizer.backward(self, loss, startup_program=None, parameter_list=None, no_grad_set=None, callbacks=None)
DistributedOptimizer.apply_gradients(self, params_grads)
ExponentialMovingAverage.update(self)
ExponentialMovingAverage.apply(self, executor, need_restore=True)
ExponentialMovingAverage.restore(self, executor)
ModelAverage.apply(self, executor, need_restore=True)
ModelAverage.restore(self, executor)
ModelAverage.backward(self, loss, startup_program=None, parameter_list=None, no_grad_set=None, callbacks=None)
ModelAverage.apply_gradients(self, params_grads)
ModelAverage.apply_optimize(self, loss, startup_program, params_grads)
ModelAverage.minimize(self, loss, startup_program=None, no_grad_set=None, grad_clip=None)
ModelAverage.set_dict(self, state_dict)
ModelAverage.state_dict(self)
ModelAverage.clear_grad(self)
ASGD.append_regularization_ops(self, parameters_and_grads, regularization=None)
ASGD.clear_grad(self, set_to_zero=True)
RecomputeOptimizer.load(self, stat_dict)
RecomputeOptimizer._set_checkpoints(self, checkpoints)
SGD.current_step_lr(self)
SGD.get_opti_var_name_list(self)
"""  # noqa: E501
METHODS = """
minimize(self, loss, startup_program=None, no_grad_set=None, grad_clip=None)
backward(self, loss, startup_program=None, parameter_list=None, no_grad_set=None, callbacks=None)
apply_gradients(self, params_grads)
apply_optimize(self, loss, startup_program, params_grads)
state_dict(self)
set_dict(self, state_dict)
set_state_dict(self, state_dict)
set_lr(self, value)
set_lr_scheduler(self, scheduler)
get_lr(self)
step(self)
clear_grad(self)
"""  # the two faces of the API name the parameters of `minimize` differently
SCHEDULES = (
    "CosineAnnealingDecay CosineAnnealingWarmRestarts CyclicLR ExponentialDecay InverseTimeDecay LRScheduler "
    "LambdaDecay LinearLR LinearWarmup MultiStepDecay MultiplicativeDecay NaturalExpDecay NoamDecay "
    "OneCycleLR PiecewiseDecay PolynomialDecay ReduceOnPlateau StepDecay"
)
SUFFIXED = (
    "SGD Momentum LarsMomentum Adagrad DecayedAdagrad Adadelta Adam AdamW AMSGrad Adamax RMSProp Ftrl Lamb "
    "DGCMomentum ASGD LookAhead RowWiseAdagrad"
)


def documented(lines: str) -> dict[str, dict[str, Any]]:
    """The arguments and defaults of each name."""
    names = {}
    for line in lines.strip().splitlines():
        name, _, arguments = line.partition("(")
        parameters = inspect.signature(eval(f"lambda {arguments[:-1]}: 0")).parameters
        names[name] = {key: value.default for key, value in parameters.items() if key != "self"}
    return names


def check(name: str, arguments: dict[str, Any]) -> list[str]:
    """Every documented argument is there, in the documented order, with its default; all there are."""
    made: Any = Optimizer if name == "Optimizer" else fluid.optimizer
    for part in name.split(".") if made is fluid.optimizer else ():
        made = getattr(made, part)
    parameters = inspect.signature(made).parameters
    assert [n for n in parameters if n in arguments] == list(arguments), f"{name}: order or names"
    for key, default in arguments.items():
        if default is not REQUIRED:  # where the documents have none, a default does no harm
            assert parameters[key].default == default, f"{name}: {key}"
    return [key for key in parameters if key != "self"]


@pytest.mark.parametrize("name", documented(OPTIMIZERS))
def test_optimizers(name: str) -> None:
    """Hyperparameters may be given by place or by name, and all methods of the base class are there."""
    made, arguments = getattr(fluid.optimizer, name), documented(OPTIMIZERS)[name]
    later = ("initial_accumulator_value", "lazy_mode", "exclude_from_weight_decay_fn")
    first = [key for key in arguments if key not in later]
    actual = check(name, arguments)
    if name != "Momentum":  # of its two faces one has `parameters` there
        assert actual[: len(first)] == first
    needed = {"learning_rate": 0.1, "momentum": 0.5, "rampup_begin_step": 2}
    opt: Optimizer = made(
        **{k: needed[k] for k, v in arguments.items() if v is REQUIRED},
        regularization=L2Decay(0.5),
        name="mine",
    )
    assert opt.decay().l2 == 0.5
    check_methods(name)


def check_methods(name: str) -> None:
    for method, arguments in documented(METHODS).items():
        problems = check(f"{name}.{method}", arguments)
        assert method != "minimize" or "parameter_list" in problems


def test_wrappers_and_methods() -> None:
    """Averages, wrappers, the newer pages, and methods that only some have, have the documented arguments."""
    for name, arguments in documented(OTHERS).items():
        actual = check(name, arguments)
        assert name != "ModelAverage.minimize" or "parameter_list" in actual
    for name in ("RecomputeOptimizer", "PipelineOptimizer"):
        check_methods(name)


def test_momentum_by_place() -> None:
    """The third argument is `use_nesterov` for the older face and `parameters` for the newer."""
    momentum: Any = fluid.optimizer.Momentum
    assert momentum(0.1, 0.5, True).rule() == rules.Momentum(0.5, True)
    w = Parameter("w", np.zeros(2))
    assert momentum(0.1, 0.5, [w], True).parameters == [w]


def test_other_names() -> None:
    """Schedules, initializers, clips and regularizers; older names mean the same classes."""
    for name in SUFFIXED.split():
        assert getattr(fluid.optimizer, f"{name}Optimizer") is getattr(fluid.optimizer, name)
    for name in SCHEDULES.split():
        assert hasattr(lr, name), name
    for name in ("Constant", "MSRA", "Normal", "TruncatedNormal", "Uniform", "Xavier"):
        assert getattr(initializer, f"{name}Initializer") is getattr(initializer, name)
    for name in ("L1Decay", "L2Decay"):
        older = getattr(fluid.regularizer, f"{name}Regularizer")
        assert older is getattr(fluid.regularizer, name)
        assert older().coeff == 0.0
        assert older(0.5).coeff == older(regularization_coeff=0.5).coeff == 0.5
    for kind in ("Value", "Norm", "GlobalNorm"):
        assert hasattr(fluid.clip, f"GradientClipBy{kind}")
    attribute = "name initializer learning_rate regularizer trainable do_model_average"
    assert set(attribute.split()) <= set(inspect.signature(fluid.ParamAttr).parameters)
