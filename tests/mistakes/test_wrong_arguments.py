"""Every public function, class and method against a battery of wrong values: one sentence each."""

import contextlib
import inspect
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import features, fleet, layers, optimizer
from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.validation.annotations import check
from psfleet.core.engine.schema import entry
from psfleet.core.graph.program import names
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.fleet.file_datasets import FileDataset
from tests.mistakes.public_calls import MISSING, Call, a_variable, calls

WRONG: list[Any] = [
    *("x", b"x", None, True, object(), 1j),
    *(math.nan, math.inf, -1, 2.5, 10**400),
    *([], {}, [math.nan], np.array([0.1, 0.2])),
]
INTERNAL = {
    *("psfleet.Client", "psfleet.DenseTable", "psfleet.SparseTable", "psfleet.Program"),
    *("psfleet.Variable", "psfleet.SparseGrad", "psfleet.fleet.Util"),
    "psfleet.fleet.DistributedStrategy",  # it checks each of its settings by itself
    *("psfleet.metrics.FleetMetrics", "psfleet.metrics.MetricReading"),
    *("psfleet.features.FeatureLookup", "psfleet.features.feed"),
    *("psfleet.initializer.resolve", "psfleet.initializer.starting"),
    # A rule and a policy are subclassed; what they are made of is checked where the class is declared.
    *("psfleet.OptimizerSpec", "psfleet.Slot", "psfleet.Rule", "psfleet.EvictionPolicy"),
    *("psfleet.regularizer.as_decay", "psfleet.optimizer.optimizer_of", "psfleet.clip.clip_by_own"),
}
"""What psfleet makes and calls for a script."""
INTERNAL_METHODS = {
    *("add", "check", "columns", "measure", "score", "scores", "sums_of"),  # of metrics
    *("rule", "decay", "lend", "lender", "clip_by", "scale", "rate_factor", "apply_values"),
    *("resolve", "gradient", "after", "as_variable", "check_state", "as_regularizer", "of"),
    *("scalars", "resting_scalars"),
    *("read", "from_hyperparameters", "prepare", "lookup", "pooled", "with_rows", "variable"),
    *(
        "add_update",
        "kept",
        "last",
        "gradients",
        "pool",
        "pooled_gradients",
        "values",
        "padded",
        *("from_argument", "counted", "generate_batch", "generate_sample", "observe", "expanded"),
    ),
}
ENDING = {"run_server", "init_server", "stop_worker", "reset", "connect"}
"""Calls that end what the next one needs."""
CALLS = {
    call.label: call
    for call in calls()
    if call.label not in INTERNAL and call.name not in INTERNAL_METHODS
}


