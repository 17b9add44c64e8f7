"""Objects of a user's modules, by the name that a command is given."""

import importlib
import os
import sys
from typing import Any

from psfleet.errors import ConfigError


def find_object(reference: str, what: str, advice: str) -> Any:
    """Return the object that MODULE:NAME names. The module, which may lie in the present folder, is imported.

    Args:
        reference: The name.
        what: Kind of the object, for the error.
        advice: Alternatives, for the error.

    Raises:
        ConfigError: It cannot be imported; the error quotes `reference`.
    """
    module, _, name = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the end: a file of the user must not stand for a library
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"the {what} {reference!r} cannot be imported ({type(error).__name__}: {error}); {advice}"
        ) from error
