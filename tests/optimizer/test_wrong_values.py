"""Every documented argument against a battery of wrong values: one sentence that quotes the value."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, initializer, layers, optimizer
from psfleet.errors import PsfleetError
from psfleet.fluid import dygraph
from psfleet.optimizer import lr
from psfleet.parameters.parameter import Parameter
from psfleet.program import names
from psfleet.program.program import Program, program_guard

NAN, INF = math.nan, math.inf
NEVER: list[Any] = ["x", [], {}, object()]
NOT_A_NUMBER = [*NEVER, NAN, INF, -INF, True, False, 1j, [0.5, 0.5], np.array([0.1, 0.2])]
WRONG: dict[str, list[Any]] = {
    "number": [*NOT_A_NUMBER, 10**400],
    "not negative": [*NOT_A_NUMBER, -1, -1e-9],
    "positive": [*NOT_A_NUMBER, -1, 0, 0.0],
    "inside 1": [*NOT_A_NUMBER, -1, 1, 2],
    "up to 1": [*NOT_A_NUMBER, -1, 1.5],
    "below 1": [*NOT_A_NUMBER, 1, 2],
    "whole": [*NOT_A_NUMBER, 2.5, -7],
    "count": [*NOT_A_NUMBER, 2.5, -1, 0],
    "switch": [*NEVER, NAN, "no", "False", 2, 0.5],
    "text": [3, 0.5, True, [], {}, object()],
    "function": ["x", 3, NAN, [], {}, True],
    "choice": ["x", "", 3, NAN, [], {}, object(), True],
    "clip": ["x", 3, NAN, [], {}, object(), True],
    "decay": ["x", NAN, INF, -1, [], {}, object(), True],
    "parameters": ["x", 3, NAN, True, {}, [], [3], ["w"], object()],
    "numbers": ["x", 3, NAN, True, {}, [NAN], ["x"], [None], [True], object()],
    "texts": ["x", 3, NAN, True, {}, [3], [None], object()],
    "names": ["x", 3, NAN, True, {}, [3], [None], ["no such name"], object()],
    "optimizer": ["x", 3, NAN, [], {}, object(), True],
    "two": ["x", 3, NAN, {}, [1.0], [1.0, 2.0, 3.0], [NAN, 1.0], ["x", 1.0], object()],
    "thres_steps": ["x", NAN, INF, [], {}, object(), True, -1],
}
KIND = {
    "learning_rate": "not negative",
    "momentum": "up to 1",
    **dict.fromkeys(["beta1", "beta2", "decay", "rho"], "inside 1"),
    **dict.fromkeys(
        ["epsilon", "l1", "l2", "initial_accumulator_value", "lars_coeff", "lars_weight_decay"],
        "not negative",
    ),
    **dict.fromkeys(["lamb_weight_decay", "end_lr", "end_learning_rate"], "not negative"),
    **dict.fromkeys(["min_lr", "eta_min", "start_lr", "threshold", "eps"], "not negative"),
    **dict.fromkeys(["base_learning_rate", "max_learning_rate", "exp_gamma"], "not negative"),
    **dict.fromkeys(["momentum_decay", "average_window_rate"], "not negative"),
    **dict.fromkeys(["rescale_grad", "lr_power"], "number"),
    **dict.fromkeys(["d_model", "power", "divide_factor", "decay_steps"], "positive"),
    **dict.fromkeys(["step_each_epoch", "epochs"], "positive"),
    **dict.fromkeys(["local_grad_clip_norm", "warmup_steps"], "not negative"),
    **dict.fromkeys(["total_steps", "T_max", "T_0", "T_mult", "step_size", "k"], "count"),
    **dict.fromkeys(["step_size_up", "step_size_down", "batch_num", "rampup_step"], "count"),
    **dict.fromkeys(["min_average_window", "max_average_window", "num_trainers"], "count"),
    **dict.fromkeys(["queue_size", "sync_steps", "step", "servers"], "count"),
    **dict.fromkeys(["last_epoch", "patience", "cooldown"], "whole"),
    **dict.fromkeys(["begin", "rampup_begin_step", "start_cpu_core_id"], "whole"),
    **dict.fromkeys(["bias_correction_step", "min_row_size_to_use_multithread"], "whole"),
    **dict.fromkeys(["start_factor", "end_factor", "phase_pct", "alpha"], "up to 1"),
    **dict.fromkeys(["use_nesterov", "centered", "lazy_mode", "amsgrad", "verbose"], "switch"),
    **dict.fromkeys(["staircase", "cycle", "three_phase", "multi_precision"], "switch"),
    **dict.fromkeys(["name", "dtype"], "text"),
    **dict.fromkeys(["lr_ratio", "apply_decay_param_fun", "lr_lambda"], "function"),
    **dict.fromkeys(["exclude_from_weight_decay_fn", "scale_fn"], "function"),
    **dict.fromkeys(["mode", "threshold_mode", "anneal_strategy", "scale_mode"], "choice"),
    **dict.fromkeys(["sparse_mode", "precision"], "choice"),
    "grad_clip": "clip",
    **dict.fromkeys(["weight_decay", "regularization", "regularizer"], "decay"),
    "initializer": "clip",
    **dict.fromkeys(["parameters", "parameter_list"], "parameters"),
    **dict.fromkeys(["sparsity", "boundaries", "values", "milestones"], "numbers"),
    "concurrency_list": "numbers",
    "exclude_from_weight_decay": "texts",
    **dict.fromkeys(["optimizer", "inner_optimizer"], "optimizer"),
    **dict.fromkeys(["learning_rate_range", "etas"], "two"),
    "thres_steps": "thres_steps",
    "gamma": "not negative",
    "clip_norm": "positive",
    "group_name": "text",
    **dict.fromkeys(["auto_skip_clip", "force_cpu", "uniform", "trainable"], "switch"),
    **dict.fromkeys(["do_model_average", "need_clip"], "switch"),
    **dict.fromkeys(["max", "min", "value", "low", "high", "loc"], "number"),
    **dict.fromkeys(
        ["coeff", "regularization_coeff", "scale", "fan_in", "fan_out"], "not negative"
    ),
    "seed": "whole",
    "decay_rate": "not negative",
    "factor": "inside 1",
}
LISTS_OF_VARIABLES = ("cut_list", "place_list")  # what is in them is seen when the program is cut
RIGHT: dict[str, Any] = {
    "learning_rate": 0.1,
    "momentum": 0.9,
    "rampup_begin_step": 0,
    "average_window_rate": 0.5,
    "d_model": 64,
    "warmup_steps": 10,
    "boundaries": [5, 12],
    "values": [0.5, 0.2, 0.1],
    "gamma": 0.5,
    "decay_steps": 10,
    "decay_rate": 0.5,
    "milestones": [5, 12],
    "step_size": 5,
    "lr_lambda": lambda epoch: 0.5,
    "T_max": 10,
    "T_0": 10,
    "start_lr": 0.0,
    "end_lr": 0.5,
    "total_steps": 20,
    "max_learning_rate": 0.5,
    "base_learning_rate": 0.1,
    "step_size_up": 5,
    "step_each_epoch": 3,
    "epochs": 10,
    "begin": 0,
    "max": 1.0,
    "clip_norm": 1.0,
}
MADE: dict[str, Callable[..., Any]] = {
    **{
        f"optimizer.{name}": getattr(optimizer, name)
        for name in optimizer.__all__
        if name not in ("lr", "DistributedOptimizer", "optimizer_of")
    },
    **{f"lr.{name}": getattr(lr, name) for name in lr.__all__ if name != "LRScheduler"},
    **{
        f"dygraph.{name}": getattr(dygraph, name)
        for name in dygraph.__all__
        if name.endswith(("Decay", "Warmup", "Plateau"))
    },
    **{
        f"initializer.{name}": getattr(initializer, name)
        for name in ("Constant", "Uniform", "Normal", "TruncatedNormal", "Xavier", "MSRA")
    },
    "ParamAttr": fluid.ParamAttr,
}
EXCEPTIONS = {
    ("dygraph.StepDecay", "decay_rate"): "below 1",
    ("dygraph.MultiStepDecay", "decay_rate"): "below 1",
    ("lr.StepDecay", "gamma"): "below 1",
    ("lr.MultiStepDecay", "gamma"): "below 1",
}
"""Where a name of KIND means something else."""


def required(make: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a call needs."""
    found = {}
    for name, parameter in inspect.signature(make).parameters.items():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            inner = name in ("optimizer", "inner_optimizer")
            found[name] = optimizer.SGD(0.1) if inner else RIGHT[name]
    return found


