"""The site of the documents can be built, and its search finds the page that a user needs."""

import json
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.programs import IN_DOCS, ended

ROOT = Path(__file__).resolve().parents[2]
SEARCHES = {
    "early stopping": "hooks/#early-stopping",
    "overfitting": "hooks/#early-stopping",
    "negative sampling": "models/#negative-sampling",
    "sampled softmax": "models/#negative-sampling",
    "out of memory": "troubleshooting/#out-of-memory",
    "mixed precision": "torch/#autocast",
    "feature hashing": "features/",
    "learning rate": "api/lr/",
    "export onnx": "serving/#onnx",
    "ftrl": "api/optimizer/#ftrl",
    "report_evaluation": "api/fleet/#report_evaluation",
    "kafka": "readers/#kafka",
    "kubernetes": "run/kubernetes/",
}
"""By what a user types the place that has to be among the first three."""


@IN_DOCS
def test_the_search_finds_what_users_look_for() -> None:
    """`make site` builds the site strictly, and the search that comes with it leads to these pages."""
    for module in ("zensical", "griffe"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install psfleet[docs]")
    if shutil.which("node") is None:
        pytest.skip("Node.js, which runs the site's search, is not installed")
    built = ended([sys.executable, "tools/build_site.py"], cwd=ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "build" / "site" / "html"
    search = ended(["node", str(Path(__file__).with_name("search.js")), str(site), *SEARCHES])
    assert search.returncode == 0, search.stderr
    found = dict(zip(SEARCHES, map(json.loads, search.stdout.splitlines()), strict=True))
    wrong = {
        query: found[query][:3]
        for query, place in SEARCHES.items()
        if not any(one.startswith(place) for one in found[query][:3])
    }
    assert not wrong


def test_the_page_about_installation_has_every_extra() -> None:
    """docs/install.md says of each extra of pyproject.toml what it brings."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    page = (ROOT / "docs" / "install.md").read_text()
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert {extra for extra in extras if f"`{extra}`" not in rows} == set()
