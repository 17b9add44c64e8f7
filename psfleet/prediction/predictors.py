"""Models as functions from inputs to predictions, with the values of one runtime."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psfleet.errors import UsageError
from psfleet.execution.executor import Executor
from psfleet.execution.inference import Loaded, frozen_program
from psfleet.program.variable import Variable
from psfleet.runtime.interface import Runtime

Predictor = Callable[[Any], Any]
"""The predictions for a batch of inputs: an array or tensor [n], [n, 1] or [n, k], or a mapping of them."""

MakePredictor = Callable[[Runtime], Predictor]


def predictor_of(model: Any) -> MakePredictor:
    """Return the maker of a predictor that computes as the model does, with a runtime's values.

    What the model is now counts, not what becomes of it.

    Args:
        model: Variables of a program (one, or a mapping): inputs are feeds. A torch module: inputs are what
            it is called with, a tuple several arguments.

    Raises:
        UsageError: It is something else.
    """
    if isinstance(model, Variable):
        return _of_variables({"": model})
    if (
        isinstance(model, Mapping)
        and model
        and all(isinstance(v, Variable) for v in model.values())
    ):
        return _of_variables(model)
    if any(kind.__module__ == "torch.nn.modules.module" for kind in type(model).__mro__):
        frozen: Any = importlib.import_module("psfleet.torch.conversion")
        make: MakePredictor = frozen.module_predictor(model)
        return make
    raise UsageError(
        f"the model is {model!r:.80}; it must be a variable of a program, a mapping of them, or a torch "
        "module"
    )


def _of_variables(targets: Mapping[str, Variable]) -> MakePredictor:
    names, load = list(targets), frozen_program(list(targets.values()))
    return lambda runtime: program_predictor(load(runtime), names)


def program_predictor(loaded: Loaded, names: Sequence[str]) -> Predictor:
    """Return the predictor of a program that was loaded.

    Args:
        loaded: The program, its feeds and targets.
        names: Names of the predictions; [""]: there is one, which needs none.
    """
    program, feeds, targets = loaded
    executor = Executor()

    def predict(inputs: Mapping[str, Any]) -> Any:
        feed = {name: inputs[name] for name in feeds if name in inputs}
        results = executor.run(program, feed=feed, fetch_list=targets)
        return results[0] if list(names) == [""] else dict(zip(names, results, strict=True))

    return predict
