"""psfleet without torch."""

import sys
from pathlib import Path

import pytest

from tests.programs import ended

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    process = ended([sys.executable, "-c", code], cwd=ROOT, check=True)
    return process.stdout.strip()


def test_torch_is_here() -> None:
    """The other tests of this folder need PyTorch: without it they are not even collected."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")


def test_torch_is_not_imported() -> None:
    """Neither psfleet nor psfleet.torch imports torch before one of its names is used."""
    code = "import sys, psfleet, psfleet.fleet, psfleet.torch; print('torch' in sys.modules)"
    assert run(code) == "False"


def test_missing_torch_is_named() -> None:
    """Where torch is missing, using a name says how to install it."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import psfleet.torch as pst\n"
        "try: pst.Embedding\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    assert run(code) == (
        "ConfigError psfleet.torch.Embedding needs PyTorch, which is not installed; "
        "run: pip install '.[torch]' in psfleet's checkout"
    )