def test_no_module_is_missing() -> None:
    """Every public module can be walked; those whose extra is not installed are skipped by name."""
    if MISSING:
        pytest.skip(f"extras of psfleet are not installed: {', '.join(sorted(MISSING))}")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An embedded runtime and an empty folder."""
    monkeypatch.chdir(tmp_path)
    engine = EmbeddedRuntime()
    before = current().use(engine)
    yield
    current().use(before)
    engine.close()


def test_all_are_checked() -> None:
    """Every public function that takes arguments checks them against its annotations."""
    taking = [call for call in CALLS.values() if len(inspect.signature(call.inner).parameters) > 1]
    assert len(taking) > 300
    assert [call.label for call in taking if not call.is_checked] == []


RANGES = {
    (
        -1,
        -1e-9,
    ): "learning_rate epsilon l1 l2 initial_accumulator_value lars_coeff lars_weight_decay eps "
    "lamb_weight_decay end_lr end_learning_rate min_lr eta_min start_lr threshold base_learning_rate "
    "max_learning_rate exp_gamma momentum_decay average_window_rate gamma local_grad_clip_norm warmup_steps "
    "coeff regularization_coeff scale fan_in fan_out decay_rate",
    (
        -1,
        0,
    ): "d_model power divide_factor decay_steps step_each_epoch epochs clip_norm total_steps T_max T_0 "
    "T_mult step_size k step_size_up step_size_down batch_num rampup_step min_average_window "
    "max_average_window num_trainers queue_size sync_steps step servers",
    (-1, 1, 2): "beta1 beta2 decay rho factor",
    (-1, 1.5): "momentum start_factor end_factor phase_pct alpha",
    (2.5, -7): "last_epoch patience cooldown begin rampup_begin_step start_cpu_core_id seed",
}
"""Values that arguments of these names may not have, in constructors of optimizers and their like."""
UNBOUNDED = {"psfleet.fluid.dygraph.BatchNorm", "psfleet.fluid.dygraph.Dropout"}
FACES = ("psfleet.optimizer.", "psfleet.fluid.dygraph.", "psfleet.initializer.", "psfleet.clip.")


def out_of_range() -> Iterator[tuple[Call, str, tuple[float, ...]]]:
    """Each constructor with an argument that has a range, and values out of it."""
    for call in CALLS.values():
        if call.label.startswith(FACES) and isinstance(call.function, type):
            for values, arguments in RANGES.items():
                for argument in set(arguments.split()) & call.arguments.keys():
                    if call.label not in UNBOUNDED:
                        yield call, argument, values


def test_out_of_range() -> None:
    """Numbers out of range are refused by name and value, where the argument stands."""
    tried = list(out_of_range())
    assert len(tried) > 150
    taken = []
    for call, argument, values in tried:
        for value in values:
            said = trial(call, argument, value)
            if argument not in said or repr(value) not in said:
                taken.append((call.label, argument, value, said))
    assert taken == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of log(-1), as NumPy says it
@pytest.mark.parametrize("label", [label for label in CALLS if CALLS[label].name not in ENDING])
def test_wrong_arguments(label: str) -> None:
    """A wrong value of any argument ends in an error of psfleet in one line, or is not wrong."""
    call = CALLS[label]
    for argument in call.arguments:
        for value in WRONG:
            with (
                names.guard(),
                program_guard(Program(), Program()),
                contextlib.redirect_stdout(io.StringIO()),
            ):
                said = trial(call, argument, value)
            assert "\n" not in said, (argument, said)


def trial(call: Call, argument: str, value: Any) -> str:
    """Call with one wrong value; the sentence of the refusal, empty where it was taken rightly."""
    function, given = call.bound(), {**call.right(), argument: value}
    several = inspect.signature(call.inner).parameters.get(argument)
    try:
        if several is not None and several.kind is several.VAR_POSITIONAL:
            del given[argument]
            value_returned = function(value, **given)
        else:
            value_returned = function(**given)
        if hasattr(value_returned, "__enter__"):
            with value_returned:
                pass
        elif isinstance(value_returned, Iterator):
            next(value_returned, None)
    except PsfleetError as error:
        return str(error)
    except NotImplementedError:
        return ""  # of a base class
    check(call.label, argument, value, call.arguments[argument])  # else it should have been refused
    return ""


TAKEN: dict[str, Callable[[], Any]] = {
    "learning_rate is 'x'": lambda: psfleet.Parameter("w", [1.0], learning_rate="x"),  # type: ignore[arg-type]
    "count_filter is 2.5": lambda: entry.CountFilterEntry(2.5),  # type: ignore[arg-type]
    "count_filter is 0, it must be a number of pushes": lambda: entry.CountFilterEntry(0),
    "steps is 2.5": lambda: entry.TTLEntry(2.5),  # type: ignore[arg-type]
    "is_sparse is 'x'": lambda: layers.embedding(a_variable(), [10, 2], is_sparse="x"),  # type: ignore[arg-type]
    "optimizer is 'x'": lambda: features.Table("t", 2, optimizer="x"),
    "prefetch is 'x'": lambda: fleet.dataset(10, 2, prefetch="x"),  # type: ignore[arg-type]
    "is 'shuffle_seed' meant": lambda: fleet.dataset(10, 2, shufle_seed=1),  # type: ignore[call-arg]
    "ids are texts, such as 'a'; hash them: psfleet.features.hashed": lambda: (
        psfleet.connect().sparse_table("words", 2, optimizer.SGD(0.1)).pull(["a"])
    ),
    "gamma is -1": lambda: optimizer.lr.StepDecay(0.1, 5, gamma=-1),
    "batch_size is 2.5": lambda: FileDataset().set_batch_size(2.5),  # type: ignore[arg-type]
    "batch_size is nan": lambda: FileDataset().set_batch_size(math.nan),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("sentence", TAKEN)
def test_what_would_train_otherwise_than_said(sentence: str) -> None:
    """Values are refused that were once taken for something else, such as a batch of the whole file."""
    with (
        names.guard(),
        program_guard(Program(), Program()),
        pytest.raises(PsfleetError, match=sentence),
    ):
        TAKEN[sentence]()
