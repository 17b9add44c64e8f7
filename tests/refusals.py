"""Tables of what is refused: a line of a script each, and the sentence that refuses it."""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from psfleet.core.base.errors import PsfleetError


def cases(table: str) -> list[list[str]]:
    """Lines `what is refused  # sentence` as pairs, for a test that they parametrise."""
    return [line.split("  # ", 1) for line in table.strip().splitlines()]


def named(*things: Any) -> dict[str, Any]:
    """Functions and classes by their names."""
    return {thing.__name__: thing for thing in things}


def check_refusals(
    table: str,
    names: Mapping[str, Any],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Check that each line is refused by an error of psfleet in one line with its sentence.

    Args:
        table: Lines `call  # sentence`. The sentence is a part of `Kind: message`; "..." in it stands for any
            text.
        names: What the calls may use.
        around: Makes what each call runs in.
    """
    wrong = []
    for line in table.strip().splitlines():
        call, _, sentence = line.rpartition("  # ")
        pattern = ".*".join(re.escape(part) for part in sentence.split("..."))
        message = "nothing"
        try:
            with around():
                exec(call, dict(names))
        except PsfleetError as error:
            message = f"{type(error).__name__}: {error}"
        if not call or "\n" in message or not re.search(pattern, message):
            wrong.append(f"{call}\n    said {message}\n    not  {sentence}")
    assert not wrong, "\n".join(wrong)
