"""Part of the fleet that calls callbacks: at steps, evaluations and snapshots of a process."""

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
    """Callbacks of a process, and what they are told: values of the script, evaluations and snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Callback] = []
        self._step_values: dict[str, float] = {}
        self._told: set[str] = set()  # folders of which the callbacks know
        self._logged = LoggedValues(lambda: (self._joined or read_environment()).event_folder)

    def add_callbacks(self, *callbacks: Callback) -> None:
        """Call these at the steps, evaluations and snapshots of this process, in this order.

        Call it after `init`, on all workers, with the same callbacks in every run of the script.

        Args:
            *callbacks: Such as `EarlyStopping` and `WandbLogger` of psfleet.fleet.callbacks.
        """
        for callback in callbacks:
            callback.fleet = self
            self._callbacks.append(callback)
            if hasattr(callback, "state_dict"):
                name = f"psfleet.callbacks.{len(self._callbacks)}.{type(callback).__name__}"
                self._own_loops().remember(name, callback)
            callback.on_add()

    def log(self, name: str, value: SupportsFloat, step: int | None = None) -> None:
        """Show a value of this worker in the job's displays.

            fleet.log("accuracy", accuracy)

        The newest value of each name is in the progress line, in `psfleet top`, on the page of `--watch` and
        in its metrics, and in the report. With `--tensorboard FOLDER` every value is in an event file.
        Callbacks get it at the end of the step.

        Args:
            name: One line, the same on all workers that log the value; at most 100 names.
            value: A number, or an array or tensor of one.
            step: Its place on TensorBoard's axis of steps; None: how many pushes this worker has made.

        Raises:
            UsageError: It is no such name or value. Nothing is logged.
            ConfigError: The event file cannot be written, or tensorboardX is not installed.
        """
        current().check_process("what is logged here")
        number = self._logged.log(name, value, current().pushes if step is None else step)
        if self._callbacks:
            self._step_values[name] = number

    def report_evaluation(self, values: Mapping[str, SupportsFloat]) -> None:
        """Hand the metrics of an evaluation to the callbacks, and log them.

        Every worker calls it, at the same step and with the same names. Values of worker 0 count for all, so
        that all workers decide alike; the others may pass NaN.

        Args:
            values: By name.

        Raises:
            UsageError: A value is no number, or a callback needs another one.
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
        """The loops of this process."""
        raise NotImplementedError

    def _end_step(self) -> bool:
        """Call the callbacks at the end of a step; whether the loop ends here."""
        values, self._step_values = self._step_values, {}
        self._hear_of_snapshots()
        for callback in self._callbacks:
            callback.on_step(current().pushes, values)
        return self._is_stopped()

    def _is_stopped(self) -> bool:
        return any(callback.is_stopped for callback in self._callbacks)

    def _close_callbacks(self) -> None:
        """Close them, once: the next loop has none."""
        self._logged.close()
        self._hear_of_snapshots()
        while self._callbacks:
            self._callbacks.pop(0).close()

    def _hear_of_snapshots(self) -> None:
        """Tell the callbacks of the newest snapshot that the servers took by themselves."""
        newest = current().newest_snapshot
        if newest is not None and newest[0] not in self._told and self.is_first_worker():
            self._has_saved(*newest)

    @override
    def _has_saved(self, folder: str, step: int = 0) -> None:
        self._told.add(folder)
        for callback in self._callbacks:
            callback.on_snapshot(step or current().pushes, folder)