def arguments(make: Callable[..., Any]) -> list[str]:
    """The names of all arguments, those of `**older` among them."""
    found = list(inspect.signature(make).parameters)
    older = ["parameter_list", "regularization", "multi_precision"] if "older" in found else []
    taken = set(found) | {"weight_decay"} if "Lamb" in make.__name__ else set(found)
    return [n for n in found if n != "older"] + [n for n in older if n not in taken]


@pytest.mark.parametrize("label", MADE)
def test_wrong_values(label: str) -> None:
    """A wrong value is refused at once, by an error of psfleet in one line with name and value; right ones
    beside it are not."""
    make = MADE[label]
    assert make(**required(make)) is not None
    for argument in arguments(make):
        if argument not in LISTS_OF_VARIABLES:
            refuses(label, argument)


def refuses(label: str, argument: str) -> None:
    """Try the wrong values of one argument."""
    make, kind = MADE[label], EXCEPTIONS.get((label, argument), KIND[argument])
    default = inspect.signature(make).parameters.get(argument)
    wrong = list(WRONG[kind])
    if default is not None and default.default is not None:
        wrong.append(None)
    for value in wrong:
        with pytest.raises(PsfleetError) as caught:
            make(**{**required(make), argument: value})
        text = str(caught.value)
        assert "\n" not in text, text
        assert argument in text or kind in ("decay", "parameters", "positive"), (value, text)
        quoted = repr(value[0]) if isinstance(value, list) and value else repr(value)
        assert quoted[:40] in text or repr(value)[:40] in text, (value, text)


