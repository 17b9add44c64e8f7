"""Executor: runs a program on a feed, and trains its parameters if an optimizer has added updates.

A step runs in the caller's thread:

    check the feed -> early records -> pull -> forward -> backward -> late records -> push

Early records are operations that compute the ids of look-ups from the feed alone. After them, one pull can
bring the dense parameters and all rows. Late records compute with gradients, such as a norm that the script
fetches. With `read_ahead`, the pull of the next step starts before this
step's forward pass, and runs while the step computes. `core/graph/program/run.py` makes the plan and runs the
records.

The module also warns about scripts that run a program many times but never train it, a common mistake.
"""

import atexit
import functools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from psfleet.core.base.errors import UsageError
from psfleet.core.base.logs import log_of
from psfleet.core.base.memory import available_memory
from psfleet.core.base.threads import deferred
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.execution import model_files
from psfleet.core.graph.parameters import binding
from psfleet.core.graph.parameters.binding import invalidate, note, read_ahead
from psfleet.core.graph.parameters.parameter import Parameter, fetch
from psfleet.core.graph.program.operation import Array, Gradient
from psfleet.core.graph.program.pipeline.chunk import shared_norms
from psfleet.core.graph.program.pipeline.pipelined_run import PipelinedRun, pipelined_step
from psfleet.core.graph.program.program import Program, default_main_program
from psfleet.core.graph.program.recompute import RecomputingRun
from psfleet.core.graph.program.run import (
    ExecutionPlan,
    ProgramRun,
    batch_size,
    check_feed,
    make_plan,
)
from psfleet.core.graph.program.variable import Variable, VariableSource
from psfleet.core.net.connections import grpc_process
from psfleet.core.runtime.process_runtime import active, current
from psfleet.core.runtime.stages import here
from psfleet.data.read_ahead import with_next

_log = log_of(__name__)

_runs = 0  # runs of programs that have parameters but no updates, and are not clones for tests


T = TypeVar("T")
Fetch = Variable | VariableSource | str
_Pair = tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]
# Programs and fetch lists whose plans an executor remembers: many more than usual scripts have. A script that
# builds a program in each step must not keep them all in memory.
_PLANS = 64


def note_untrained_run() -> None:
    """Count a run of a program whose parameters no optimizer updates. A warning at exit uses the count."""
    global _runs
    _runs += 1
    _tell_at_exit()


def check_trained() -> None:
    """Check, at the end of a loop over data, that the loop has trained something.

    Raises:
        UsageError: Programs were run in the loop, but no gradient was pushed.
    """
    if sentence := _suspicion():
        _forget()
        raise UsageError(sentence)


def _suspicion() -> str:
    """Return the warning for a script that never trains, or an empty text if the script is fine.

    A single run may be a test of the program, and a script that has loaded a model may only evaluate it.
    """
    if _runs < 2 or binding.has_pushed() or model_files.has_loaded():
        return ""
    return (
        f"a program with parameters was run {_runs} times and never trained: no optimizer minimizes its "
        "loss; call minimize(loss) of an optimizer before exe.run, or run program.clone(for_test=True) to "
        "evaluate"
    )


def _forget() -> None:
    global _runs
    _runs = 0


@functools.cache  # so that every call after the first one does nothing
def _tell_at_exit() -> None:
    atexit.register(_tell)


def _tell() -> None:
    # `last_value` exists if the script has ended with an exception, perhaps before it could train.
    sentence = _suspicion()
    if sentence and not hasattr(sys, "last_value"):
        _log.warning(f"psfleet: {sentence}")


@checked
class CPUPlace:
    """Device of an executor: the CPU. All programs run there."""

    def __repr__(self) -> str:
        return "CPUPlace()"


@checked
class CUDAPlace:
    """CUDA device, accepted so that scripts of the reference framework run. It has no effect.

    Programs run on the CPU. Only servers use CUDA.
    """

    def __init__(self, id: int = 0) -> None:
        self.id = id

    def __repr__(self) -> str:
        return f"CUDAPlace({self.id})"


