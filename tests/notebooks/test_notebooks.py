"""Notebooks, executed in a real kernel."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.test_pages import ROOT
from tests.leaks import nothing_left
from tests.programs import IN_DOCS

EXAMPLE = ROOT / "examples" / "notebook.ipynb"
CURVES = ROOT / "examples" / "curves.ipynb"
pytestmark = [
    IN_DOCS,
    # jupyter_client and nbclient have warnings of their own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(autouse=True)
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels find psfleet and keep their files here; nothing of them is left behind."""
    paths = [str(ROOT / part) for part in (".", "server", "worker", "launch")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    with nothing_left():
        yield
    assert not list((tmp_path / "TMPDIR").glob("psfleet-*"))
    assert not processes_with(str(tmp_path))


def processes_with(text: str) -> list[str]:
    """Processes other than this one whose environment has the text, whoever their parent is."""
    processes = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            try:
                if text.encode() in (folder / "environ").read_bytes():
                    processes.append(folder.name)
            except OSError:  # it has ended, or is another user's
                continue
    return processes


def executed(cells: list[str], **options: Any) -> list[str]:
    """What each cell printed, or its error."""
    make: Any = nbformat.v4  # it publishes no types
    notebook = make.new_notebook(cells=[make.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=150, kernel_name="python3", **options).execute()
    return [
        "".join(
            out.get("text", "") or f"{out.get('ename')}: {out.get('evalue')}"
            for out in cell.outputs
        )
        for cell in notebook.cells
    ]


def example() -> dict[str, str]:
    """The example's cells of code, by id."""
    cells = json.loads(EXAMPLE.read_text())["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}


def test_the_example_and_its_cells_again() -> None:
    """The model's cell runs twice, then with another dim; training gives the same loss each time."""
    cells = example()
    again = cells["model"].replace("DIM = 8", "DIM = 5")
    assert again != cells["model"]
    begin = [cells["imports"], cells["data"]]
    train = [cells["model"], cells["train"]]
    output = executed(
        [*begin, *train, *train, again, cells["train"], cells["fleet"], cells["tables"]]
    )
    first, second, other, servers, tables = output[3], output[5], output[7], output[8], output[9]
    assert first.startswith("loss 0.")
    assert second == first
    assert other != first
    assert servers.startswith("loss 0.")
    assert tables == "(1, 2)\n"


def test_curves_are_drawn() -> None:
    """The notebook of curves trains until the AUC is no better, and draws two curves."""
    pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: pip install psfleet[examples]"
    )
    read: Any = nbformat.read
    notebook = read(CURVES, 4)
    NotebookClient(notebook, timeout=150, kernel_name="python3").execute()
    outputs = {cell["id"]: cell.get("outputs") for cell in notebook.cells}
    steps = int(outputs["train"][0]["text"].split()[0])
    assert 100 < steps < 2000
    assert outputs["draw"][0]["data"]["image/png"]


@pytest.mark.parametrize("path", [EXAMPLE, CURVES], ids=lambda path: path.stem)
def test_the_examples_have_no_outputs(path: Path) -> None:
    """The notebook in the repository is as before its first run."""
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


STOP = """
import os, signal, threading
exe.run(feed=batches[0], fetch_list=[loss])
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
while True:
    exe.run(feed=batches[0], fetch_list=[loss])
"""
SERVERS = """
ps.reset()
servers = LocalFleet(servers=2, workers=1).start()
fleet.init(fleet.UserDefinedRoleMaker(server_endpoints=servers.endpoints))
loss = build()
exe = ps.Executor()
"""


@pytest.mark.parametrize("where", ["embedded", "on servers"])
def test_a_stopped_cell(where: str) -> None:
    """An interrupt during exe.run ends the cell, and the next one trains on; nothing is left behind."""
    cells = example()
    model = [cells["model"]] if where == "embedded" else [cells["model"], SERVERS, SERVERS]
    end = "fleet.stop_worker()" + ("" if where == "embedded" else "; servers.close()")
    output = executed(
        [cells["imports"], cells["data"], *model, STOP, cells["train"], end], allow_errors=True
    )
    assert output[-3] == "KeyboardInterrupt: "
    assert output[-2].startswith("loss 0.")
    assert output[-1] == ""


def test_without_reset_the_way_is_named() -> None:
    """The model's cell without reset(), run a second time, is refused in a sentence that names it."""
    cells = example()
    bare = cells["model"].replace("ps.reset()\n", "")
    output = executed([cells["imports"], bare, bare], allow_errors=True)
    assert output[-1].startswith("UsageError: the program has a variable 'ids' already")
    assert "begin it with psfleet.reset()" in output[-1]
