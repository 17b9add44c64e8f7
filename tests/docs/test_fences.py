"""Every fence of the pages is run: Python embedded, TOML by its reader, commands until they would start.

The first Python of a page is what its other blocks need. Each of them runs behind it, in an empty folder.
Those of README.md need nothing. Blocks that are programs of their own have tests in test_pages.py.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import psfleet
from psfleet.core.runtime.strategy import load_strategy_file
from psfleet.features import load_features
from psfleet_launch.commands.launch_command import launch
from psfleet_launch.commands.options import load_job_file
from psfleet_launch.commands.psfleet_cli import psfleet as command_line
from psfleet_launch.engines.launch_engine import EngineSettings
from psfleet_launch.job.job_request import JobRequest, Launch
from tests.docs.test_pages import ROOT, blocks
from tests.programs import IN_DOCS

# Blocks of several optimizers compile kernels of their own, where no earlier run has left them.
pytestmark = pytest.mark.timeout(600)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = {"modes.md", "notebooks.md", "prediction.md", "rules.md", "start.md"}
"""Pages whose Python test_pages.py runs as programs; each test there takes all blocks of its page."""
EXTRAS = {
    "torch": r"\btorch\b",
    "pyarrow": r"data\.(parquet|text_files|record_batches)|import pyarrow",
    "confluent_kafka": r"\bKafkaTopic\(",
    "httptools": r"serving\.Server\(",
    "onnxruntime": r"import onnxruntime",
}
"""Modules that need not be installed, and what of a block needs each."""
LANGUAGES = {"", "python", "toml", "text", "diff", "yaml"}
"""Languages that fences may be in; commands have none."""


def fences(page: Path, *languages: str) -> list[str]:
    """The page's blocks in these languages."""
    return [block for language, block in FENCE.findall(page.read_text()) if language in languages]


def python() -> Iterator[Any]:
    """Each block of Python with what stands before it, named by its page and number."""
    for page in PAGES:
        if page.name in PROGRAMS:
            continue
        first, *others = fences(page, "python") or [""]
        alone = page.name == "README.md"
        programs = [first, *(block if alone else f"{first}\n{block}" for block in others)]
        for number, program in enumerate(programs if first else []):
            yield pytest.param(program, id=f"{page.stem}-{number}")


def has_statements(block: str) -> bool:
    """Whether it is Python with more than expressions, which queries for Prometheus may look like."""
    try:
        return any(not isinstance(statement, ast.Expr) for statement in ast.parse(block).body)
    except SyntaxError:
        return False


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run in; nothing of psfleet is left before and after."""
    monkeypatch.chdir(tmp_path)
    psfleet.reset()
    yield tmp_path
    psfleet.reset()


@pytest.fixture
def with_scripts(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the scripts that commands name."""
    monkeypatch.syspath_prepend(empty)
    for name in ("train.py", "my_script.py"):
        Path(name).touch()
    Path("examples").symlink_to(ROOT / "examples")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "decisions" not in page.parts], ids=lambda p: p.stem
)
def test_no_code_escapes(page: Path) -> None:
    """All code of a page is in fences that begin a line, and Python is in those of its language."""
    text = page.read_text()
    assert {language for language, _ in FENCE.findall(text)} <= LANGUAGES
    assert not re.findall(r"^(?: {4}|\t|.*```).*", FENCE.sub("", text), re.MULTILINE)
    assert not [block for block in fences(page, "", "text") if has_statements(block)]


def test_programs_are_pages() -> None:
    """The pages that are run as programs are there, and have Python."""
    assert all(blocks(name) for name in PROGRAMS)


@IN_DOCS
@pytest.mark.parametrize("program", [*python()])
def test_python(program: str, empty: Path) -> None:
    """A block runs in one process behind the first one of its page."""
    for module, words in EXTRAS.items():
        if re.search(words, program):
            pytest.importorskip(module, reason=f"{module} is not installed")
    exec(compile(program, "block", "exec"), {"__name__": "block"})


@pytest.mark.usefixtures("with_scripts")
def test_toml() -> None:
    """Job files, strategies and features are read by what reads them in a job."""
    actual = [block for page in PAGES for block in fences(page, "toml")]
    assert len(actual) >= 10
    for block in actual:
        Path("a.toml").write_text(block)
        if block.startswith("[job]"):
            load_job_file("a.toml", JobRequest, Launch, EngineSettings)
        elif block.startswith("[tables"):
            load_features("a.toml")
        else:
            load_strategy_file("a.toml")


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of psfleet that stands at the beginning of a line."""
    for block in fences(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").removeprefix(".venv/bin/")
            if re.match(r"psfleet(-launch)? [^ ]", line) and "job " not in line:
                yield shlex.split(line, comments=True)


@pytest.mark.usefixtures("with_scripts")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if [*commands(page)]], ids=lambda p: p.stem
)
def test_commands(page: Path) -> None:
    """The command takes what stands behind it: options with their values, and scripts that are there."""
    for name, *words in commands(page):
        command: click.Command = launch if name == "psfleet-launch" else command_line
        while True:
            context = command.make_context(name, list(words))
            if not isinstance(command, click.Group):
                break
            _, below, words = command.resolve_command(context, words)
            assert below is not None
            command = below
