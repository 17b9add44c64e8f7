"""The runtime of a process, which a script, `psfleet.fleet` and all clients share: one seat in the fleet."""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from psfleet.core.base.errors import UsageError
from psfleet.core.base.logs import set_up_logs
from psfleet.core.base.settings.environment import check_alone
from psfleet.core.engine.gradient_checks import check_process
from psfleet.core.engine.interface import Runtime, load_runtime

Parts = Mapping[str, Mapping[str, Any]]
"""Parts of a strategy, in the form of a strategy file."""


class ProcessRuntime:
    """Holds the active runtime and knows who uses it, so that its seat is left once and in time.

    A process has one. Threads that are to act as processes of their own have one each, see `using`.

    Attributes:
        bound_tables: Binding of the active runtime's tables, see psfleet.core.graph.parameters.binding.
        caches: Values of its tables that were read, to be forgotten when others have changed them.
        mergers: Those that have kept gradients of the active runtime (GradientMerger).
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        self.bound_tables: Any = None
        self.caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self.mergers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._make: Callable[[Parts], Runtime] | None = None
        self._exit: SystemExit | None = None
        self._runtime: Runtime | None = None
        self.use(runtime)

    def active(self) -> Runtime:
        """Return the active runtime, made when it is first asked for.

        Embedded, unless `fleet.init()` has found a cluster.

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
        """True if a runtime has been made and is still open."""
        return self._runtime is not None

    @property
    def is_held(self) -> bool:
        """True if a client is open."""
        return self._runtime is not None and self._clients > 0

    @property
    def pushes(self) -> int:
        """Number of the script's pushes, with those of earlier incarnations; 0 without a runtime."""
        return int(getattr(self._runtime, "pushes", 0))

    def check_process(self, what: str) -> None:
        """Refuse to take something in a fork of the process that trains, as `check_process` does."""
        if self._runtime is not None:
            check_process(self._process, what)

    @property
    def waiting_steps(self) -> int:
        """Number of steps whose gradients gradient_merge keeps in this process until a later step."""
        return max((merger.waiting for merger in self.mergers), default=0)

    @property
    def newest_snapshot(self) -> tuple[str, int] | None:
        """Folder of the newest of the job's snapshots, and the script's last push in it; 0: not known."""
        snapshot: tuple[str, int] | None = getattr(self._runtime, "newest_snapshot", None)
        return snapshot

    @property
    def server_num(self) -> int | None:
        """Number of servers of the runtime; None: there is none."""
        return None if self._runtime is None else self._runtime.server_num

    def provide(self, make: Callable[[Parts], Runtime] | None) -> None:
        """Set how the next active runtime is made; None: embedded.

        make: Gets what a client asks for, which counts where the script has said nothing.
        """
        self._make = make

    def use(self, runtime: Runtime | None) -> Runtime | None:
        """Make `runtime` the active one and return the one before it. None: made when next asked for."""
        before, self._runtime = self._runtime, runtime
        self._process = os.getpid()
        self.mergers.clear()
        self._clients = 0  # open ones of the active runtime
        self._is_kept = runtime is not None  # it stays open when the last of them is closed
        self._lingers = False  # the last one failed: the script's end decides whether to leave
        return before

    def hold(self, make: Callable[[Parts], Runtime], parts: Parts) -> Runtime:
        """Return the active runtime for one client more, which has asked for these settings.

        It is made as `fleet.init()` has found, or by `make`.
        """
        if self._runtime is None:
            self._runtime = (self._make or make)(parts)
            self._process = os.getpid()
            atexit.unregister(self._leave)
            atexit.register(self._leave)
        self._clients += 1
        self._lingers = False
        self._exit = None  # it was caught, and the script goes on
        return self._runtime

    def let_go(self, runtime: Runtime, timeout: float | None = None) -> None:
        """End the use by a client: flush the runtime, and close it if nothing else in the process uses it.

        Args:
            runtime: The client's.
            timeout: For a client in whose `with` block something failed: seconds for which a flush
                waits for other workers. It keeps its seat in a fleet until the script ends.
        """
        if runtime is self._runtime:
            self._clients -= 1
            self._lingers = timeout is not None and runtime.server_num > 0
            if self._clients or self._is_kept or self._make or self._lingers:
                runtime.flush(timeout)
                return
            self._runtime = None
        runtime.close()

    # -- the script's end ----------------------------------------------------------------------

    def _leave(self) -> None:
        """At the end of a script whose seat is still taken: leave, unless it has failed."""
        if (self.is_held or self._lingers) and not self.has_failed():
            before = self.use(None)
            if before is not None:
                before.close()

    def expect_exit(self, error: BaseException) -> None:
        """Take note of a failure that is `sys.exit`, of which the interpreter leaves no trace."""
        if isinstance(error, SystemExit):
            self._exit = error

    def has_failed(self) -> bool:
        """Return whether the script has ended with an error or with a nonzero exit code.

        Its worker then keeps its seat in the fleet: a worker that leaves counts as finished, and the others
        would go on without its share of the data. The launcher, or the platform that runs the job, sees the
        exit code.
        """
        return self._exit is not None or hasattr(sys, "last_value")


def check_none_waits(steps: int, holder: str) -> None:
    """Refuse to save what lacks the gradients of steps that wait to be merged.

    Args:
        steps: Number of these steps.
        holder: The thing to be saved, for the message.

    Raises:
        UsageError: There are some.
    """
    if steps:
        raise UsageError(
            f"gradients of {steps} step(s) wait to be merged (gradient_merge), and {holder} would lack "
            "them; save after a step that pushes, or let every worker push them first: opt.push_merged()"
        )


def is_failure(error: BaseException) -> bool:
    """Return whether a script that ends with this error, uncaught, has failed."""
    return not isinstance(error, SystemExit) or bool(error.code)


def _alone() -> Runtime:
    check_alone()
    set_up_logs()
    return load_runtime("embedded")


_current = ContextVar("process_runtime", default=ProcessRuntime())  # noqa: B039  # one of the process
current: Callable[[], ProcessRuntime] = _current.get


def active() -> Runtime:
    """Return the active runtime of this process, see `ProcessRuntime.active`."""
    return current().active()


@contextmanager
def using(runtime: Runtime | None = None) -> Iterator[ProcessRuntime]:
    """Within, let this thread act as a process of its own, and so the threads that psfleet starts for it.

    Several workers of one fleet can so train as threads of one process.

    Args:
        runtime: Its active one; None: made when it is asked for.
    """
    process = ProcessRuntime(runtime)
    token = _current.set(process)
    try:
        yield process
    finally:
        _current.reset(token)
