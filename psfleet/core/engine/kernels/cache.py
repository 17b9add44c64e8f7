"""Imports generated kernel modules, and keeps their machine code on disk for the next process.

Compiling a module of kernels takes seconds, so each module is compiled once on a machine. numba's own cache
looks only at the file of the compiled function, but the machine code of a kernel also contains the helper
functions that it calls. So the code of each module is written to a file whose name has a hash of everything
that the machine code depends on:

    ~/.cache/psfleet/kernels/psfleet_kernel_<stem>_<hash>.py      code of the module, without comments
                             psfleet_kernel_<stem>_<hash>.lock    empty until the module has been compiled
                             __pycache__/...                      machine code, written by numba

    hash of: code of the module and of its helpers (_HELPERS, or more for a GPU), versions of numba, llvmlite,
             NumPy and Python, the processor

After a change of a rule or a helper, after an upgrade, or on another machine that shares the home folder, the
name is different and the module is compiled again. Comments, docstrings and line numbers are in neither the
hash nor the file: `without_comments` removes them first. Old files are never removed.

A module is compiled by one process; other processes that need it wait and then load it (decision 2). If
the folder cannot be written or locked, each process compiles for itself, which only costs time.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
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
# Seconds for which a process waits for another process that compiles. A process that has been stopped while
# it compiles keeps its lock; after this time the waiting processes compile for themselves.
_LONGEST = 300.0
_COMMENT = re.compile(r"^([^\"'#\n]*?)[ \t]*#[^\n]*$", re.MULTILINE)
_BLANK = re.compile(r"^[ \t]*\n", re.MULTILINE)
_lock = threading.Lock()  # held while a module is compiled; guards `_modules` and `short_rows`
_modules: dict[str, ModuleType] = {}
# False within `load_in_any_order`: `_lock_file` then raises BlockingIOError instead of waiting.
_waits = ContextVar("_waits", default=True)


def load_text(stem: str, text: str, helpers: str = "") -> ModuleType:
    """Import a module of kernels, compiled now or loaded from the cache. Thread-safe.

    Takes seconds if the module has to be compiled. Later calls with the same text return the same module.

    Args:
        stem: Start of the file's name, which people see in stack traces.
        text: Python source of the module.
        helpers: Source of further modules whose functions are compiled into these kernels. The modules in
            _HELPERS need not be given.

    Raises:
        BlockingIOError: Another process is compiling the module, and the caller is `load_in_any_order`.
    """
    code = without_comments(text)
    name = _name_of(stem, code, helpers)
    with _lock:
        if name not in _modules:
            path = cache_folder() / f"{name}.py"
            with short_rows(), _compiling(path.with_suffix(".lock")):
                _modules[name] = _mended(name, _write(path, code))
        return _modules[name]


def without_comments(text: str) -> str:
    """Return Python source that compiles to the same code, without comments, docstrings and blank lines.

    Two texts that differ in nothing else give the same result, so their line numbers are the same too. A
    comment behind a quote on its line stays, and a text with other strings in triple quotes is not changed.
    """
    # Not `ast.parse`: two threads that parse at once can get a SystemError (CPython issue 106905), and a
    # server loads kernels in the threads of its calls.
    code, *quoted_and_code = text.split('"""')
    parts = [_COMMENT.sub(r"\1", code)]
    for after in quoted_and_code[1::2]:
        if parts[-1].rpartition("\n")[2].strip() or after[:1] not in ("", "\n"):
            return text
        parts.append(_COMMENT.sub(r"\1", after))
    return text if len(quoted_and_code) % 2 else _BLANK.sub("", "".join(parts))


def _name_of(stem: str, code: str, helpers: str = "") -> str:
    """Return the module's name: it differs if anything that the machine code depends on differs."""
    key = "\0".join([_surroundings(), without_comments(helpers), code])
    digest = hashlib.blake2b(key.encode(), digest_size=10).hexdigest()
    return f"psfleet_kernel_{stem}_{digest}"


