"""Start Python programs as forks of a process that has already imported what they need.

A server needs 1.2 s of CPU time before its first line: imports of NumPy, numba and gRPC, and loading
compiled kernels. Tests start hundreds of servers and workers. Here one process for each test process,
the zygote, pays that once. It has a single thread and never touches gRPC, so it may fork. What it forks is
a real process with an environment, a folder, streams and sockets of its own, and a child of whoever
asked for it. `install` has `subprocess` start programs of psfleet and scripts this way, also behind
`nsenter --net=FILE`, `unshare --mount` and a shell that mounts something or joins a control group; everything
else, what is started by `exec_popen`, and what is told PSFLEET_TEST_STARTER=0 is a new interpreter as ever.
tests/test_starter.py compares both.
The workers of pytest-xdist are such forks too, so that a whole run pays for these imports once. Each has a
zygote of its own, forked from it before it has a thread.

A fork differs in four ways: its modules are imported already, it shows the command line of the zygote,
all forks of a zygote have its hash seed, and one that may start others has a zygote as its child.
"""

import atexit
import contextlib
import ctypes
import importlib
import inspect
import io
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

exec_popen = subprocess.Popen
_PR_SET_CHILD_SUBREAPER = 36
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
_LIBC = ctypes.CDLL(None)
_LARGEST = 1 << 18  # bytes of a request: a command line and an environment
_ROOM = "PSFLEET_TEST_ROOM"  # a long one: room for environments that children show in /proc
_AT_START = dict(os.environ)  # what Python and numba have read in a zygote
# What a fork can still obey, or need not: no kernel of psfleet has several threads.
_SETTABLE = {"PYTHONPATH", "PYTHONUNBUFFERED", "NUMBA_NUM_THREADS"}
_STARTS = ("subprocess", "psfleet.fleet.testing", "from processes")  # in scripts that start others
_SHELL = re.compile(r'(?:.*mount |echo \$\$ > |cd ).* && exec "\$@"')
"""A shell's script whose effects last in the process that started it: mounts, a control group, a folder."""
_XDIST_WORKER = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]  # as execnet starts one
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a zygote ends when its connection does


# -- a process that starts others ----------------------------------------------------------------


