"""ProcessRuntime: the one runtime that a script, `psfleet.fleet` and all clients of a process share.

A process is one worker of its fleet, for any number of clients. This module counts the clients, makes the
runtime when it is first needed, and leaves the fleet when the last client is closed or the script ends. A
script that fails does not leave, since a worker that leaves counts as finished. `using` gives a thread a
separate ProcessRuntime, so that one process can run several workers.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from psfleet.core.base.errors import UsageError
from psfleet.core.base.forks import check_process
from psfleet.core.base.logs import set_up_logs
from psfleet.core.base.settings.environment import check_alone
from psfleet.core.engine.runtime_interface import load_runtime
from psfleet.core.runtime.script_runtime import ScriptRuntime

Parts = Mapping[str, Mapping[str, Any]]
"""Parts of a strategy by name, each a mapping of settings, as in a strategy file."""


class ProcessRuntime:
    """Active runtime of a process. Counts the clients that use it, so that the process leaves the fleet once.

    A process has one ProcessRuntime; a thread inside `using` has a separate one.

    Attributes:
        bound_tables: Tables of the active runtime (psfleet.core.graph.parameters.binding.BoundTables).
        caches: Caches of pulled values, which are cleared when tables may have changed.
        mergers: GradientMergers that hold gradients for the active runtime.
    """

    def __init__(self, runtime: ScriptRuntime | None = None) -> None:
        self.bound_tables: Any = None
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.mergers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._make: Callable[[Parts], ScriptRuntime] | None = None
        self._exit: SystemExit | None = None
        self._runtime: ScriptRuntime | None = None
        self.use(runtime)

    def active(self) -> ScriptRuntime:
        """Return the active runtime. The first call makes one.

        It is embedded unless `fleet.init()` has found a cluster.

        Raises:
            ConfigError: The environment names a fleet, and the script has not called `fleet.init()`.
        """
        if self._runtime is None:
            self._runtime = self._make({}) if self._make else _alone()
            self._process = os.getpid()
        self._is_kept = True
        return self._runtime

    @property
    def is_active(self) -> bool:
        """True if a runtime was made and is still open."""
        return self._runtime is not None

    @property
    def is_held(self) -> bool:
        """True if a client, an object through which the script uses the runtime, is open."""
        return self._runtime is not None and self._clients > 0

    @property
    def pushes(self) -> int:
        """Number of the script's pushes, including those before a restart. 0 without a runtime."""
        return 0 if self._runtime is None else self._runtime.pushes

    def check_process(self, what: str) -> None:
        """Raise UsageError if this process is a fork of the process that has made the runtime."""
        if self._runtime is not None:
            check_process(self._process, what)

    @property
    def waiting_steps(self) -> int:
        """Number of steps whose gradients `gradient_merge` holds in this process until a later push."""
        return max((merger.waiting for merger in self.mergers), default=0)

    @property
    def newest_snapshot(self) -> tuple[str, int] | None:
        """Folder of the job's newest snapshot, and the script's last push in it (0 if it is not known)."""
        cluster = None if self._runtime is None else self._runtime.cluster
        return None if cluster is None else cluster.newest_snapshot

    @property
    def server_num(self) -> int | None:
        """Number of servers of the runtime, or None without a runtime."""
        return None if self._runtime is None else self._runtime.server_num

    def provide(self, make: Callable[[Parts], ScriptRuntime] | None) -> None:
        """Set the function that makes the next active runtime, or None for an embedded one.

        Args:
            make: Function that returns a runtime. Its argument is the settings that a client requests, which
                apply unless the script has chosen others.
        """
        self._make = make

    def use(self, runtime: ScriptRuntime | None) -> ScriptRuntime | None:
        """Replace the active runtime and return the previous one.

        After None, the next use makes a new runtime.
        """
        before, self._runtime = self._runtime, runtime
        self._process = os.getpid()
        self.mergers.clear()
        self._clients = 0  # open clients of the active runtime
        self._is_kept = runtime is not None  # the runtime stays open when the last client is closed
        self._lingers = False  # the last client has failed: whether to leave is decided at exit
        return before

    def hold(self, make: Callable[[Parts], ScriptRuntime], parts: Parts) -> ScriptRuntime:
        """Return the active runtime for another client, and count the client.

        Makes a runtime if there is none.

        Args:
            make: Makes the runtime, unless `fleet.init()` has set another function.
        """
        if self._runtime is None:
            self._runtime = (self._make or make)(parts)
            self._process = os.getpid()
            atexit.unregister(self._leave)  # an earlier runtime may have registered it
            atexit.register(self._leave)
        self._clients += 1
        self._lingers = False
        self._exit = None  # the script has caught its SystemExit, and continues
        return self._runtime

    def let_go(self, runtime: ScriptRuntime, timeout: float | None = None) -> None:
        """End a client's use of the runtime: flush it, and close it if nothing else in the process uses it.

        Args:
            timeout: Seconds for which the flush waits for other workers, if the client's `with` block has
                failed; else None. After a failure the process stays in the fleet until the script ends.
        """
        if runtime is self._runtime:
            self._clients -= 1
            self._lingers = timeout is not None and runtime.server_num > 0
            if self._clients or self._is_kept or self._make or self._lingers:
                runtime.flush(timeout)
                return
            self._runtime = None
        runtime.close()

    def _leave(self) -> None:
        """Leave the fleet at the end of a script, if it is still in the fleet and has not failed."""
        if (self.is_held or self._lingers) and not self.has_failed():
            before = self.use(None)
            if before is not None:
                before.close()

    def expect_exit(self, error: BaseException) -> None:
        """Record that the script ends by `sys.exit`.

        Unlike other errors, this does not set sys.last_value.
        """
        if isinstance(error, SystemExit):
            self._exit = error

    def has_failed(self) -> bool:
        """Return whether the script has ended with an error or with a nonzero exit code.

        The worker of a failed script does not leave the fleet. A worker that leaves counts as finished, and
        the other workers would go on without its share of the data. The launcher, or the platform that runs
        the job, sees the exit code.
        """
        return self._exit is not None or hasattr(sys, "last_value")


def check_none_waits(steps: int, holder: str) -> None:
    """Raise an error if gradients wait to be merged, because a file saved now would lack them.

    Args:
        holder: Name of the file or table to save, for the message.

    Raises:
        UsageError: `steps` is not 0.
    """
    if steps:
        raise UsageError(
            f"gradients of {steps} step(s) wait to be merged (gradient_merge), and {holder} would lack "
            "them; save after a step that pushes, or let every worker push them first: opt.push_merged()"
        )


def is_failure(error: BaseException) -> bool:
    """Return whether a script has failed if this error ends it."""
    return not isinstance(error, SystemExit) or bool(error.code)


def _alone() -> ScriptRuntime:
    check_alone()
    set_up_logs()
    runtime: ScriptRuntime = load_runtime("embedded")
    return runtime


_current = ContextVar("process_runtime", default=ProcessRuntime())  # noqa: B039  # one of the process
current: Callable[[], ProcessRuntime] = _current.get


def active() -> ScriptRuntime:
    """Return the active runtime of this process. The first call makes one."""
    return current().active()


@contextmanager
def using(runtime: ScriptRuntime | None = None) -> Iterator[ProcessRuntime]:
    """Let this thread, and the threads that psfleet starts for it, act as a process with its own runtime.

    Several workers of one fleet can then train as threads of one process.

    Args:
        runtime: Active runtime inside the block, or None to make one at its first use.
    """
    process = ProcessRuntime(runtime)
    token = _current.set(process)
    try:
        yield process
    finally:
        _current.reset(token)
