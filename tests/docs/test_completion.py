"""Shells complete commands and options with the lines that docs/install.md gives."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.programs import IN_DOCS, ended

pytestmark = IN_DOCS
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "install.md").read_text()

# What a shell does when somebody types words and then Tab. zsh shows what it finds through these functions.
TAB = {
    "bash": "COMP_WORDS=({words}); COMP_CWORD={last}; {function} {command}; "
    "printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "zsh": "_describe() {{ print -l -- ${{(P)3}} }}; compadd() {{ print -l -- ${{(P)@[-1]}} }}; "
    "words=({words}); CURRENT=$(({last} + 1)); {function}",
    "fish": 'complete -C "{words}"',
}
START = {
    "bash": ["bash", "--norc", "--noprofile", "-c"],
    "zsh": ["zsh", "-f", "-c"],
    "fish": ["fish", "--no-config", "-c"],
}


def documented(shell: str, command: str) -> str:
    """The line of the page for this shell and command."""
    variable = f"_{command.upper().replace('-', '_')}_COMPLETE={shell}_source"
    [line] = re.findall(rf"^.*\b{variable}\b.*$", PAGE, re.MULTILINE)
    return str(line)


def completed(shell: str, *words: str) -> set[str]:
    """What the shell proposes for the last word."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed (apt-get install {shell})")
    command = words[0]
    tab = TAB[shell].format(
        words=" ".join(words),
        last=len(words) - 1,
        command=command,
        function=f"_{command.replace('-', '_')}_completion",
    )
    begin = "autoload -Uz compinit; compinit -D -u;" if shell == "zsh" else ""
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    process = ended(
        [*START[shell], f"{begin}\n{documented(shell, command)}\n{tab}"],
        env={**os.environ, "PATH": programs},
    )
    assert process.returncode == 0, process.stderr
    # zsh and fish show the help behind the word.
    return {re.split(r"[:\t]", line)[0] for line in process.stdout.splitlines()}


@pytest.mark.parametrize("shell", START)
def test_commands_are_completed(shell: str) -> None:
    """psfleet re -> report."""
    assert completed(shell, "psfleet", "re") == {"report"}


@pytest.mark.parametrize("shell", START)
def test_options_and_their_values_are_completed(shell: str) -> None:
    """psfleet-launch --work -> --workers; --mode s -> sync, ssp."""
    assert "--workers" in completed(shell, "psfleet-launch", "--work")
    assert completed(shell, "psfleet-launch", "--mode", "s") == {"sync", "ssp"}
