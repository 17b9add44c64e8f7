"""Build the site of the documents in build/site/html: strict, without anything from elsewhere.

The pages are those of docs/, the README as the first one, the benchmarks, and the API reference
(tools/api_pages.py). mkdocs.yml sorts them; tools/check_docs.py proves that it names every page. A link that
leads nowhere is an error.
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


def collect() -> None:
    """Lay out all pages as mkdocs.yml names them."""
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    (PAGES / "README.md").unlink()
    readme = (ROOT / "README.md").read_text()
    readme = readme.replace("](docs/README.md)", "](index.md)").replace("](docs/", "](")
    (PAGES / "index.md").write_text(readme.replace("](benchmarks/README.md", "](benchmarks.md"))
    benchmarks = (ROOT / "benchmarks" / "README.md").read_text()
    (PAGES / "benchmarks.md").write_text(benchmarks.replace("](../docs/", "]("))
    for page in PAGES.rglob("*.md"):
        text = page.read_text()
        text = re.sub(r"\]\((?:\.\./)+benchmarks/README\.md", f"]({_up(page)}benchmarks.md", text)
        page.write_text(re.sub(r"\]\(\.\./README\.md", f"]({_up(page)}index.md", text))
    api_pages.write(ROOT, PAGES / "api")


def _up(page: Path) -> str:
    return "../" * (len(page.relative_to(PAGES).parts) - 1)


def main() -> int:
    """Build; what the builder says."""
    collect()
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(build, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
