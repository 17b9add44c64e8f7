"""Turns the text of a kernel module into a module, compiled once per machine and user.

numba can cache compiled code only for functions that stand in a file, and it looks for changes in
that file alone. So every kernel module is written to a file whose name holds a hash of all that the
machine code depends on: the text, the helpers it calls, the versions and the processor. An edited
rule, an upgrade or another machine on a shared home folder then means another file.
"""

import fcntl
import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite
import llvmlite.binding
import numba
import numpy as np

from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import UserSettings

_HELPERS = ("hash_index.py", "hashing.py", "id_routing.py", "intrinsics.py", "row_rounding.py")
_LONGEST = 300.0  # seconds for which a process waits for another one that compiles
_lock = threading.Lock()
_modules: dict[str, ModuleType] = {}
_waits = ContextVar("_waits", default=True)  # for what another process compiles


def load_text(stem: str, text: str) -> ModuleType:
    """Return the module with this text, with kernels compiled here or taken from the cache. Thread-safe.

    Args:
        stem: Start of the file's name, for people who read a stack trace.
        text: The module's source.
    """
    name = _name_of(stem, text)
    with _lock:
        if name not in _modules:
            path = cache_folder() / f"{name}.py"
            with short_rows(), _compiling(path.with_suffix(".lock")):
                _modules[name] = _mended(name, _write(path, text))
        return _modules[name]


def _name_of(stem: str, text: str) -> str:
    digest = hashlib.blake2b((_surroundings() + text).encode(), digest_size=10).hexdigest()
    return f"psfleet_kernel_{stem}_{digest}"


def load_in_any_order(*loads: Callable[[], object]) -> None:
    """Call functions that load kernels; put off those whose kernels another process is compiling.

    So processes that start together share the work, where otherwise all would wait for the first kernel.
    """
    later = []
    reset = _waits.set(False)
    try:
        for load in loads:
            try:
                load()
            except BlockingIOError:
                later.append(load)
    finally:
        _waits.reset(reset)
    for load in later:
        load()


@contextmanager
def short_rows() -> Iterator[None]:
    """Switch on LLVM's SLP vectorizer, which joins neighbouring scalar operations, for what is compiled
    meanwhile.

    The loop over a row of up to 16 weights is unrolled before it could be vectorised; numba
    leaves the pass that would mend this switched off, unless NUMBA_SLP_VECTORIZE says otherwise.
    """
    settings: Any = numba.config
    before = settings.SLP_VECTORIZE
    settings.SLP_VECTORIZE = 1
    try:
        yield
    finally:
        settings.SLP_VECTORIZE = before


@cache
def cache_folder() -> Path:
    """Return the folder of compiled kernels: PSFLEET_CACHE, or ~/.cache/psfleet/kernels.

    Machine code is loaded from it, so no other user may write to it. If others may, or if it cannot be
    written, a private temporary folder takes its place.
    """
    folder = Path(os.path.expanduser(from_variable(UserSettings, "cache", os.environ)))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder) and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="psfleet-kernels-"))


def _is_private(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def _surroundings() -> str:
    """Return all that the machine code depends on besides the module's own text."""
    here = Path(__file__).parent
    helpers = [(here / name).read_text() for name in _HELPERS]
    processor = [
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        "short rows",
    ]
    versions = [numba.__version__, llvmlite.__version__, np.__version__, sys.version]
    return "\0".join([*versions, *processor, *helpers])


def _write(path: Path, text: str) -> Path:
    """Write a file in one step, by renaming, because several processes may write it at the same time."""
    if not path.exists() or path.read_text() != text:
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    return path


@contextmanager
def _compiling(path: Path) -> Iterator[None]:
    """Let one process compile while the others wait for what it leaves in the cache (decision 2).

    The process that compiles locks the file, and writes to it when it is done. A file that is not empty is
    never locked again, so that later processes load in parallel.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # a full disk; the module is compiled all the same
        yield
        return
    try:
        is_locked = os.fstat(file).st_size == 0 and _lock_file(file)
        yield
        if is_locked:
            with suppress(OSError):
                os.pwrite(file, b"compiled", 0)
    finally:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has it, too
        os.close(file)


def _lock_file(file: int) -> bool:
    """Lock a file; return whether that worked.

    Waits for a process that compiles, for as long as that may take.

    Raises:
        BlockingIOError: Another process compiles, and `load_in_any_order` has something else to do.
    """
    end = time.monotonic() + _LONGEST
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not _waits.get():
                raise
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False
    return False


def _mended(name: str, path: Path) -> ModuleType:
    """Import the module; if that fails, remove its compiled code and try once more.

    A full disk or a lost machine may have left half a file, and numba unpickles what it finds.
    """
    try:
        return _import(name, path)
    except Exception:
        if not forget_compiled(name):
            raise
        return _import(name, path)


def forget_compiled(name: str) -> bool:
    """Remove the compiled code of a module; return whether there was any."""
    files = list((cache_folder() / "__pycache__").glob(f"{name}.*"))
    for file in files:
        file.unlink(missing_ok=True)
    return bool(files)


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
