"""Every fence of the pages is run: Python embedded, TOML by its reader, commands until they would start.

Blocks that a page means to be run as one program have tests in test_pages.py.
"""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import psfleet
from psfleet.features import load_features
from psfleet.strategy import load_strategy_file
from psfleet_launch.commands.launch_command import launch
from psfleet_launch.commands.options import load_job_file
from psfleet_launch.commands.psfleet_cli import psfleet as command_line
from psfleet_launch.engines.launch_engine import EngineSettings
from psfleet_launch.job.job_request import JobRequest, Launch
from tests.docs.test_pages import ROOT

# Blocks of several optimizers compile kernels of their own, where no earlier run has left them.
pytestmark = pytest.mark.timeout(600)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = {
    f"docs/{n}.md" for n in ("features", "modes", "notebooks", "prediction", "rules", "start")
}
"""Pages whose Python test_pages.py runs as programs."""

FLEET = "from psfleet import fleet, layers\nfleet.init()\n"
LOADER = "loader = [(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))] * 2\n"
TORCH = f"""{FLEET}import torch
from torch import nn
import psfleet.torch as pst
{LOADER}
def train_step(x, y): return 1.0
"""
BEFORE: dict[str, list[str]] = {
    "README.md": [
        "def batches(): yield {'ids': np.ones((4, 10), np.int64), 'late': np.ones((4, 1))}",
        "ids = others = np.arange(3)\ngrads = np.ones((3, 16))",
    ],
    "docs/strategies.md": ["from psfleet import fleet", "from psfleet import fleet"],
    "docs/tables.md": [
        """
batches = [(np.arange(3), np.arange(3))]
def step(users, items, bias): return np.ones_like(users), np.ones_like(items), np.ones(1)
""",
        f"""{TORCH}
from psfleet import ParamAttr
from psfleet.features import Table
ps, ids = psfleet.connect(), layers.data('ids', [None, 3], dtype='int64')
model = nn.ModuleDict({{'cities': nn.Embedding(9, 4, sparse=True)}})
optimizers = torch.optim.SparseAdam(model.parameters())
""",
        "ps, optimizer = psfleet.connect(), psfleet.optimizer.SGD(0.1)",
        f"""{TORCH}
from psfleet import ParamAttr
from psfleet.features import Table
ps, ids = psfleet.connect(), layers.data('ids', [None, 3], dtype='int64')
""",
        f"{FLEET}ps, ids = psfleet.connect(), layers.data('ids', [None, 3], dtype='int64')",
        "",
        "",
        f"""{FLEET}
from psfleet.entry import CapacityEntry, EvictionStreamEntry
ps, optimizer = psfleet.connect(), psfleet.optimizer.SGD(0.1)
class cache: delete = print
""",
        f"{FLEET}psfleet.connect().sparse_table('users', 4, psfleet.optimizer.SGD(0.1))",
        f"""{FLEET}
from psfleet.entry import ShowClickEntry
ids = layers.data('ids', [None, 3], dtype='int64')
""",
        f"""{TORCH}
from psfleet.entry import ShowClickEntry
from psfleet.optimizer import Adam
ids = shows = torch.ones(3, dtype=torch.int64)
clicks = shows - 1
""",
    ],
    "docs/torch.md": [
        TORCH,
        f"""{TORCH}
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
sparse, dense = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
""",
        TORCH,
        f"""{TORCH}
model = nn.Linear(8, 4)
opt = pst.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
def loss_of(z, y): return nn.functional.cross_entropy(z.float(), y)
""",
    ],
    "docs/watch.md": [FLEET],
    "docs/wire.md": ["from psfleet import fleet"],
}
"""By page what stands before each of its blocks of Python; names that the text around it explains."""


def fences(page: Path, *languages: str) -> list[str]:
    """The page's blocks in these languages."""
    return [block for language, block in FENCE.findall(page.read_text()) if language in languages]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run in, with train.py and my_script.py to name; nothing of psfleet is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("train.py", "my_script.py"):
        Path(name).touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    psfleet.reset()
    yield tmp_path
    psfleet.reset()


def test_no_page_is_left_out() -> None:
    """Every page with Python is run, here or as programs."""
    with_python = {str(page.relative_to(ROOT)): fences(page, "python") for page in PAGES}
    assert {name for name, found in with_python.items() if found} == PROGRAMS | BEFORE.keys()
    assert {name: len(with_python[name]) for name in BEFORE} == {
        n: len(b) for n, b in BEFORE.items()
    }


@pytest.mark.parametrize(
    ("page", "number"), [(name, n) for name, blocks in BEFORE.items() for n in range(len(blocks))]
)
def test_python(page: str, number: int, alone: Path) -> None:
    """A block runs in one process behind what the page says of it."""
    before = BEFORE[page][number]
    if "torch" in before:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    names: dict[str, Any] = {"np": np, "psfleet": psfleet, "__name__": "fence"}
    for part in (before, fences(ROOT / page, "python")[number]):
        exec(compile(part, f"{page}, block {number}", "exec"), names)


def test_toml(alone: Path) -> None:
    """Job files, strategies and features are read by what reads them in a job."""
    found = [block for page in PAGES for block in fences(page, "toml")]
    assert len(found) >= 10
    for block in found:
        Path("a.toml").write_text(block)
        if block.startswith("[job]"):
            load_job_file("a.toml", JobRequest, Launch, EngineSettings)
        elif block.startswith("[tables"):
            load_features("a.toml")
        else:
            load_strategy_file("a.toml")


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of psfleet that stands at the beginning of a line."""
    for block in itertools.chain(fences(page, "", "console", "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").removeprefix(".venv/bin/")
            if re.match(r"psfleet(-launch)? [^ ]", line) and "job " not in line:
                yield shlex.split(line, comments=True)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if [*commands(page)]], ids=lambda p: p.stem
)
def test_commands(page: Path, alone: Path) -> None:
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
