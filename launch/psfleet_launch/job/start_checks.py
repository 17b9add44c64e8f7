"""Checks of the script, variables and devices before anything starts, so that an error is one line and
comes at once.

Without them a server would refuse a wrong device or variable after it has loaded, and a worker a wrong
script after all servers are ready.
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
    """Refuse a Python file that cannot be compiled; `what` names it, as in "script 'train.py'"."""
    # Python also runs archives and compiled files. They are not checked.
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
    """Refuse a wrong variable of the user, which every process of the job would inherit and refuse."""
    resolve(None, from_variables(UserSettings, variables).get("strategy", ""))


def check_this_machine(settings: JobSettings) -> None:
    """Refuse a GPU or a folder for tables that this machine does not have. For servers that run here."""
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
        # In another process, because a process that has used CUDA keeps memory of the GPU until it ends.
        look = (
            "from psfleet.core.engine.tables.memory_choice import why_no_gpu; print(why_no_gpu())"
        )
        command = [sys.executable, "-P", "-c", look]
        if why := subprocess.run(command, capture_output=True, text=True).stdout.strip():
            raise ConfigError(
                f"--device is 'cuda', but {why}; use --device auto or cpu to hold tables in host memory"
            )
