"""Methods of Fleet that save and load: snapshots, models for training and for inference, and removal of rows.

A script calls these methods on every worker. Worker 0 does the work. Workers other than 0 return at once from
methods that save, and wait for worker 0 in `load_model` and `shrink`.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.validation.annotations import Range, checked
from psfleet.core.engine.eviction_reader import EvictionReader
from psfleet.core.engine.schema.table import key_of
from psfleet.core.graph.execution.inference import save_inference
from psfleet.core.graph.execution.model_files import TableNames, load, save
from psfleet.core.graph.parameters.binding import invalidate
from psfleet.core.runtime.process_runtime import active, check_none_waits, current
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.fleet.roles import FleetRole


@checked
class FleetSaving(FleetRole):
    """Methods of a Fleet that save, load and shrink tables."""

    def snapshot(self) -> str:
        """Take a snapshot of the whole fleet in the job's folder, and return its path.

            path = fleet.snapshot()  # psfleet-launch --resume PATH starts another job from it

        Other workers continue to train meanwhile. On workers other than 0 the call does nothing and returns
        "".
        """
        if not self.is_first_worker():
            return ""
        check_none_waits(current().waiting_steps, "the snapshot")
        folder = active().save("")
        self._has_saved(folder)
        return folder

    def _has_saved(self, folder: str) -> None:
        """Called after tables were saved in a folder. A subclass notifies the callbacks."""

    def save_persistables(self, *arguments: Any, main_program: Any = None, mode: int = 0) -> None:
        """Write all tables, including optimizer state, to a folder. `load_model` continues from the folder.

            fleet.save_persistables("model")

        Worker 0 saves; on other workers the call does nothing. Paddle's form `(executor, dirname)` is
        accepted too.

        Args:
            arguments: The folder, or an executor and the folder.
            main_program: Ignored. Accepted because Paddle has it.
            mode: Content to write:
                0 writes everything.
                1 writes a delta: only the changes since the last save with mode 1 or 2.
                2 writes a base: everything, so that the next delta has the changes since this save.
                3 is the same as 0. (Paddle also ages its rows then; in psfleet only `shrink` does.)

        Raises:
            CheckpointError: The fleet has no table, or the folder cannot be written.
        """
        path = _dirname("save_persistables", arguments)
        if mode not in (0, 1, 2, 3):
            raise ConfigError(f"save_persistables mode is {mode!r}; it must be 0, 1, 2 or 3")
        if self.is_first_worker():
            save(active(), path, delta=mode == 1, base=mode == 2)
            self._has_saved(path)

    def load_model(self, *arguments: Any, mode: int = 0, tables: TableNames | None = None) -> None:
        """Load tables from a folder that `save_persistables` has written.

            fleet.load_model("model")

        All workers must call it after the model was created. Worker 0 loads, while the other workers wait.
        The number of servers may differ from the number at the time of saving.

        Args:
            arguments: The folder, or an executor and the folder.
            mode: Must be 0.
            tables: Tables to load, as for `Client.load`, or None for all tables.

        Raises:
            CheckpointError: No table or parameter of the script would get a value. Nothing has changed.
        """
        path = _dirname("load_model", arguments)
        if mode != 0:
            raise ConfigError(f"load_model mode is {mode!r}; only 0 (everything) is available")
        load(active(), path, tables)

    def save_inference_model(
        self, *arguments: Any, main_program: Any = None, features: FeatureSet | None = None
    ) -> None:
        """Write a model for prediction: weights without optimizer state, and the part of the program that
        computes the targets.

            fleet.save_inference_model("served", ["ids"], [chance], features=features)

        Worker 0 saves; on other workers the call does nothing.

        Args:
            arguments: Folder, names of the variables to feed, target variables and, optionally, the
                program. Paddle's executor may come first.
            main_program: Program, if `arguments` has none. None is the default program.
            features: Feature set to store with the model, including the statistics of its transforms, for
                `psfleet serve`, `psfleet predict` and `psfleet.serving.load`.
        """
        if arguments and not isinstance(arguments[0], str | os.PathLike):
            arguments = arguments[1:]
        if len(arguments) == 4 and main_program is None:
            *arguments, main_program = arguments  # type: ignore[assignment]
        if len(arguments) != 3:
            raise UsageError(
                "save_inference_model needs dirname, feeded_var_names and target_vars, and takes a "
                f"main_program; it got {len(arguments)} of them"
            )
        path, feeds, targets = arguments
        if self.is_first_worker():
            active().flush()
            save_inference(os.fspath(path), list(feeds), list(targets), main_program, features)

    def shrink(
        self,
        threshold: float | None = None,
        unseen: Annotated[int, Range(1, 2**31 - 1)] | None = None,
        table: str | None = None,
    ) -> int:
        """Remove rows with a low score, and rows that were not updated for some time, from sparse tables.

            removed = fleet.shrink(unseen=7)  # called daily: removes rows not updated for a week

        All workers must call it; each waits for all workers before and after. Worker 0 does the work.

        Args:
            threshold: Rows with a lower score are removed. Rows have scores in tables with a ShowClickEntry
                or an eviction policy such as LFU. None uses the entry's `delete_threshold`, and removes no
                row by its score in tables without one.
            unseen: Rows are removed if no push has named them since this many calls of `shrink`. None uses
                the entry's `delete_after_unseen`, and removes no row in tables without one.
            table: Name of the table, or None for all sparse tables.

        Returns:
            Number of removed rows; 0 on workers other than 0.
        """
        active().barrier()
        count = 0
        if self.is_first_worker() and not active().passes:
            key = 0 if table is None else key_of(table)
            count = active().shrink(key, threshold, unseen)
        active().barrier()
        invalidate()
        return count

    def evictions(self, table: str, position: Sequence[int] = ()) -> EvictionReader:
        """Return a reader of the ids whose rows were evicted from a sparse table. Any worker may call it.

        Use it to remove the same ids from a copy of the table, such as a cache.

        Args:
            table: Name of the table. Its entry must contain an EvictionStreamEntry.
            position: Position at which an earlier reader stopped, or () to begin with the oldest evictions
                that the servers still have.
        """
        return EvictionReader(active(), table, position)


def _dirname(function: str, arguments: Sequence[Any]) -> str:
    """Return the folder from the arguments (dirname) or (executor, dirname[, program])."""
    for argument in arguments[:2]:
        if isinstance(argument, str | os.PathLike) and os.fspath(argument):
            return os.fspath(argument)
    raise UsageError(f"{function} needs a folder; it got {arguments!r}")