def load_in_any_order(*loads: Callable[[], object]) -> None:
    """Call functions that load kernels, and postpone those whose kernels another process is compiling.

    Servers on one machine start together and need the same modules. If all servers loaded them in the same
    order, one server would compile everything while the rest wait. This way each server compiles a part.

    Args:
        loads: Functions that call `load_text`. A function whose kernels were being compiled elsewhere is
            called again.
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
    """Compile with LLVM's SLP vectorizer, which joins neighbouring scalar operations into vectors.

    LLVM unrolls the loop over a short row (up to 16 or 32 weights) before it looks for loops to vectorise.
    Without the SLP pass a row of 16 under Adagrad is updated by 16 divisions and 16 roots, one after the
    other: 39 ns instead of 11 (decision 2). numba switches the pass off unless NUMBA_SLP_VECTORIZE is set.
    The setting is global, so it is restored for functions of the user's own.
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

    Machine code is loaded from this folder and run, so no other user may be able to write there. If another
    user can, or if this process cannot, the process uses a new private folder under the temporary folder
    instead, and compiles every kernel for itself.
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
    """Return everything that the machine code of every module depends on besides the module's own code."""
    here = Path(__file__).parent
    helpers = [without_comments((here / name).read_text()) for name in _HELPERS]
    processor = [
        llvmlite.binding.get_host_cpu_name(),
        llvmlite.binding.get_host_cpu_features().flatten(),
        "short rows",  # the option of `short_rows`, which changes the machine code but not the text
    ]
    versions = [numba.__version__, llvmlite.__version__, np.__version__, sys.version]
    return "\0".join([*versions, *processor, *helpers])


def _write(path: Path, code: str) -> Path:
    """Write the code to the file, unless the file has it already.

    The file appears complete, by renaming a temporary file, because several processes may write it at the
    same time.
    """
    if not path.exists() or path.read_text() != code:
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(code)
        os.replace(temporary, path)
    return path


@contextmanager
def _compiling(path: Path) -> Iterator[None]:
    """Let one process compile a module while other processes that need it wait (decision 2).

    The content of the lock file tells whether the machine code exists:

        empty        take the lock, import the module (which compiles it), write "compiled"
        not empty    import without a lock, so that processes load in parallel
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # a full disk; the module is compiled all the same
        yield
        return
    try:
        # If this process had to wait for the lock, the other one has compiled, and the import only loads.
        is_locked = os.fstat(file).st_size == 0 and _lock_file(file)
        yield
        # Not reached if compiling failed: the file stays empty, and the next process tries under the lock.
        if is_locked:
            with suppress(OSError):
                os.pwrite(file, b"compiled", 0)
    finally:
        with suppress(OSError):
            # Closing alone would not unlock if a process was forked meanwhile: it has a copy of the file.
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _lock_file(file: int) -> bool:
    """Lock a file, waiting up to _LONGEST seconds for a process that holds the lock.

    Returns:
        True if this process has the lock. False after _LONGEST, or on a file system without locks; the caller
        then compiles without it.

    Raises:
        BlockingIOError: Another process compiles, and `load_in_any_order` can load another module meanwhile.
    """
    end = time.monotonic() + _LONGEST
    # A loop, because a blocking flock has no time limit.
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
    """Import the module; if that fails, remove its compiled code and import it once more.

    After a full disk or a crash of the machine a file of machine code may be incomplete, and numba does not
    check it.
    """
    try:
        return _import(name, path)
    except Exception:
        if not forget_compiled(name):
            raise
        return _import(name, path)


def forget_compiled(name: str) -> bool:
    """Remove the compiled code of a module from the cache; return whether the cache had any."""
    files = list((cache_folder() / "__pycache__").glob(f"{name}.*"))
    for file in files:
        file.unlink(missing_ok=True)
    return bool(files)


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: numba looks up the module of a function there (inspect.getmodule).
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
