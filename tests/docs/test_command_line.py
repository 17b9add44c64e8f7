"""Options of the commands and what the pages say of them."""

import re
from collections.abc import Iterator
from pathlib import Path

import click

from psfleet_launch.commands.launch_command import launch
from psfleet_launch.commands.psfleet_cli import psfleet

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """A command and those below it, by what is typed."""
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {word}")


COMMANDS = dict([*commands(psfleet, "psfleet"), *commands(launch.complete(), "psfleet-launch")])


def options(command: click.Command) -> set[str]:
    """The long options of a command."""
    words = {word for one in command.params for word in (*one.opts, *one.secondary_opts)}
    return {word for word in words if word.startswith("--")} | {"--help"}


def test_every_option_is_on_a_page() -> None:
    """A page names each command, and some page each of its options."""
    text = "\n".join(page.read_text() for page in PAGES)
    known = {*OPTION.findall(text), "--help", "--version"}
    for name, command in COMMANDS.items():
        assert name in text
        assert options(command) <= known, name


def typed(page: Path) -> Iterator[tuple[str, str]]:
    """Commands in a page, each with the words behind it that are its own."""
    names = sorted(COMMANDS, key=len, reverse=True)
    command = re.compile(rf"(?<![\w/-])({'|'.join(map(re.escape, names))})(?![\w-])([^`\n]*)")
    for match in command.finditer(page.read_text().replace("\\\n", " ")):
        # What stands behind the script is the script's; # begins a remark.
        yield match[1], re.split(r"\.py\b|#|  +|;|,? and |\|", match[2])[0]


def test_pages_name_no_option_that_is_not_there() -> None:
    """What a page says behind a command, that command takes."""
    for page in PAGES:
        for name, words in typed(page):
            unknown = set(OPTION.findall(words)) - options(COMMANDS[name])
            assert not unknown, f"{page.name}: {name}{words}"


def test_commands_are_found_in_pages() -> None:
    """The search finds what the pages type: of the launcher alone more than ten options."""
    actual = {
        option
        for page in PAGES
        for name, words in typed(page)
        if name == "psfleet-launch"
        for option in OPTION.findall(words)
    }
    assert len(actual) > 10
