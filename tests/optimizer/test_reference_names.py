"""The reference's documents against the product: names, arguments in order, defaults, methods."""

import inspect
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, initializer, rules
from psfleet.optimizer import Optimizer, lr
from psfleet.parameters.parameter import Parameter
from psfleet.regularizer import L2Decay

REQUIRED = inspect.Parameter.empty
RATE: dict[str, Any] = {"learning_rate": 0.001}
NEEDED: dict[str, Any] = {"learning_rate": REQUIRED}
LAST: dict[str, Any] = {"regularization": None, "name": None}
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
# As the older documents list them; `regularization` and `name` are given by name there too.
SIGNATURES: dict[str, dict[str, Any]] = {
    "SGD": {**NEEDED, **LAST},
    "Momentum": {**NEEDED, "momentum": REQUIRED, "use_nesterov": False, **LAST},
    "LarsMomentum": {
        **NEEDED,
        "momentum": REQUIRED,
        "lars_coeff": 0.001,
        "lars_weight_decay": 0.0005,
        **LAST,
    },
    "Adagrad": {**NEEDED, "epsilon": 1e-6, **LAST, "initial_accumulator_value": 0.0},
    "DecayedAdagrad": {**NEEDED, "decay": 0.95, "epsilon": 1e-6, **LAST},
    "Adadelta": {"learning_rate": REQUIRED, "epsilon": 1e-6, "rho": 0.95, **LAST},
    "Adam": {**RATE, **ADAM, **LAST, "lazy_mode": False},
    "Adamax": {**RATE, **ADAM, **LAST},
    "RMSProp": {**NEEDED, "rho": 0.95, "epsilon": 1e-6, "momentum": 0.0, "centered": False, **LAST},
    "Ftrl": {**NEEDED, "l1": 0.0, "l2": 0.0, "lr_power": -0.5, **LAST},
    "Lamb": {
        **RATE,
        "lamb_weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-6,
        **LAST,
        "exclude_from_weight_decay_fn": None,
    },
    "DGCMomentum": {
        **NEEDED,
        "momentum": REQUIRED,
        "rampup_begin_step": REQUIRED,
        "rampup_step": 1,
        "sparsity": (0.999,),
        "use_nesterov": False,
        "local_grad_clip_norm": None,
        "num_trainers": None,
        **LAST,
    },
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "ExponentialMovingAverage": {"decay": 0.999, "thres_steps": None, "name": None},
    "ModelAverage": {
        "average_window_rate": REQUIRED,
        "min_average_window": 10000,
        "max_average_window": 10000,
        "regularization": None,
        "name": None,
    },
    "PipelineOptimizer": {
        "optimizer": REQUIRED,
        "cut_list": None,
        "place_list": None,
        "concurrency_list": None,
        "queue_size": 30,
        "sync_steps": 1,
        "start_cpu_core_id": 0,
    },
    "RecomputeOptimizer": {"optimizer": REQUIRED},
    "DistributedOptimizer": {"optimizer": REQUIRED, "strategy": None},
}
NEWER: dict[str, Any] = {"parameters": None, "weight_decay": None, "grad_clip": None, "name": None}
APPLY: dict[str, Any] = {"executor": REQUIRED, "need_restore": True}
OWN_METHODS: dict[str, dict[str, Any]] = {  # beside those of the base class
    "DistributedOptimizer.minimize": {
        "losses": REQUIRED,
        "scopes": None,
        "startup_programs": None,
        "parameter_list": None,
        "no_grad_set": None,
    },
    "ExponentialMovingAverage.update": {},
    "ExponentialMovingAverage.apply": APPLY,
    "ExponentialMovingAverage.restore": {"executor": REQUIRED},
    "ModelAverage.apply": APPLY,
    "ModelAverage.restore": {"executor": REQUIRED},
    "ASGD.append_regularization_ops": {"parameters_and_grads": REQUIRED, "regularization": None},
    "ASGD.clear_grad": {"set_to_zero": True},
    "RecomputeOptimizer.load": {"stat_dict": REQUIRED},
    "RecomputeOptimizer._set_checkpoints": {"checkpoints": REQUIRED},
    "SGD.current_step_lr": {},
    "SGD.get_opti_var_name_list": {},
}
METHODS: dict[str, dict[str, Any]] = {
    "minimize": {
        "loss": REQUIRED,
        "startup_program": None,
        "parameter_list": None,
        "no_grad_set": None,
        "grad_clip": None,
    },
    "backward": {
        "loss": REQUIRED,
        "startup_program": None,
        "parameter_list": None,
        "no_grad_set": None,
        "callbacks": None,
    },
    "apply_gradients": {"params_grads": REQUIRED},
    "apply_optimize": {"loss": REQUIRED, "startup_program": REQUIRED, "params_grads": REQUIRED},
    "state_dict": {},
    "set_dict": {"state_dict": REQUIRED},
    "set_state_dict": {"state_dict": REQUIRED},
    "set_lr": {"value": REQUIRED},
    "set_lr_scheduler": {"scheduler": REQUIRED},
    "get_lr": {},
    "step": {},
    "clear_grad": {},
}
SCHEDULES = [
    "CosineAnnealingDecay",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LRScheduler",
    "LambdaDecay",
    "LinearLR",
    "LinearWarmup",
    "MultiStepDecay",
    "MultiplicativeDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "OneCycleLR",
    "PiecewiseDecay",
    "PolynomialDecay",
    "ReduceOnPlateau",
    "StepDecay",
]
INITIALIZERS = ["Constant", "MSRA", "Normal", "TruncatedNormal", "Uniform", "Xavier"]


