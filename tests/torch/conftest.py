"""Each test here has an embedded runtime and a strategy of its own. Most need PyTorch."""

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet import fleet as fleet_api
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests import starter
from tests.runtimes import own_runtime

if importlib.util.find_spec("torch") is None:  # test_without_torch.py says so
    _OTHERS = {"test_examples.py", "test_without_torch.py"}
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("*.py") if path.name not in _OTHERS
    ]


@pytest.fixture(autouse=True)
def fleet() -> Iterator[EmbeddedRuntime]:
    """The active runtime: fresh, and closed when the test is over; so is the strategy of a test."""
    with own_runtime() as runtime:
        yield runtime
        fleet_api.init()


@pytest.fixture(scope="session")
def torch_zygote() -> None:
    """Scripts that import torch start as forks of a process that has it."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
    if subprocess.Popen is not starter.exec_popen:
        starter.start_torch_zygote()
