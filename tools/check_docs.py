"""Checks the documents: files, links and make targets that they name exist, and their Python parses.

All Markdown files of the repository are checked: relative links with their headings and decision numbers,
words in backticks that look like a file of the repository (`psfleet/core/engine/rules/adam.py`,
`docs/decisions/`), `make` commands, blocks of Python, and the width of lines outside tables. Decisions are
numbered without a gap, and the table of their README has the title, date and status of each.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "psfleet/",
    "server/",
    "worker/",
    "launch/",
    "protos/",
    "tests/",
    "examples/",
    "benchmarks/",
    "docs/",
    "tools/",
    ".ci/",
)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
WORD = re.compile(r"`([\w./-]+)`")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANCHOR = re.compile(r"\]\((?!\w+:)([^)#\s]*\.md)?#([\w-]+)\)")
DECISION = re.compile(r"\[([^\]]*)\]\([^)\s]*?(\d{4})-[\w-]+\.md[^)]*\)")
RECORD = re.compile(
    r"# (\d+)\. (.+)\n\nDate: ([\d-]+(?: to [\d-]+)?)\n\nStatus: (accepted|rejected|superseded by \d+)\b"
)
WIDEST = 140
COMMAND = re.compile(r"^(?:\$ )?make ([a-z-]+)", re.MULTILINE)


def documents() -> list[Path]:
    """Return the Markdown files of the working tree, without those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).exists()]


def complaints(document: Path, targets: set[str]) -> Iterator[str]:
    """Return the errors of one document, as phrases that follow the document's name."""
    text = document.read_text()
    prose = BLOCK.sub("", text)
    for name in LINK.findall(prose):
        if not (document.parent / name).exists():
            yield f"links to {name!r}, which is not there"
    for name, anchor in ANCHOR.findall(prose):
        target = document.parent / name if name else document
        if target.exists() and anchor not in anchors(target):
            yield f"links to {name}#{anchor}, a heading that is not there"
    for label, number in DECISION.findall(prose):
        if any(int(digits) != int(number) for digits in re.findall(r"\d+", label)):
            yield f"calls decision {int(number)} {label!r}"
    for row, line in enumerate(text.splitlines(), 1):
        if len(line) > WIDEST and not line.startswith("|") and document.name != "CHANGELOG.md":
            yield f"line {row} has {len(line)} characters; {WIDEST} fit"
    for word in WORD.findall(prose):
        if word.startswith(FOLDERS) and not (ROOT / word).exists():
            yield f"names `{word}`, which is not there"
    for language, block in BLOCK.findall(text):
        if language == "python":
            yield from _syntax(block)
        for target in COMMAND.findall(block):
            if target not in targets:
                yield f"says 'make {target}', which the Makefile does not know"


def unsorted() -> Iterator[str]:
    """Return an error for each page of docs/ that is missing from the site's navigation.

    Decisions are left out; the table of their own README lists them.
    """
    named = (ROOT / "mkdocs.yml").read_text()
    for page in documents():
        name = page.relative_to(ROOT).as_posix().removeprefix("docs/")
        is_page = page.is_relative_to(ROOT / "docs") and name != "README.md"
        if is_page and not re.match(r"decisions/\d{4}-", name) and f"- {name}\n" not in named:
            yield f"docs/{name} is not in the navigation of mkdocs.yml"


def unlisted() -> Iterator[str]:
    """Return an error for each decision that lacks a number, date or status, or has a wrong row in README."""
    folder = ROOT / "docs" / "decisions"
    table = (folder / "README.md").read_text()
    for number, page in enumerate(sorted(folder.glob("[0-9]*.md")), 1):
        head = RECORD.match(page.read_text())
        row = "| [{}]({}) | {} | {} | {} |\n"
        if not head or row.format(number, page.name, *head.groups()[1:]) not in table:
            yield f"docs/decisions/README.md lacks row {number}, {page.name}: title, date, status"
        elif int(head[1]) != number or not page.name.startswith(f"{number:04}-"):
            yield f"docs/decisions/{page.name} is the decision {number} in order"


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, formed as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _syntax(block: str) -> Iterator[str]:
    try:
        ast.parse(block)
    except SyntaxError as error:
        yield f"has Python that does not parse: {error.text!r}"


def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def main() -> int:
    """Check all documents and print the errors. Returns 1 if there are any."""
    targets = make_targets()
    errors = [
        f"{document.relative_to(ROOT)} {complaint}"
        for document in documents()
        for complaint in complaints(document, targets)
    ]
    errors += unsorted()
    errors += unlisted()
    for line in errors:
        print(line, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
