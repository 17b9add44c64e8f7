"""Exit codes that the commands share."""

import click

__all__ = ["USAGE_EXIT", "exit_after"]

USAGE_EXIT = 2  # bad usage, which no second attempt mends


def exit_after(abort: click.Abort) -> int:
    """The exit code of a command that an interrupt has ended.

    Raises:
        EOFError: That was the cause. click takes each for the end of a prompt, and no command asks anything.
    """
    if isinstance(abort.__cause__, EOFError):
        raise abort.__cause__
    return 130
