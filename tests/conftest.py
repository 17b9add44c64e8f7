"""What holds in all tests: Hypothesis counts examples, processes start fast, and nothing is left behind."""

import gc
import importlib
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from psfleet.core.base.logs import set_up_logs
from psfleet.core.runtime.process_runtime import current
from tests import starter
from tests.leaks import nothing_left

# By number of examples, never by time: that a machine does other things is no fault of what is tested.
settings.register_profile("by number", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("by number")
# Programs of tests are forks of one that has loaded everything (tests/starter.py).
# PSFLEET_TEST_STARTER=0: they are new interpreters.
_forks = os.environ.get("PSFLEET_TEST_STARTER") != "0"
if _forks:
    starter.install()

importlib.import_module(
    "numpy.testing"
)  # that of NumPy 1.26 starts lscpu when it is first imported

_HERE = Path(__file__).parent
_NOT_QUICK = {"subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "socket.bind"}
_quick_test = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without quick tests under `-m quick`: importing all files takes as long as running those."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return "pytest.mark.quick" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each worker of xdist begin with other folders: a test file that another one has compiled meanwhile
    costs it next to nothing, and else each would compile all of them: 8 CPU-s in a new tree."""
    report = yield
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if collector.path == _HERE:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        first = len(report.result) * number // workers
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)  # before those of a fixture are put together
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by path, because all workers of xdist need the same order."""
    items.sort(key=lambda item: item.path.parts)


@pytest.hookimpl(tryfirst=True)  # no fixture is to be blamed for the zygote
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Log as a script that trains alone, whatever role a test before had in this process."""
    set_up_logs()
    if _forks and not item.get_closest_marker("quick"):
        starter.start_zygote()


def pytest_collection_finish() -> None:
    """Spare each search for garbage what stays until the end: the tests and all that they have imported."""
    gc.collect()
    gc.freeze()


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _quick_test and (event in _NOT_QUICK or (event, arguments[:1]) == ("import", ("torch",))):
        raise AssertionError(
            f"{event} in {_quick_test}: a test that does this must not have the mark quick"
        )


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every thread and child process of a test has ended when it is over, and so has the process's runtime:
    else the next test that connects would share it instead of what its environment names."""
    global _quick_test
    if request.node.get_closest_marker("quick"):
        _quick_test = request.node.nodeid
    had_runtime = current().is_active
    try:
        with nothing_left():
            yield
            if not had_runtime:
                current().provide(None)
                if (runtime := current().use(None)) is not None:
                    runtime.close()
    finally:
        _quick_test = ""