class _Zygote:
    """The connection of this process to its zygote.

    Args:
        more: A module that it imports besides those of psfleet.
        base: The zygote whose fork it is; without one it is a new interpreter.
        read: Variables that its modules read while they are imported.
    """

    def __init__(self, more: str = "psfleet", base: "_Zygote | None" = None, **read: str) -> None:
        self.more = more
        self.base = base
        self.read = read
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self.is_inner = False

    @property
    def is_started(self) -> bool:
        """Whether there is one."""
        return self._connection is not None

    def start(self) -> None:
        """Start a zygote, unless there is one."""
        with self._lock:
            if self._connection is not None:
                return
            self._connection, theirs = _pair()
            with theirs:
                wait = self._execute(theirs) if self.base is None else self._fork(theirs)
            atexit.register(_end, self._connection, wait)

    def _execute(self, connection: socket.socket) -> Callable[[], object]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        settled = {_ROOM: "x" * (1 << 15), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        inherited = {name: said for name, said in os.environ.items() if name != "PYTHONPATH"}
        return exec_popen(
            [sys.executable, "-P", __file__, str(connection.fileno()), self.more, path],
            stdin=subprocess.DEVNULL,
            pass_fds=[connection.fileno()],
            env={**inherited, **settled, **self.read},
        ).wait

    def _fork(self, connection: socket.socket) -> Callable[[], object]:
        assert self.base is not None
        with open(os.devnull) as null:
            files = [null.fileno(), 1, 2, connection.fileno()]
            request = _request(serves=self.more, kept=files[3:], environment=_AT_START)
            process = self.base.fork(request, files)
        return lambda: os.waitpid(process, 0)

    def forget(self) -> None:
        """Have no zygote, as in a new process."""
        self._lock, self._connection, self.is_inner = threading.Lock(), None, False

    def use(self, connection: socket.socket) -> None:
        """Take the zygote at the other end of the connection."""
        self._connection = connection
        self.is_inner = True

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """The process id of a new child of this process that runs the request."""
        self.start()
        assert self._connection is not None
        with self._lock:
            with _subreaper():
                socket.send_fds(self._connection, [json.dumps(request).encode()], files)
                reply = self._connection.recv(100)
            assert reply, "the zygote has ended; its error is above"
            # It begins now: had it ended before, a zygote of its own would be a child of this process.
            self._connection.send(b"begin")
        return int(reply)


_zygote = _Zygote()
_torch_zygote = _Zygote("torch", _zygote)
_simulator_zygote = _Zygote("numba.cuda", NUMBA_ENABLE_CUDASIM="1")
_plain_path = [*sys.path]  # in a zygote: of an interpreter that was given no path
start_zygote, start_torch_zygote = _zygote.start, _torch_zygote.start


def start_simulator_zygote(more: str = "numba.cuda") -> None:
    """Start one under numba's simulator, unless there is one. more: A module that it imports."""
    if not _simulator_zygote.is_started:
        _simulator_zygote.more = more
    _simulator_zygote.start()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _end(connection: socket.socket, wait: Callable[[], object]) -> None:
    """Await a zygote's end: as an orphan it might become a child of a process that forks just then."""
    connection.close()
    wait()


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Within, a descendant whose parent ends becomes a child of this process."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Forking(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks where it can."""

    def _execute_child(self, *arguments: Any) -> None:
        execute: Any = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(execute).bind(*arguments).arguments
        program, around = _program(given["args"])
        environment = dict(os.environ if given["env"] is None else given["env"])
        folder = os.fspath(given["cwd"] or os.getcwd())
        zygote = _zygote_for(program, environment, folder)
        executes = not program or _needs_exec(zygote, environment, given)
        if executes and not _needs_zygote(given):
            execute(*arguments)
            return
        standard = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        files = [number if file == -1 else file for number, file in enumerate(standard)]
        request = _request(
            program=program,
            executed=[os.fspath(word) for word in given["args"]] if executes else [],
            **around,
            folder=folder,
            environment=environment,
            kept=sorted(given["pass_fds"]),
            session=given["start_new_session"],
            dies_with_its_parent=given["preexec_fn"] is not None,
            starts_others=_starts_others(program, folder),
        )
        self.pid = zygote.fork(request, [*files, *request["kept"]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        close: Any = self._close_pipe_fds  # type: ignore[attr-defined]
        close(*(given[name] for name in pipes))


def _request(**fields: Any) -> dict[str, Any]:
    """A request to a zygote. serves: The module that another zygote imports, in place of a program."""
    return {
        "program": [],
        "executed": [],
        "serves": "",
        "network": "",
        "mounts": "",
        "shell": [],
        "session": False,
        "dies_with_its_parent": False,
        "starts_others": False,
        "ignored": [n for n in _IGNORED if signal.getsignal(n) == signal.SIG_IGN],
        **fields,
    }


def _program(command: Any) -> tuple[list[str], dict[str, Any]]:
    """What follows `python`, if it is a script or a module of psfleet, else empty; and what is before it:
    the file of its network, the file of its mounts, or "new", and a shell's script with its name."""
    around: dict[str, Any] = {}
    if not isinstance(command, list | tuple):
        return [], around
    words = [os.fspath(word) for word in command]
    for option, name in (("--net=", "network"), ("--mount=", "mounts")):
        if words[0] == "nsenter" and words[1].startswith(option):
            around[name], words = words[1].removeprefix(option), words[2:]
    if words[:2] == ["unshare", "--mount"]:
        around["mounts"], words = "new", words[2:]
    if words[:2] == ["sh", "-c"] and _SHELL.fullmatch(words[2]):
        around["shell"], words = words[2:4], words[4:]
    if words[0] != sys.executable:
        return [], around
    bare = words[1:][words[1] == "-P" :]
    is_ours = bare[0].endswith(".py") or (bare[0] == "-m" and bare[1].startswith("psfleet"))
    return (words[1:] if is_ours or bare == _XDIST_WORKER else []), around


def _zygote_for(program: Sequence[str], environment: dict[str, str], folder: str) -> _Zygote:
    """The one that has imported the most of what the program needs."""
    is_simulated = environment.get("NUMBA_ENABLE_CUDASIM") == "1"
    if _simulator_zygote.is_started and is_simulated:
        return _simulator_zygote
    is_torchs = _torch_zygote.is_started and "import torch" in _script(program, folder)
    return _torch_zygote if is_torchs else _zygote


def _needs_exec(zygote: _Zygote, environment: dict[str, str], given: dict[str, Any]) -> bool:
    """Whether only a new interpreter can be what was asked for."""
    asks = environment.get("PSFLEET_TEST_STARTER") == "0"
    counts = environment.get("PSFLEET_MEMORY", "")  # below 1 GB the memory of its zygote counts
    had = {**_AT_START, **zygote.read}
    names = {name for name in {*environment, *had} if name.startswith(("PYTHON", "NUMBA"))}
    reads = any(environment.get(name) != had.get(name) for name in names - _SETTABLE)
    reads = reads or any(Path(entry, "sitecustomize.py").is_file() for entry in _path(environment))
    unknown = given["preexec_fn"] is not None and not _is_spawned(given)
    return asks or 0 < len(counts) < 10 or reads or unknown or given.get("umask", -1) != -1


def _path(environment: dict[str, str]) -> list[str]:
    """The absolute entries of its PYTHONPATH."""
    named = environment.get("PYTHONPATH", "")
    return [os.path.abspath(entry) for entry in named.split(os.pathsep)] if named else []


def _needs_zygote(given: dict[str, Any]) -> bool:
    """Whether a process of a job must not be forked here, where gRPC would start threads in the fork."""
    return _zygote.is_inner and _is_spawned(given) and bool(shutil.which(given["args"][0]))


def _is_spawned(given: dict[str, Any]) -> bool:
    return getattr(given["preexec_fn"], "__module__", "") == "psfleet_launch.job.spawn"


def _starts_others(program: Sequence[str], folder: str) -> bool:
    """Whether it is given a zygote; without one it starts new interpreters."""
    if "psfleet_launch" in program or program == _XDIST_WORKER:
        return True
    if _zygote.is_inner or "psfleet_server" in program:
        return False
    text = _script(program, folder)
    return not text or any(word in text for word in _STARTS)


def _script(program: Sequence[str], folder: str) -> str:
    """The text of the scripts among the words of a command."""
    scripts = [Path(folder, word) for word in program if word.endswith(".py")]
    return "".join(path.read_text() for path in scripts if path.is_file())


def install() -> None:
    """Have `subprocess` fork what it can from now on."""
    subprocess.Popen = Forking  # type: ignore[misc]


# -- the zygote ----------------------------------------------------------------------------------


def _load(more: str) -> None:
    importlib.import_module("tests.preloading").load(more)


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; return only in a new process, with its request and files."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    while True:
        data, files, _, _ = socket.recv_fds(connection, _LARGEST, 100)
        if not data:
            os._exit(0)
        (ours, theirs), (waits, begins) = os.pipe(), os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)  # until this process is a child of the one that asked
            # Its number will be another file's, which the end of this object must not close.
            connection.detach()
            request = json.loads(data)
            _settle(request)
            os.write(theirs, str(os.getpid()).encode())
            os.close(begins)
            os.read(waits, 1)  # until all others have closed the other end
            for file in (ours, theirs, waits):
                os.close(file)
            return request, files
        for file in (theirs, waits):
            os.close(file)
        os.waitpid(between, 0)
        reply = os.read(ours, 100)  # nothing: the one that asked has ended, and so has the new one
        if not reply:
            os._exit(0)
        connection.send(reply)
        connection.recv(100)
        for file in (ours, begins, *files):
            os.close(file)


def _settle(request: dict[str, Any]) -> None:
    """What must hold when the other process learns of this one: its environment, by which jobs find it, its
    session, and its end with a parent."""
    _show(request["environment"])
    for number in {*_IGNORED} - {*request["ignored"]}:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    if request["session"]:
        os.setsid()
    if request["dies_with_its_parent"]:
        from psfleet_launch.job.spawn import _die_with

        _die_with(os.getppid())


def _run_and_end(request: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the program and end as an interpreter does, with one difference: its modules are not cleared, for
    that would write to, so copy, every page of memory that is shared with the zygote."""
    code: Any = None
    try:
        _become(request, files)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise  # it is a text to be printed
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be what an exec would have made of this process, and run the program."""
    for zygote in (_zygote, _torch_zygote, _simulator_zygote):
        zygote.forget()
    _keep(files, [0, 1, 2, *request["kept"]])
    if request["serves"]:
        _load(request["serves"])
        _run_and_end(*_serve(socket.socket(fileno=request["kept"][0])))
    for name in ("network", "mounts"):
        if request[name] and request[name] != "new":
            with open(request[name], "rb") as file:
                assert _LIBC.setns(file.fileno(), 0) == 0
    if request["executed"]:
        _execute(request)
    os.chdir(request["folder"])
    if request["mounts"] == "new":
        assert _LIBC.unshare(_NEW_MOUNTS) == 0
    if request["shell"]:
        _prepare(request)
    if request["starts_others"]:
        _fork_zygote()
        # Tests start processes as if this one were a new interpreter.
        _zygote.is_inner = request["program"] != _XDIST_WORKER
        install()
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    np.random.seed()  # Python does this for `random` in every fork
    _run(request["program"])


def _prepare(request: dict[str, Any]) -> None:
    """Run a shell's script in the mounts of this process up to the program, and take over its variables."""
    script, name = request["shell"]
    script = script.replace("$$", str(os.getpid())).removesuffix('exec "$@"')
    private = "mount --make-rprivate / && " if request["mounts"] == "new" else ""  # as unshare does
    command = ["sh", "-c", f"{private}{script} export PWD && exec env -0", name]
    text = subprocess.check_output(command, stdin=subprocess.DEVNULL, text=True)
    variables = dict(line.split("=", 1) for line in text.split("\0") if line)
    os.chdir(variables["PWD"])
    os.environ.update({k: v for k, v in variables.items() if k not in ("PWD", "OLDPWD", "_")})


def _execute(request: dict[str, Any]) -> None:
    """As `subprocess` does between `fork` and `exec`."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.execvpe(request["executed"][0], request["executed"], request["environment"])


def _stream(number: int) -> io.TextIOWrapper:
    """What Python makes of standard output or standard error when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    like = sys.stdout if number == 1 else sys.stderr
    return io.TextIOWrapper(
        open(number, "wb", buffering=0 if unbuffered else -1, closefd=False),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
        write_through=unbuffered,
    )


def _keep(files: list[int], numbers: list[int]) -> None:
    """Give the files their numbers, and close all others."""
    apart = [os.dup2(file, 1000 + place) for place, file in enumerate(files)]
    os.closerange(3, 1000)
    for file, number in zip(apart, numbers, strict=True):
        os.dup2(file, number)
    os.closerange(1000, 1000 + len(apart))


def _fork_zygote() -> None:
    """Make a zygote for this process while it has no thread."""
    ours, theirs = _pair()
    if (zygote := os.fork()) == 0:
        _show(_AT_START)  # it belongs to no job
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):
            os.dup2(null, number)
        _run_and_end(*_serve(theirs))
    theirs.close()
    _zygote.use(ours)
    atexit.register(_end, ours, lambda: os.waitpid(zygote, 0))


def _show(environment: dict[str, str]) -> None:
    """Make it this process's, also where others see it: in /proc, by which jobs find their processes."""
    os.environ.clear()
    os.environ.update(environment)
    status = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(status[47]), int(status[48])
    data = b"".join(os.fsencode(f"{name}={said}") + b"\0" for name, said in environment.items())
    ctypes.memmove(start, data[: end - start].ljust(end - start, b"\0"), end - start)


def _run(program: list[str]) -> None:
    if program == _XDIST_WORKER:
        sys.path[:], sys.argv = ["", *_path(dict(os.environ)), *_plain_path], ["-c"]
        exec(program[-1], {"__name__": "__main__"})
        return
    is_safe = program[0] == "-P"
    first, *others = program[is_safe:]
    path = _path(dict(os.environ))
    if not is_safe:
        path.insert(0, os.getcwd() if first == "-m" else os.path.dirname(os.path.abspath(first)))
    sys.path[:] = path + _plain_path
    if first == "-m":
        sys.argv = list(others)
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *others]
        _run_script(os.path.abspath(first))


def _run_script(path: str) -> None:
    """As runpy.run_path, which would change the first argument."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))


if __name__ == "__main__":
    sys.modules["tests.starter"] = sys.modules["__main__"]  # a worker's conftest.py uses its zygote
    sys.path[:0] = sys.argv[3].split(os.pathsep)
    _load(sys.argv[2])
    _run_and_end(*_serve(socket.socket(fileno=int(sys.argv[1]))))
