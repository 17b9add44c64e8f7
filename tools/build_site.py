"""Build the site of the documents in build/site/html: strict, without anything from elsewhere.

The pages are those of docs/, the README as the first one, the benchmarks, and the API reference
(tools/api_pages.py). mkdocs.yml sorts them; a page that it does not name, or a link that leads nowhere,
is an error.
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


def unsorted() -> list[str]:
    """Pages that mkdocs.yml does not name."""
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    there = {page.relative_to(PAGES).as_posix() for page in PAGES.rglob("*.md")}
    return sorted(one for one in there - named if not re.match(r"decisions/\d{4}-", one))


def main() -> int:
    """Build; 1 if a page is not sorted in, or else what the builder says."""
    collect()
    if left := unsorted():
        print(f"mkdocs.yml does not name {', '.join(left)}", file=sys.stderr)
        return 1
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(build, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
