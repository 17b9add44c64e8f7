"""Every test of this folder has an embedded runtime of its own, and one thread for torch."""

import subprocess
from collections.abc import Iterator

import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from tests import starter
from tests.runtimes import own_runtime


@pytest.fixture(autouse=True)
def fleet() -> Iterator[EmbeddedRuntime]:
    """The active runtime: fresh, and closed when the test is over."""
    with own_runtime() as runtime:
        yield runtime


@pytest.fixture(scope="session")
def torch_zygote() -> None:
    """Scripts that import torch start as forks of a process that has it."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
    if subprocess.Popen is not starter.exec_popen:
        starter.start_torch_zygote()
