"""Snapshots, saved models and loaded ones, and what is no longer worth saving."""

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
    """Saving and reading of the fleet's tables by a script; worker 0 does it for all."""

    def snapshot(self) -> str:
        """Take a snapshot of the whole fleet in the job's folder; where it lies.

        Training of the other workers goes on. Worker 0 asks for it; for the others the call does
        nothing and gives "".
        """
        if not self.is_first_worker():
            return ""
        check_none_waits(current().waiting_steps, "the snapshot")
        folder = active().save("")
        self._has_saved(folder)
        return folder

    def _has_saved(self, folder: str) -> None:
        """Be told that the tables are in a folder."""

    def save_persistables(self, *arguments: Any, main_program: Any = None, mode: int = 0) -> None:
        """Write every table, optimizer state included, to a folder: weights and all to go on from.

        Worker 0 saves, for the others the call does nothing. Called as `save_persistables(dirname)` or
        with the reference's `(executor, dirname)`.

        Args:
            mode: 0: everything. 1: a delta, what has changed since the last delta or base. 2: a base,
                everything, and the next delta says the changes since. 3: everything; the reference
                also ages its rows then, which here only `shrink` does.

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
        """Set tables from a folder written by `save_persistables`, by any number of servers.

        Worker 0 loads; the others wait for it. All workers must call it, once the model is made.

        Args:
            tables: None: every one. Else those that get the folder's weights, see `Client.load`.

        Raises:
            CheckpointError: No table or parameter of the script would get a value; nothing was changed.
        """
        path = _dirname("load_model", arguments)
        if mode != 0:
            raise ConfigError(f"load_model mode is {mode!r}; only 0 (everything) is available")
        load(active(), path, tables)

    def save_inference_model(
        self, *arguments: Any, main_program: Any = None, features: FeatureSet | None = None
    ) -> None:
        """Write what predicting needs, and no optimizer state: the program up to the targets, weights.

        Called as `(dirname, feeded_var_names, target_vars, main_program)`, of which the last may be left out,
        or with the reference's executor first.
        Worker 0 saves, for the others the call does nothing. `features`, with the statistics of their
        transforms, come with the model, for `psfleet serve`, `psfleet predict` and `psfleet.serving.load`.
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
        """Remove rows of sparse tables that are worth little or not in use.

        All workers must call it: they meet before and after. Worker 0 shrinks.

        Args:
            threshold: In tables with a ShowClickEntry the least score of a row that stays; None: the
                entry's delete_threshold. In tables whose eviction policy has scores, such as LFU, the least
                of those; None: all stay. In other tables the same as `unseen`.
            unseen: Rows go that no push has named since the unseen-th shrink before this one. None: the
                entry's delete_after_unseen; in other tables none go.
            table: Name of the one table that is meant; None: every sparse table.

        Returns:
            How many rows went; 0 on workers other than the first.
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
        """A reader of the ids whose rows go from a sparse table, on any worker; see `EvictionReader`.

        Args:
            table: Its name; its entry has an EvictionStreamEntry.
            position: Position of an earlier reader, which it goes on from; (): from the oldest
                evictions that the servers remember.
        """
        return EvictionReader(active(), table, position)


def _dirname(function: str, arguments: Sequence[Any]) -> str:
    """The folder among (dirname) or (executor, dirname[, program])."""
    for argument in arguments[:2]:
        if isinstance(argument, str | os.PathLike) and os.fspath(argument):
            return os.fspath(argument)
    raise UsageError(f"{function} needs a folder; it got {arguments!r}")