def check(owner: str, found: dict[str, inspect.Parameter], documented: dict[str, Any]) -> None:
    """Every documented argument is there, in the documented order, with its default."""
    shared = [name for name in documented if name in found]
    assert [name for name in found if name in documented] == shared, f"{owner}: order"
    for name, default in documented.items():
        assert name in found, f"{owner} has no argument {name!r}"
        if default is not REQUIRED:  # where the documents have none, a default does no harm
            assert found[name].default == default, f"{owner}: {name}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_optimizers(name: str) -> None:
    """Both names mean one class, whose hyperparameters may be given by place or by name."""
    made = getattr(fluid.optimizer, name)
    assert getattr(fluid.optimizer, f"{name}Optimizer") is made
    documented = {k: v for k, v in SIGNATURES[name].items() if k not in LAST}
    first = [k for k in documented if k not in ("initial_accumulator_value", "lazy_mode")]
    first = [k for k in first if k != "exclude_from_weight_decay_fn"]
    found = dict(inspect.signature(made).parameters)
    check(name, found, documented)
    if name != "Momentum":  # of its two faces one has `parameters` there
        assert list(found)[: len(first)] == first
    needed = {"learning_rate": 0.1, "momentum": 0.5, "rampup_begin_step": 2}
    opt: Optimizer = made(
        **{k: needed[k] for k, v in documented.items() if v is REQUIRED},
        regularization=L2Decay(0.5),
        name="mine",
    )
    assert opt.decay().l2 == 0.5


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers(name: str) -> None:
    """So have averages and wrappers the documented arguments."""
    found = dict(inspect.signature(getattr(fluid.optimizer, name)).parameters)
    check(name, found, WRAPPERS[name])


@pytest.mark.parametrize("name", OWN_METHODS)
def test_own_methods(name: str) -> None:
    """The methods that only some of them have."""
    owner, method = name.split(".")
    found = inspect.signature(getattr(getattr(fluid.optimizer, owner), method)).parameters
    check(name, dict(list(found.items())[1:]), OWN_METHODS[name])


@pytest.mark.parametrize("owner", ["DistributedOptimizer", "ModelAverage"])
def test_methods_of_wrappers(owner: str) -> None:
    """What the page of a wrapper lists of the base class's methods."""
    listed = ["backward", "apply_gradients"]
    if owner == "ModelAverage":
        listed += ["apply_optimize", "minimize", "set_dict", "state_dict", "clear_grad"]
    for name in listed:
        method = getattr(getattr(fluid.optimizer, owner), name)
        found = dict(list(inspect.signature(method).parameters.items())[1:])
        documented = METHODS[name]
        if name == "minimize":  # the two faces of the API name `parameters` differently
            assert "parameter_list" in found
            documented = {k: v for k, v in documented.items() if k != "parameter_list"}
        check(f"{owner}.{name}", found, documented)


def test_newer_pages() -> None:
    """The base class and ASGD have the newer documents' arguments, in their order."""
    check("Optimizer", dict(inspect.signature(Optimizer).parameters), {**NEEDED, **NEWER})
    asgd = {**RATE, "batch_num": 1, **NEWER}
    check("ASGD", dict(inspect.signature(fluid.optimizer.ASGD).parameters), asgd)


@pytest.mark.parametrize("owner", [*SIGNATURES, "RecomputeOptimizer", "PipelineOptimizer"])
def test_methods(owner: str) -> None:
    """The methods of the base class, on every optimizer and wrapper that trains."""
    for name, documented in METHODS.items():
        method = getattr(getattr(fluid.optimizer, owner), name)
        found = dict(list(inspect.signature(method).parameters.items())[1:])
        if name == "minimize":  # the two faces of the API name `parameters` differently
            assert "parameter_list" in found
            documented = {k: v for k, v in documented.items() if k != "parameter_list"}
        check(f"{owner}.{name}", found, documented)


def test_momentum_by_place() -> None:
    """The third argument is `use_nesterov` for the older face and `parameters` for the newer."""
    momentum: Any = fluid.optimizer.Momentum
    assert momentum(0.1, 0.5, True).rule() == rules.Momentum(0.5, True)
    w = Parameter("w", np.zeros(2))
    assert momentum(0.1, 0.5, [w], True).parameters == [w]


def test_other_names() -> None:
    """Schedules, initializers, clips and regularizers, with their older names."""
    for name in SCHEDULES:
        assert hasattr(lr, name), name
    for name in INITIALIZERS:
        assert getattr(initializer, f"{name}Initializer") is getattr(initializer, name)
    for name in ("L1Decay", "L2Decay"):
        older = getattr(fluid.regularizer, f"{name}Regularizer")
        assert older is getattr(fluid.regularizer, name)
        assert older().coeff == 0.0
        assert older(0.5).coeff == older(regularization_coeff=0.5).coeff == 0.5
    for kind in ("Value", "Norm", "GlobalNorm"):
        assert hasattr(fluid.clip, f"GradientClipBy{kind}")
    attribute = inspect.signature(fluid.ParamAttr).parameters
    for name in [
        "name",
        "initializer",
        "learning_rate",
        "regularizer",
        "trainable",
        "do_model_average",
    ]:
        assert name in attribute
