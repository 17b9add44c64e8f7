"""Methods of Fleet for logged values, evaluations and callbacks (`callbacks.py`).

After each step the loops of `data_loops.py` call `_end_step`, in the thread that trains. It passes the values
that were logged during the step, and new snapshots, to the callbacks.
"""

from collections.abc import Mapping
from typing import SupportsFloat

import numpy as np
from typing_extensions import override

from psfleet.core.base.observability.logged_values import LoggedValues
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.base.validation.annotations import checked
from psfleet.core.runtime.process_runtime import active, current
from psfleet.fleet.callbacks import Callback
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.fleet_saving import FleetSaving


@checked
class FleetCallbacks(FleetSaving):
    """Methods of a Fleet that log values, report evaluations and call callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Callback] = []
        self._step_values: dict[str, float] = {}
        self._told: set[str] = set()  # folders of snapshots that were passed to the callbacks
        self._logged = LoggedValues(lambda: (self._joined or read_environment()).event_folder)

    def add_callbacks(self, *callbacks: Callback) -> None:
        """Add callbacks that are called, in this order, after steps, evaluations and snapshots.

            fleet.add_callbacks(EarlyStopping("auc", patience=3), WandbLogger(project="clicks"))

        Call it after `init`, on all workers, with the same callbacks in every run of the script.

        Args:
            *callbacks: Objects of subclasses of `psfleet.fleet.callbacks.Callback`.
        """
        for callback in callbacks:
            callback.fleet = self
            self._callbacks.append(callback)
            if hasattr(callback, "state_dict"):
                name = f"psfleet.callbacks.{len(self._callbacks)}.{type(callback).__name__}"
                self._own_loops().remember(name, callback)
            callback.on_add()

    def log(self, name: str, value: SupportsFloat, step: int | None = None) -> None:
        """Log a value of this worker, such as its loss, for the displays and callbacks.

            fleet.log("accuracy", accuracy)

        The newest value of each name is shown in the progress line, in `psfleet top`, on the page and in
        the metrics of `--watch`, and in the report. With `--tensorboard FOLDER` every value is written to
        an event file. Callbacks get the value at the end of the step.

        Args:
            name: Name without line breaks, the same on all workers that log the value. A script can use 100
                names.
            value: A number, or an array or tensor with one element.
            step: Position on TensorBoard's axis of steps, or None for this worker's number of pushes.

        Raises:
            UsageError: The name or the value cannot be used. Nothing is logged.
            ConfigError: The event file cannot be written, or tensorboardX is not installed.
        """
        current().check_process("what is logged here")
        number = self._logged.log(name, value, current().pushes if step is None else step)
        if self._callbacks:
            self._step_values[name] = number

    def report_evaluation(self, values: Mapping[str, SupportsFloat]) -> None:
        """Log the metrics of an evaluation, and pass them to the callbacks.

            fleet.report_evaluation({"auc": auc})

        All workers must call it, at the same step and with the same names. All workers' callbacks get the
        values of worker 0, so that they decide alike. Other workers may pass NaN.

        Args:
            values: Metrics by name.

        Raises:
            UsageError: A value is no number, or a callback needs a metric that is missing.
        """
        current().check_process("this evaluation")
        names = sorted(values)
        numbers = np.array([float(values[name]) for name in names], np.float64)
        if self.worker_num() > 1:
            counts = self.is_first_worker() and not self.is_later_stage()
            numbers = active().all_reduce(numbers if counts else np.zeros_like(numbers), "sum")
        evaluation = dict(zip(names, numbers.tolist(), strict=True))
        step = current().pushes
        for name, value in evaluation.items() if self.is_first_worker() else ():
            self._logged.log(name, value, step)
        for callback in self._callbacks:
            callback.on_evaluation(step, evaluation)

    def _own_loops(self) -> DataLoops:
        raise NotImplementedError

    def _end_step(self) -> bool:
        """Call the callbacks at the end of a step, and return True if the loop is to end here."""
        values, self._step_values = self._step_values, {}
        self._hear_of_snapshots()
        for callback in self._callbacks:
            callback.on_step(current().pushes, values)
        return self._is_stopped()

    def _is_stopped(self) -> bool:
        return any(callback.is_stopped for callback in self._callbacks)

    def _close_callbacks(self) -> None:
        self._logged.close()
        self._hear_of_snapshots()
        while self._callbacks:
            self._callbacks.pop(0).close()

    def _hear_of_snapshots(self) -> None:
        """Pass the newest snapshot of `--snapshot-every` to the callbacks, unless they have got it
        already."""
        newest = current().newest_snapshot
        if newest is not None and newest[0] not in self._told and self.is_first_worker():
            self._has_saved(*newest)

    @override
    def _has_saved(self, folder: str, step: int = 0) -> None:
        self._told.add(folder)
        for callback in self._callbacks:
            callback.on_snapshot(step or current().pushes, folder)