@pytest.mark.parametrize(
    "label", [label for label, make in MADE.items() if not dataclasses.is_dataclass(make)]
)
def test_arguments_that_do_not_exist(label: str) -> None:
    """An unknown argument, and a missing one, is named in an error of psfleet."""
    make = MADE[label]
    with pytest.raises(PsfleetError, match="'no_such_argument'"):
        make(**required(make), no_such_argument=1)
    if needed := [name for name in required(make) if name not in ("begin",)]:
        rest = {name: value for name, value in required(make).items() if name != needed[0]}
        with pytest.raises(PsfleetError, match=f"'{needed[0]}'"):
            make(**rest)


def line() -> Any:
    """A loss of the parameters line.w_0 and line.b_0."""
    return layers.mean(layers.fc(layers.data("x", [None, 1]), 1, name="line"))


def recomputing() -> Any:
    """A RecomputeOptimizer that has a checkpoint."""
    made = optimizer.RecomputeOptimizer(optimizer.SGD(0.1))
    made._set_checkpoints(["line"])
    return made


def minimizing(make: Callable[[], Any], argument: str) -> Callable[[Any], Any]:
    """A call of `minimize` with one argument."""
    return lambda value: make().minimize(line(), **{argument: value})


def calling(make: Callable[[], Any], method: str) -> Callable[[Any], Any]:
    """A call of a method with one argument."""
    return lambda value: getattr(make(), method)(value)


