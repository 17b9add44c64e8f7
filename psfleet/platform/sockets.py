"""Unix sockets of a job: a private folder whose name every transport takes."""

import os
import re
import tempfile
from pathlib import Path

from psfleet.errors import ConfigError

LONGEST_PATH = 107  # bytes of a unix socket's path: sun_path of sys/un.h, less its end
_ROOM = len("/server.00000")

# Endpoints are listed with commas between them, and gRPC reads a path as a part of a URI.
_PLAIN = re.compile(r"/[A-Za-z0-9_./+~-]*")


def make_private_folder() -> Path:
    """Return a new folder of mode 0700, in TMPDIR, or in /tmp if sockets cannot lie there.

    They cannot where the path is too long, or has other characters than letters, digits and _ . / + ~ -.

    Raises:
        ConfigError: The folder cannot be made.
    """
    try:
        name = os.path.abspath(tempfile.mkdtemp(prefix="psfleet-"))
        if len(name) + _ROOM > LONGEST_PATH or not _PLAIN.fullmatch(name):
            os.rmdir(name)
            name = tempfile.mkdtemp(prefix="psfleet-", dir="/tmp")
    except OSError as error:
        raise ConfigError(
            f"no folder for sockets can be made in {error.filename!r} ({error.strerror}); name another "
            "one in TMPDIR"
        ) from None
    return Path(name)
