"""Checks of a job before anything starts, so that one line says at once what a process would refuse.

A server refuses a wrong device or variable only after it has loaded, and a worker a wrong strategy or script
only after all servers are ready. What can be known without them is checked here, in the launcher.
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
    """Refuse a Python file that no interpreter can compile.

    Args:
        path: The file. Archives and compiled files, which Python runs too, are not read.
        what: Name of the file for the message, such as "script 'train.py'".

    Raises:
        ConfigError: It cannot be compiled, or cannot be read.
    """
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
    """Refuse a value of the launcher's own environment that it would pass on, and each process refuse.

    Raises:
        ConfigError: A variable is wrong; the error names it.
    """
    resolve(None, from_variables(UserSettings, variables).get("strategy", ""))


def check_this_machine(settings: JobSettings) -> None:
    """Refuse memory for tables that this machine, on which the job's servers run, does not have.

    Raises:
        ConfigError: There is no GPU for `--device cuda`, or no folder for rows on disk.
    """
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
    # A process of its own, because one that has looked keeps memory of the GPU until it ends.
    look = "from psfleet.core.engine.tables.memory_choice import why_no_gpu; print(why_no_gpu())"
    if settings.device == "cuda" and (why := _said_by(look)):
        raise ConfigError(
            f"--device is 'cuda', but {why}; use --device auto or cpu to hold tables in host memory"
        )


def _said_by(program: str) -> str:
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