def calls() -> Iterator[tuple[str, Callable[[Any], Any], str]]:
    """Calls of methods with one wrong value: a name, the call and what the value may not be."""
    kinds: list[tuple[str, Callable[[], Any]]] = [
        ("SGD", lambda: optimizer.SGD(0.1)),
        ("LookAhead", lambda: optimizer.LookAhead(optimizer.SGD(0.1))),
        ("Recompute", recomputing),
        ("Pipeline", lambda: optimizer.PipelineOptimizer(optimizer.SGD(0.1))),
    ]
    for name, make in kinds:
        for argument, kind in (
            ("grad_clip", "clip"),
            ("parameter_list", "names"),
            ("no_grad_set", "names"),
        ):
            yield f"{name}.minimize {argument}", minimizing(make, argument), kind
        yield f"{name}.set_lr", calling(make, "set_lr"), "not negative"
        yield f"{name}.set_lr_scheduler", calling(make, "set_lr_scheduler"), "clip"
    yield "clear_grad", lambda v: optimizer.SGD(0.1).clear_grad(v), "switch"
    yield (
        "ModelAverage.minimize",
        lambda v: optimizer.ModelAverage(0.5).minimize(line(), grad_clip=v),
        "clip",
    )
    yield (
        "need_restore",
        lambda v: optimizer.ExponentialMovingAverage().apply(need_restore=v),
        "switch",
    )
    yield "epoch", lambda v: lr.StepDecay(0.5, 7).step(v), "not negative"
    yield "strategy", lambda v: optimizer.DistributedOptimizer(optimizer.SGD(0.1), v), "clip"
    yield "wrapped", lambda v: optimizer.DistributedOptimizer(v), "optimizer"


CALLS = {name: (call, kind) for name, call, kind in calls()}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_values_of_methods(name: str) -> None:
    """So are the arguments of methods, and nothing is added to the program."""
    call, kind = CALLS[name]
    for value in WRONG[kind]:
        if name == "strategy" and isinstance(value, dict):
            continue  # a strategy that says nothing
        with names.guard(), program_guard(Program(), Program()):
            with pytest.raises(PsfleetError) as caught:
                call(value)
            quoted = repr(value[0]) if isinstance(value, list) and value else repr(value)
            assert quoted[:40] in str(caught.value) or repr(value)[:40] in str(caught.value)
            assert not fluid.default_main_program().updates


STATES: dict[str, dict[str, Any]] = {
    "another's": {"other.moment1": np.zeros(2), "other.moment2": np.zeros(2), "other.step": 1},
    "nonsense": {"nonsense": 1},
    "count": {"global_step": "x"},
    "slot": {"w.moment1": "x", "w.moment2": np.zeros(2), "w.step": 1},
    "step": {"w.moment1": np.zeros(2), "w.moment2": np.zeros(2), "w.step": NAN},
}


@pytest.mark.parametrize("case", STATES)
@pytest.mark.parametrize("updated", [False, True])
def test_state_of_something_else(case: str, updated: bool) -> None:
    """A state with only foreign names, or with a wrong entry, is refused and changes nothing."""
    w = Parameter("w", [1.0, 2.0])
    opt = optimizer.Adam(0.1, parameters=[w])
    if updated:
        opt.apply_gradients([(w, np.ones(2, np.float32))])
    elif case in ("slot", "step"):
        pytest.skip("waits for the parameter's first update")
    before = opt.state_dict()
    with pytest.raises(PsfleetError):
        opt.set_state_dict(STATES[case])
    after = opt.state_dict()
    assert before.keys() == after.keys()
    for key in before:
        np.testing.assert_array_equal(before[key], after[key])


def test_a_rate_that_fails_later() -> None:
    """A function that gives no number, and a formula that overflows, end in a sentence at that step."""
    answers = itertools.chain([1.0, 1.0], itertools.repeat("x"))
    schedule = lr.LambdaDecay(0.5, lambda epoch: next(answers))  # type: ignore[arg-type,return-value]
    schedule.step()
    with pytest.raises(PsfleetError, match="what lr_lambda gives is 'x'"):
        schedule.step()
    growing = lr.exponential_decay(1.0, 1, 1e200)
    growing.step()
    with pytest.raises(PsfleetError, match="the rate of epoch 2"):
        growing.step()
