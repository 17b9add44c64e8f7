"""`psfleet ckpt` and `psfleet log` on changed files.

The promise: exit code 0 and the truth, or another one and one sentence; then nothing was written.
"""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from psfleet.core.base.errors import PsfleetError
from psfleet_launch.commands import psfleet_cli
from psfleet_server.durability import inspect_log
from tests.fuzz import chains, files
from tests.fuzz.chains import LOG, TIP, a_log, reseal_snapshots, some_snapshots
from tests.fuzz.files import Reader, of_folder, reseal_log
from tests.fuzz.frames import Broken

# A word in braces is a path in the folder.
_CKPT = (
    ("verify", f"{{{TIP}}}"),
    ("diff", f"{{{TIP}}}", f"{{{TIP}}}"),
    ("reshard", f"{{{TIP}}}", "{out}", "--servers", "2"),
    ("export", f"{{{TIP}}}", "{out}", "--ids"),
    ("export", f"{{{TIP}}}", "{out}", "--format", "npz"),
)
_LOG = (
    ("verify", f"{{{LOG}}}"),
    ("replay", f"{{{LOG}}}", "", ""),
    ("replay", f"{{{LOG}}}", "", "{out}"),
)


class Refused(PsfleetError):
    """The tool has said why in a sentence."""


class Tool:
    """A command; of several forms of it each time the next.

    Args:
        main: Takes words, prints, returns the exit code.
        forms: Words after `first`.
        fails: The exit codes with which it says that something is wrong.
    """

    def __init__(
        self,
        main: Callable[[Sequence[str]], int],
        first: Sequence[str],
        forms: Iterable[Sequence[str]],
        fails: Sequence[int],
    ) -> None:
        self._main = main
        self._first = first
        self._forms = itertools.cycle(forms)
        self._fails = fails

    def __call__(self, folder: Path) -> str:
        """What it prints.

        Raises:
            Refused: It was not satisfied.
            Broken: It was not, and has said too much or has changed something.
        """
        words = [*self._first, *(_placed(word, folder) for word in next(self._forms))]
        before = of_folder(folder), set(folder.rglob("*"))
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = self._main(words)
        if code == 0:
            if error.getvalue():
                raise Broken(f"{words} has succeeded and says {error.getvalue()!r}")
            return out.getvalue()
        said = error.getvalue() or out.getvalue().splitlines(keepends=True)[-1]
        if code not in self._fails or said.count("\n") != 1 or not said.endswith("\n"):
            raise Broken(f"{words}: exit code {code}, {said!r}")
        if before != (of_folder(folder), set(folder.rglob("*"))):
            raise Broken(f"{words}: {said!r}, and it has written something")
        raise Refused(said.rstrip("\n"))


def _placed(word: str, folder: Path) -> str:
    return str(folder / word.strip("{}")) if word.startswith("{") else word


def readers(folder: Path) -> list[Reader]:
    """The tools with good files, and with files whose checksums fit whatever has been changed."""
    snapshots, others = (some_snapshots(folder / f"snapshots {seed}", seed) for seed in (1, 2))
    log = a_log(folder / "log", 1, complete=(2,)).files
    ckpt = Tool(psfleet_cli.main, ["ckpt"], _CKPT, [2])
    hostile_ckpt = Tool(psfleet_cli.main, ["ckpt"], _CKPT, [1, 2])  # 1: they differ
    ls = Tool(psfleet_cli.main, ["ckpt"], [("ls", "{.}")], [1])
    hostile_ls = Tool(psfleet_cli.main, ["ckpt"], [("ls", "{.}")], [1, 2])
    logs = [Tool(inspect_log.main, [], _LOG, [1]) for _ in range(2)]
    strange = list(others.values())
    return [
        Reader("ckpt", snapshots, ckpt, True, None, strange),
        Reader("hostile ckpt", snapshots, hostile_ckpt, False, reseal_snapshots, strange),
        Reader("ckpt ls", snapshots, ls, False),  # what only a checksum tells is for `verify`
        Reader("hostile ckpt ls", snapshots, hostile_ls, False, reseal_snapshots, strange),
        Reader("log tools", log, logs[0]),
        Reader("hostile log tools", log, logs[1], False, reseal_log, list(log.values())),
    ]


def every_reader(folder: Path) -> list[Reader]:
    """Everything that reads files, with good files that are made in the folder."""
    found = []
    for name, made in (("files", files.readers), ("chains", chains.readers), ("tools", readers)):
        (folder / name).mkdir(parents=True)
        found += made(folder / name)
    return found
