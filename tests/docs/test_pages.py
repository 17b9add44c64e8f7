"""The Python of the pages for newcomers runs as it stands there."""

import ast
import os
import pkgutil
import re
import sys
from pathlib import Path

import pytest

from tests.programs import IN_DOCS, ended

ROOT = Path(__file__).resolve().parents[2]
pytestmark = IN_DOCS
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[str]:
    """The page's blocks of Python, in order."""
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def run(program: str, folder: Path, *launch: str) -> str:
    """What a fresh process prints that runs the program in the folder, or a job that `launch` describes."""
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "server", "worker", "launch"))
    (folder / "train.py").write_text(program)
    words = ["-m", "psfleet_launch", *launch] if launch else []
    process = ended(
        [sys.executable, *words, "train.py"], cwd=folder, env={**os.environ, "PYTHONPATH": paths}
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_prediction(tmp_path: Path) -> None:
    """The page's training writes a model to predict with, and a snapshot is read."""
    training, prediction, reading, _ = blocks("prediction.md")
    run(training, tmp_path)
    assert run(prediction, tmp_path) == "(1, 1)\n"
    assert run(reading, tmp_path) == "(2, 8)\n(2, 8)\n"


def test_readers(tmp_path: Path) -> None:
    """The page's last block reads a table of a job that runs, from a process of its own."""
    (tmp_path / "reader.py").write_text(blocks("prediction.md")[-1])
    training = """
import subprocess, sys
import psfleet
with psfleet.connect() as ps:
    users = ps.sparse_table("users", 8, psfleet.optimizer.SGD(0.1))
    users.push([17], [[1.0] * 8]).wait()
    subprocess.run([sys.executable, "reader.py"], check=True)
"""
    output = run(training, tmp_path, "--servers", "2", "--job", "taste", "--no-progress")
    assert output == "8 (3, 8) (1, 1)\n"


def test_features(tmp_path: Path) -> None:
    """The page's features are looked up by a client and by a program."""
    definitions, client, program, *_ = blocks("features.md")
    assert "'friends': (3, 16), 'clicked': (3, 8)" in run(definitions + client, tmp_path)
    assert run(definitions + program, tmp_path) == "(2, 16)\n"


@pytest.mark.parametrize("number", [1, 2])
def test_notebooks(number: int, tmp_path: Path) -> None:
    """The page's model can be built twice, and on servers."""
    model, in_a_block, in_cells = blocks("notebooks.md")
    servers = [
        in_a_block.replace("...", "pass"),
        "from psfleet.fleet.testing.local_fleet import LocalFleet\n" + in_cells,
    ]
    build = model.partition("fleet.init()\n")[2]
    run(
        f"{model}\n{model}\n{servers[number - 1]}\n{build}"
        if number == 2
        else model * 2 + servers[0],
        tmp_path,
    )


def test_rules(tmp_path: Path) -> None:
    """The page's rule trains to the same bits embedded and on servers, and passes its test."""
    module, script, test = blocks("rules.md")
    (tmp_path / "my_rules.py").write_text(module)
    (tmp_path / "train.py").write_text(script)
    embedded = run(script, tmp_path)
    launch = ["-m", "psfleet_launch", "--servers", "2", "--no-progress", "--rules", "my_rules"]
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "server", "worker", "launch"))
    job = ended(
        [sys.executable, *launch, "train.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}
    )
    assert job.returncode == 0, job.stderr
    assert embedded.strip() in job.stdout
    run(test + "\ntest_lion()\n", tmp_path)


def test_modes(tmp_path: Path) -> None:
    """The page's modes, one with a gate of its own, can be registered, and its scripts can name one."""
    *modes, script, with_settings = blocks("modes.md")
    (tmp_path / "my_modes.py").write_text("\n".join(modes))
    run(script, tmp_path)
    run(with_settings, tmp_path)


def test_start(tmp_path: Path) -> None:
    """The PyTorch script of the first page learns on two servers, and that of the graph in one process."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    with_torch, with_graph = blocks("start.md")
    output = run(with_torch, tmp_path, "--servers", "2", "--workers", "2", "--job", "taste")
    first, *_, last = (float(line.partition(": loss ")[2]) for line in output.splitlines())
    assert first > 0.6 > 0.3 > last, output
    assert (tmp_path / "psfleet-logs" / "taste" / "report.html").exists()
    first, *_, last = (
        float(line.partition(": loss ")[2]) for line in run(with_graph, tmp_path).splitlines()
    )
    assert first > 0.2 > 0.1 > last


def test_names_to_migrate_to_are_there() -> None:
    """Every name of psfleet on the page about other systems can be had."""
    names = set(re.findall(r"`(psfleet(?:\.\w+)+)`", (ROOT / "docs" / "migrate.md").read_text()))
    assert len(names) >= 20
    of_torch = {name for name in names if name.startswith("psfleet.torch.")}
    for name in names - of_torch:
        pkgutil.resolve_name(name)
    pytest.importorskip("torch", reason="PyTorch is not installed")
    for name in of_torch:
        pkgutil.resolve_name(name)


def test_messages_of_the_troubleshooting_page_are_there() -> None:
    """Each message that the page explains stands in the code as the page quotes it."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = set(re.findall(r"^\| `(.+?)`", page, re.MULTILINE))
    assert len(quoted) >= 15
    nodes = [
        node
        for folder in ("psfleet", "server", "worker", "launch")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]
    missing = {words for words in quoted if not any(words in text for text in texts)}
    assert not missing, f"no message has {sorted(missing)}"


@pytest.mark.parametrize(
    "job", [[], ["--sync", "--servers", "2", "--workers", "2"]], ids=["one", "2x2"]
)
def test_the_loop_that_evaluates(tmp_path: Path, job: list[str]) -> None:
    """The page's loop ends with the best model, in one process and in a job of two servers and workers."""
    first, *others = blocks("metrics.md")
    [loop] = [block for block in others if "EarlyStopping" in block]
    output = run(first + loop, tmp_path, *job, *(["--no-progress"] if job else []))
    assert len(set(re.findall(r"best AUC \d\.\d{4}, in epoch \d+", output))) == 1, output
    assert (tmp_path / "best" / "manifest.json").exists()