@checked
class Executor:
    """Runs programs.

        exe = fluid.Executor()
        exe.run(fluid.default_startup_program())
        [value] = exe.run(feed={"x": x, "y": y}, fetch_list=[loss])

    It keeps the plans of the last 64 pairs of a program and a fetch list, so run the same pairs again.

    Attributes:
        place: Device, which has no effect.
        meter: Object whose `measure(run)` is called after every operation, or None.
    """

    def __init__(self, place: Any = None) -> None:
        _settle_process()
        self.place = CPUPlace() if place is None else place
        self.meter: Any = None
        self._plans: OrderedDict[tuple[int, tuple[str, ...]], ExecutionPlan] = OrderedDict()
        self._pair: _Pair = None, None

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Fetch] | Fetch | None = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Any = None,
        return_numpy: bool = True,
        use_program_cache: bool = True,
        use_prune: bool = True,
    ) -> list[Any]:
        """Run a program once. If optimizers have added updates to it, this is a training step.

        Args:
            program: Program to run, or None for the default main program. A startup program does nothing.
            feed: Arrays by the names of the program's data variables.
            fetch_list: Variables to return, or their names: results, parameters or gradients. May also
                contain learning rate schedules that count updates, for the rate of this step.
            return_numpy: False to return variables with values instead of arrays.
            feed_var_name, fetch_var_name, scope, use_program_cache, use_prune: Accepted for scripts of the
                reference framework, without effect.

        Returns:
            One array per entry of the fetch list, or a SparseGrad for a sparse parameter's gradient.

        Raises:
            ShapeError: A feed has another shape than its variable.
            IdError: Ids are fractional, NaN or outside a table.
            UsageError: A feed is missing or unknown, a fetch is unknown, or nothing would be computed.
        """
        # Not in `_run`: train_from_dataset and infer_from_dataset fetch nothing between two prints.
        if fetch_list is None:
            _check_trains(program or default_main_program())
        return self._run(program, feed, fetch_list, self._following(program, feed), return_numpy)

    def _following(
        self, program: Program | None, feed: Mapping[str, Any] | None
    ) -> Mapping[str, Any] | None:
        """Return the feed after this one, if this call trains with the feed that `read_ahead` yielded last.

        Between two training steps a loop may run other programs or feeds, such as an evaluation. For these
        the method returns None, so that they read nothing ahead.
        """
        program = program or default_main_program()
        present, following = self._pair
        if feed is None or feed is not present or program.for_test or not program.updates:
            return None
        # Used once: if the script runs this feed again, the pull for the next one has been started already.
        self._pair = None, None
        return following

    def read_ahead(
        self, batches: Iterable[T], feed: Callable[[T], Mapping[str, Any]] | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """Yield feeds for a loop of `run`.

        Each step's pull then overlaps with the computation of the step before.

            for feed in exe.read_ahead(fleet.shard(batches())):
                exe.run(feed=feed, fetch_list=[loss])

        This has an effect in async mode only: each step then uses values that lack exactly one push of this
        worker, its last one. In other modes, and if the next batch is not known yet, nothing is read ahead.

        Args:
            batches: Batches. `fleet.shard` and `fleet.dataset` can show their next batch without consuming
                it. Any other iterable is read one batch ahead of the training.
            feed: Makes a feed from a batch. None if batches are feeds.
        """
        try:
            for present, following in _with_next(batches, feed):
                self._pair = present, following
                yield present
        finally:  # also if the loop is left early, so that its feeds are not kept
            self._pair = None, None

    def _run(
        self,
        program: Program | None,
        feed: Mapping[str, Any] | None,
        fetch_list: Sequence[Fetch] | Fetch | None,
        following: Mapping[str, Any] | None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run a program as `run` does.

        Also starts to pull the values for the next step, whose feed is `following`.
        """
        program = program or default_main_program()
        if not isinstance(program, Program):
            raise UsageError(f"the program to run is {program!r}; it must be a Program or None")
        fetches = [_named(program, entry) for entry in _entries(fetch_list)]
        plan = self._plan(program, fetches)
        arrays = check_feed(program, plan.feeds, feed or {})
        run: ProgramRun | PipelinedRun
        if (
            plan.is_pipelined
        ):  # which reads nothing ahead: `following` is only for steps of one process
            run = pipelined_step(program, plan, arrays, fetches, self.meter)
        else:
            _check_whole(program)
            run = self._step(program, plan, arrays, following)
        # Before the update, so that a fetched parameter has the values with which the step has computed.
        results = [run.result(variable) for variable in fetches]
        if not (program.updates or program.for_test) and program.all_parameters():
            note_untrained_run()
        self._update(program, run.values, _counted(plan, batch_size(program, arrays)))
        if return_numpy:
            return results
        return [_wrapped(variable, value) for variable, value in zip(fetches, results, strict=True)]

    def _plan(self, program: Program, fetches: Sequence[Variable]) -> ExecutionPlan:
        # No two programs have the same version, and each change of a program gives it a new one.
        key = (program.version, tuple(variable.name for variable in fetches))
        if key not in self._plans:
            self._plans[key] = make_plan(program, fetches)
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _step(
        self,
        program: Program,
        plan: ExecutionPlan,
        feeds: dict[Variable, Array],
        following: Mapping[str, Any] | None,
    ) -> ProgramRun:
        kind = RecomputingRun if plan.recomputes else ProgramRun
        run = kind(program, plan, feeds, self.meter)
        if not program.records:
            return run
        # The early records compute the ids of look-ups from the feed. One pull then brings all values,
        # except for a look-up whose ids depend on parameters: it pulls its rows later, in `main`.
        run.forward(plan.early)
        dense = [v.parameter for v in plan.dense if v.parameter]
        if here().processes > 1:
            _check_fits(dense)
        fetch(dense, plan.wanted_reads(run.values))
        run.take_parameters()
        # Read ahead only ids that are fed: computed ids would need the early records of the next step.
        # Start after this step's pull, because the runtime allows one pull at a time, and before the long
        # computation.
        if following is not None and all(
            v in feeds for lookup in plan.lookups for v in lookup.inputs
        ):
            read_ahead(dense, plan.wanted_reads(check_feed(program, plan.feeds, following)))
        run.main()
        run.backward()
        run.forward(plan.late)
        return run

    # Deferred, so that an interrupt cannot end a step between the updates of two optimizers, or before it is
    # counted.
    @staticmethod
    @deferred()
    def _update(program: Program, gradients: Mapping[Variable, Any], samples: int) -> None:
        # Taken first, because that clears them: a run that updates nothing must not leave any to the next.
        averages = program.take_observed()
        if program.for_test or _shows_averages(program):
            return
        # Before the updates, with whose first push the averages are sent. Without updates there is no push.
        if program.updates:
            for parameter, momentum, value in averages:
                note(parameter, momentum, value)
        for update in program.updates:
            # A parameter has no gradient if the loss does not depend on it, or if another stage has it.
            values: list[tuple[Any, Gradient]] = [
                (parameter, gradients[variable])
                for parameter, variable in update.params_grads
                if gradients.get(variable) is not None
            ]
            loss = None if update.loss is None else float(gradients[update.loss].item())
            # In a pipeline, stages add up their squared norms for clipping by the global norm. All parameters
            # are named, not only those of this stage (`values`): all stages add in the order of the names, so
            # that the norm has the bits of a run in one process.
            with shared_norms([parameter.name for parameter, _ in update.params_grads]):
                update.optimizer.apply_values(values, samples=samples, loss=loss)
        # Runs without updates count too, because dropout draws its mask from the number of the step.
        program.step += 1
        if here().processes > 1:  # other stages have changed the tables of their parameters
            invalidate()
        if program.updates:
            for hook in program.after_step:
                hook(program.step)

    def train_from_dataset(
        self,
        program: Program | None = None,
        dataset: Iterable[Mapping[str, Any]] | None = None,
        scope: Any = None,
        thread: int = 0,
        debug: bool = False,
        fetch_list: Sequence[Variable | str] | None = None,
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        fetch_handler: Callable[[list[Any]], Any] | None = None,
        read_ahead: bool = False,
    ) -> int:
        """Run the program once for each batch of a dataset.

            exe.train_from_dataset(main, dataset, fetch_list=[loss], print_period=1000)

        Args:
            program: Program to run, or None for the default main program.
            dataset: Feeds: a dataset of fluid.DatasetFactory, or any iterable of feeds.
            scope, thread, debug: Accepted for scripts of the reference framework, without effect.
            fetch_list: Variables to print every `print_period` batches.
            fetch_info: Text in front of each printed value. The default is the variable's name.
            print_period: Number of batches between two prints.
            fetch_handler: Called with the fetched values, which are then not printed.
            read_ahead: True to pull the values for the next batch while this one is computed, as
                `Executor.read_ahead` does. Has an effect in async mode only, and only if ids are fed and not
                computed.

        Returns:
            Number of batches.
        """
        if dataset is None:
            raise UsageError("train_from_dataset needs a dataset")
        names = [v if isinstance(v, str) else v.name for v in fetch_list or ()]
        texts = list(fetch_info or names)
        if len(texts) != len(names):
            raise UsageError(
                f"train_from_dataset: fetch_info has {len(texts)} texts for {len(names)} fetches; give one "
                "for each, or none"
            )
        count = 0
        feeds = _with_next(dataset) if read_ahead else ((feed, None) for feed in dataset)
        for count, (feed, following) in enumerate(feeds, 1):
            # A period of 0 prints every batch, as 1 does.
            fetches = fetch_list if count % max(print_period, 1) == 0 else None
            # Not `run`, which would look for the following feed in the pair of a loop over `read_ahead`.
            values = self._run(program, feed, fetches, following)
            if fetches and fetch_handler is not None:
                fetch_handler(values)
            elif fetches:
                parts = (f"{text}: {value}" for text, value in zip(texts, values, strict=True))
                print(f"batch {count}", *parts, flush=True)
        return count

    def infer_from_dataset(
        self,
        program: Program | None = None,
        dataset: Iterable[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> int:
        """Run a test clone of the program for each batch, so that nothing is updated.

        Everything else is as in train_from_dataset.
        """
        test = (program or default_main_program()).clone(for_test=True)
        return self.train_from_dataset(test, dataset, **options)

    def close(self) -> None:
        """Drop the plans. The executor can still be used, and makes new plans."""
        self._plans.clear()


def _with_next(
    batches: Iterable[T], feed: Callable[[T], Mapping[str, Any]] | None = None
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Yield each feed with the feed after it, or with None if the next feed is not known yet."""

    def make(batch: Any) -> Any:
        return batch if feed is None else feed(batch)

    next_feed: Mapping[str, Any] | None = None
    for batch, following in with_next(
        batches, lambda: current().is_active and active().reads_ahead
    ):
        present = make(batch) if next_feed is None else next_feed
        next_feed = None if following is None else make(following)
        yield present, next_feed


def _check_trains(program: Any) -> None:
    """Raise an error if nothing would be computed: no result is fetched and the program trains nothing."""
    if isinstance(program, Program) and program.records and not program.updates:
        raise UsageError(
            "run: fetch_list is None and the program trains nothing, so that nothing would be computed; name "
            "results, such as fetch_list=[loss], or let an optimizer minimize(loss) first"
        )


def _check_whole(program: Program) -> None:
    """Raise an error if a pipeline of several stages would train a program that is not cut into stages.

    Each stage would train the whole program, so each gradient would be pushed several times.
    """
    if program.updates and not program.for_test and here().processes > 1:
        raise UsageError(
            f"the program is not cut into stages, and this is {here().name(here().process)}; "
            "minimize with fleet.distributed_optimizer or a PipelineOptimizer"
        )


def _check_fits(parameters: Sequence[Parameter]) -> None:
    """Raise an error if a stage has too little memory for all weights of a program, which it runs whole.

    Without this check the kernel would kill the process, which names no reason.
    """
    size, free = 4 * sum(math.prod(parameter.shape) for parameter in parameters), available_memory()
    if 0 < free < size:
        raise UsageError(
            f"a program without updates runs whole in {here().name(here().process)}: its weights take "
            f"{size / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are available; evaluate on a machine with "
            "more memory, or fetch results in the steps that train"
        )


def _counted(plan: ExecutionPlan, samples: int) -> int:
    """Return the number of samples to report with a push.

    Of a pipeline's stages, only the first reports any: all stages train on the same samples.
    """
    return 0 if plan.is_pipelined and here().process else samples


def _shows_averages(program: Program) -> bool:
    """Return whether the program's parameters show averages of their weights in place of the weights.

    A run then updates nothing. In the reference framework such a run would update the averages, and
    `restore`, which brings the weights back, would drop the update.
    """
    # Only AveragedBinding has this attribute.
    return any(
        getattr(parameter.binding, "read_only", False)
        for update in program.updates
        for parameter, _ in update.params_grads
    )


@functools.cache
def _settle_process() -> None:
    """Tune malloc so that this process keeps the memory of a step for the next step.

    If the memory were returned to the system and requested again, a step of an MLP would take 20 % longer.
    """
    grpc_process.prepare()


def _entries(fetch_list: Sequence[Fetch] | Fetch | None) -> list[Fetch]:
    if fetch_list is None:
        return []
    return [*fetch_list] if isinstance(fetch_list, list | tuple) else [fetch_list]  # type: ignore[list-item]


def _named(program: Program, entry: Any) -> Variable:
    if isinstance(entry, VariableSource):
        entry = entry.as_variable(program)
    # A parameter is no Variable, but has the name of its variable.
    if not isinstance(entry, Variable | str) and not hasattr(entry, "name"):
        raise UsageError(f"fetch_list has {entry!r}; it must hold variables or names")
    return program.variable(entry if isinstance(entry, str) else entry.name, "fetch")


def _wrapped(variable: Variable, value: Array | SparseGrad) -> Any:
    if isinstance(value, SparseGrad):
        return value
    return Variable(variable.name, np.shape(value), value.dtype, value=value, stop_gradient=True)
