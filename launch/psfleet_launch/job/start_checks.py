"""Checks of the script, variables and devices before a process is started.

They report an error in one line and at once. Without them a server would report a wrong device or variable
only after loading, and a worker would report a wrong script only after all servers are ready.
"""

import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from importlib.util import decode_source
from pathlib import Path

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import from_variables
from psfleet.core.base.settings.declared_settings import JobSettings, UserSettings
from psfleet.core.runtime.strategy import resolve


def check_source(path: Path, what: str) -> None:
    """Raise ConfigError if a Python file is missing or cannot be compiled.

    Args:
        what: Name of the file in the error, such as "script 'train.py'".
    """
    # Python can also run archives and compiled files. These are not checked.
    if path.suffix == ".pyc" or zipfile.is_zipfile(path):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the process that runs the file shows its warnings
            compile(decode_source(path.read_bytes()), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f" in line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{what} has a syntax error{where}: {error.msg}; correct it") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte, up to Python 3.11
        raise ConfigError(f"{what} cannot be read: {error}; correct it") from None


def check_variables(variables: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if a variable of the user has a wrong value. Every process of the job would fail."""
    resolve(None, from_variables(UserSettings, variables).get("strategy", ""))


def check_this_machine(settings: JobSettings) -> None:
    """Raise ConfigError if this machine lacks the GPU or the folder for tables that servers here will
    need."""
    if settings.device == "disk" and not settings.disk:
        raise ConfigError("--device is 'disk', which needs a folder; name it with --server-disk")
    if settings.disk:
        try:
            os.makedirs(settings.disk, exist_ok=True)
            tempfile.TemporaryFile(dir=settings.disk).close()
        except OSError as error:
            raise ConfigError(
                f"--server-disk is {settings.disk!r}, where no file can be made ({error.strerror}); name "
                "another folder"
            ) from None
    if settings.device == "cuda":
        # Run in another process, because a process that has used CUDA occupies memory of the GPU until it
        # ends.
        look = (
            "from psfleet.core.engine.tables.memory_choice import why_no_gpu; print(why_no_gpu())"
        )
        command = [sys.executable, "-P", "-c", look]
        if why := subprocess.run(command, capture_output=True, text=True).stdout.strip():
            raise ConfigError(
                f"--device is 'cuda', but {why}; use --device auto or cpu to hold tables in host memory"
            )
