"""Credentials of a fleet over TCP: the job's certificates and its token, as files in a folder.

    ca.pem      certificate of the job's own authority, which signs all certificates of the job
    cert.pem    certificate of this role
    key.pem     private key of that certificate, readable by its owner only
    token       secret of the job, sent with every call

Client and server both present a certificate (mutual TLS). A server's certificate names `SERVER_NAME`
rather than a host. Only the job's launcher creates certificates, so a process that has a server's
certificate is a server of this job, on any machine. A worker's certificate is not valid for servers, so
a worker cannot pose as one. Readers have a token that is derived from the job's token: servers can compute
it, but a reader cannot compute the job's token from it. token_check.py compares the tokens of calls.
"""

import hashlib
import hmac
import os
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from psfleet.core.base.errors import ConfigError

SERVER_NAME = "psfleet-server"
FILES = ("ca.pem", "cert.pem", "key.pem", "token")
_LONGEST = 1 << 16  # bytes read of one of these files
_FEWEST = 16  # characters of the shortest token accepted
CERTIFICATE_DAYS = 30.0
_OTHERS, _GROUP, _GROUP_CHANGES = 0o007, 0o070, 0o030


@dataclass(frozen=True)
class Credentials:
    """Credentials of one role of one job, read from a folder. `repr` shows the folder but no secret.

    Each file is read when it is first needed, and then kept in memory.
    """

    folder: Path

    @classmethod
    def read(cls, folder: str | Path) -> "Credentials":
        """Return the credentials in a folder, after checking that its files are complete and secret.

        Raises:
            ConfigError: A file is missing or empty, or other users can read a secret.
        """
        credentials = cls(Path(folder))
        for name in FILES:
            credentials._content(name)
        if len(credentials.token) < _FEWEST or not credentials.token.isascii():
            raise ConfigError(
                f"{str(credentials.folder / 'token')!r} holds no token of at least {_FEWEST} letters; "
                "make new credentials with: psfleet certs FOLDER"
            )
        return credentials

    @cached_property
    def ca(self) -> bytes:
        """Certificate of the job's authority, in PEM format."""
        return self._content("ca.pem")

    @cached_property
    def certificate(self) -> bytes:
        """Certificate of this role, in PEM format."""
        return self._content("cert.pem")

    @cached_property
    def key(self) -> bytes:
        """Private key of this role, in PEM format."""
        return self._content("key.pem")

    @cached_property
    def token(self) -> str:
        """Secret of the job, or the token of readers in the credentials of a reader."""
        return self._content("token").decode("ascii", "replace").strip()

    @cached_property
    def bearer(self) -> str:
        """Value of the `authorization` header that every call must have: `Bearer` and the token."""
        return f"Bearer {self.token}"

    @cached_property
    def reader_bearer(self) -> str:
        """Value of the `authorization` header of readers, who have a token of their own."""
        return f"Bearer {reader_token(self.token)}"

    def _content(self, name: str) -> bytes:
        path = self.folder / name
        try:
            status = path.stat()
            with path.open("rb") as file:
                content = file.read(_LONGEST)
        except OSError as error:
            raise ConfigError(
                f"credential {str(path)!r} cannot be read ({error.strerror}); name a folder that the "
                "launcher or `psfleet certs` has made, as PSFLEET_TLS and --agent-credentials do"
            ) from None
        if name in ("key.pem", "token"):
            _refuse_if_open(path, status)
        if not content.strip():
            raise ConfigError(f"credential {str(path)!r} is empty; make new ones: psfleet certs")
        return content


def reader_token(token: str) -> str:
    """Return the token for readers of a job. The job's token cannot be computed from the result."""
    return hmac.new(token.encode(), b"psfleet reader", hashlib.sha256).hexdigest()


def _refuse_if_open(path: Path, status: os.stat_result) -> None:
    """Raise an error if other users can read a secret file.

    If the file belongs to another user, its group may read it: Kubernetes mounts secrets this way (fsGroup)
    for a process that is not root. ssh accepts the same modes.
    """
    mode = stat.S_IMODE(status.st_mode)
    mask = _GROUP if status.st_uid == os.geteuid() else _GROUP_CHANGES
    audience = "every user" if mode & _OTHERS else "its group" if mode & mask else ""
    if audience:
        raise ConfigError(
            f"{str(path)!r} has mode {mode:o}: {audience} can get at it; chmod 600 it, and "
            "make new credentials if somebody may have read it"
        )
