"""Builds the website of the documentation in build/site/html.

The pages are those of docs/, README, CONTRIBUTING and CHANGELOG of the root, the benchmarks, and the API
reference (tools/api_pages.py). mkdocs.yml sorts them; tools/check_docs.py checks that it names every page.
The build is strict, so that a broken link is an error, and the site loads nothing from other hosts.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import api_pages

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
PAGES = SITE / "src"
_OF_THE_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def collect() -> None:
    """Copy all pages into one folder, under the names in mkdocs.yml, with their links adapted."""
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    (PAGES / "README.md").unlink()
    for name, page in _OF_THE_ROOT.items():
        text = (ROOT / name).read_text()
        for of_root, to in _OF_THE_ROOT.items():
            text = text.replace(f"]({of_root})", f"]({to})")
        text = text.replace("](docs/README.md)", "](index.md)").replace("](docs/", "](")
        (PAGES / page).write_text(text.replace("](benchmarks/README.md", "](benchmarks.md"))
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text()
    (PAGES / "benchmarks.md").write_text(benchmarks.replace("](../docs/", "]("))
    for page in PAGES.rglob("*.md"):
        text = page.read_text()
        text = re.sub(r"\]\((?:\.\./)+benchmarks/README\.md", f"]({_up(page)}benchmarks.md", text)
        for of_root, to in _OF_THE_ROOT.items():
            above = rf"\]\((?:\.\./)+{re.escape(of_root)}"
            text = re.sub(above, f"]({_up(page)}{to}", text)
        page.write_text(text)
    api_pages.write(ROOT, PAGES / "api")


def _up(page: Path) -> str:
    return "../" * (len(page.relative_to(PAGES).parts) - 1)


def main() -> int:
    """Build the site, and return the exit code of the site builder."""
    collect()
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(build, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
